"""What runs in the next step: requests and their states, admission, preemption, and the one way pages are given back. No torch.

Every step decodes all running requests first and spends what is left of `max_batch_tokens` on prefill, in chunks. Admission is
optimistic: a request is let in when its present tokens fit, not its future ones. When pages run out, the sessions that wait for a tool
lose theirs first, then the newest running request is preempted: it gives up its pages and is computed again later, which is mostly a
prefix hit. Equal prompts that arrive together are prefilled once: the later ones are held until the first one's pages can be matched.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any, Callable

from .cache import PageCache, PageTable
from .types import UserError

OnToken = Callable[[int, float], None]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Raises UserError for a value outside its range.

    max_tokens: at most so many ids are sampled. temperature: 0 is greedy, and so is anything below 1e-5. top_p in (0, 1], 1 is off.
    top_k: 0 is off. seed: the noise is a function of (seed, absolute position) alone, so equal prompts need different seeds to differ.
    stop_token_ids: further ids that end the text, beside the end-of-text ids; stop: strings that end it (they are cut from the text,
    not from the ids); ignore_eos: go on past the end-of-text ids, though not past stop_token_ids.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, ok, right in (
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer of at least 1"),
            ("temperature", _is_number(self.temperature) and 0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer of at least 0 (0: off)"),
            ("seed", _is_int(self.seed), "an integer"),
            ("stop_token_ids", all(_is_int(i) and i >= 0 for i in self.stop_token_ids), "token ids"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "strings that are not empty"),
        ):
            if not ok:
                raise UserError(f"sampling parameters: {name} is {getattr(self, name)!r}, it should be {right}")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass
class Completion:
    """What a request came to. finish_reason: "stop" (a stop id or string), "length" (a limit), or "abort".

    token_ids are all the sampled ids, the stop id included; logprobs and weight_versions have one entry each. cached_tokens: how many
    prompt tokens were not computed because their KV was there. text: the ids decoded without special tokens, up to a stop string.
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
    """One sampling. `ids` are the prompt and what has been sampled; the KV of ids[:table.written] stands in `table`."""

    id: int
    ids: list[int]
    params: SamplingParams
    limit: int                                                       # where len(ids) ends at the latest
    stop_ids: frozenset[int]
    stop_text: StopText | None = None
    on_token: OnToken | None = None
    table: PageTable = field(default_factory=PageTable)
    keeps_pages: bool = False                                        # its session wants the table back at the end
    resumed: bool = False                                            # it came with KV of an earlier turn
    prompt_tokens: int = 0
    cached_tokens: int | None = None                                 # None: not admitted yet
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        return self.completion is not None

    def accept(self, token: int, logprob: float) -> str:
        """Appends a sampled token; returns the reason to finish, or ""."""
        self.ids.append(token)
        self.logprobs.append(logprob)
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
            found = [at for at in (self._bytes.find(stop, search_from) for stop in self._stops) if at >= 0]
            self.end = min(found, default=None)
        return self.end is not None

    @property
    def text(self) -> str:
        return self._bytes[: self.end].decode(errors="replace")


@dataclass
class Plan:
    """One step: `decodes` compute one token each, `prefills` the ids[start:start + count] of a request."""

    decodes: list[Request] = field(default_factory=list)
    prefills: list[tuple[Request, int, int]] = field(default_factory=list)

    @property
    def sampling(self) -> list[Request]:
        """Whose next token this step yields, decodes first: a chunk that ends before its request does yields none."""
        return self.decodes + [request for request, start, count in self.prefills if start + count == len(request.ids)]


