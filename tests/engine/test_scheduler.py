"""The scheduler: who runs in a step, what is prefilled once, who gives way, and that every request comes to the same in the end."""

from __future__ import annotations

import random

import pytest
from paged_world import World, reference

from nanorchestra.engine.cache import PageTable
from nanorchestra.engine.request import SamplingParams, StopText
from nanorchestra.errors import UserError


def assert_correct(world: World, *requests) -> None:
    for request in requests:
        prompt = request.ids[: request.prompt_tokens]
        assert request.ids == reference(prompt, request.limit - request.prompt_tokens)


def test_a_step_decodes_everyone_before_it_prefills():
    """Strict prefill-first starves the decodes: here a long prompt arrives while two requests decode."""
    world = World(num_pages=64, max_batch_tokens=8)
    a, b = world.submit([1, 2], max_tokens=20), world.submit([3], max_tokens=20)
    world.step()
    late = world.submit(list(range(40)), max_tokens=3)
    for _ in range(6):
        world.step()
        decodes, prefills = world.log[-1]
        assert decodes == [a.id, b.id] and [count for _, _, count in prefills] == [6]
    world.run()
    assert_correct(world, a, b, late)


def test_a_group_is_prefilled_once():
    world = World(num_pages=64, max_batch_tokens=64)
    prompt = list(range(22))  # five pages of 4 and two tokens
    requests = [world.submit(prompt) for _ in range(8)]
    world.run()
    assert world.prefilled == 22
    assert [r.cached_tokens for r in requests] == [0] + [22] * 7
    assert_correct(world, *requests)


def test_a_group_whose_prompt_takes_many_steps_is_prefilled_once():
    world = World(num_pages=64, max_batch_tokens=8)
    requests = [world.submit(list(range(41)), max_tokens=1) for _ in range(4)]
    world.run()
    assert world.computed == 41
    assert_correct(world, *requests)


def test_forks_write_into_copies_and_the_last_one_into_the_original():
    world = World(num_pages=64, max_batch_tokens=64)
    requests = [world.submit([1, 2, 3, 4, 5, 6]) for _ in range(3)]
    world.step()
    assert len({tuple(r.table.pages) for r in requests}) == 1
    last = requests[0].table.pages[1]
    plan = world.step()
    assert list(plan.copies.values()) == [last] * 2 and requests[2].table.pages[1] == last
    world.run()
    assert_correct(world, *requests)


def test_a_follower_whose_leader_is_aborted_computes_for_himself():
    world = World(num_pages=64, max_batch_tokens=8)
    leader, follower = world.submit(list(range(30))), world.submit(list(range(30)))
    world.step()
    assert follower in world.scheduler.waiting
    world.finish(leader, "abort")
    world.run()
    assert follower.cached_tokens == 8
    assert_correct(world, follower)


def test_a_prompt_that_came_after_new_weights_does_not_follow_one_with_older_kv():
    world = World(num_pages=64, max_batch_tokens=8)
    world.submit(list(range(30)))
    world.step()
    world.scheduler.set_version(1, keep=True)
    late = world.submit(list(range(30)))
    world.run()
    assert late.cached_tokens == 0
    assert_correct(world, *world.requests)


@pytest.mark.parametrize("budget", [64, 4096])
def test_groups_that_arrive_interleaved_are_each_prefilled_once(budget):
    """Prompts of one length that end in the same id, as a chat's do: each group has a leader of its own."""
    world = World(num_pages=800, page_size=16, max_batch_tokens=budget, max_running=64)
    requests = [
        world.submit([100 * group + i for i in range(94)] + [7], max_tokens=2)
        for _ in range(8)
        for group in range(2)
    ]
    world.run()
    assert world.prefilled == 2 * 95
    assert_correct(world, *requests)


def test_a_shared_beginning_is_prefilled_once_too():
    world = World(num_pages=64, max_batch_tokens=64)
    requests = [world.submit(list(range(16)) + [30 + i] * 5) for i in range(4)]
    world.run()
    assert world.prefilled == 21 + 3 * 5
    assert_correct(world, *requests)


def test_who_is_held_does_not_block_others():
    world = World(num_pages=64, max_batch_tokens=16)
    first, held, other = (
        world.submit(list(range(30))),
        world.submit(list(range(30))),
        world.submit([7] * 9),
    )
    world.step()
    assert held in world.scheduler.waiting
    world.step()
    assert [i for i, _, _ in world.log[1][1]] == [first.id, other.id] and held.cached_tokens == 30
    world.run()
    assert_correct(world, first, held, other)


def test_the_newest_is_preempted_and_comes_to_the_same_end():
    world = World(num_pages=8, page_size=2, max_batch_tokens=32)
    requests = [world.submit([i] * 3, max_tokens=12) for i in range(3)]
    gone = []
    release = world.scheduler._release
    world.scheduler._release = lambda request, keep_pages: (
        gone.append(request.id) if not request.finish_reason else None,
        release(request, keep_pages),
    )
    world.run()
    assert gone and requests[0].id not in gone, "the oldest must never give way"
    assert world.scheduler.preemptions == len(gone)
    assert_correct(world, *requests)
    assert world.cache.available == 8


