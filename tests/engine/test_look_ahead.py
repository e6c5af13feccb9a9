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

    overlaps, ahead, chunks_ahead, waits = True, 0, 0, 0

    def launch(self, batch, previous=None):
        if previous is None:
            return super().launch(batch)
        self.ahead += 1
        self.chunks_ahead += len(batch.prefills)
        newest = self.read(previous)
        unread = [request for request in batch.decodes if request in newest]
        for request in unread:
            request.ids.append(newest[request].token)
        launched = super().launch(batch)
        for request in unread:
            request.ids.pop()
        return launched

    def wait(self):
        self.waits += 1


class EvenAfterThirds(Guide):
    """After an id that 3 divides, the next one must be even. It has no grammar."""

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
        return np.arange(320) % 2 == 0 if self.holds else None


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


@pytest.mark.parametrize("seed, pages", [(0, 150), (1, 45), (2, 45)])
def test_looking_ahead_changes_no_token(model, seed, pages):
    """Guides that forbid ids at times, and reports of the most probable ids, among the rows."""
    serial, _ = storm(model, seed, False, pages)
    ahead, serving = storm(model, seed, True, pages)
    assert serving.runner.ahead > 10 and serving.runner.chunks_ahead > 10
    for a, b in zip(serial, ahead, strict=True):
        assert a[:2] == b[:2]
        for one, other in zip(a[2], b[2], strict=True):
            assert [token for token, _ in one] == [token for token, _ in other]


@pytest.mark.parametrize("how", ["abort", "update_weights"])
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
        serving.update_weights()
    assert serving.runner.waits == 1
    while serving.has_work:
        serving.step()


@pytest.mark.parametrize(
    "place, call", [("request.accept", 1), ("runner.read", 4), ("scheduler.finish", 1)]
)
def test_an_interrupt_inside_of_a_step_leaves_nothing_behind(model, monkeypatch, place, call):
    """No request that is never served again, and no held page.

    A session goes on from what has been sampled.
    """
    serving = engine(model, ahead=True, num_pages=80)
    session, prompt = serving.session([6, 7, 8]), [9 + i % 7 for i in range(20)]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    request = session.submit(SamplingParams(max_tokens=5, ignore_eos=True))
    requests = [request, *(serving.submit([*prompt, i], params) for i in range(6, 9))]
    part, name = place.split(".")
    owner = request if part == "request" else getattr(serving, part)
    right, calls = getattr(owner, name), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        return right(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        while serving.has_work:
            serving.step()
    check_scheduler(serving.scheduler)
    while serving.has_work:
        serving.step()
    assert all(each.finished for each in requests)
    history = session.ids
    assert history == [6, 7, 8, *request.completion.token_ids]
    session.append([13])
    continued = session.sample(params).token_ids
    session.close()
    assert serving.generate([[*history, 13]], params)[0].token_ids == continued
    assert serving.blocks.available == serving.blocks.num_pages


def test_a_request_that_cannot_be_admitted_ahead_is_told_once(model, monkeypatch):
    serving = engine(model, ahead=True)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    sound = serving.submit([6, 7, 8], params)
    serving.step()
    bad = serving.submit([9, 10], params)
    right = serving.blocks.match

    def match(sequence):
        if sequence is bad.sequence:
            raise RuntimeError("no pages for this one")
        return right(sequence)

    monkeypatch.setattr(serving.blocks, "match", match)
    told = []
    while not sound.finished:
        told += serving.step()
    assert told.count(bad) == 1 and told.count(sound) == 1 and serving.runner.ahead
