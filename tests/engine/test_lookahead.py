"""The engine that launches a step before it has read the last one's draws gives what the plain engine gives, whatever happens in between."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import pytest
import torch

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.request import PENDING
from nanorchestra.engine.runner import Runner
from nanorchestra.engine.sampler import Sampler
from nanorchestra.model.qwen3 import PRESETS, Qwen3

SHAPE = dataclasses.replace(
    PRESETS["nano"],
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    eos_token_ids=(3, 4, 5),
)


class AheadRunner(Runner):
    """A plain runner with the interface of the GPU's: what it draws is read later, and a pending id comes from what was drawn before."""

    fused = True
    launched_ahead = 0

    def launch(self, plan, after=None):
        known = dict(zip(after.requests, after.tokens)) if after else {}
        pending = [request for request in plan.decodes if request.ids[-1] == PENDING]
        assert not pending or not plan.prefills
        self.launched_ahead += bool(pending)
        for request in pending:
            request.ids[-1] = known[request]
        requests = plan.sampling
        drawn = type("Drawn", (), {})()
        drawn.requests = requests
        drawn.draws = Sampler(64)(
            self.logits(plan), [r.params for r in requests], [len(r.ids) for r in requests]
        )
        drawn.tokens = [draw.token for draw in drawn.draws]
        for request in pending:
            request.ids[-1] = PENDING
        return drawn

    def draws(self, drawn, requests, sampler, allowed):
        return [drawn.draws[drawn.requests.index(request)] for request in requests]


@pytest.fixture(scope="module")
def model():
    model = Qwen3(SHAPE)
    model.init_weights(0)
    return model


def engine(model, ahead: bool, **settings) -> Engine:
    made = Engine(model, **dict(num_pages=40, page_size=4, max_batch_tokens=24) | settings)
    if ahead:
        made.runner = AheadRunner(model, made.cache.num_pages, made.cache.page_size)
    return made


def storm(model, seed: int, ahead: bool, pages: int) -> tuple[list, Engine]:
    """The same requests, sessions, forks, aborts and new weights, at times that depend on nothing but finished requests."""
    rng = random.Random(seed)
    serving = engine(model, ahead, num_pages=pages)
    results, sessions = (
        [],
        [
            serving.session([rng.randrange(6, 64) for _ in range(rng.randint(2, 12))])
            for _ in range(3)
        ],
    )
    for _ in range(8):

        def params():
            return SamplingParams(
                max_tokens=rng.randint(1, 14),
                seed=rng.randrange(1000),
                temperature=rng.choice((0.0, 1.0, 3.0)),
                ignore_eos=rng.random() < 0.3,
                stop_token_ids=(7, 8, 9),
                top_k=rng.choice((0,) * 9 + (5,)),
            )

        requests = [
            serving.submit([rng.randrange(6, 64) for _ in range(rng.choice((3, 3, 20)))], params())
            for _ in range(rng.randint(0, 5))
        ]
        turns = [session.submit(params()) for session in sessions]
        doomed = rng.choice(requests) if requests and rng.random() < 0.3 else None
        if doomed is not None:
            serving.step()
            serving.abort(doomed)
        while not all(request.finished for request in requests + turns):
            serving.step()
            serving.scheduler.check()
            assert all(PENDING not in request.ids for request in requests + turns)
        results += [
            (r.completion.token_ids, r.completion.finish_reason)
            for r in requests + turns
            if r is not doomed
        ]
        for session in sessions:
            session.append([rng.randrange(6, 64) for _ in range(rng.randint(1, 5))])
        if rng.random() < 0.4:
            sessions[rng.randrange(3)].close()
            sessions = [s for s in sessions if not s._closed]
            sessions.append(sessions[0].fork())
        if rng.random() < 0.3:
            serving.update_weights(inflight=rng.choice(("recompute", "keep")))
        sessions = [s if len(s.ids) < 60 else serving.session([9, 10]) for s in sessions]
    return results, serving


@pytest.mark.parametrize("pages", [150, 45])
@pytest.mark.parametrize("seed", range(6))
def test_looking_ahead_changes_no_token(model, seed, pages):
    plain, _ = storm(model, seed, False, pages)
    ahead, serving = storm(model, seed, True, pages)
    assert ahead == plain and serving.runner.launched_ahead > 3


def test_a_failed_step_leaves_no_pending_id(model):
    serving = engine(model, True)
    requests = [
        serving.submit([6, 7, n], SamplingParams(max_tokens=20, ignore_eos=True)) for n in (10, 11)
    ]
    for _ in range(3):
        serving.step()
    logits, serving.runner.logits = serving.runner.logits, lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        serving.step()
    serving.runner.logits = logits
    assert all(r.completion.finish_reason == "abort" and PENDING not in r.ids for r in requests)
    serving.scheduler.check()
    again = serving.generate([[6, 7, 10]], SamplingParams(max_tokens=5, ignore_eos=True))[
        0
    ].token_ids
    assert (
        again
        == engine(model, False)
        .generate([[6, 7, 10]], SamplingParams(max_tokens=5, ignore_eos=True))[0]
        .token_ids
    )


