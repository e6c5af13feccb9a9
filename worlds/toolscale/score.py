"""Scores an attempt at a task: 0 or 1, the product over the task's reward basis, as in tau2-bench.

DB: the database after the calls equals that after the golden calls.
ACTION: what the database does not show. The agent has handed over if and only if the golden calls
    do; an action with `compare_args` was done with these arguments. Without DB, all golden writes
    were. Reads are free.
COMMUNICATE: every information stands in a message that is no list of numbers; numbers are compared
    as numbers ("1,000" is 1000, and 5 is not in 15).
NL_ASSERTION: `judged` asks a language model. A verdict that cannot be read is a no.

A task's `rules` are sentences of its policy that are checked on the trace, whatever the reward
basis: [{"text": what the policy says, "check": a name in CHECKS, "args": {...}}, ...]. The trace is
a list of ("user", text), ("agent", text) and ("call", name, arguments, error).
"""

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

from nanorchestra.agent.tool import Tool
from nanorchestra.schemas import Json
from worlds.toolscale.domain import Domain
from worlds.toolscale.toolkit import ToolError
from worlds.toolscale.user import ask
from worlds.toolscale.words import communicated, numbers

Call = tuple[str, Json]  # (name, arguments)
Step = tuple[Any, ...]  # of a trace
SPARE = 8  # numbers that a message may have beside what is told
MOST_CLAIMED = 32  # numbers that the messages up to one that tells may have together
_ASSENT = re.compile(
    r"\W*(yes|yep|yeah|sure|ok(ay)?|correct|right|exactly|absolutely|please (do|proceed|go)|"
    r"go ahead|do it|proceed|(i )?confirm(ed)?|that('s| is) (right|correct|fine)|sounds good)\b"
)
JUDGE = """A service agent has talked to a user:

{talk}

Is each of these statements true of the conversation?

{claims}

Answer with a JSON list that has true or false for each statement, and nothing else."""


class Scorer:
    """Scores attempts at one task.

    `golden` are the task's calls, `gold` the database after them, `effects` the places of those
    that change it or hand over; `communicate_info` is what the user wants to be told; `claims` are
    for a judge.
    """

    def __init__(self, domain: Domain, task: Json):
        criteria = task["evaluation_criteria"]
        self.domain, self.basis = domain, criteria["reward_basis"]
        self.actions, self.rules = criteria["actions"], task.get("rules", ())
        self.golden = [(action["name"], action["arguments"]) for action in self.actions]
        self.handovers = domain.of_kind("handover")
        self.communicate_info = criteria["communicate_info"]
        self.claims = "NL_ASSERTION" in self.basis and criteria.get("nl_assertions") or ()
        self.gold, self.effects = self._after(self.golden)

    def pending(self, trace: Sequence[Step]) -> list[int]:
        """Returns the places of the golden writes and hand-overs that have not been made."""
        return [place for place in self.effects if not self._made(self.actions[place], trace)]

    def handed(self, trace: Sequence[Step]) -> bool:
        """Returns whether the agent has handed the user over."""
        return bool(done(trace, self.handovers))

    def score(self, trace: Sequence[Step]) -> float:
        """Returns the reward of an attempt. `claims` are left to `judged`."""
        calls = [step[1:3] for step in trace if step[0] == "call" and not step[3]]
        parts = {
            "DB": lambda: self._after(calls)[0] == self.gold,
            "ACTION": lambda: self._acted(trace),
            "COMMUNICATE": lambda: self._informed(trace),
            "NL_ASSERTION": lambda: True,
        }
        kept = all(CHECKS[rule["check"]](trace, **rule["args"]) for rule in self.rules)
        return float(kept and all(parts[basis]() for basis in self.basis))

    def _after(self, calls) -> tuple[Any, list[int]]:
        """The database after the calls, and the places of those that had an effect."""
        kit, places = self.domain.start.copy(), []
        for place, (name, arguments) in enumerate(calls):
            if self.domain.kinds.get(name) == "read":
                continue
            before = kit.copy()
            with contextlib.suppress(ToolError):  # a call that fails changes nothing
                kit.call(name, arguments)
            if kit != before or name in self.handovers:
                places.append(place)
        return kit, places

    def _acted(self, trace) -> bool:
        if self.handed(trace) != any(name in self.handovers for name, _ in self.golden):
            return False
        written = () if "DB" in self.basis else self.effects  # DB sees what is written
        return all(
            self._made(action, trace)
            for place, action in enumerate(self.actions)
            if action.get("compare_args") or action["name"] in self.handovers or place in written
        )

    def _made(self, action, trace) -> bool:
        """True if an action was done. What a hand-over says in a sentence is free."""
        name, wanted = action["name"], action["arguments"]
        if keys := action.get("compare_args"):
            wanted = {key: value for key, value in wanted.items() if key in keys}
        elif name in self.handovers:
            wanted = {key: value for key, value in wanted.items() if " " not in str(value)}
        return bool(done(trace, [name], wanted))

    def _informed(self, trace) -> bool:
        return all(_told(info, trace) for info in self.communicate_info)


def _told(info, trace) -> bool:
    """True if a message of the agent has the information, and few numbers that are not the user's.

    A message with many does not count, and none does after many of few.
    """
    heard, claimed = set(), set()
    for kind, text, *_ in trace:
        if kind == "user":
            heard |= numbers(text)
        elif kind == "agent" and len(numbers(text) - heard) <= SPARE:
            claimed |= numbers(text) - heard
            if len(claimed) <= MOST_CLAIMED and communicated(info, [text]):
                return True
    return False


def attempt(calls: Sequence[Call], messages: Sequence[str] = ()) -> list[Step]:
    """Returns the trace of calls that are all confirmed and succeed, and messages after them."""
    asked = ("agent", "Shall I do that?"), ("user", "Yes, please.")
    steps = [step for call in calls for step in (*asked, ("call", *call, False))]
    return steps + [("agent", text) for text in messages]


def done(trace: Sequence[Step], tools: Sequence[str], where: Json | None = None) -> list[int]:
    """Returns the places in the trace of the tools' calls that succeeded with these arguments."""
    return [
        place
        for place, (kind, name, *rest) in enumerate(trace)
        if kind == "call" and name in tools and not rest[1]
        if (where or {}).items() <= rest[0].items()
    ]


def confirmed(trace: Sequence[Step], tools: Sequence[str]) -> bool:
    """Returns whether the user has assented right before each call, to a message of the agent."""
    for place in done(trace, tools):
        talk = [step for step in trace[:place] if step[0] != "call"][-2:]
        if [step[0] for step in talk] != ["agent", "user"] or not _ASSENT.match(talk[1][1].lower()):
            return False
    return True


def _before(trace, first, then) -> bool:
    """True if one of the first tools succeeded before any of the others."""
    later = done(trace, then)
    return not later or bool(done(trace[: later[0]], first))


CHECKS = {
    "confirmed": confirmed,  # tools
    "before": _before,  # first, then
    "made": lambda trace, tools: bool(done(trace, tools)),
}


def judged(expert: Tool, claims: Sequence[str], talk: Sequence[str]) -> bool:
    """Returns whether a language model finds that all claims are true. Raises EndpointError."""
    numbered = [f"{number}. {claim}" for number, claim in enumerate(claims, 1)]
    text = JUDGE.format(talk="\n".join(talk), claims="\n".join(numbered))
    answer = ask(expert, text)
    with contextlib.suppress(LookupError, ValueError):
        return json.loads(re.findall(r"\[[^\[\]]*\]", answer)[-1]) == [True] * len(claims)
    return False