def test_a_preempted_request_goes_before_those_who_came_later():
    world = World(num_pages=8, page_size=2, max_batch_tokens=32, max_running=2)
    requests = [world.submit([i] * 3, max_tokens=12) for i in range(4)]
    while not world.scheduler.preemptions:
        world.step()
    assert world.scheduler.waiting == requests[1:]
    world.run()
    assert list(world.done) == [0, 1, 2, 3]
    assert_correct(world, *requests)


@pytest.mark.parametrize("seed", range(6))
def test_a_pool_for_one_serves_many(seed):
    """Liveness: pages just suffice for the longest request, and everyone still finishes, exactly."""
    rng = random.Random(seed)
    world = World(num_pages=7, page_size=3, max_batch_tokens=rng.choice((4, 9, 30)), max_running=4)
    requests = [
        world.submit(
            [rng.randrange(2) for _ in range(rng.randrange(1, 14))], max_tokens=rng.randrange(1, 9)
        )
        for _ in range(12)
    ]
    world.run(2000)
    assert_correct(world, *requests)
    assert world.cache.available == 7


def test_a_running_request_gets_a_token_every_step_while_pages_suffice():
    world = World(num_pages=200, max_batch_tokens=16, max_running=8)
    rng = random.Random(1)
    watched = world.submit([1], max_tokens=60)
    world.step()
    for _ in range(50):
        if rng.random() < 0.5:
            world.submit(
                [rng.randrange(9) for _ in range(rng.randrange(1, 60))],
                max_tokens=rng.randrange(1, 10),
            )
        before = len(watched.ids)
        world.step()
        assert len(watched.ids) == before + 1


def turn(world: World, ids: list[int], table: PageTable, max_tokens: int = 3):
    request = world.submit(ids, max_tokens, table)
    world.run()
    assert request.ids == reference(ids, max_tokens)
    return request


def test_a_session_prefills_only_what_is_new():
    world, table, ids = World(num_pages=32), PageTable(), list(range(10))
    ids = turn(world, ids, table).ids
    for _ in range(4):
        before, known = world.prefilled, len(ids) - 1  # the last sampled token has no KV yet
        request = turn(world, ids + [7, 8, 9, 9, 9], table)
        assert request.cached_tokens == known and world.prefilled - before == 6
        ids = request.ids
    world.scheduler.close(table)
    assert world.cache.available == 32


def test_a_session_under_pressure_is_revoked_and_recomputes():
    world, table = World(num_pages=8, page_size=2, max_batch_tokens=64), PageTable()
    ids = turn(world, [1] * 6, table).ids
    assert len(table.pages) > 0
    big = world.submit([2] * 13, max_tokens=3)  # needs all eight pages
    world.run()
    assert world.scheduler.revocations == 1 and table.pages == []
    assert_correct(world, big)
    turn(world, ids + [3, 3], table)


def test_returning_sessions_go_before_cold_prompts():
    world, table = World(num_pages=64, max_batch_tokens=8, max_running=1), PageTable()
    ids = turn(world, [1, 2, 3], table).ids
    running = world.submit([5], max_tokens=4)
    world.step()
    cold, back = world.submit([6], max_tokens=1), world.submit(ids + [4], 1, table)
    world.run()
    order = [i for _, prefills in world.log for i, _, _ in prefills]
    assert order[-3:] == [running.id, back.id, cold.id]


@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "decoding", "finished", "held"])
def test_abort_gives_the_pages_back_at_once(state):
    world = World(num_pages=32, max_batch_tokens=8)
    other = world.submit(list(range(12)), max_tokens=6)
    if state == "held":
        request = world.submit(list(range(12)), max_tokens=6)
    else:
        request = world.submit([9] * 20, max_tokens=6)
    steps = {"waiting": 0, "held": 1, "mid-prefill": 3, "decoding": 8, "finished": 30}[state]
    for _ in range(steps):
        world.step()
    if state != "finished":
        world.finish(request, "abort")
    world.scheduler.check()
    assert (
        request not in world.scheduler.waiting + world.scheduler.running
        and request.table.pages == []
    )
    length = len(request.ids)
    world.run()
    assert len(request.ids) == length, "no token after an abort"
    assert_correct(world, other)
    assert world.cache.available == 32


