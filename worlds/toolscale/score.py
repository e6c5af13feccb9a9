"""Scores an attempt at a task: 0 or 1, the product over the task's reward basis, as in tau2-bench.

DB: the tables after the calls equal those after the golden calls.
ACTION: every golden call is among the calls with exactly its arguments, or with those that its
    `compare_args` names; a calculation counts by its value.
COMMUNICATE: every information stands in a message; numbers are compared as numbers ("1,000" is
    1000, and 5 is not in 15).
NL_ASSERTION: `judged` asks a language model. A verdict that cannot be read is a no.

A task's `rules` are sentences of its policy that no tool enforces: [{"text": what the policy says,
"check": a name in CHECKS, "args": {...}}, ...]. Every check must hold on the trace, whatever the
reward basis: a list of ("user", text), ("agent", text) and ("call", name, arguments, error).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from nanorchestra.agent.environment import Tool
from worlds.toolscale.program import Json, Tables, ToolError, calculate
from worlds.toolscale.user import ask
from worlds.toolscale.world import World

Call = tuple[str, Json]  # (name, arguments)
Step = tuple[Any, ...]  # of a trace
_ASSENT = re.compile(r"\W*(yes|yep|yeah|sure|ok(ay)?|correct|right|please do|go ahead|confirmed)\b")
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
        self.told, self.rules = criteria["communicate_info"], task.get("rules", ())
        self.claims = "NL_ASSERTION" in self.basis and criteria.get("nl_assertions") or ()

    @cached_property
    def gold(self) -> Tables:
        """The tables after the golden calls."""
        return self._after(self.golden)

    def score(self, trace: Sequence[Step]) -> float:
        """Returns the reward of an attempt. `claims` are left to `judged`."""
        calls = [step[1:3] for step in trace if step[0] == "call"]
        messages = [step[1] for step in trace if step[0] == "agent"]
        parts = {
            "DB": self._after(calls) == self.gold,
            "ACTION": all(self._made(action, calls) for action in self.actions),
            "COMMUNICATE": all(communicated(info, messages) for info in self.told),
            "NL_ASSERTION": True,
        }
        kept = all(CHECKS[rule["check"]](trace, **rule["args"]) for rule in self.rules)
        return float(kept and all(parts[basis] for basis in self.basis))

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


def attempt(calls: Sequence[Call], messages: Sequence[str] = ()) -> list[Step]:
    """Returns the trace of calls that all succeed, and messages after them."""
    return [("call", *call, False) for call in calls] + [("agent", text) for text in messages]


def done(trace: Sequence[Step], tools: Sequence[str], where: Json | None = None) -> list[int]:
    """Returns the places in the trace of the tools' calls that succeeded with these arguments."""
    return [
        place
        for place, (kind, name, *rest) in enumerate(trace)
        if kind == "call" and name in tools and not rest[1]
        if (where or {}).items() <= rest[0].items()
    ]


def _confirmed(trace: Sequence[Step], **which: Any) -> bool:
    """True if the user has assented right before each call, to a message of the agent."""
    for place in done(trace, **which):
        talk = [step for step in trace[:place] if step[0] != "call"][-2:]
        if [step[0] for step in talk] != ["agent", "user"] or not _ASSENT.match(talk[1][1].lower()):
            return False
    return True


def _before(trace: Sequence[Step], first: Sequence[str], then: Sequence[str]) -> bool:
    """True if one of the first tools succeeded before any of the others."""
    later = done(trace, then)
    return not later or bool(done(trace[: later[0]], first))


def _said_before(trace: Sequence[Step], info: str, tools: Sequence[str]) -> bool:
    """True if the user was told the information before any of the tools succeeded."""
    first = min(done(trace, tools), default=len(trace))
    return communicated(info, [step[1] for step in trace[:first] if step[0] == "agent"])


def _unsaid(trace: Sequence[Step], infos: Sequence[str]) -> bool:
    """True if no message of the agent has any of the information."""
    messages = [step[1] for step in trace if step[0] == "agent"]
    return not any(communicated(info, messages) for info in infos)


def _last(trace: Sequence[Step], **which: Any) -> bool:
    """True if nothing is called after one of these calls."""
    calls = [place for place, step in enumerate(trace) if step[0] == "call"]
    return all(place == calls[-1] for place in done(trace, **which))


CHECKS = {
    "confirmed": _confirmed,  # tools, where?
    "before": _before,  # first, then
    "said_before": _said_before,  # info, tools
    "unsaid": _unsaid,  # infos
    "last": _last,  # tools, where?
    "never": lambda trace, **which: not done(trace, **which),  # tools, where?
    "at_most": lambda trace, tools, times: len(done(trace, tools)) <= times,
}


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
