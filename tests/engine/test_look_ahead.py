"""Launching a step before the last one's draws are read changes no token, whatever happens."""

from __future__ import annotations

import random

import numpy as np
import pytest
from invariants import check_scheduler

from nanorchestra.engine.cpu_runner import CpuRunner
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.guide import Guide
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

SHAPE = ModelConfig(64, 32, 32, 2, 2, 1, 16, 256, eos_token_ids=(3, 4, 5))


class AheadRunner(CpuRunner):
    """Takes a step's newest ids from the step before it, as a GPU does."""

    overlaps, ahead, waits = True, 0, 0

    def launch(self, batch, previous=None):
        if previous is None:
            return super().launch(batch)
        self.ahead += 1
        newest = self.read(previous)
        for request in batch.decodes:
            request.ids.append(newest[request].token)
            request.sequence.num_computed += 1
        launched = super().launch(batch)
        for request in batch.decodes:
            request.ids.pop()
            request.sequence.num_computed -= 1
        return launched

    def wait(self):
        self.waits += 1


class EvenAfterThirds(Guide):
    """After an id that 3 divides, the next one must be even."""

    def __init__(self):
        self.last = 1

    def copy(self):
        return EvenAfterThirds()

    def advance(self, token):
        assert not self.holds or token % 2 == 0, "a forbidden id was drawn"
        self.last = token

    @property
    def holds(self):
        return self.last % 3 == 0

    def allowed(self):
        return np.arange(64) % 2 == 0 if self.holds else None


@pytest.fixture(scope="module")
def model():
    model = Qwen3(SHAPE)
    model.init_weights(0)
    return model


def engine(model, ahead: bool, **settings) -> Engine:
    made = Engine(model, **{"num_pages": 40, "page_size": 4, "max_batch_tokens": 24} | settings)
    if ahead:
        made.runner = AheadRunner(model, made.num_drawable, made.blocks.num_pages, 4)
    return made


def storm(model, seed: int, ahead: bool, pages: int) -> tuple[list, Engine]:
    """The same requests, sessions, aborts and new weights, at times that no token decides."""
    rng, results = random.Random(seed), []
    serving = engine(model, ahead, num_pages=pages)
    serving.eos_ids |= {7, 8, 9}

    def prompt(count: int) -> list[int]:
        return [rng.randrange(6, 64) for _ in range(count)]

    def params() -> SamplingParams:
        return SamplingParams(
            max_tokens=rng.randint(1, 14),
            seed=rng.randrange(1000),
            temperature=rng.choice((0.0, 1.0, 3.0)),
            ignore_eos=rng.random() < 0.3,
            top_k=rng.choice((0,) * 9 + (5,)),
            top_logprobs=rng.choice((0, 0, 3)),
            guide=EvenAfterThirds() if rng.random() < 0.4 else None,
        )

    sessions = [serving.session(prompt(rng.randint(2, 12))) for _ in range(3)]
    for _ in range(8):
        count = rng.randint(0, 5)
        requests = [serving.submit(prompt(rng.choice((3, 3, 20))), params()) for _ in range(count)]
        turns = [session.submit(params()) for session in sessions]
        doomed = rng.choice(requests) if requests and rng.random() < 0.3 else None
        if doomed is not None:
            serving.step()
            serving.abort(doomed)
        while not all(request.finished for request in requests + turns):
            serving.step()
            check_scheduler(serving.scheduler)
        for request in requests + turns:
            if request is not doomed:
                done = request.completed()
                results.append((done.token_ids, done.finish_reason, request.top_logprobs))
        for session in sessions:
            session.append(prompt(rng.randint(1, 5)))
        if rng.random() < 0.3:
            serving.update_weights()
        sessions = [s if len(s.ids) < 60 else serving.session([9, 10]) for s in sessions]
    return results, serving


@pytest.mark.parametrize("pages", [150, 45])
@pytest.mark.parametrize("seed", range(6))
def test_looking_ahead_changes_no_token(model, seed, pages):
    """Guides that forbid ids at times, and reports of the most probable ids, among the rows."""
    serial, _ = storm(model, seed, False, pages)
    ahead, serving = storm(model, seed, True, pages)
    assert serving.runner.ahead > 10
    for a, b in zip(serial, ahead, strict=True):
        assert a[:2] == b[:2]
        for one, other in zip(a[2], b[2], strict=True):
            assert [token for token, _ in one] == [token for token, _ in other]


def test_a_guided_row_does_not_switch_looking_ahead_off(model):
    serving = engine(model, ahead=True, num_pages=80)
    params = [
        SamplingParams(max_tokens=30, seed=i, ignore_eos=True, guide=EvenAfterThirds())
        for i in range(4)
    ]
    serving.generate([[6, 7, 8 + i] for i in range(4)], params)
    assert serving.runner.ahead == serving.stats["steps"] - 1, "all but the prefill"


