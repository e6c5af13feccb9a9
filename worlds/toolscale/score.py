"""Scores an attempt at a task: 0 or 1, the product over the task's reward basis, as in tau2-bench.

DB: the tables after the calls equal those after the golden calls.
ACTION: every golden call is among the calls with exactly its arguments, or with those that its
    `compare_args` names; a calculation counts by its value.
COMMUNICATE: every information stands in a message; numbers are compared as numbers ("1,000" is
    1000, and 5 is not in 15).
NL_ASSERTION: `judged` asks a language model. A verdict that cannot be read is a no.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from functools import cached_property

from nanorchestra.agent.environment import Tool
from worlds.toolscale.program import Json, Tables, ToolError, calculate
from worlds.toolscale.user import ask
from worlds.toolscale.world import World

Call = tuple[str, Json]  # (name, arguments)
_NUMBER = re.compile(r"(?<![\w.])(?<!\d[-:])\d+(?:\.\d+)?(?!\w)(?![-:.]\d)")
JUDGE = """A service agent has talked to a user:

{talk}

Is each of these statements true of the conversation?

{claims}

Answer with a JSON list that has true or false for each statement, and nothing else."""


class Scorer:
    """Scores attempts at one task.

    `golden` are the task's calls; `told` is what the user wants to be told; `claims` are for a
    judge.
    """

    def __init__(self, world: World, task: Json):
        criteria = task["evaluation_criteria"]
        self.world, self.basis = world, criteria["reward_basis"]
        self.actions = criteria["actions"]
        self.golden = [(action["name"], action["arguments"]) for action in self.actions]
        self.told = criteria["communicate_info"]
        self.claims = "NL_ASSERTION" in self.basis and criteria.get("nl_assertions") or ()

    @cached_property
    def gold(self) -> Tables:
        """The tables after the golden calls."""
        return self._after(self.golden)

    def score(self, calls: Sequence[Call], messages: Sequence[str]) -> float:
        """Returns the reward of an attempt that made these calls and sent these messages.

        `claims` are left to `judged`.
        """
        parts = {
            "DB": self._after(calls) == self.gold,
            "ACTION": all(self._made(action, calls) for action in self.actions),
            "COMMUNICATE": all(communicated(info, messages) for info in self.told),
            "NL_ASSERTION": True,
        }
        return float(all(parts[basis] for basis in self.basis))

    def _after(self, calls: Sequence[Call]) -> Tables:
        tables = dict(self.world.tables)
        for name, arguments in calls:
            with contextlib.suppress(ToolError):  # a call that fails changes nothing
                self.world.call(tables, name, arguments)
        return tables

    def _made(self, action: Json, calls: Sequence[Call]) -> bool:
        name, wanted, keys = action["name"], action["arguments"], action.get("compare_args")
        if keys is None:
            return self._comparable((name, wanted)) in map(self._comparable, calls)
        given = [arguments for other, arguments in calls if other == name]
        return any(all(a.get(key) == wanted.get(key) for key in keys) for a in given)

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


def judged(expert: Tool, claims: Sequence[str], talk: Sequence[str]) -> bool:
    """Returns whether a language model finds that all claims are true. Raises EndpointError."""
    numbered = [f"{number}. {claim}" for number, claim in enumerate(claims, 1)]
    text = JUDGE.format(talk="\n".join(talk), claims="\n".join(numbered))
    answer = ask(expert, text)
    with contextlib.suppress(LookupError, ValueError):
        return json.loads(re.findall(r"\[[^\[\]]*\]", answer)[-1]) == [True] * len(claims)
    return False


def _spoken(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).casefold().strip()