def fail(serving, ahead: bool) -> None:
    """The next step is computed, and its draws are refused; the one after it is on its way by then, if `ahead`."""
    owner, name = (serving.runner, "draws") if ahead else (serving, "sampler")
    right = getattr(owner, name)

    def refuse(*_):
        raise FloatingPointError("not finite")

    setattr(owner, name, refuse)
    with pytest.raises(FloatingPointError, match="not finite"):
        serving.step()
    setattr(owner, name, right)


@pytest.mark.parametrize("steps", range(3, 8))
def test_a_failed_step_leaves_the_sessions_of_the_plain_engine(model, steps):
    """Also where the step fills a page (page_size is 4): what is erased must not be found by another prompt."""
    left = []
    for ahead in (False, True):
        serving = engine(model, ahead, max_batch_tokens=64)
        session, bystander = serving.session([6, 7, 8, 9, 10]), serving.session([11, 12])
        turn, _ = (
            one.submit(SamplingParams(max_tokens=30, ignore_eos=True, temperature=0))
            for one in (session, bystander)
        )
        for _ in range(steps):
            serving.step()
        fail(serving, ahead)
        serving.scheduler.check()
        left.append(
            (
                session.ids,
                session._table.written,
                bystander._table.written,
                sorted(ids for _, ids in serving.cache._index),
            )
        )
        assert session._table.written == len(session.ids) - 1
        assert all(
            serving.runner.k_cache[0, page].flatten(1).any()
            for page in serving.cache._index.values()
        )
        slots = [
            (session._table.pages[n // 4], n % 4)
            for n in range(session._table.written, len(session._table.pages) * 4)
        ]
        assert not any(serving.runner.k_cache[:, page, :, at].any() for page, at in slots)
        bystander.append([13])
        given = [list(session.ids), list(bystander.ids), turn.ids + [14]]
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
        requests = [
            session.submit(params),
            bystander.submit(params),
            serving.submit(given[2], params),
        ]
        while serving.has_work:
            serving.step()
        assert [r.completion.token_ids for r in requests] == [
            c.token_ids for c in engine(model, False, num_pages=99).generate(given, params)
        ]
    assert left[0] == left[1]


@pytest.mark.parametrize("pages", range(4, 12))
def test_a_step_that_fails_in_a_full_pool_says_why(model, pages):
    """Two requests outgrow the pool: at some step somebody has to give way, and that one fails too."""
    for steps in range(2, 20):
        serving = engine(model, True, num_pages=pages, max_batch_tokens=64)
        requests = [
            serving.submit([6, 7, n], SamplingParams(max_tokens=30, ignore_eos=True))
            for n in (10, 11)
        ]
        for _ in range(steps):
            if all(not request.finished for request in requests):
                serving.step()
        if serving.has_work:
            fail(serving, True)
            serving.scheduler.check()


def test_new_weights_and_sleep_throw_the_next_step_away(model):
    outcomes = []
    for ahead in (False, True):
        changed = Qwen3(SHAPE)
        changed.load_state_dict(model.state_dict())
        serving = engine(changed, ahead)
        request = serving.submit([6, 7, 8], SamplingParams(max_tokens=12, ignore_eos=True))
        for _ in range(4):
            serving.step()
        with torch.no_grad():
            changed.norm.mul_(3)
        serving.update_weights(inflight="recompute")
        serving.step()
        serving.sleep()
        serving.wake()
        while not request.finished:
            serving.step()
        outcomes.append((request.completion.token_ids, request.completion.weight_versions))
    assert outcomes[0] == outcomes[1]


def plan_and_preempt_by_known_ids(scheduler, plan):
    ahead, preempted = (
        any(PENDING in request.ids for request in scheduler.running),
        scheduler.preemptions,
    )
    planned = plan()
    assert not ahead or (
        scheduler.preemptions == preempted
        and not scheduler.waiting
        and planned.requests == planned.decodes
    )
    return planned


@pytest.mark.parametrize("pages", range(18, 40, 3))
def test_preemption_while_looking_ahead(model, pages, monkeypatch):
    """Samples of one prompt, whose half-full last page is copied, outgrow the pool: the newest gives way, but not in a step that is planned
    ahead, where he would wait with an id that is not known, and equal somebody else's who has another."""
    outcomes, preempted = [], 0
    for ahead in (False, True):
        serving = engine(model, ahead, num_pages=pages, max_batch_tokens=64)
        monkeypatch.setattr(
            serving.scheduler,
            "plan",
            partial(plan_and_preempt_by_known_ids, serving.scheduler, serving.scheduler.plan),
        )
        session = serving.session([6, 7, 8, 9, 10])
        session.sample(SamplingParams(max_tokens=2, ignore_eos=True))
        family = [session] + [session.fork() for _ in range(3)]
        params = [SamplingParams(max_tokens=30, ignore_eos=True, seed=seed) for seed in range(4)]
        requests = [member.submit(p) for member, p in zip(family, params)] + [
            serving.submit([11, 12, 13], params[0])
        ]
        while not all(request.finished for request in requests):
            serving.step()
            serving.scheduler.check()
        outcomes.append([request.completion.token_ids for request in requests])
        preempted += serving.stats["preemptions"]
    assert outcomes[0] == outcomes[1] and preempted