def test_a_queue_that_cannot_move_does_not_switch_looking_ahead_off(model):
    serving = engine(model, ahead=True, num_pages=80, max_running=2)
    params = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True) for i in range(6)]
    serving.generate([[6, 7, 8 + i] for i in range(6)], params)
    assert serving.runner.ahead >= serving.stats["steps"] - 2 * 3


@pytest.mark.parametrize("how", ["abort", "update_weights", "reset_prefix_cache"])
def test_a_step_that_is_dropped_is_waited_for(model, how):
    """The GPU may still read the host's pinned memory, which the next step writes."""
    serving = engine(model, ahead=True, num_pages=80)
    request = serving.submit([6, 7, 8], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(4):
        serving.step()
    assert serving.runner.ahead and not serving.runner.waits
    if how == "abort":
        serving.abort(request)
        serving.step()
    else:
        getattr(serving, how)()
    assert serving.runner.waits == 1
    while serving.has_work:
        serving.step()


@pytest.mark.parametrize("place", ["accept", "draw"])
def test_an_interrupt_inside_of_a_step_leaves_no_request_behind(model, place, monkeypatch):
    """A request whose token is committed but not accepted would never be served again."""
    serving = engine(model, ahead=True, num_pages=80)
    request = serving.submit([6, 7, 8], SamplingParams(max_tokens=30, ignore_eos=True))
    waiting = [serving.submit([9] * 20, SamplingParams(max_tokens=3)) for _ in range(3)]
    for _ in range(3):
        serving.step()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(request if place == "accept" else serving.runner, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                serving.step()
    assert request.completion.finish_reason == "abort"
    check_scheduler(serving.scheduler)
    while serving.has_work:
        serving.step()
    assert all(other.finished for other in waiting)
    assert serving.blocks.available == serving.blocks.num_pages


@pytest.mark.parametrize("is_session", [False, True])
def test_an_interrupt_where_a_request_ends_leaves_no_page_behind(model, is_session, monkeypatch):
    """The request has its completion, but is still among those that run."""
    serving = engine(model, ahead=True, num_pages=80)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    session = serving.session([6, 7, 8])
    request = session.submit(params) if is_session else serving.submit([6, 7, 8], params)
    finish, calls = serving.scheduler.finish, []

    def interrupt(request):
        calls.append(request)
        if len(calls) == 1:
            raise KeyboardInterrupt
        finish(request)

    with monkeypatch.context() as patch:
        patch.setattr(serving.scheduler, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            while serving.has_work:
                serving.step()
    assert request.completion.finish_reason == "length" and not serving.has_work
    check_scheduler(serving.scheduler)
    assert serving.blocks.available == serving.blocks.num_pages
    session.close()


@pytest.mark.parametrize("place", ["match", "grow"])
def test_an_interrupt_inside_of_admission_leaves_no_page_behind(model, place, monkeypatch):
    """A waiting request that kept pages of an emptied cache would read those of others."""
    serving = engine(model, ahead=False, num_pages=80)
    prompt = [9 + i % 7 for i in range(20)]
    done = serving.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    right, calls = getattr(serving.blocks, place), []

    def interrupt(*arguments):
        result = right(*arguments)
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return result

    requests = [
        serving.submit(prompt + [i], SamplingParams(max_tokens=3, ignore_eos=True))
        for i in range(6, 9)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(serving.blocks, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            serving.step()
    check_scheduler(serving.scheduler)
    while serving.has_work:
        serving.step()
        check_scheduler(serving.scheduler)
    assert all(request.finished for request in requests)
    again = serving.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert again.token_ids == done.token_ids
    assert serving.blocks.available == serving.blocks.num_pages


@pytest.mark.parametrize("steps", range(3, 8))
def test_a_failed_step_leaves_what_has_been_sampled(model, steps):
    """The failing step's successor is under way by then. page_size is 4: one step fills a page."""
    left = []
    for ahead in (False, True):
        serving = engine(model, ahead, max_batch_tokens=64)
        session = serving.session([6, 7, 8, 9, 10])
        session.submit(SamplingParams(max_tokens=30, ignore_eos=True, temperature=0))
        for _ in range(steps):
            serving.step()
        right = serving.runner.read
        serving.runner.read = lambda launched: 1 / 0
        with pytest.raises(ZeroDivisionError):
            serving.step()
        serving.runner.read = right
        check_scheduler(serving.scheduler)
        session.append([13])
        left.append(session.ids + session.sample(SamplingParams(max_tokens=9)).token_ids)
    assert left[0] == left[1] and len(left[0]) >= 5 + steps + 1
