"""What cache and scheduler tests run on in place of a model: a KV pool that remembers histories."""

from __future__ import annotations

import itertools

from invariants import check_scheduler

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.request import Request, SamplingParams
from nanorchestra.engine.scheduler import Plan, Scheduler


class FakePool:
    """Holds for each slot what its keys and values depend on: the weights, and all ids so far."""

    def __init__(self, cache: PageCache):
        self.cache, self.slots = cache, {}

    def copy(self, copies: dict[int, int]) -> None:
        old = dict(self.slots)
        for page, source in copies.items():
            for offset in range(self.cache.page_size):
                self.slots[page, offset] = old.get((source, offset))

    def _history(self, ids: list[int], position: int) -> tuple:
        return self.cache.root, tuple(ids[: position + 1])

    def write(self, table: PageTable, ids: list[int], start: int, count: int) -> None:
        size = self.cache.page_size
        for p in range(start, start + count):
            self.slots[table.pages[p // size], p % size] = self._history(ids, p)

    def assert_reads(self, table: PageTable, ids: list[int], length: int) -> None:
        """What is read through the table is the sequence's own history, under these weights."""
        size = self.cache.page_size
        for p in range(length):
            stored = self.slots.get((table.pages[p // size], p % size))
            assert stored == self._history(ids, p), f"position {p} holds {stored}"


def policy(ids: list[int]) -> int:
    """The next token: depends on the whole history and on nothing else."""
    return hash(tuple(ids)) % 11


class World:
    """A scheduler, a fake pool, and the engine's loop around them.

    `log` has an entry a step: (ids of decodes, [(id, start, count) of prefills]).
    """

    def __init__(self, num_pages=32, page_size=4, max_batch_tokens=64, max_running=8):
        self.cache = PageCache(num_pages, page_size)
        self.scheduler = Scheduler(self.cache, max_batch_tokens, max_running)
        self.pool = FakePool(self.cache)
        self.log: list[tuple[list[int], list[tuple[int, int, int]]]] = []
        self.requests: list[Request] = []
        self.done: dict[int, str] = {}
        self._ids = itertools.count()

    def submit(
        self, ids: list[int], max_tokens: int = 4, table: PageTable | None = None
    ) -> Request:
        request = Request(
            next(self._ids),
            list(ids),
            SamplingParams(max_tokens=max_tokens),
            limit=min(len(ids) + max_tokens, self.cache.num_pages * self.cache.page_size + 1),
            table=table or PageTable(),
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def finish(self, request: Request, reason: str) -> None:
        self.done[request.id] = reason
        self.scheduler.finish(request)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        check_scheduler(self.scheduler)
        chunks = [(r, len(r.ids) - 1, 1) for r in plan.decodes] + plan.prefills
        budget = self.scheduler.max_batch_tokens
        assert sum(count for *_, count in chunks) <= budget, "the step is larger than its budget"
        served = [r for r, *_ in chunks + plan.forks]
        assert len(set(served)) == len(served), "a request is there twice"
        assert not {r.id for r in served} & self.done.keys(), "a request has ended"
        self.pool.copy(plan.copies)
        for request, start, count in chunks:
            assert count > 0 and start == request.table.written, "a chunk leaves a gap"
            self.pool.write(request.table, request.ids, start, count)
        for request, start, count in chunks:
            self.pool.assert_reads(request.table, request.ids, start + count)
        for request, _ in plan.forks:
            self.pool.assert_reads(request.table, request.ids, len(request.ids))
        self.scheduler.commit(plan)
        for request in plan.sampling:
            if reason := request.accept(policy(request.ids), 0.0):
                self.finish(request, reason)
        prefills = [(r.id, start, count) for r, start, count in plan.prefills]
        self.log.append(([r.id for r in plan.decodes], prefills))
        check_scheduler(self.scheduler)
        return plan

    def run(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"{limit} steps did not finish the work")

    @property
    def prefilled(self) -> int:
        """Tokens computed in prefill so far."""
        return sum(count for _, prefills in self.log for *_, count in prefills)

    def assert_correct(self, *requests: Request) -> None:
        """They have ended with the tokens they would have alone."""
        for request in requests:
            prompt = request.ids[: request.prompt_tokens]
            assert request.ids == reference(prompt, request.limit - request.prompt_tokens)


def reference(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request comes to, however it is scheduled."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(policy(ids))
    return ids
