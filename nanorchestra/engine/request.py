"""A request: sampling parameters, checks at the door, state, completion. No torch."""

from __future__ import annotations

import numbers
import operator
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nanorchestra.engine.cache import PageTable
from nanorchestra.errors import UserError, require

if TYPE_CHECKING:
    import numpy as np

    from nanorchestra.engine.guide import Guide
    from nanorchestra.model.tokenizer import Tokenizer

OnToken = Callable[[int, float], None]
WHOLE = "max_tokens", "top_k", "seed", "top_logprobs"  # parameters that are integers


@dataclass(frozen=True)
class SamplingParams:
    """Says how one request is sampled. Raises UserError for a value outside its range."""

    max_tokens: int = 256
    temperature: float = 1.0  # below 1e-5 is greedy
    top_p: float = 1.0  # keeps the most probable ids of this total probability; 1 is off
    top_k: int = 0  # keeps so many of the most probable ids; 0 is off
    seed: int = 0  # the noise is a function of (seed, position): equal prompts need other seeds
    stop_token_ids: tuple[int, ...] = ()  # ids that end the text, beside the end-of-text ids
    ignore_eos: bool = False  # go on past the end-of-text ids
    top_logprobs: int = 0  # reports so many of the most probable ids of each draw
    guide: Guide | None = None  # holds calls, or the answer, to a form

    def __post_init__(self):
        for name in WHOLE:
            object.__setattr__(self, name, self._number(name, operator.index, "an integer"))
        for name in ("temperature", "top_p"):
            self._number(name, _real, "a number")
        for name, right, expected in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= 3.4e38, "from 0 to 3.4e38, fp32's largest"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "from 0 (off) to 2**31 - 1"),
            ("top_logprobs", 0 <= self.top_logprobs <= 20, "from 0 to 20"),
        ):
            value = getattr(self, name)
            require(right, f"sampling parameters: {name} is {value!r}, it should be {expected}")

    def _number(self, name, convert, expected):
        """Returns a parameter as `convert` gives it: in a step, a wrong type would end all rows."""
        value = getattr(self, name)
        try:
            return convert(value)
        except TypeError:
            said = reprlib.repr(value)
            message = f"sampling parameters: {name} is {said}, it should be {expected}"
            raise UserError(message) from None

    @property
    def greedy(self) -> bool:
        """True if the most probable id is taken."""
        return self.temperature < 1e-5

    @property
    def truncated(self) -> bool:
        """True if the draw is from the most probable ids alone."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0)


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
        for i in (min(values, default=0), max(values, default=0)):
            right = f"it should be from 0 to {self.vocab_size - 1}"
            require(0 <= i < self.vocab_size, f"prompt: token id {reprlib.repr(i)}, {right}")
        return values

    def check_length(self, ids: list[int], sampled: int = 0) -> None:
        """Raises UserError if there are no ids, or no room for them and `sampled` more."""
        room = self.context - sampled
        require(ids, "prompt: it is empty, there should be at least one token")
        require(
            len(ids) <= room,
            f"prompt: {len(ids)} tokens, the context of {self.context} leaves room for {room}",
        )
        require(
            not sampled or len(ids) <= self.pool,
            f"prompt: {len(ids)} tokens do not fit the KV pool of {self.pool} tokens (num_pages)",
        )


@dataclass
class Completion:
    """A finished request.

    token_ids are all sampled ids, a stop id included. logprobs and weight_versions have one entry
    for each: its log-probability under the distribution it was drawn from, and the version of the
    weights that drew it. cached_tokens: prompt tokens whose KV did not have to be computed. text:
    the ids decoded without special tokens. finish_reason: "stop" (a stop id), "length" (a limit),
    "abort", or "error" (`Request.error` says which).
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
    """One sampling. `ids` are the prompt and the sampled ids; `table` has the KV of the first."""

    id: int
    ids: list[int]
    params: SamplingParams
    limit: int  # len(ids) at which the text ends at the latest
    stop_ids: frozenset[int] = frozenset()
    on_token: OnToken | None = None
    table: PageTable = field(default_factory=PageTable)
    cached_tokens: int | None = None  # None: not admitted yet
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    top_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    completion: Completion | None = None
    error: Exception | None = None  # why it failed; no other request is touched by it

    def __post_init__(self):
        self.prompt_tokens = len(self.ids)
        self.guide = self.params.guide and self.params.guide.copy()
        self.resumed = bool(self.table.pages)  # it comes with the KV of its session's last turn
        if self.table.age < 0:
            self.table.age = self.id

    def completed(self) -> Completion:
        """Returns the completion. Raises what ended the request if that was an error."""
        if self.error is not None:
            raise self.error
        return self.completion

    @property
    def finished(self) -> bool:
        """True once there is a completion."""
        return self.completion is not None

    @property
    def plain(self) -> bool:
        """True if the draw needs no guide, and only the drawn id is reported."""
        return not (self.params.top_logprobs or self.guide)

    @cached_property
    def prompt_hash(self) -> int:
        """Hash of the prompt's ids."""
        return hash(tuple(self.ids[: self.prompt_tokens]))

    @property
    def allowed(self) -> np.ndarray | None:
        """The ids that the guide lets follow, bool [vocab_size], or None for all."""
        return self.guide and self.guide.allowed()

    def accept(
        self,
        token: int,
        logprob: float,
        top: Sequence[tuple[int, float]] = (),
        weight_version: int = 0,
    ) -> str:
        """Appends a sampled token. Returns the reason to finish, or ""."""
        self.ids.append(token)
        self.top_logprobs.append(top)
        self.logprobs.append(logprob)
        self.weight_versions.append(weight_version)
        if self.guide is not None:
            self.guide.advance(token)
        if token in self.stop_ids:
            return "stop"
        return "length" if len(self.ids) >= self.limit else ""

    def finish(
        self, reason: str, tokenizer: Tokenizer | None, error: Exception | None = None
    ) -> None:
        """Makes the completion. With an error, or ids that do not decode, it says "error"."""
        ids = self.ids[self.prompt_tokens :]
        text, self.error = "", error
        try:
            if tokenizer is not None:
                text = tokenizer.decode(ids, skip_special=True)
        except Exception as problem:
            self.error = error or problem
        if self.error is not None:
            reason = "error"
        self.completion = Completion(
            self.prompt_tokens,
            self.cached_tokens or 0,
            ids,
            self.logprobs,
            text,
            reason,
            self.weight_versions,
        )


def _real(value) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError
