"""The scheduler on a mock model: what it computes when, and that no request reads another's KV."""

from __future__ import annotations

import itertools
import random

import pytest
from invariants import check_scheduler

from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.gpu_runner import GpuRunner
from nanorchestra.engine.scheduler import Batch, Scheduler
from nanorchestra.engine.sequence import Request, SamplingParams, Sequence


class FakePool:
    """Holds for each slot what its keys and values depend on: the weights, and all ids so far."""

    def __init__(self, blocks: BlockManager):
        self.blocks, self.slots = blocks, {}
        self.weights = 0  # their version

    def _history(self, sequence: Sequence, position: int) -> tuple:
        return self.weights, tuple(sequence.ids[: position + 1])

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
        max_running = min(max_running, max_batch_tokens)
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


def test_a_step_decodes_all_running_requests_before_it_prefills():
    """Prefill-first starves the decodes: here a long prompt arrives while two requests decode."""
    world = World(num_pages=64, max_batch_tokens=8)
    a, b = world.submit([1, 2], max_tokens=20), world.submit([3], max_tokens=20)
    world.step()
    late = world.submit(list(range(40)), max_tokens=3)
    for _ in range(6):
        world.step()
        decodes, prefills = world.log[-1]
        assert decodes == [a.id, b.id] and [count for *_, count in prefills] == [6]
    world.run()
    world.assert_correct(a, b, late)


@pytest.mark.parametrize("budget, length", [(64, 22), (8, 41), (64, 3), (64, 24), (64, 25)])
def test_the_full_pages_of_a_group_are_prefilled_once(budget, length):
    """The others compute what follows them, which may be a last token alone, as a decode."""
    world = World(num_pages=64, max_batch_tokens=budget)
    requests = [world.submit(list(range(length))) for _ in range(6)]
    world.run()
    shared = (length - 1) // 4 * 4  # pages have four tokens
    assert [r.cached_tokens for r in requests] == [0] + [shared] * 5
    assert world.prefilled <= length + 5 * (length - shared)
    world.assert_correct(*requests)


def test_a_shared_prefix_is_prefilled_once_and_blocks_no_other_request():
    world = World(num_pages=64, max_batch_tokens=32)
    requests = [world.submit(list(range(16)) + [30 + i] * 5) for i in range(4)]
    other = world.submit([7] * 9)
    world.step()
    assert [i for i, *_ in world.log[0][1]] == [requests[0].id, other.id]
    world.run()
    assert world.prefilled == 21 + 3 * 5 + 9
    world.assert_correct(*requests, other)


def test_the_newest_is_preempted_keeps_its_place_and_comes_to_the_same_end():
    world = World(num_pages=8, page_size=2, max_batch_tokens=32, max_running=2)
    requests = [world.submit([i] * 3, max_tokens=12) for i in range(4)]
    while not world.scheduler.preemptions:
        world.step()
    assert world.scheduler.waiting == requests[1:]
    world.run()
    assert list(world.done) == [0, 1, 2, 3]
    world.assert_correct(*requests)
    assert world.blocks.available == 8


@pytest.mark.parametrize("seed", range(10))
def test_storm(seed):
    """Submissions, sessions, aborts and new weights in any order: all text is right, no leak."""
    rng = random.Random(seed)
    pages, size = rng.choice((10, 24)), rng.choice((2, 3))
    world = World(pages, size, rng.choice((3, 8, 40)), rng.choice((2, 5)))
    capacity = pages * size
    sessions = [Sequence([i % 2], is_session=True) for i in range(4)]
    turns = dict.fromkeys(range(4))  # the open turn of each session

    def some(count: int) -> list[int]:
        return [rng.randrange(2) for _ in range(count)]

    for _ in range(1000):
        kind, number = rng.random(), rng.randrange(4)
        queued = world.scheduler.running + world.scheduler.waiting
        if kind < 0.15:
            world.submit(some(rng.randrange(1, min(16, capacity))), rng.randrange(1, 8))
        elif kind < 0.35 and turns[number] is None:
            sequence = sessions[number]
            sequence.ids.extend(some(rng.randrange(3)))
            if len(sequence.ids) > capacity - 6:
                world.scheduler.free(sequence)
                sequence = sessions[number] = Sequence(sequence.ids[:2], is_session=True)
            turns[number] = world.submit([], rng.randrange(1, 6), sequence)
        elif kind < 0.42 and queued:
            world.finish(rng.choice(queued), "abort")
        elif kind < 0.45:
            world.pool.weights += 1
            world.scheduler.reset()
        else:
            world.step()
        check_scheduler(world.scheduler)
        for number, turn in turns.items():
            if turn is not None and turn.id in world.done:
                turns[number] = None
    world.run(3000)
    for request in world.requests:
        text = world.texts[request.id]
        prompt = text[: request.prompt_tokens]
        complete = reference(prompt, request.limit - request.prompt_tokens)
        ended = world.done[request.id] == "length"
        assert text == (complete if ended else complete[: len(text)])
    for sequence in sessions:
        world.scheduler.free(sequence)
    check_scheduler(world.scheduler)
    assert world.blocks.available == pages


def test_a_step_that_decodes_has_a_bounded_prefill_on_a_gpu():
    """Twelve requests decode while prompts of up to 24,000 tokens come."""
    bound = GpuRunner.mixed_prefill
    scheduler = Scheduler(BlockManager(20_000, 64), 8192, 64, bound)
    rng, prefills = random.Random(0), []
    for step in range(500):
        if step < 12 or step % 100 == 0:
            length = 300 if step < 12 else rng.randint(2_000, 24_000)
            ids = [rng.randrange(9) for _ in range(length)]
            scheduler.add(Request(step, Sequence(ids), SamplingParams(), 10**6))
        batch = scheduler.schedule()
        if batch.decodes:
            prefills.append(batch.prefill_tokens)
        sampled = batch.sampled
        scheduler.commit(batch)
        for request in sampled:
            request.accept(rng.randrange(9), 0.0, [], 0)
    assert max(prefills) == bound and 0 in prefills
