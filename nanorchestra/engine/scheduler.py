"""What runs in the next step: admission, preemption, and the one way pages are given back. No torch.

Every step decodes all running requests first and spends what is left of `max_batch_tokens` on prefill, in chunks. Admission is
optimistic: a request is let in when its present tokens fit, not its future ones. When pages run out, the newest session loses its own,
whether it runs or waits for a tool, and is computed again later, which is mostly a prefix hit: if instead whoever waited longest gave way,
more sessions than fit would take turns in computing everything anew. Only a session that has waited for `LEASE` steps goes first.

Equal prompts that arrive together are prefilled once: the later ones are held until the first one's last chunk, whose logits they sample
from too, on pages forked from his. What shares only a beginning is held until those pages can be matched.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.request import Request

LEASE = 4096  # steps after which a session that waits for a tool is the first to lose its pages, however old it is


@dataclass
class Plan:
    """One step: `decodes` compute one token each, `prefills` the ids[start:start + count] of a request.

    Each (request, leader) of `forks` has the leader's ids and pages, and needs no more than the logits of the leader's last token.
    Before anything is computed, each page of `copies` is given the KV of the page it names.
    """

    decodes: list[Request] = field(default_factory=list)
    prefills: list[tuple[Request, int, int]] = field(default_factory=list)
    forks: list[tuple[Request, Request]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)

    @property
    def sampling(self) -> list[Request]:
        """Whose next token this step yields, decodes first: a chunk that ends before its request does yields none."""
        ended = [
            request for request, start, count in self.prefills if start + count == len(request.ids)
        ]
        return self.decodes + ended + [request for request, _ in self.forks]

    @property
    def requests(self) -> list[Request]:
        """All whom the step serves."""
        return (
            self.decodes
            + [request for request, _, _ in self.prefills]
            + [request for request, _ in self.forks]
        )


class Scheduler:
    """Decides the steps. A request is waiting, running or finished; `running` is in order of age, `waiting` in order of admission.

    The age of a request is that of its session. `parked` holds the tables of sessions that are not running, with their age and the step
    at which their lease ends: their pages can be taken (`_revoke`), and the session then computes its KV anew.
    """

    def __init__(self, cache: PageCache, max_batch_tokens: int, max_running: int):
        self.cache, self.max_batch_tokens, self.max_running = (
            cache,
            max_batch_tokens,
            min(max_running, max_batch_tokens),
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parked: dict[PageTable, tuple[int, int]] = {}
        self.steps = self.preemptions = self.revocations = 0

    def add(self, request: Request) -> None:
        """Queues a request: those that resume a session first, then in order of age."""
        bisect.insort(self.waiting, request, key=_admission_order)

    def plan(self) -> Plan:
        """The next step's work. Pages for it are held; nothing counts as written before `commit`."""
        plan = Plan()
        position = 0
        while position < len(self.running):
            request = self.running[position]
            length, written = len(request.ids), request.table.written
            if length - written == 1:
                if not self.cache.writable(request.table, length) and not self._make_room(request):
                    continue  # it was the newest itself, and is waiting again
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
        plan.copies, self.cache.copies = self.cache.copies, {}
        return plan

    def _chunk(self, plan: Plan, request: Request, remaining: int, budget: int) -> int:
        count = min(remaining, budget)
        plan.prefills.append((request, request.table.written, count))
        return count

    def _admit_waiting(self, plan: Plan, budget: int, being_computed: set) -> None:
        leaders = {_outline(r): r for r in self.running}
        for request in list(self.waiting):
            if len(self.running) >= self.max_running:
                return
            leader = leaders.get(_outline(request))
            if (
                leader is not None
                and leader.ids == request.ids
                and leader.table.root == self.cache.root
                and not request.table.pages
            ):
                self._follow(plan, request, leader)
                continue
            if budget <= 0:
                return
            self.parked.pop(request.table, None)
            if not request.table.pages:
                self.cache.match(request.table, request.ids)
                key = self.cache.next_key(request.table, request.ids[:-1])
                if key is not None and key in being_computed:
                    self.cache.release(
                        request.table
                    )  # the page it needs next is on its way: wait for it
                    continue
            if not self._fit(request):
                if request.resumed and request.table.written:
                    self._park(request.table, request.session)
                else:
                    self.cache.release(request.table)
                return
            self._admit(request, request.table.written)
            leaders[_outline(request)] = request
            being_computed.add(self.cache.next_key(request.table, request.ids))
            budget -= self._chunk(plan, request, len(request.ids) - request.table.written, budget)

    def _follow(self, plan: Plan, request: Request, leader: Request) -> None:
        """`request` waits for what `leader` computes, the same ids, until his last chunk."""
        served = leader in plan.decodes or any(
            r is leader and start + count == len(r.ids) for r, start, count in plan.prefills
        )
        if served and self.cache.available > len(self.running):
            self.cache.fork(leader.table, request.table, len(leader.ids))
            self._admit(request, request.prompt_tokens)
            plan.forks.append((request, leader))

    def _admit(self, request: Request, cached_tokens: int) -> None:
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_age)
        if request.cached_tokens is None:
            request.cached_tokens = cached_tokens

    def _fit(self, request: Request) -> bool:
        """Pages for all its present tokens, leaving each running request room for one more page. Alone, it may take what is parked."""
        while True:
            spare = self.cache.available - self.cache.missing(request.table, len(request.ids))
            if spare >= len(self.running):
                return self.cache.grow(request.table, len(request.ids))
            if not self._revoke(request.session if self.running else -1):
                return False

    def _make_room(self, request: Request) -> bool:
        """Room for one more token of a running request, at the cost of whoever is newest; False if it was preempted itself."""
        while not self.cache.grow(request.table, len(request.ids)):
            newest = self.running[-1]
            if not self._revoke(newest.session):
                self.preemptions += 1
                self._requeue(newest)
                if newest is request:
                    return False
        return True

    def _park(self, table: PageTable, session: int) -> None:
        self.parked[table] = (session, self.steps + LEASE)

    def _requeue(self, request: Request) -> None:
        """A running request waits again, without its pages."""
        self._release(request, keep_pages=False)
        self.add(request)

    def _revoke(self, than: int = -1) -> bool:
        """Takes the pages of a parked session whose lease is over, or else of the newest, if it is newer `than` this one. False if none is."""
        for table, (_, lease) in self.parked.items():
            if lease >= self.steps:
                table = max(self.parked, key=self.parked.__getitem__)
                if self.parked[table][0] <= than:
                    return False
            self.close(table)
            self.revocations += 1
            return True
        return False

    def commit(self, plan: Plan) -> None:
        """The step has completed: the KV of its tokens is in the pages. Call it before the sampled tokens are accepted."""
        self.steps += 1
        cache, page_size = self.cache, self.cache.page_size
        for request in plan.decodes:
            table = request.table
            if (table.written + 1) % page_size:
                table.written += 1
            else:
                cache.commit(table, request.ids, table.written + 1)
        for request, start, count in plan.prefills:
            cache.commit(request.table, request.ids, start + count)
        for request, _ in plan.forks:
            cache.commit(request.table, request.ids, len(request.ids))

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
            self._park(request.table, request.session)
        else:
            self.close(request.table)

    def fork(self, table: PageTable, other: PageTable, session: int) -> None:
        """The table of one session, which is parked or empty, is shared with that of a new one."""
        if table.pages:
            self.cache.fork(table, other, table.written)
            self._park(other, session)

    def close(self, table: PageTable) -> None:
        """A session is over: its pages become idle."""
        self.parked.pop(table, None)
        self.cache.release(table)

    def set_version(self, version: int, keep: bool = False) -> None:
        """New weights: no page written before matches again. What runs or is parked keeps its KV, or waits to compute it anew."""
        if not keep:
            for request in self.running[::-1]:
                self._requeue(request)
            while self._revoke():
                pass
        self.cache.set_version(version)
        for table in [request.table for request in self.running] + list(self.parked):
            self.cache.detach(table)

    def check(self) -> None:
        """The cache's invariants, and: every table is known, both queues are in order, waiting requests hold no pages but parked ones."""
        tables = {request.table for request in self.running} | set(self.parked)
        self.cache.check(tables)
        assert self.running == sorted(self.running, key=_age), "running is not in order of age"
        assert self.waiting == sorted(self.waiting, key=_admission_order), (
            "waiting is not in order of admission"
        )
        assert all(not r.table.pages or r.table in self.parked for r in self.waiting), (
            "a waiting request holds pages"
        )
        assert all(r.table.written < len(r.ids) for r in self.running + self.waiting), (
            "a request has nothing to compute"
        )


def _outline(request: Request) -> tuple[int, int, int]:
    """Equal for requests with equal prompts and as many ids, the last one equal too: hardly ever for others than those with equal ids."""
    return request.prompt_hash, len(request.ids), request.ids[-1]


def _age(request: Request) -> tuple[int, int]:
    return request.session, request.id


def _admission_order(request: Request) -> tuple[bool, int, int]:
    return not request.resumed, request.session, request.id
