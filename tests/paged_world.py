"""What the cache and scheduler tests run on instead of a model: a KV pool that remembers histories, and a policy that is a function."""

from __future__ import annotations

import itertools

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.request import Request, SamplingParams
from nanorchestra.engine.scheduler import Plan, Scheduler


class FakePool:
    """Holds, for each slot, what its keys and values depend on: the weight versions of, and all ids at, the positions up to its own.

    `versions` has for each table its root and the version of each of its positions, as they should be.
    """

    def __init__(self, cache: PageCache):
        self.cache, self.slots, self.versions = cache, {}, {}

    def copy(self, copies: dict[int, int]) -> None:
        old = dict(self.slots)
        for page, source in copies.items():
            for offset in range(self.cache.page_size):
                self.slots[page, offset] = old.get((source, offset))

    def write(self, table: PageTable, ids: list[int], start: int, count: int) -> None:
        root, versions = self.versions.get(table, (None, []))
        if root != table.root:
            versions = [self.cache.version] * start  # found in the cache, and so by these weights
        versions = (versions + [self.cache.version] * start)[:start] + [self.cache.version] * count
        self.versions[table] = (table.root, versions)
        for p in range(start, start + count):
            self.slots[table.pages[p // self.cache.page_size], p % self.cache.page_size] = (
                tuple(versions[: p + 1]),
                tuple(ids[: p + 1]),
            )

    def remember(self, tables) -> None:
        """New weights are to come, and these tables keep what they have."""
        for table in tables:
            if table.root == self.cache.root:
                self.versions[table] = (table.root, [self.cache.version] * table.written)

    def fork(self, table: PageTable, other: PageTable) -> None:
        root, versions = self.versions.get(table, (None, []))
        self.versions[other] = (root, list(versions))

    def assert_reads(self, table: PageTable, ids: list[int], length: int) -> None:
        """What is read through the table is the sequence's own history: no stale weights, nobody else's tokens."""
        versions = (
            [self.cache.version] * length
            if table.root == self.cache.root or not length
            else self.versions[table][1]
        )
        for p in range(length):
            stored = self.slots.get(
                (table.pages[p // self.cache.page_size], p % self.cache.page_size)
            )
            expected = (tuple(versions[: p + 1]), tuple(ids[: p + 1]))
            assert stored == expected, f"position {p} holds {stored}, not its history {expected}"


def policy(ids: list[int]) -> int:
    """The next token: depends on the whole history and on nothing else."""
    return hash(tuple(ids)) % 11


class World:
    """A scheduler, a fake pool, and the loop around them that the engine has. `log` has one entry a step: (decodes, [(id, start, count)])."""

    def __init__(self, num_pages=32, page_size=4, max_batch_tokens=64, max_running=8):
        self.cache = PageCache(num_pages, page_size)
        self.scheduler = Scheduler(self.cache, max_batch_tokens, max_running)
        self.pool = FakePool(self.cache)
        self.log: list[tuple[list[int], list[tuple[int, int, int]]]] = []
        self.requests: list[Request] = []
        self.done: dict[int, str] = {}
        self._ids = itertools.count()

    def submit(
        self, ids: list[int], max_tokens: int = 4, table: PageTable | None = None, session: int = -1
    ) -> Request:
        limit = min(len(ids) + max_tokens, self.cache.num_pages * self.cache.page_size + 1)
        request = Request(
            next(self._ids),
            list(ids),
            SamplingParams(max_tokens=max_tokens),
            limit,
            frozenset(),
            prompt_tokens=len(ids),
            table=table if table is not None else PageTable(),
            keeps_pages=table is not None,
            resumed=bool(table and table.pages),
            session=session,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def finish(self, request: Request, reason: str) -> None:
        self.done[request.id] = reason
        self.scheduler.finish(request, reason)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        self.scheduler.check()
        chunks = [(r, len(r.ids) - 1, 1) for r in plan.decodes] + plan.prefills
        assert sum(count for _, _, count in chunks) <= self.scheduler.max_batch_tokens, (
            "the step is larger than its budget"
        )
        assert len({r.id for r, _, _ in chunks}) == len(chunks), "a request is in a step twice"
        assert not {r for r, _ in plan.forks} & {r for r, _, _ in chunks}, "a fork computes too"
        assert not {r.id for r in plan.requests} & self.done.keys(), "a step serves who has ended"
        self.pool.copy(plan.copies)
        for request, start, count in chunks:
            assert count > 0 and start == request.table.written, (
                "a chunk does not begin where the KV ends"
            )
            self.pool.write(request.table, request.ids, start, count)
        for request, start, count in chunks:
            self.pool.assert_reads(request.table, request.ids, start + count)
        for request, leader in plan.forks:
            self.pool.fork(leader.table, request.table)
            self.pool.assert_reads(request.table, request.ids, len(request.ids))
        self.scheduler.commit(plan)
        for request in plan.sampling:
            reason = request.accept(policy(request.ids), 0.0)
            if reason:
                self.finish(request, reason)
        self.log.append(
            (
                [r.id for r in plan.decodes],
                [(r.id, start, count) for r, start, count in plan.prefills],
            )
        )
        self.scheduler.check()
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
        return sum(count for _, prefills in self.log for _, _, count in prefills)

    @property
    def computed(self) -> int:
        """Tokens computed so far, one by one or in chunks."""
        return self.prefilled + sum(len(decodes) for decodes, _ in self.log)


def reference(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request must come to, however it is scheduled."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(policy(ids))
    return ids
