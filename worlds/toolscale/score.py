"""Scores an attempt at a task: 0 or 1, the product over the task's reward basis, as in tau2-bench.

DB: the tables after the calls equal those after the golden calls.
ACTION: every golden call is among the calls with exactly its arguments; a calculation counts by
    its value.
COMMUNICATE: every information stands in a message; numbers are compared as numbers ("1,000" is
    1000, and 5 is not in 15).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import cached_property

from worlds.toolscale.program import Json, Tables, ToolError, calculate
from worlds.toolscale.world import World

Call = tuple[str, Json]  # (name, arguments)
_NUMBER = re.compile(r"(?<![\w.])(?<!\d[-:])\d+(?:\.\d+)?(?!\w)(?![-:.]\d)")


class Scorer:
    """Scores attempts at one task.

    `golden` are the task's calls; `told` is what the user wants to be told.
    """

    def __init__(self, world: World, task: Json):
        criteria = task["evaluation_criteria"]
        self.world, self.basis = world, criteria["reward_basis"]
        self.golden = [(a["name"], a["arguments"]) for a in criteria["actions"]]
        self.told = criteria["communicate_info"]

    @cached_property
    def gold(self) -> Tables:
        """The tables after the golden calls. Raises ToolError if one of them fails."""
        tables = dict(self.world.tables)
        for name, arguments in self.golden:
            self.world.call(tables, name, arguments)
        return tables

    def score(self, calls: Sequence[Call], messages: Sequence[str]) -> float:
        """Returns the reward of an attempt that made these calls and sent these messages."""
        tables = dict(self.world.tables)
        for name, arguments in calls:
            with contextlib.suppress(ToolError):  # a call that fails changes nothing
                self.world.call(tables, name, arguments)
        made = [self._comparable(call) for call in calls]
        parts = {
            "DB": tables == self.gold,
            "ACTION": all(self._comparable(call) in made for call in self.golden),
            "COMMUNICATE": all(communicated(info, messages) for info in self.told),
        }
        return float(all(parts[basis] for basis in self.basis))

    def _comparable(self, call: Call) -> tuple[str, Json | float]:
        name, arguments = call
        tool = self.world.by_name.get(name)
        if tool and tool["kind"] == "calculate":
            with contextlib.suppress(ToolError, LookupError, TypeError):
                return name, calculate(arguments["expression"])
        return call


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
