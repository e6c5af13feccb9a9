"""Scores an attempt at a task: 0 or 1, the product over the task's reward basis, as in tau2-bench.

DB: the tables after the predicted calls equal those after the golden calls.
ACTION: every golden call is among the predicted ones with all its arguments, and no others; a
    calculation counts by its value.
COMMUNICATE: every information stands in a message; numbers are compared as numbers ("1,000" is
    1000, and 5 is not in 15).
ENV_ASSERTION: facts about the final tables hold.
NL_ASSERTION: a judge agrees; an answer that is missing or cannot be read counts as a no.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from worlds.toolscale.program import Tables, ToolError, calculate
from worlds.toolscale.shapes import Json
from worlds.toolscale.world import World

Call = tuple[str, Json]
# (assertion, messages) -> an answer, which should hold {"met": true or false}
Judge = Callable[[str, Sequence[str]], str]
_NUMBER = re.compile(r"(?<![\w.])(?<!\d[-:])\d+(?:\.\d+)?(?!\w)(?![-:.]\d)")


@dataclass(frozen=True)
class Score:
    """`reward` is 0.0 or 1.0, the product of `parts` (basis -> passed)."""

    reward: float
    parts: dict[str, bool]


class Scorer:
    """Scores attempts at one task, whose format formats.py has checked."""

    def __init__(self, world: World, task: Json):
        self.world, self.task, self.criteria = world, task, task["evaluation_criteria"]
        actions = self.criteria["actions"]
        self.actions = [action for action in actions if action["requestor"] == "assistant"]

    def golden_calls(self) -> list[Call]:
        """Returns the golden calls, in order."""
        return [(action["name"], action["arguments"]) for action in self.actions]

    @cached_property
    def gold(self) -> Tables:
        """The tables after the golden calls. Raises ToolError if one of them fails."""
        tables = dict(self.world.tables)
        for name, arguments in self.golden_calls():
            self.world.call(tables, name, arguments)
        return tables

    def score(
        self, calls: Sequence[Call], messages: Sequence[str], judge: Judge | None = None
    ) -> Score:
        """Returns the score of an attempt that made these calls and sent these messages."""
        tables, criteria = dict(self.world.tables), self.criteria
        for name, arguments in calls:
            with contextlib.suppress(ToolError):  # a call that fails changes nothing
                self.world.call(tables, name, arguments)
        checks: dict[str, Callable[[], bool]] = {
            "DB": lambda: tables == self.gold,
            "ACTION": lambda: all(
                any(self._matches(action, call) for call in calls) for action in self.actions
            ),
            "COMMUNICATE": lambda: all(
                communicated(info, messages) for info in criteria["communicate_info"]
            ),
            "ENV_ASSERTION": lambda: all(
                _holds(assertion, tables) for assertion in criteria["env_assertions"]
            ),
            "NL_ASSERTION": lambda: all(
                judge is not None and verdict(judge(claim, messages))
                for claim in criteria["nl_assertions"] or ()
            ),
        }
        parts = {basis: checks[basis]() for basis in criteria["reward_basis"]}
        return Score(float(all(parts.values())), parts)

    def _matches(self, action: Json, call: Call) -> bool:
        name, arguments = call
        wanted, keys = action["arguments"], action["compare_args"]
        if name != action["name"]:
            return False
        if keys is not None:
            return all(key in arguments and wanted.get(key) == arguments[key] for key in keys)
        if self.world.by_name[name]["kind"] == "calculate":
            with contextlib.suppress(ToolError, LookupError, TypeError):
                return calculate(arguments["expression"]) == calculate(wanted["expression"])
        return wanted == arguments


def communicated(info: str, messages: Sequence[str]) -> bool:
    """Returns whether a message holds `info`: as a number, or as whole words in any case."""
    info, messages = _spoken(info), [_spoken(message) for message in messages]
    if re.fullmatch(r"\$?\d+(\.\d+)?", info):
        value = float(info.lstrip("$"))
        return any(float(n) == value for message in messages for n in _NUMBER.findall(message))
    words = rf"(?<!\w){re.escape(info)}(?!\w)"
    return any(info in message and re.search(words, message) for message in messages)


def _spoken(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).casefold().strip()


def verdict(answer: str) -> bool:
    """Returns whether a judge's answer holds a JSON object whose "met" is true."""
    found = re.search(r"\{.*\}", answer, re.DOTALL)
    try:
        value = json.loads(found[0]) if found else None
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("met") is True


def _holds(assertion: Json, tables: Tables) -> bool:
    """Whether `assert_record(table, key, field?, value?)` holds.

    The record is there, and its field has the value. Other functions are not known and do not hold.
    """
    if assertion["func_name"] != "assert_record":
        return False
    wanted = assertion["arguments"]
    record = tables.get(wanted["table"], {}).get(wanted["key"])
    found = record is not None
    if found and "field" in wanted:
        found = record.get(wanted["field"]) == wanted["value"]
    return found == assertion.get("assert_value", True)
