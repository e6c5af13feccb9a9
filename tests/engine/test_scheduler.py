"""The scheduler on a mock model: what it computes when, and that no request reads another's KV."""

from __future__ import annotations

import random

import pytest
from invariants import check_scheduler
from paged_world import World, reference

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.inputs import CHUNKS
from nanorchestra.engine.request import Request, SamplingParams
from nanorchestra.engine.scheduler import Scheduler
from nanorchestra.model.hf_config import PRESETS
from nanorchestra.training.costs import GPUS, Costs


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


@pytest.mark.parametrize("budget, length", [(64, 22), (8, 41)])
def test_a_group_is_prefilled_once(budget, length):
    world = World(num_pages=64, max_batch_tokens=budget)
    requests = [world.submit(list(range(length))) for _ in range(6)]
    world.run()
    assert world.prefilled in (length, length - 1), "the last token of a prompt may be a decode"
    assert [r.cached_tokens for r in requests] == [0] + [length] * 5
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
    assert world.cache.available == 8


@pytest.mark.parametrize("seed", range(10))
def test_storm(seed):
    """Submissions, sessions, aborts and new weights in any order: all text is right, no leak."""
    rng = random.Random(seed)
    pages, size = rng.choice((10, 24)), rng.choice((2, 3))
    world = World(pages, size, rng.choice((3, 8, 40)), rng.choice((2, 5)))
    capacity, version = pages * size, 0
    sessions = [{"table": PageTable(kept=True), "ids": [i % 2], "open": None} for i in range(4)]

    def some(count: int) -> list[int]:
        return [rng.randrange(2) for _ in range(count)]

    for _ in range(1000):
        kind, session = rng.random(), rng.choice(sessions)
        queued = world.scheduler.running + world.scheduler.waiting
        if kind < 0.15:
            world.submit(some(rng.randrange(1, min(16, capacity))), rng.randrange(1, 8))
        elif kind < 0.35 and session["open"] is None:
            session["ids"] = session["ids"] + some(rng.randrange(3))
            if len(session["ids"]) > capacity - 6:
                world.scheduler.close(session["table"])
                session["ids"] = session["ids"][:2]
            tokens = rng.randrange(1, 6)
            session["open"] = world.submit(session["ids"], tokens, session["table"])
        elif kind < 0.42 and queued:
            world.finish(rng.choice(queued), "abort")
        elif kind < 0.45:
            version += 1
            world.scheduler.reset(version)
        else:
            world.step()
        check_scheduler(world.scheduler)
        for session in sessions:
            if session["open"] is not None and session["open"].id in world.done:
                session["ids"], session["open"] = session["open"].ids, None
    world.run(3000)
    for request in world.requests:
        prompt = request.ids[: request.prompt_tokens]
        complete = reference(prompt, request.limit - request.prompt_tokens)
        ended = world.done[request.id] == "length"
        assert request.ids == (complete if ended else complete[: len(request.ids)])
    for session in sessions:
        world.scheduler.close(session["table"])
    check_scheduler(world.scheduler)
    assert world.cache.available == pages


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("card", ["h200", "a100"])
def test_no_running_request_waits_for_long_chunks_on_a_gpu(card, model):
    """Twelve requests decode; prompts of up to 24,000 tokens come; time by the roofline.

    The gap between two tokens of a request is at most three median steps.
    """
    costs, gpu = Costs.of(PRESETS[model]), GPUS[card]
    far = costs.token_flops / costs.pair_flops
    scheduler = Scheduler(PageCache(20_000, 64), 8192, 64, (CHUNKS[-1], far))
    rng, gaps, number = random.Random(0), [], iter(range(10**6))
    for step in range(1000):
        if step < 12 or step % 200 == 0:
            length = 300 if step < 12 else rng.randint(2_000, 24_000)
            ids = [rng.randrange(9) for _ in range(length)]
            scheduler.add(Request(next(number), ids, SamplingParams(), 10**6))
        plan = scheduler.plan()
        chunks = [(start, count) for _, start, count in plan.prefills]
        tokens = len(plan.decodes) + sum(count for _, count in chunks)
        pairs = sum(count * (start + count / 2) for start, count in chunks)
        kv = sum(len(r.ids) for r in plan.decodes) * costs.kv_bytes / gpu.bandwidth
        products = costs.weight_bytes / gpu.bandwidth, tokens * costs.token_flops / gpu.flops
        if plan.decodes:
            gaps.append(max(products) + kv + pairs * costs.pair_flops / gpu.flops)
        scheduler.commit(plan)
        for request in plan.sampling:
            request.accept(rng.randrange(9), 0.0)
            if len(request.ids) > 24_500:
                scheduler.finish(request)
    gaps.sort()
    assert gaps[-1] <= 3 * gaps[len(gaps) // 2], "of more than 800 steps"