@pytest.mark.parametrize("seed", range(10))
def test_storm(seed):
    """Submissions, sessions, forks, aborts and new weights in any order, 10,000 in all: nobody reads what is not his, nothing leaks, all finished text is right."""
    rng = random.Random(seed)
    world = World(
        num_pages=rng.choice((10, 24)),
        page_size=rng.choice((2, 3)),
        max_batch_tokens=rng.choice((3, 8, 40)),
        max_running=rng.choice((2, 5)),
    )
    capacity = world.cache.num_pages * world.cache.page_size
    sessions = [
        {"table": PageTable(), "ids": [rng.randrange(2)], "open": None, "age": -1} for _ in range(4)
    ]
    for _ in range(1000):
        kind = rng.random()
        if kind < 0.15:
            world.submit(
                [rng.randrange(2) for _ in range(rng.randrange(1, min(16, capacity)))],
                rng.randrange(1, 8),
            )
        elif kind < 0.35:
            session = rng.choice(sessions)
            if session["open"] is None:
                session["ids"] = (
                    session["ids"] + [rng.randrange(2) for _ in range(rng.randrange(3))]
                )[: capacity - 1]
                if len(session["ids"]) > capacity - 6:
                    world.scheduler.close(session["table"])
                    session["ids"] = session["ids"][:2]
                session["open"] = world.submit(
                    session["ids"], rng.randrange(1, 6), session["table"], session["age"]
                )
                session["age"] = session["open"].session
        elif kind < 0.42 and world.scheduler.running + world.scheduler.waiting:
            world.finish(rng.choice(world.scheduler.running + world.scheduler.waiting), "abort")
        elif kind < 0.45:
            world.pool.remember(
                [r.table for r in world.scheduler.running] + list(world.scheduler.parked)
            )
            world.scheduler.set_version(world.cache.version + 1, keep=rng.random() < 0.5)
        elif kind < 0.5:
            session = rng.choice(sessions)
            if session["open"] is None and len(sessions) < 8:
                sessions.append(
                    {
                        "table": PageTable(),
                        "ids": list(session["ids"]),
                        "open": None,
                        "age": rng.randrange(1000),
                    }
                )
                world.scheduler.fork(session["table"], sessions[-1]["table"], sessions[-1]["age"])
                world.pool.fork(session["table"], sessions[-1]["table"])
        else:
            world.step()
        world.scheduler.check()
        for session in sessions:
            if session["open"] is not None and session["open"].id in world.done:
                session["ids"], session["open"] = session["open"].ids, None
    world.run(3000)
    for request in world.requests:
        complete = reference(
            request.ids[: request.prompt_tokens], request.limit - request.prompt_tokens
        )
        assert (
            request.ids == complete
            if world.done[request.id] == "length"
            else request.ids == complete[: len(request.ids)]
        )
    for session in sessions:
        world.scheduler.close(session["table"])
    world.cache.check([])
    assert world.cache.available == world.cache.num_pages


@pytest.mark.parametrize("field, value", [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"), ("top_p", 0), ("top_p", 1.5),
    ("top_p", float("nan")), ("top_k", -1), ("top_k", 2.5), ("max_tokens", 0), ("max_tokens", True), ("seed", 0.5), ("seed", None),
    ("temperature", 1e39), ("temperature", 10**40), ("top_k", 2**70), ("min_p", -0.1), ("min_p", 1.5), ("min_p", float("nan")), ("min_p", None),
    ("top_logprobs", -1), ("top_logprobs", 21), ("top_logprobs", 2.0), ("top_logprobs", True), ("stop", ("",)), ("stop", (3,)), ("stop", None), ("stop", 5),
    ("stop", "\ud800"), ("stop", ("a", "b\udfff")), ("stop_token_ids", ("a",)), ("stop_token_ids", (-1,)), ("stop_token_ids", 5), ("stop_token_ids", None),
    ("stop_token_ids", "5"), ("tools", 5), ("tools", None), ("tools", ("calc", "")), ("tools", [None]),
])  # fmt: skip
def test_bad_sampling_parameters_are_refused(field, value):
    with pytest.raises(UserError, match=f"^sampling parameters: {field} is .*, it should be .+"):
        SamplingParams(**{field: value})


def test_good_sampling_parameters_are_taken():
    assert (
        SamplingParams(stop="ab").stop == ("ab",)
        and SamplingParams(tools="calc").tools == ("calc",)
        and SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    )
    assert (
        SamplingParams(temperature=0).greedy
        and SamplingParams(temperature=1e-6).greedy
        and not SamplingParams().greedy
    )
    assert SamplingParams(seed=-(2**70), temperature=2).seed == -(2**70)


class Letters:
    """A tokenizer of fixed pieces; the last is a special token. Pieces cut characters and stop strings anywhere."""

    pieces = [
        b"a",
        b"b",
        b"ab",
        b"ba",
        b"\xc3",
        b"\xa9",
        b"x\xc3",
        b"END",
        b"EN",
        b"D",
        b"<special>",
    ]

    def bytes_of(self, token):
        return self.pieces[token]

    def decode(self, ids, skip_special=False):
        return b"".join(self.pieces[i] for i in ids if not (skip_special and i == 10)).decode(
            errors="replace"
        )


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_are_found_as_a_search_of_the_whole_text_finds_them(seed):
    rng, tokenizer = random.Random(seed), Letters()
    stops = tuple(
        rng.sample(["aba", "END", "é", "bb", "xé", "ENDab", "a" * 4], rng.randrange(1, 4))
    )
    watch, ids = StopText(stops, tokenizer), []
    for _ in range(60):
        ids.append(rng.randrange(11))
        text = tokenizer.decode(ids, skip_special=True)
        found = [text.find(stop) for stop in stops if stop in text]
        assert watch.feed(ids[-1]) == bool(found)
        if found:
            assert watch.text == text[: min(found)]
            return
        assert watch.text == text