class Scheduler:
    """Decides the steps. A request is waiting, running or finished; `running` is in order of age, `waiting` in order of admission.

    `parked` holds the tables of sessions that are not running, least recently used first: their pages can be taken (`revoke`), and the
    session then computes its KV anew.
    """

    def __init__(self, cache: PageCache, max_batch_tokens: int, max_running: int):
        self.cache, self.max_batch_tokens, self.max_running = cache, max_batch_tokens, min(max_running, max_batch_tokens)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parked: dict[PageTable, None] = {}
        self.preemptions = self.revocations = 0

    def add(self, request: Request) -> None:
        """Queues a request: those that resume a session first, then in order of arrival."""
        bisect.insort(self.waiting, request, key=_admission_order)

    def plan(self) -> Plan:
        """The next step's work. Pages for it are held; nothing counts as written before `commit`."""
        plan = Plan()
        position = 0
        while position < len(self.running):
            request = self.running[position]
            length, written = len(request.ids), request.table.written
            if length - written == 1:
                if length > len(request.table.pages) * self.cache.page_size and not self._make_room(request):
                    continue                                         # it was the newest itself, and is waiting again
                plan.decodes.append(request)
            position += 1
        budget = self.max_batch_tokens - len(plan.decodes)
        being_computed = set()
        if len(plan.decodes) < len(self.running):
            for request in self.running:
                remaining = len(request.ids) - request.table.written
                if remaining > 1:
                    being_computed.add(self.cache.next_key(request.table, request.ids))
                    if budget > 0:
                        budget -= self._chunk(plan, request, remaining, budget)
        if self.waiting:
            self._admit_waiting(plan, budget, being_computed)
        return plan

    def _chunk(self, plan: Plan, request: Request, remaining: int, budget: int) -> int:
        count = min(remaining, budget)
        plan.prefills.append((request, request.table.written, count))
        return count

    def _admit_waiting(self, plan: Plan, budget: int, being_computed: set) -> None:
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_running:
                return
            self.parked.pop(request.table, None)
            if not request.table.pages:
                self.cache.match(request.table, request.ids)
                key = self.cache.next_key(request.table, request.ids[:-1])
                if key is not None and key in being_computed:
                    self.cache.release(request.table)                # the page it needs next is on its way: wait for it
                    continue
            if not self._fit(request):
                if request.resumed and request.table.written:
                    self.parked[request.table] = None
                else:
                    self.cache.release(request.table)
                return
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=_age)
            if request.cached_tokens is None:
                request.cached_tokens = request.table.written
            being_computed.add(self.cache.next_key(request.table, request.ids))
            budget -= self._chunk(plan, request, len(request.ids) - request.table.written, budget)

    def _fit(self, request: Request) -> bool:
        """Pages for all its present tokens, leaving each running request room for one more page. Alone, it may take what is parked."""
        while True:
            spare = self.cache.available - self.cache.missing(request.table, len(request.ids))
            if spare >= len(self.running):
                return self.cache.grow(request.table, len(request.ids))
            if self.running or not self._revoke():
                return False

    def _make_room(self, request: Request) -> bool:
        """Room for one more token of a running request, at the cost of parked sessions and newer requests; False if it was preempted."""
        while not self.cache.grow(request.table, len(request.ids)):
            if not self._revoke():
                newest = self.running[-1]
                self.preemptions += 1
                self._release(newest, keep_pages=False)
                self.add(newest)
                if newest is request:
                    return False
        return True

    def _revoke(self) -> bool:
        """Takes the pages of the session that has waited longest. False if there is none."""
        for table in self.parked:
            del self.parked[table]
            self.cache.release(table)
            self.revocations += 1
            return True
        return False

    def commit(self, plan: Plan) -> None:
        """The step has completed: the KV of its tokens is in the pages. Call it before the sampled tokens are accepted."""
        cache, page_size = self.cache, self.cache.page_size
        for request in plan.decodes:
            table = request.table
            if (table.written + 1) % page_size:
                table.written += 1
            else:
                cache.commit(table, request.ids, table.written + 1)
        for request, start, count in plan.prefills:
            cache.commit(request.table, request.ids, start + count)

    def finish(self, request: Request, reason: str) -> None:
        """Takes a waiting or running request out for good: it stopped, was aborted, or its step failed."""
        request.finish_reason = reason
        self._release(request, keep_pages=request.keeps_pages)

    def _release(self, request: Request, keep_pages: bool) -> None:
        """The one way out of a state, for finish, abort, preemption and error alike."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        if keep_pages and request.table.pages:
            self.parked.pop(request.table, None)
            self.parked[request.table] = None
        else:
            self.parked.pop(request.table, None)
            self.cache.release(request.table)

    def close(self, table: PageTable) -> None:
        """A session is over: its pages become idle."""
        self.parked.pop(table, None)
        self.cache.release(table)

    def set_version(self, version: int) -> None:
        """New weights: everything parked is revoked, and no page written before matches again. Only while nothing runs or waits."""
        while self._revoke():
            pass
        self.cache.set_version(version)

    def check(self) -> None:
        """The cache's invariants, and: every table is known, ages are in order, waiting requests hold no pages but parked ones."""
        tables = {request.table for request in self.running} | set(self.parked)
        self.cache.check(tables)
        assert [r.id for r in self.running] == sorted(r.id for r in self.running), "running is not in order of age"
        assert all(not r.table.pages or r.table in self.parked for r in self.waiting), "a waiting request holds pages"
        assert all(r.table.written < len(r.ids) for r in self.running + self.waiting), "a request has nothing to compute"


def _age(request: Request) -> int:
    return request.id


def _admission_order(request: Request) -> tuple[bool, int]:
    return not request.resumed, request.id
