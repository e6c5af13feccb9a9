"""The records that pass between packages: Task, ToolCall, ToolResult, Turn, Trajectory, Price.

Plain data. Costs are US dollars, latencies seconds. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from nanorchestra.errors import nearest, require
from nanorchestra.schemas import Json
from nanorchestra.validation import Number, validated

RESULT_WORDS = 3_000  # that the policy reads of a result
Weight = Annotated[Number, Field(ge=0, le=1e9)]
ToolWeight = Annotated[Number, Field(ge=-1e9, le=1e9)]
Limit = Annotated[Number, Field(gt=0, le=1e9)]


class Price(NamedTuple):
    """What a language model charges, in US dollars per million tokens."""

    input_per_million: float
    output_per_million: float

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Returns the US dollars of so many tokens, read and written."""
        usd_in, usd_out = self
        return (input_tokens * usd_in + output_tokens * usd_out) / 1e6


@dataclass(frozen=True)
class ToolCall:
    """One tool invocation as the policy wrote it; `raw` is its text.

    `error` says why it cannot be run (not JSON, no name, ...); None for a call that can.
    """

    name: str
    arguments: Json
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    """One assistant turn in parts; `truncated` if it ended inside its reasoning or a call."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    truncated: bool = False

    @property
    def well_formed(self) -> bool:
        """True if nothing is cut off and every call is JSON with a name and arguments."""
        return not self.truncated and all(call.error is None for call in self.calls)


@dataclass(frozen=True)
class ToolResult:
    """The observation that a call returned, and what it cost; tokens are those of an expert.

    `infrastructure` marks a failure that the policy did not cause: the attempt leaves its group.
    `refused` marks a call that was not run and does not count as one. `alias` is the expert behind
    a tool that offers several, "" for other tools. `retries` counts the requests that were
    repeated; `waited_s` are the seconds of latency_s that passed before the one that counts was
    under way: in failed requests, pauses, and a queue. `findings` is what the call adds to the
    attempt's Evidence.
    `parts` are the calls that this one made, as `part` writes them; their cost is in cost_usd.
    `given_up` marks a call whose reply was not waited for, since the user's seconds were over after
    its latency_s.
    """

    content: str
    cost_usd: float = 0.0
    latency_s: float = 0.0
    error: bool = False
    infrastructure: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    alias: str = ""
    refused: bool = False
    retries: int = 0
    findings: dict[str, list[Any]] = field(default_factory=dict)
    parts: list[Json] = field(default_factory=list)
    waited_s: float = 0.0
    given_up: bool = False


def part(name: str, arguments: Json, result: ToolResult) -> Json:
    """Returns a call and its result as one JSON object."""
    return {"name": name, "arguments": arguments} | asdict(result)


MODELS = {"proprietary": " models", "open": " models"}  # what these words say of an expert
ITEM = r'(?:"[^"]*"|[^\s,"]+)'
PAIR = re.compile(rf"(\S+)=({ITEM}(?:,{ITEM})*|\S*)")  # NAME=VALUE in a line


def banned(names: Collection[str], never: Collection[str]) -> str:
    """Returns the ban that one of the names falls under, "" if there is none.

    Case, spaces, hyphens and underscores make no difference.
    """
    keys = {_key(name) for name in names}
    return next((ban for ban in never if _key(ban) in keys), "")


def _lower(limit: float | None, other: float | None) -> float | None:
    """Returns the lower of two limits; None is no limit."""
    stated = [each for each in (limit, other) if each is not None]
    return min(stated, default=None)


def _key(name):
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()


@dataclass(frozen=True)
class Preference:
    """What the user wants: words for the prompt, weights for the reward, and limits that bind.

    `tools` maps a tool's name to its weight: negative to avoid the tool, positive to favour it.
    The loop enforces three hard limits: names `never` to call, `usd` to spend at most, `seconds`
    until the answer at most; None is no limit. A name in `never` is that of a tool, an alias, a
    model, a kind ("search") or an owner.
    """

    text: str = ""
    outcome: Weight = 1.0
    cost: Weight = 0.0
    latency: Weight = 0.0
    tools: dict[str, ToolWeight] = field(default_factory=dict)
    never: list[str] = field(default_factory=list)
    usd: Limit | None = None
    seconds: Limit | None = None

    @property
    def words(self) -> str:
        """What the prompt says: the text, and a sentence for each hard limit not in it."""
        unsaid = [name + MODELS.get(name, "") for name in self.never if name not in self.text]
        limits = [f"Never call {', '.join(unsaid)}."] if unsaid else []
        limits += [f"Spend at most ${self.usd:g}."] if self.usd is not None else []
        limits += [f"Answer within {self.seconds:g} seconds."] if self.seconds is not None else []
        return " ".join(filter(None, [self.text, *limits]))

    @classmethod
    def parse(cls, line: str, where: str) -> Preference:
        """Returns the preference of a line: its words, and what its NAME=VALUE state.

        'Be quick. latency=1 gpt-5=-1 never=python,"web search" usd=0.05 seconds=60' is an example.
        UserError, which begins with `where`.
        """
        vector: Json = {}
        for name, text in PAIR.findall(line):
            if name == "never":
                bans = [ban.strip(' "') for ban in re.findall(ITEM, text)]
                vector[name] = [*vector.get(name, []), *bans]
                continue
            require(name not in vector, f"{where}: {name}= is stated twice")
            vector[name] = text
            with suppress(ValueError):  # what is no number is refused by its name
                vector[name] = json.loads(text)
        return cls.of(" ".join(PAIR.sub("", line).split()), vector, where)

    @classmethod
    def of(cls, text: str, vector: Json, where: str) -> Preference:
        """Returns the preference of a text and a vector. UserError, which begins with `where`.

        Entries are the weights "outcome" (or "accuracy"), "cost", "latency" and those of tools, and
        the limits "never" (a list), "usd" and "seconds".
        """
        tools = {"outcome" if name == "accuracy" else name: v for name, v in vector.items()}
        own = {each.name for each in fields(cls)} - {"text", "tools"}
        stated = {name: tools.pop(name) for name in own & tools.keys()}
        return validated(cls, stated | {"text": text, "tools": tools}, where)

    def check_names(
        self, where: str, tools: Collection[str], ban_names: Collection[str] = ()
    ) -> None:
        """Raises UserError for a weight of none of the `tools`, or a ban of none of both."""
        unknown = sorted({*self.tools} - {*tools})
        known = f"weights are outcome, cost, latency and those of {', '.join(tools)}"
        require(not unknown, f"{where}: there is no {', '.join(unknown)}; {known}")
        known = dict.fromkeys([*tools, *ban_names])
        for name in self.never:
            wrong = f"{where}: there is no {name} to ban; there are {', '.join(known)}"
            require(banned(known, [name]), wrong + nearest(name, known))

    def stricter(self, other: Preference) -> Preference:
        """Returns it with the limits of another one too: of two limits the lower, and all bans."""
        return replace(
            self,
            never=[*self.never, *other.never],
            usd=_lower(self.usd, other.usd),
            seconds=_lower(self.seconds, other.seconds),
        )

    @property
    def name(self) -> str:
        """The name of the preference in summaries: "right", "cheap", "fast" or "balanced"."""
        if self.cost == self.latency:
            return "balanced" if self.cost else "right"
        return "cheap" if self.cost > self.latency else "fast"

    @property
    def avoided(self) -> tuple[str, ...]:
        """The names of the tools to avoid."""
        return tuple(name for name, weight in self.tools.items() if weight < 0)


@dataclass(frozen=True)
class Bounds:
    """The least and the most that an attempt at a task can cost (US dollars) and last (seconds)."""

    cost_usd: tuple[float, float] = (0.0, 0.0)
    latency_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Task:
    """One problem.

    `bounds` are known before any attempt. `world` is the name of its world, `kind` that of its
    question or domain. `offers` maps a name in the prompt (tool, alias) to what is behind it, for
    summaries. `data` is JSON of the world's own: tools offered, gold answer, hidden facts.
    """

    id: str
    question: str
    preference: Preference = Preference()
    bounds: Bounds = Bounds()
    world: str = ""
    kind: str = ""
    offers: dict[str, str] = field(default_factory=dict)
    data: Json = field(default_factory=dict)


@dataclass
class Turn:
    """One sampling of the policy, its calls and their observations.

    Trajectory.ids[start:end] were sampled, after the prompt ids[context:start]: the whole
    trajectory so far, or with rebuilt context the turn's own prompt. A turn that is not
    `well_formed` was cut, holds a call that is not JSON, or none where a tool gives the answer.
    """

    start: int
    end: int
    finish_reason: str
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    context: int = 0
    well_formed: bool = True

    @property
    def calls_s(self) -> float:
        """Seconds of its calls, which run side by side: those of the slowest."""
        return max((result.latency_s for result in self.results), default=0.0)


@dataclass
class Trajectory:
    """All turns of one attempt at a task.

    ids, sampled, logprobs and weight_versions have one entry per id. Only ids with sampled[i]
    enter the loss; given ids have log-probability 0.0 and version -1. An id that a model behind
    an endpoint wrote has log-probability None. With rebuilt context the ids are prompt and turn,
    prompt and turn, ...

    status: "answered", "turn_limit", "token_limit", "time_limit" (of an agent that is not ours),
    "user_limit" (a limit of the preference), or "infrastructure" (a failure that the policy did not
    cause: the attempt leaves its group).
    policy_usd, calls_usd: what the policy's own tokens and its calls have cost so far.
    verdict: how the answer was judged, "" if the world does not say it.
    """

    task_id: str
    seed: int
    prompt_length: int = 0
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: str = "answered"
    answer: str = ""
    well_formed: bool = True
    outcome: float = 0.0
    policy_usd: float = 0.0
    calls_usd: float = 0.0
    latency_s: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    verdict: str = ""

    @property
    def cost_usd(self) -> float:
        """US dollars so far, of the policy's own tokens and of its calls."""
        return self.calls_usd + self.policy_usd

    def contexts(self) -> list[tuple[int, int, int]]:
        """Returns (begin, start, end) of each context: one, or one per turn.

        ids[begin:start] is its prompt, ids[start:end] all that follows.
        """
        starts = {}
        for turn in self.turns:
            starts.setdefault(turn.context, turn.start)
        starts = starts or {0: self.prompt_length}
        ends = [*list(starts)[1:], len(self.ids)]
        return list(zip(starts.keys(), starts.values(), ends, strict=True))

    def append_given(self, ids: list[int]) -> None:
        """Appends ids that the policy reads: a prompt, or observations."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.weight_versions += [-1] * len(ids)

    def append_sampled(
        self, ids: list[int], logprobs: list[float | None], weight_versions: list[int]
    ) -> None:
        """Appends ids that the policy has sampled."""
        self.ids += ids
        self.sampled += [True] * len(ids)
        self.logprobs += logprobs
        self.weight_versions += weight_versions

    def add_calls(
        self, turn: Turn, calls: Sequence[ToolCall], results: Sequence[ToolResult]
    ) -> None:
        """Adds calls to a turn, and bills them: their US dollars, the seconds of its slowest.

        A refused call does not count as one. Its name is that of the expert behind it. The calls of
        an agent that is not ours may come in several parts, of which the slowest counts once.
        """
        before_s = turn.calls_s
        turn.calls += calls
        turn.results += results
        for call, result in zip(calls, results, strict=True):
            if not result.refused:
                name = result.alias or call.name
                self.calls[name] = self.calls.get(name, 0) + 1
        self.calls_usd += sum(result.cost_usd for result in results)
        self.latency_s += turn.calls_s - before_s

    @property
    def failure(self) -> str:
        """What the infrastructure failed with, if that has ended the attempt; else ""."""
        if self.status != "infrastructure":
            return ""
        results = [result for turn in self.turns for result in turn.results]
        said = [result.content for result in results if result.infrastructure]
        return said[-1] if said else "no reason is recorded"
