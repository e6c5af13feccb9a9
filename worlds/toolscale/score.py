"""What an attempt at a task is worth: 0 or 1, the product over the task's reward basis, as tau2-bench does it, with its leaks closed.

DB: the predicted calls are replayed from the task's start, and the hash of the tables must be that after the golden calls. ACTION: every golden
call must be among the predicted ones, all its arguments equal, missing ones noticed; a calculation counts by its value. COMMUNICATE:
every information must stand in a message, numbers compared as numbers ("1,000" is 1000, and 5 is not in 15). ENV_ASSERTION: facts about the
final tables. NL_ASSERTION: a judge's verdict, which counts as a failure if there is none or it cannot be read.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Sequence

from nanorchestra.errors import UserError
from worlds.toolscale.program import Tables, ToolError, calculate, canonical
from worlds.toolscale.world import World

DEFAULT_BASIS = ("DB", "COMMUNICATE")
Call = tuple[str, dict[str, Any]]
Judge = Callable[
    [str, Sequence[str]], str
]  # (assertion, messages) -> its answer, which should hold {"met": true or false}
_NUMBER = re.compile(r"(?<![\w.])(?<!\d[-:])\d+(?:\.\d+)?(?!\w)(?![-:.]\d)")


@dataclass(frozen=True)
class Score:
    """`reward` is 0.0 or 1.0, the product of `parts` (basis -> passed)."""

    reward: float
    parts: dict[str, bool]


class Scorer:
    """Scores attempts at one task. The golden calls are replayed once; one that errs raises UserError."""

    def __init__(self, world: World, task: dict[str, Any]):
        self.world, self.task = world, task
        self.criteria = task.get("evaluation_criteria") or {}

    def start(self) -> Tables:
        """The tables as the task finds them: the world's, with the task's initialization data and actions."""
        tables = self.world.fresh()
        initial = self.task.get("initial_state") or {}
        data = (initial.get("initialization_data") or {}).get("agent_data")
        if data:
            tables = _merged(copy.deepcopy(tables), data)
        for action in initial.get("initialization_actions") or ():
            try:
                self.world.call(tables, action["func_name"], action["arguments"])
            except ToolError as error:
                raise UserError(
                    f"task {self.task['id']}: initialization action {action['func_name']}: {error}"
                ) from None
        return tables

    def golden_calls(self) -> list[Call]:
        return [
            (action["name"], action["arguments"])
            for action in self.criteria.get("actions") or ()
            if action.get("requestor", "assistant") == "assistant"
        ]

    @cached_property
    def gold(self) -> Tables:
        """The tables after the golden calls."""
        tables = self.start()
        for position, (name, arguments) in enumerate(self.golden_calls()):
            try:
                self.world.call(tables, name, arguments)
            except ToolError as error:
                raise UserError(
                    f"task {self.task['id']}: golden call {position}, {name}: {error}"
                ) from None
        return tables

    @cached_property
    def gold_hash(self) -> str:
        return self.world.hash(self.gold)

    def replay(self, calls: Sequence[Call]) -> Tables:
        """The tables after the predicted calls; those that err have changed nothing."""
        tables = self.start()
        for name, arguments in calls:
            try:
                self.world.call(tables, name, arguments)
            except ToolError:
                pass
        return tables

    def score(
        self, calls: Sequence[Call], messages: Sequence[str], judge: Judge | None = None
    ) -> Score:
        """The score of an attempt that made these calls, in order, and sent these messages to the user."""
        tables, parts = self.replay(calls), {}
        for basis in self.criteria.get("reward_basis") or DEFAULT_BASIS:
            if basis == "DB":
                parts[basis] = self.world.hash(tables) == self.gold_hash
            elif basis == "ACTION":
                parts[basis] = all(
                    any(self._matches(action, call) for call in calls)
                    for action in self.criteria.get("actions") or ()
                    if action.get("requestor", "assistant") == "assistant"
                )
            elif basis == "COMMUNICATE":
                parts[basis] = all(
                    communicated(info, messages)
                    for info in self.criteria.get("communicate_info") or ()
                )
            elif basis == "ENV_ASSERTION":
                parts[basis] = all(
                    _holds(assertion, tables)
                    for assertion in self.criteria.get("env_assertions") or ()
                )
            elif basis == "NL_ASSERTION":
                assertions = self.criteria.get("nl_assertions") or ()
                parts[basis] = all(
                    judge is not None and verdict(judge(assertion, messages))
                    for assertion in assertions
                )
            else:
                raise UserError(
                    f"task {self.task['id']}: reward_basis has {basis!r}; it may hold DB, ACTION, COMMUNICATE, ENV_ASSERTION, NL_ASSERTION"
                )
        return Score(float(all(parts.values())), parts)

    def _matches(self, action: dict[str, Any], call: Call) -> bool:
        name, arguments = call
        if name != action["name"]:
            return False
        wanted, keys = action["arguments"], action.get("compare_args")
        tool = self.world.by_name.get(name)
        if keys is None and tool and tool["kind"] == "calculate":
            try:
                return calculate(arguments["expression"]) == calculate(wanted["expression"])
            except (ToolError, KeyError, TypeError):
                return False
        keys = wanted.keys() | arguments.keys() if keys is None else keys
        return all(
            key in wanted and key in arguments and _plain(wanted[key]) == _plain(arguments[key])
            for key in keys
        )


def communicated(info: str, messages: Sequence[str]) -> bool:
    """True if one of the messages holds `info`: a number as a number, a text as whole words, in any case."""
    info = _spoken(info)
    if re.fullmatch(r"\$?\d+(\.\d+)?", info):
        return any(
            float(found) == float(info.lstrip("$"))
            for message in messages
            for found in _NUMBER.findall(_spoken(message))
        )
    pattern = re.compile(rf"(?<!\w){re.escape(info)}(?!\w)")
    return any(pattern.search(_spoken(message)) for message in messages)


def verdict(answer: Any) -> bool:
    """A judge's answer: true only if it holds a JSON object whose "met" is true."""
    found = re.search(r"\{.*\}", answer, re.DOTALL) if isinstance(answer, str) else None
    try:
        value = json.loads(found[0]) if found else None
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("met") is True


def _spoken(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", str(text)).casefold().strip()


def _plain(value: Any) -> str:
    """Canonical JSON in which 20.0 is 20."""
    return canonical(int(value) if isinstance(value, float) and value.is_integer() else value)


def _holds(assertion: dict[str, Any], tables: Tables) -> bool:
    """`assert_record(table, key, field?, value?)`: the record is there, and its field has the value. Other functions are not known: they fail."""
    if assertion.get("func_name") != "assert_record":
        return False
    wanted = assertion["arguments"]
    record = tables.get(wanted["table"], {}).get(wanted["key"])
    found = record is not None and (
        "field" not in wanted
        or wanted["field"] in record
        and _plain(record[wanted["field"]]) == _plain(wanted["value"])
    )
    return found == assertion.get("assert_value", True)


def _merged(tables: Any, more: Any) -> Any:
    for key, value in more.items():
        tables[key] = (
            _merged(tables[key], value)
            if isinstance(value, dict) and isinstance(tables.get(key), dict)
            else value
        )
    return tables
