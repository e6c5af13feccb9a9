"""The scheduler on a mock model: what it computes when, and that no request reads another's KV."""

from __future__ import annotations

import random

import pytest
from invariants import check_scheduler

from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.scheduler import Scheduler
from nanorchestra.engine.sequence import Request, SamplingParams, Sequence


def policy(ids: list[int]) -> int:
    """The next token: depends on the whole history and on nothing else."""
    return hash(tuple(ids)) % 11


class World:
    """A scheduler, the engine's loop around it, and a pool that knows what its KV depends on.

    `slots` holds for each (page, offset) the version of the weights and all ids so far. `log` has
    an entry a step: (ids of decodes, [(id, start, count) of prefills]).
    """

    def __init__(self, num_pages=64, page_size=4, max_batch_tokens=64, max_running=8):
        self.blocks = BlockManager(num_pages, page_size)
        max_running = min(max_running, max_batch_tokens)
        self.scheduler = Scheduler(self.blocks, max_batch_tokens, max_running)
        self.slots, self.weights = {}, 0
        self.log: list[tuple[list[int], list[tuple[int, int, int]]]] = []
        self.requests: list[Request] = []
        self.ended: dict[Request, tuple[str, list[int]]] = {}  # the reason, prompt and text

    def submit(
        self, ids: list[int], max_tokens: int = 4, session: Sequence | None = None
    ) -> Request:
        sequence = session or Sequence(list(ids))
        capacity = self.blocks.num_pages * self.blocks.page_size
        limit = min(len(sequence.ids) + max_tokens, capacity + 1)
        request = Request(len(self.requests), sequence, SamplingParams(), limit)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def finish(self, request: Request, reason: str) -> None:
        self.ended[request] = reason, list(request.ids)
        self.scheduler.finish(request)

    def pool(self, sequence: Sequence, start: int, end: int):
        """The slots of positions, and what they should hold."""
        size = self.blocks.page_size
        for p in range(start, end):
            slot = sequence.block_table[p // size], p % size
            yield slot, (self.weights, tuple(sequence.ids[: p + 1]))

    def step(self) -> None:
        batch = self.scheduler.schedule()
        check_scheduler(self.scheduler)
        assert len(batch.decodes) + batch.prefill_tokens <= self.scheduler.max_batch_tokens
        chunks = [(r, len(r.ids) - 1, len(r.ids)) for r in batch.decodes]
        chunks += [(chunk.request, chunk.start, chunk.end) for chunk in batch.prefills]
        served = {request for request, *_ in chunks}
        assert len(served) == len(chunks) and not served & self.ended.keys()
        for request, start, end in chunks:
            assert request.sequence.num_computed == start < end, "a chunk leaves a gap"
            self.slots.update(self.pool(request.sequence, start, end))
        for request, _, end in chunks:
            for slot, history in self.pool(request.sequence, 0, end):
                assert self.slots[slot] == history, "it reads what is not its own"
        sampled = batch.sampled
        self.scheduler.commit(batch)
        for request in sampled:
            if reason := request.accept(policy(request.ids), 0.0, [], 0):
                self.finish(request, reason)
        prefills = [(chunk.request.id, chunk.start, chunk.count) for chunk in batch.prefills]
        self.log.append(([r.id for r in batch.decodes], prefills))
        check_scheduler(self.scheduler)

    def run(self) -> None:
        """Steps to the end; each request then has the tokens that it would have alone."""
        for _ in range(3000):
            if self.scheduler.waiting or self.scheduler.running:
                self.step()
        for request in self.requests:
            reason, text = self.ended[request]
            alone = text[: request.prompt_tokens]
            while len(alone) < (request.limit if reason == "length" else len(text)):
                alone.append(policy(alone))
            assert text == alone


def test_a_step_decodes_all_running_requests_before_it_prefills():
    """Prefill-first starves the decodes: here a long prompt arrives while two requests decode."""
    world = World(max_batch_tokens=8)
    a, b = world.submit([1, 2], max_tokens=20), world.submit([3], max_tokens=20)
    world.step()
    world.submit(list(range(40)), max_tokens=3)
    for _ in range(6):
        world.step()
        decodes, prefills = world.log[-1]
        assert decodes == [a.id, b.id] and [count for *_, count in prefills] == [6]
    world.run()


@pytest.mark.parametrize("budget, length", [(8, 41), (64, 3), (64, 24), (64, 25)])
def test_the_full_pages_of_a_group_are_prefilled_once(budget, length):
    """The others compute what follows them, and no request that shares nothing waits for them."""
    world = World(max_batch_tokens=budget)
    requests = [world.submit(list(range(length))) for _ in range(6)]
    other = world.submit([50] * 3)
    world.run()
    shared = (length - 1) // 4 * 4  # pages have four tokens
    assert [r.cached_tokens for r in requests] == [0] + [shared] * 5
    chunks = [(step, *chunk) for step, (_, prefills) in enumerate(world.log) for chunk in prefills]
    assert sum(count for *_, count in chunks) <= length + 5 * (length - shared) + 3
    first_steps = [step for step, request, *_ in chunks if request == other.id]
    assert first_steps[0] == (length - 1) // budget


@pytest.mark.parametrize("seed", range(10))
def test_storm(seed):
    """Submissions, sessions, aborts and new weights in any order: all text is right, no leak."""
    rng = random.Random(seed)
    pages, size = rng.choice((10, 24)), rng.choice((2, 3))
    world = World(pages, size, rng.choice((3, 8, 40)), rng.choice((2, 5)))
    capacity = pages * size
    sessions = [Sequence([i % 2], is_session=True) for i in range(4)]
    turns = dict.fromkeys(range(4))  # the last turn of each session

    def some(count: int) -> list[int]:
        return [rng.randrange(2) for _ in range(count)]

    for _ in range(1000):
        kind, number = rng.random(), rng.randrange(4)
        queued = world.scheduler.running + world.scheduler.waiting
        if kind < 0.15:
            world.submit(some(rng.randrange(1, min(16, capacity))), rng.randrange(1, 8))
        elif kind < 0.35 and turns[number] not in queued:
            sequence = sessions[number]
            sequence.ids.extend(some(rng.randrange(3)))
            if len(sequence.ids) > capacity - 6:
                world.scheduler.free(sequence)
                sequence = sessions[number] = Sequence(sequence.ids[:2], is_session=True)
            turns[number] = world.submit([], rng.randrange(1, 6), sequence)
        elif kind < 0.42 and queued:
            world.finish(rng.choice(queued), "abort")
        elif kind < 0.45:
            world.weights += 1
            world.scheduler.reset()
        else:
            world.step()
        check_scheduler(world.scheduler)
    world.run()
    for sequence in sessions:
        world.scheduler.free(sequence)
    check_scheduler(world.scheduler)
    assert world.blocks.available == pages
