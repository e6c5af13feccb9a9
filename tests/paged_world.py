"""What cache and scheduler tests run on in place of a model: a KV pool that remembers histories."""

from __future__ import annotations

import itertools

from invariants import check_scheduler

from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.scheduler import Batch, Scheduler
from nanorchestra.engine.sequence import Request, SamplingParams, Sequence


class FakePool:
    """Holds for each slot what its keys and values depend on: the weights, and all ids so far."""

    def __init__(self, blocks: BlockManager):
        self.blocks, self.slots = blocks, {}

    def _history(self, sequence: Sequence, position: int) -> tuple:
        return self.blocks.root, tuple(sequence.ids[: position + 1])

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        size = self.blocks.page_size
        for p in range(start, end):
            self.slots[sequence.block_table[p // size], p % size] = self._history(sequence, p)

    def assert_reads(self, sequence: Sequence, length: int) -> None:
        """What is read through the table is the sequence's own history, under these weights."""
        size = self.blocks.page_size
        for p in range(length):
            stored = self.slots.get((sequence.block_table[p // size], p % size))
            assert stored == self._history(sequence, p), f"position {p} holds {stored}"


def policy(ids: list[int]) -> int:
    """The next token: depends on the whole history and on nothing else."""
    return hash(tuple(ids)) % 11


class World:
    """A scheduler, a fake pool, and the engine's loop around them.

    `log` has an entry a step: (ids of decodes, [(id, start, count) of prefills]).
    """

    def __init__(self, num_pages=32, page_size=4, max_batch_tokens=64, max_running=8):
        self.blocks = BlockManager(num_pages, page_size)
        self.scheduler = Scheduler(self.blocks, max_batch_tokens, max_running)
        self.pool = FakePool(self.blocks)
        self.log: list[tuple[list[int], list[tuple[int, int, int]]]] = []
        self.requests: list[Request] = []
        self.texts: dict[int, list[int]] = {}  # of requests that have ended: prompt and text
        self.done: dict[int, str] = {}
        self._ids = itertools.count()

    def submit(
        self, ids: list[int], max_tokens: int = 4, session: Sequence | None = None
    ) -> Request:
        sequence = Sequence(list(ids)) if session is None else session
        length = len(sequence.ids)
        request = Request(
            next(self._ids),
            sequence,
            SamplingParams(max_tokens=max_tokens),
            limit=min(length + max_tokens, self.blocks.num_pages * self.blocks.page_size + 1),
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def finish(self, request: Request, reason: str) -> None:
        self.done[request.id] = reason
        self.texts[request.id] = list(request.ids)
        self.scheduler.finish(request)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        check_scheduler(self.scheduler)
        budget = self.scheduler.max_batch_tokens
        tokens = len(batch.decodes) + batch.prefill_tokens
        assert tokens <= budget, "the step is larger than its budget"
        served = batch.decodes + [chunk.request for chunk in batch.prefills]
        assert len(set(served)) == len(served), "a request is there twice"
        assert not {r.id for r in served} & self.done.keys(), "a request has ended"
        chunks = [(r.sequence, len(r.ids) - 1, len(r.ids)) for r in batch.decodes]
        for chunk in batch.prefills:
            assert chunk.count > 0
            assert chunk.is_last == (chunk.end == len(chunk.request.ids))
            chunks.append((chunk.request.sequence, chunk.start, chunk.end))
        for sequence, start, end in chunks:
            assert start == sequence.num_computed, "a chunk leaves a gap"
            self.pool.write(sequence, start, end)
        for sequence, _, end in chunks:
            self.pool.assert_reads(sequence, end)
        sampled = batch.sampled
        self.scheduler.commit(batch)
        for request in sampled:
            if reason := request.accept(policy(request.ids), 0.0, [], 0):
                self.finish(request, reason)
        prefills = [(chunk.request.id, chunk.start, chunk.count) for chunk in batch.prefills]
        self.log.append(([r.id for r in batch.decodes], prefills))
        check_scheduler(self.scheduler)
        return batch

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
            text = self.texts[request.id]
            prompt = text[: request.prompt_tokens]
            assert text == reference(prompt, request.limit - request.prompt_tokens)


def reference(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request comes to, however it is scheduled."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(policy(ids))
    return ids
