"""The records that pass between packages: Task, ToolCall, ToolResult, Turn, Trajectory, Price.

Plain data. Costs are US dollars, latencies seconds. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from nanorchestra.errors import require
from nanorchestra.schemas import SHAPES, Json, check

RESULT_WORDS = 3_000  # that the policy reads of a result, if its tool states no `result_words`


class Price(NamedTuple):
    """What a language model charges, in US dollars per million tokens."""

    input_per_million: float
    output_per_million: float

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Returns the US dollars of one answer."""
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


def part(name: str, arguments: Json, result: ToolResult) -> Json:
    """Returns a call and its result as one JSON object."""
    return {"name": name, "arguments": arguments} | asdict(result)


MODELS = {"proprietary": " models", "open": " models"}  # what these words say of an expert
ITEM = r'(?:"[^"]*"|[^\s,"]+)'
PAIR = re.compile(rf"(\S+)=({ITEM}(?:,{ITEM})*|\S*)")  # NAME=VALUE in a line


def words_and_vector(line: str) -> tuple[str, Json]:
    """Returns the words of a line, and the vector that its words NAME=VALUE are.

    'Be quick. latency=1 gpt-5=-0.5 never=python,"web search" usd=0.05 seconds=60' is an example.
    """
    vector: Json = {}
    for name, text in PAIR.findall(line):
        value = text
        if name == "never":
            value = [ban.strip(' "') for ban in re.findall(ITEM, text)]
        else:
            with suppress(ValueError):
                value = json.loads(text)
        vector[name] = stricter(name, vector.get(name), value)
    return " ".join(PAIR.sub("", line).split()), vector


def stricter(name: str, before: Any, value: Any) -> Any:
    """Returns an entry of a vector that is stated twice: all bans, the lower limit, else the last.

    A value of another form is returned as it is; Preference.of says what is wrong with it.
    """
    if name == "never" and isinstance(before, list) and isinstance(value, list):
        return [*before, *value]
    limits = name in ("usd", "seconds")
    if limits and isinstance(before, int | float) and isinstance(value, int | float):
        return min(before, value)
    return value


def banned(names: Collection[str], never: Collection[str]) -> str:
    """Returns the ban that one of the names falls under, "" if there is none.

    Case, spaces, hyphens and underscores make no difference.
    """
    keys = {_key(name) for name in names}
    return next((ban for ban in never if _key(ban) in keys), "")


def _key(name):
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()


@dataclass(frozen=True)
class Preference:
    """What the user wants, in words for the prompt and as weights for the reward.

    `tools` maps a tool's name to its weight: negative to avoid the tool, positive to favour it.
    The loop enforces three hard limits: names `never` to call, `usd` to spend at most, `seconds`
    until the answer at most; None is no limit. A name in `never` is that of a tool, an alias, a
    model, a kind ("search") or an owner.
    """

    text: str = ""
    outcome: float = 1.0
    cost: float = 0.0
    latency: float = 0.0
    tools: dict[str, float] = field(default_factory=dict)
    never: list[str] = field(default_factory=list)
    usd: float | None = None
    seconds: float | None = None

    @property
    def words(self) -> str:
        """What the prompt says: the text, and a sentence for each hard limit not in it."""
        unsaid = [name + MODELS.get(name, "") for name in self.never if name not in self.text]
        limits = [f"Never call {', '.join(unsaid)}."] if unsaid else []
        limits += [f"Spend at most ${self.usd:g}."] if self.usd is not None else []
        limits += [f"Answer within {self.seconds:g} seconds."] if self.seconds is not None else []
        return " ".join(filter(None, [self.text, *limits]))

    @classmethod
    def of(
        cls,
        text: str,
        vector: Json,
        where: str,
        tools: Collection[str] | None = None,
        ban_names: Collection[str] = (),
    ) -> Preference:
        """Returns the preference of a text and a vector, which is at `where` for the UserError.

        It names no others than `tools`, if these are given; "never" may also have `ban_names`.
        Entries are the weights "outcome" (or "accuracy"), "cost", "latency" and those of tools, and
        the limits "never" (a list), "usd" and "seconds".
        """
        check(vector, "preference", where)
        given = {"outcome" if name == "accuracy" else name: v for name, v in vector.items()}
        own = {
            name: given.pop(name) for name in SHAPES["preference"]["properties"] if name in given
        }
        if tools is not None:
            unknown = sorted({*given} - {*tools})
            known = f"weights are outcome, cost, latency and those of {', '.join(tools)}"
            require(not unknown, f"{where}: there is no {', '.join(unknown)}; {known}")
            bans = own.get("never", [])
            unknown = [name for name in bans if not banned([*tools, *ban_names], [name])]
            known = ", ".join(dict.fromkeys([*tools, *ban_names]))
            require(
                not unknown, f"{where}: there is no {', '.join(unknown)} to ban; there are {known}"
            )
        return cls(text, tools=given, **own)

    @classmethod
    def parse(cls, text: str, where: str, tools: Collection[str] | None = None) -> Preference:
        """Returns the preference of a line of words and NAME=VALUE. UserError as that of `of`."""
        return cls.of(*words_and_vector(text), where, tools)

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


@dataclass
class Trajectory:
    """All turns of one attempt at a task.

    ids, sampled, logprobs and weight_versions have one entry per id. Only ids with sampled[i]
    enter the loss; given ids have log-probability 0.0 and version -1. An id that a model behind
    an endpoint wrote has log-probability None. With rebuilt context the ids are prompt and turn,
    prompt and turn, ...

    status: "answered", "turn_limit", "token_limit", "time_limit" (of an agent that is not ours),
    "user_limit" (a limit of the preference), "failed_turns" (AttemptLimits.failed_turns in a row),
    or "infrastructure" (a failure that the policy did not cause: the attempt leaves its group).
    verdict: how the answer was judged, "" if the world does not say it. trainer_logprobs: the
    trainer's log-probabilities of the sampled ids, in order, before its update, None for those that
    the loss leaves out; empty if it did not train on them.
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
    cost_usd: float = 0.0
    latency_s: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    trainer_logprobs: list[float | None] = field(default_factory=list)
    verdict: str = ""

    def count_calls(self, turn: Turn) -> None:
        """Adds the calls of a turn, their US dollars, and the seconds of the slowest.

        A refused call does not count as one. Its name is that of the expert behind it.
        """
        for call, result in zip(turn.calls, turn.results, strict=True):
            if not result.refused:
                name = result.alias or call.name
                self.calls[name] = self.calls.get(name, 0) + 1
        self.cost_usd += sum(result.cost_usd for result in turn.results)
        self.latency_s += max(result.latency_s for result in turn.results)

    @property
    def failure(self) -> str:
        """What the infrastructure failed with, if that has ended the attempt; else ""."""
        if self.status != "infrastructure":
            return ""
        results = [result for turn in self.turns for result in turn.results]
        said = [result.content for result in results if result.infrastructure]
        return said[-1] if said else "no reason is recorded"
