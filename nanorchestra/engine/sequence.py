"""What the engine serves: sampling parameters, sequences, requests and completions. No torch.

A `Sequence` is a growing list of token ids and the pages that hold the KV of its beginning. A
`Request` samples on a sequence once, up to a stop. A session keeps its sequence over many requests;
any other request has a sequence of its own.
"""

from __future__ import annotations

import numbers
import operator
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nanorchestra.errors import UserError, require

if TYPE_CHECKING:
    import numpy as np

    from nanorchestra.engine.guide import Guide
    from nanorchestra.model.tokenizer import Tokenizer

OnToken = Callable[[int, float], None]
TopLogprobs = list[tuple[int, float]]  # the most probable (id, log-probability), best first
GREEDY_BELOW = 1e-5  # temperature
LARGEST_FLOAT32 = 3.4e38
MOST_TOP_LOGPROBS = 20
ROOT = 0  # in place of the uid of a page before the first one


@dataclass(frozen=True)
class SamplingParams:
    """Says how one request is sampled. Raises UserError for a value outside its range."""

    max_tokens: int = 256
    temperature: float = 1.0  # below 1e-5 is greedy
    top_p: float = 1.0  # keeps the most probable ids of this total probability; 1 is off
    top_k: int = 0  # keeps so many of the most probable ids; 0 is off
    seed: int = 0  # the noise is a function of (seed, position): equal prompts need other seeds
    ignore_eos: bool = False  # go on past the end-of-text ids
    top_logprobs: int = 0  # reports so many of the most probable ids of each draw
    guide: Guide | None = None  # holds calls, or the answer, to a form

    def __post_init__(self):
        for name in ("max_tokens", "top_k", "seed", "top_logprobs"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            _expect(isinstance(value, numbers.Real), name, value, "a number")
        _expect(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _expect(
            0 <= self.temperature <= LARGEST_FLOAT32,
            "temperature",
            self.temperature,
            f"from 0 to {LARGEST_FLOAT32:g}, fp32's largest",
        )
        _expect(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _expect(0 <= self.top_k < 2**31, "top_k", self.top_k, "from 0 (off) to 2**31 - 1")
        _expect(
            0 <= self.top_logprobs <= MOST_TOP_LOGPROBS,
            "top_logprobs",
            self.top_logprobs,
            f"from 0 to {MOST_TOP_LOGPROBS}",
        )

    @cached_property
    def greedy(self) -> bool:
        """True if the most probable id is taken."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def truncated(self) -> bool:
        """True if the draw is from the most probable ids alone."""
        return (self.top_p < 1 or self.top_k > 0) and not self.greedy


def _whole(name, value) -> int:
    """Returns a parameter as an int. A wrong type inside a step would fail every request."""
    try:
        return operator.index(value)
    except TypeError:
        _expect(False, name, value, "an integer")


def _expect(holds, name, value, expected) -> None:
    if not holds:
        is_wrong = f"sampling parameters: {name} is {reprlib.repr(value)}"
        raise UserError(f"{is_wrong}, it should be {expected}")


@dataclass(frozen=True)
class Limits:
    """What a prompt must fit: ids below vocab_size, the context, and the KV pool, in tokens."""

    vocab_size: int
    context: int
    pool: int

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        """Returns `ids`, a sequence, array or tensor of integers, as a list. Raises UserError."""
        try:
            values = ids.tolist() if hasattr(ids, "tolist") else ids
            values = [operator.index(i) for i in values]
        except TypeError:
            raise UserError(
                f"prompt: {reprlib.repr(ids)} is not a sequence of token ids, "
                f"integers from 0 to {self.vocab_size - 1}"
            ) from None
        if values and not 0 <= min(values) <= max(values) < self.vocab_size:
            wrong = next(i for i in values if not 0 <= i < self.vocab_size)
            raise UserError(
                f"prompt: token id {reprlib.repr(wrong)}, "
                f"it should be from 0 to {self.vocab_size - 1}"
            )
        return values

    def check_length(self, length: int, sampled: int = 0) -> None:
        """Raises UserError if a prompt is empty, or has no room for itself and `sampled` more."""
        room = self.context - sampled
        require(length, "prompt: it is empty, there should be at least one token")
        require(
            length <= room,
            f"prompt: {length} tokens, the context of {self.context} leaves room for {room}",
        )
        require(
            not sampled or length <= self.pool,
            f"prompt: {length} tokens do not fit the KV pool of {self.pool} tokens (num_pages)",
        )


@dataclass(eq=False)
class Sequence:
    """Token ids in order, and the pages of the KV cache that hold the KV of the first of them."""

    ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)  # pages, in order of position
    num_computed: int = 0  # so many ids have their KV in the pages
    num_indexed: int = 0  # so many pages, from the first on, are in the prefix index
    last_uid: int = ROOT  # uid of the last of these pages
    is_session: bool = False  # the sequence outlives its requests
    arrival: int = -1  # id of the first request on it, which the scheduler sets; -1: none yet


@dataclass
class Completion:
    """A finished request.

    token_ids are all sampled ids, a stop id included. logprobs and weight_versions have one entry
    for each: its log-probability under the distribution it was drawn from (greedy: temperature 1),
    and the version of the weights that drew it. cached_tokens: prompt tokens whose KV did not have
    to be computed. text: the ids decoded without special tokens; a thought and calls are part of it
    (`chat.parse` takes them apart). finish_reason: "stop" (an id that ends a turn),
    "length" (a limit), "abort", or "error" (`Request.error` says which).
    """

    prompt_tokens: int
    cached_tokens: int
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    weight_versions: list[int]


@dataclass(eq=False)
class Request:
    """One sampling on a sequence, from submit to its completion."""

    id: int
    sequence: Sequence
    params: SamplingParams
    limit: int  # length of the sequence at which the text ends at the latest
    stop_ids: frozenset[int] = frozenset()
    on_token: OnToken | None = None
    cached_tokens: int | None = None  # None: not admitted yet
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    completion: Completion | None = None
    error: Exception | None = None  # why it failed
    ids: list[int] = field(init=False)  # the prompt and the ids sampled so far
    prompt_tokens: int = field(init=False)
    guide: Guide | None = field(init=False)  # its own, at the beginning of the turn
    # A turn whose session had its KV when it came. It is admitted first, even if its pages are
    # taken meanwhile.
    resumes: bool = field(init=False)

    def __post_init__(self):
        self.ids = self.sequence.ids
        self.prompt_tokens = len(self.ids)
        self.guide = self.params.guide and self.params.guide.copy()
        self.resumes = bool(self.sequence.block_table)

    @property
    def uncomputed(self) -> int:
        """How many ids have no KV yet: at least the last one."""
        return len(self.ids) - self.sequence.num_computed

    @property
    def is_decoding(self) -> bool:
        """True if only the last id has no KV; otherwise the request is in prefill."""
        return len(self.ids) - self.sequence.num_computed == 1

    @property
    def finished(self) -> bool:
        """True once there is a completion."""
        return self.completion is not None

    def allowed_ids(self, num_drawable: int) -> np.ndarray | None:
        """Returns the ids that the guide lets follow, bool [num_drawable], or None for all.

        Raises UserError if its mask has fewer ids, or lets none follow.
        """
        allowed = self.guide.allowed()
        if allowed is None:
            return None
        have = len(allowed)
        require(have >= num_drawable, f"guide: a mask of {have} ids; expected {num_drawable}")
        require(allowed[:num_drawable].any(), "guide: no id may follow")
        return allowed[:num_drawable]

    def accept(
        self, token: int, logprob: float, top_logprobs: TopLogprobs, weight_version: int
    ) -> str:
        """Appends a sampled token. Returns the reason to finish, or ""."""
        self.ids.append(token)
        self.top_logprobs.append(top_logprobs)
        self.weight_versions.append(weight_version)
        self.logprobs.append(logprob)  # last: a reader in another thread goes by their number
        if self.guide is not None:
            self.guide.advance(token)
        if token in self.stop_ids:
            return "stop"
        return "length" if len(self.ids) >= self.limit else ""

    def finish(
        self, reason: str, tokenizer: Tokenizer | None, error: Exception | None = None
    ) -> None:
        """Makes the completion. With an error, or ids that do not decode, it says "error"."""
        end = self.prompt_tokens + len(self.logprobs)  # a session may have gone on already
        sampled = self.ids[self.prompt_tokens : end]
        text = ""
        self.error = error
        try:
            if tokenizer is not None:
                text = tokenizer.decode(sampled, skip_special=True)
        except Exception as problem:
            self.error = error or problem
        if self.error is not None:
            reason = "error"
        self.completion = Completion(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            token_ids=sampled,
            logprobs=self.logprobs,
            text=text,
            finish_reason=reason,
            weight_versions=self.weight_versions,
        )

    def completed(self) -> Completion:
        """Returns the completion. Raises what ended the request if that was an error."""
        if self.error is not None:
            raise self.error
        return self.completion
