"""Decides what the next step computes: admission, preemption, and the release of pages. No torch.

Every step decodes all running requests first and spends the rest of `max_batch_tokens` on prefill,
in chunks. Admission is optimistic: a request is admitted when its present tokens fit, whatever its
max_tokens. When pages run out, the newest session loses its pages, whether it runs or waits for a
tool. It is computed again later, mostly from indexed pages.

Equal prompts are prefilled once: a request whose prompt is already being prefilled waits for the
last chunk, shares its pages and samples from its logits. A request that only shares a prefix with
a prompt in prefill waits until these pages are indexed.
"""

import bisect
import math
from dataclasses import dataclass, field

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.request import Request


@dataclass
class Plan:
    """One step: `decodes` compute one token each, `prefills` ids[start : start + count].

    Each (request, leader) of `forks` has the leader's ids and pages and needs only its logits.
    `copies`: page -> the page whose KV is copied into it before anything is computed.
    `failed` has the errors of requests that cannot be admitted.
    """

    decodes: list[Request] = field(default_factory=list)
    prefills: list[tuple[Request, int, int]] = field(default_factory=list)
    forks: list[tuple[Request, Request]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    failed: dict[Request, Exception] = field(default_factory=dict)

    @property
    def sampling(self) -> list[Request]:
        """Requests that get a token from this step; a chunk short of its request's end gives none.

        Decodes stand first, then prefills, then forks.
        """
        ended = [r for r, start, count in self.prefills if start + count == len(r.ids)]
        return self.decodes + ended + [request for request, _ in self.forks]


class Scheduler:
    """Plans the steps. A request is waiting, running, or finished and in neither queue.

    Invariant (tests/invariants.py): `running` is in order of age, which is the session's; `waiting`
    is in order of admission. `parked` has the table of each session between turns. A waiting
    request holds no pages but parked ones.

    mixed: tokens of prefill at most in a step that also decodes, and the context at which a token
    of a chunk costs twice as much as at the beginning.
    """

    def __init__(
        self,
        cache: PageCache,
        max_batch_tokens: int,
        max_running: int,
        mixed: tuple[int, float] | None = None,
    ):
        self.cache, self.max_batch_tokens, self.mixed = cache, max_batch_tokens, mixed
        self.max_running = min(max_running, max_batch_tokens)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parked: set[PageTable] = set()
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queues a request: those that resume a session first, then in order of age."""
        bisect.insort(self.waiting, request, key=_admission_order)

    def plan(self) -> Plan:
        """Plans the next step and takes its pages. Nothing counts as written before `commit`."""
        plan, position = Plan(), 0
        while position < len(self.running):
            request = self.running[position]
            if _remaining(request) == 1:
                if not self._make_room(request):
                    continue  # it was the newest and has been preempted itself
                plan.decodes.append(request)
            position += 1
        budget = self.max_batch_tokens - len(plan.decodes)
        if plan.decodes and self.mixed:
            budget = min(budget, self.mixed[0])
        for request in self.running:
            if _remaining(request) > 1 and budget > 0:
                budget -= self._prefill(plan, request, budget)
        if self.waiting:
            self._admit_waiting(plan, budget)
        plan.copies, self.cache.copies = self.cache.copies, {}
        return plan

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """Plans the step after `plan`, which is still being computed, or returns None.

        The next step can be planned before this step's tokens are read if all requests decode,
        none waits, none reaches its limit, and enough pages are free. Rows that the host draws,
        with a guide say, rule it out too. A request may still finish by its token: its row of the
        next step is then ignored.
        """
        going_on = [r for r in plan.decodes if len(r.ids) + 1 < r.limit and r.plain]
        pages = sum(self.cache.missing(r.table, len(r.ids) + 1) for r in going_on)
        if going_on != self.running or self.waiting or pages > self.cache.available:
            return None
        for request in going_on:
            self.cache.grow(request.table, len(request.ids) + 1)
        return Plan(going_on)

    def _prefill(self, plan, request, budget) -> int:
        """Adds a chunk, and returns what it takes of the budget."""
        start, price = request.table.written, 1.0
        if plan.decodes and self.mixed:
            price += start / self.mixed[1]
        count = min(_remaining(request), max(1, int(budget / price)))
        plan.prefills.append((request, start, count))
        return math.ceil(count * price)

    def _admit_waiting(self, plan, budget):
        leaders = {(r.prompt_hash, len(r.ids)): r for r in self.running}
        coming = {self.cache.next_key(r.table, r.ids) for r in self.running if _remaining(r) > 1}
        for request in list(self.waiting):
            if len(self.running) >= self.max_running:
                return
            try:
                taken = self._admit_next(plan, request, budget, leaders, coming)
            except Exception as error:
                plan.failed[request] = error
                continue
            if taken is None:
                return
            budget -= taken

    def _admit_next(self, plan, request, budget, leaders, coming) -> int | None:
        """Admits a request if it can be. Returns what it takes of the budget, None if it must wait.

        Those behind it then wait too; it takes nothing if it waits for another's prefill.
        """
        leader = leaders.get((request.prompt_hash, len(request.ids)))
        if leader and leader.ids == request.ids and not request.table.pages:
            self._follow(plan, request, leader)
            return 0
        if budget <= 0:
            return None
        self.parked.discard(request.table)
        if not request.table.pages:
            self.cache.match(request.table, request.ids)
            key = self.cache.next_key(request.table, request.ids[:-1])
            if key and key in coming:
                self.cache.release(request.table)
                return 0
        if not self._fit(request):
            if request.resumed:
                self.parked.add(request.table)
            else:
                self.cache.release(request.table)
            return None
        self._admit(request, request.table.written)
        leaders[request.prompt_hash, len(request.ids)] = request
        coming.add(self.cache.next_key(request.table, request.ids))
        return self._prefill(plan, request, budget)

    def _follow(self, plan, request, leader):
        """Lets `request` share what `leader` computes, the same ids, in the step that ends it."""
        if leader in plan.sampling and self.cache.available > len(self.running):
            self.cache.fork(leader.table, request.table, len(leader.ids))
            self._admit(request, request.prompt_tokens)
            plan.forks.append((request, leader))

    def _admit(self, request, cached_tokens):
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_age)
        if request.cached_tokens is None:
            request.cached_tokens = cached_tokens

    def _fit(self, request) -> bool:
        """Takes pages for all present tokens, and leaves one for each running request.

        Newer parked sessions give way. If no request runs, all parked sessions do, so that every
        request is served in the end.
        """
        length, older_than = len(request.ids), _age(request) if self.running else -1
        while self.cache.available - self.cache.missing(request.table, length) < len(self.running):
            if not self._revoke(older_than):
                return False
        return self.cache.grow(request.table, length)

    def _make_room(self, request) -> bool:
        """Takes a page for one more token of a running request, from the newest if none is free.

        Returns False if `request` was the newest and has been preempted.
        """
        while not self.cache.grow(request.table, len(request.ids)):
            newest = self.running[-1]
            if not self._revoke(_age(newest)):
                self.preemptions += 1
                self._requeue(newest)
                if newest is request:
                    return False
        return True

    def _revoke(self, age) -> bool:
        """Takes the newest parked session's pages. False if none is newer than `age`."""
        table = max(self.parked, key=lambda table: table.age, default=None)
        if table is None or table.age <= age:
            return False
        self.close(table)
        return True

    def commit(self, plan: Plan) -> None:
        """Records that the step has been computed. Call it before tokens are accepted."""
        for request, start, count in plan.prefills:
            self.cache.commit(request.table, request.ids, start + count)
        for request in plan.sampling:
            self.cache.commit(request.table, request.ids, len(request.ids))

    def finish(self, request: Request) -> None:
        """Takes out a request that stopped, was aborted, or whose step failed."""
        self._release(request, request.table.kept)

    def _requeue(self, request):
        self._release(request, False)
        self.add(request)

    def _release(self, request, keep_pages):
        """The one way out of a queue, for finish, abort, preemption and error alike."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        if keep_pages:
            self.parked.add(request.table)
        else:
            self.close(request.table)

    def close(self, table: PageTable) -> None:
        """Ends a session: its pages become idle."""
        self.parked.discard(table)
        self.cache.release(table)

    def reset(self, version: int) -> None:
        """Empties the cache: running requests and sessions will compute their KV anew."""
        for request in list(self.running):
            self._requeue(request)
        for table in list(self.parked):
            self.close(table)
        self.cache.clear(version)


def _remaining(request) -> int:
    return len(request.ids) - request.table.written


def _age(request) -> int:
    return request.table.age


def _admission_order(request) -> tuple[bool, int]:
    return not request.resumed, _age(request)
