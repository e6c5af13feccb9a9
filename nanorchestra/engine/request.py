"""What is asked of the engine and what comes of it: sampling parameters, a request on its way, its completion. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, Iterable

from nanorchestra.engine.cache import PageTable
from nanorchestra.errors import UserError
from nanorchestra.files import is_utf8

if TYPE_CHECKING:
    from nanorchestra.engine.guide import State, ToolCallGrammar

OnToken = Callable[[int, float], None]
PENDING = -1  # stands for an id that has been drawn, but is not known on the host yet


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Raises UserError for a value outside its range.

    max_tokens: at most so many ids are sampled. temperature: 0 is greedy, and so is anything below 1e-5. top_p in (0, 1], 1 is off.
    top_k: 0 is off. min_p: drops what is less probable than this share of the most probable id; 0 is off. seed: the noise is a function
    of (seed, absolute position) alone, so equal prompts need different seeds to differ. stop_token_ids: further ids that end the text,
    beside the end-of-text ids; stop: strings that end it (they are cut from the text, not from the ids); ignore_eos: go on past the
    end-of-text ids, though not past stop_token_ids. top_logprobs: so many of the most probable ids are reported beside each drawn one.
    tools: if any, tool calls are constrained to valid JSON with one of these names (guide.py); enable_thinking: as given to chat.encode.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    tools: tuple[str, ...] = ()
    enable_thinking: bool | None = None

    def __post_init__(self):
        for name in ("stop", "tools", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, Iterable):  # what is not is refused below
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name, ok, right in (
            (
                "max_tokens",
                _is_int(self.max_tokens) and self.max_tokens >= 1,
                "an integer of at least 1",
            ),
            (
                "temperature",
                _is_number(self.temperature) and 0 <= self.temperature <= 3.4e38,
                "a number of at least 0 and at most 3.4e38, float32's largest",
            ),
            (
                "top_p",
                _is_number(self.top_p) and 0 < self.top_p <= 1,
                "a number above 0 and at most 1",
            ),
            (
                "top_k",
                _is_int(self.top_k) and 0 <= self.top_k < 2**31,
                "an integer of at least 0 and below 2**31 (0: off)",
            ),
            (
                "min_p",
                _is_number(self.min_p) and 0 <= self.min_p <= 1,
                "a number of at least 0 and at most 1 (0: off)",
            ),
            (
                "top_logprobs",
                _is_int(self.top_logprobs) and 0 <= self.top_logprobs <= 20,
                "an integer from 0 to 20",
            ),
            ("seed", _is_int(self.seed), "an integer"),
            (
                "stop_token_ids",
                _all(self.stop_token_ids, lambda i: _is_int(i) and i >= 0),
                "a sequence of token ids",
            ),
            (
                "tools",
                _all(self.tools, lambda name: isinstance(name, str) and name),
                "names that are not empty",
            ),
            (
                "stop",
                _all(self.stop, _is_stop),
                "strings that are not empty and can be written as UTF-8",
            ),
        ):
            if not ok:
                raise UserError(
                    f"sampling parameters: {name} is {getattr(self, name)!r}, it should be {right}"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def plain(self) -> bool:
        """Whether the draw is from the whole vocabulary, and nothing is asked beside it."""
        return self.top_p == 1 and not (self.top_k or self.min_p or self.top_logprobs or self.tools)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and value != "" and is_utf8(value)


def _all(values: Any, right: Callable[[Any], Any]) -> bool:
    return isinstance(values, tuple) and all(map(right, values))


@dataclass
class Completion:
    """What a request came to. finish_reason: "stop" (a stop id or string), "length" (a limit), or "abort".

    token_ids are all the sampled ids, the stop id included; logprobs (under the distribution each was drawn from), weight_versions and
    top_logprobs (the most probable (id, log-probability) pairs, if asked for) have one entry each. cached_tokens: how many prompt tokens
    were not computed because their KV was there. text: the ids decoded without special tokens, up to a stop string.
    """

    prompt_tokens: int
    cached_tokens: int
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    weight_versions: list[int]
    top_logprobs: list[list[tuple[int, float]]]


@dataclass(eq=False)
class Request:
    """One sampling. `ids` are the prompt and what has been sampled; the KV of ids[:table.written] stands in `table`."""

    id: int
    ids: list[int]
    params: SamplingParams
    limit: int  # where len(ids) ends at the latest
    stop_ids: frozenset[int]
    stop_text: StopText | None = None
    on_token: OnToken | None = None
    table: PageTable = field(default_factory=PageTable)
    keeps_pages: bool = False  # its session wants the table back at the end
    resumed: bool = False  # it came with KV of an earlier turn
    session: int = -1  # the id of its session's first request, or its own
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: not admitted yet
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    grammar: ToolCallGrammar | None = None
    grammar_state: State | None = None
    finish_reason: str = ""
    completion: Completion | None = None

    def __post_init__(self):
        if self.session < 0:
            self.session = self.id

    @property
    def finished(self) -> bool:
        return self.completion is not None

    @cached_property
    def prompt_hash(self) -> int:
        """Of the prompt's ids: tells prompts apart without a look at each id. Made once, since it takes as long as they are many."""
        return hash(tuple(self.ids[: self.prompt_tokens]))

    def accept(self, token: int, logprob: float, weight_version: int = 0) -> str:
        """Appends a sampled token; returns the reason to finish, or ""."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.weight_versions.append(weight_version)
        if self.grammar is not None:
            self.grammar_state = self.grammar.advance(self.grammar_state, token)
        if token in self.stop_ids:
            return "stop"
        if self.stop_text is not None and self.stop_text.feed(token):
            return "stop"
        return "length" if len(self.ids) >= self.limit else ""


class StopText:
    """Watches for stop strings in the bytes of the sampled ids, whatever the token boundaries. `end` is where the earliest one begins."""

    def __init__(self, stops: tuple[str, ...], tokenizer):
        self._stops, self._tokenizer = [s.encode() for s in stops], tokenizer
        self._longest = max(map(len, self._stops))
        self._bytes = bytearray()
        self.end: int | None = None

    def feed(self, token: int) -> bool:
        """True if a stop string is complete now. Special tokens have no text."""
        if self._tokenizer.decode([token], skip_special=True):
            search_from = max(0, len(self._bytes) - self._longest + 1)
            self._bytes += self._tokenizer.bytes_of(token)
            found = [
                at
                for at in (self._bytes.find(stop, search_from) for stop in self._stops)
                if at >= 0
            ]
            self.end = min(found, default=None)
        return self.end is not None

    @property
    def text(self) -> str:
        return self._bytes[: self.end].decode(errors="replace")
