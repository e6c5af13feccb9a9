"""Launching a step before the last one's draws are read changes no token, whatever happens."""

from __future__ import annotations

import random

import pytest
import torch
from invariants import check_scheduler
from nanorchestra.engine.runner import Runner
from nanorchestra.engine.steps import Steps

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.scheduler import Plan
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

SHAPE = ModelConfig(64, 32, 32, 2, 2, 1, 16, 256, eos_token_ids=(3, 4, 5))


class AheadRunner(Runner):
    """Draws at launch, as a GPU does, and takes a step's newest ids from the step before it."""

    overlaps, ahead = True, 0

    def launch(self, plan: Plan, after=None):
        for request in plan.decodes if after else ():
            request.ids.append(after[request].token)
            request.table.written += 1
        self.ahead += after is not None
        logits, requests = super().launch(plan), plan.sampling
        draws = self._sample(logits, requests) if requests else []
        for request in plan.decodes if after else ():
            request.ids.pop()
            request.table.written -= 1
        return dict(zip(requests, draws, strict=True))

    def draws(self, launched, requests):
        return [launched[request] for request in requests]


@pytest.fixture(scope="module")
def model():
    model = Qwen3(SHAPE)
    model.init_weights(0)
    return model


def engine(model, ahead: bool, **settings) -> Engine:
    made = Engine(model, **{"num_pages": 40, "page_size": 4, "max_batch_tokens": 24} | settings)
    if ahead:
        made.runner = AheadRunner(model, made.cache.num_pages, 4, made.vocab_size, torch.float32)
        made._steps = Steps(made.scheduler, made.runner)
    return made


def storm(model, seed: int, ahead: bool, pages: int) -> tuple[list, Engine]:
    """The same requests, sessions, aborts and new weights, at times that no token decides."""
    rng, results = random.Random(seed), []
    serving = engine(model, ahead, num_pages=pages)

    def prompt(count: int) -> list[int]:
        return [rng.randrange(6, 64) for _ in range(count)]

    def params() -> SamplingParams:
        return SamplingParams(
            max_tokens=rng.randint(1, 14),
            seed=rng.randrange(1000),
            temperature=rng.choice((0.0, 1.0, 3.0)),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=(7, 8, 9),
            top_k=rng.choice((0,) * 9 + (5,)),
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
        results += [r.completion for r in requests + turns if r is not doomed]
        for session in sessions:
            session.append(prompt(rng.randint(1, 5)))
        if rng.random() < 0.3:
            serving.update_weights()
        sessions = [s if len(s.ids) < 60 else serving.session([9, 10]) for s in sessions]
    return [(c.token_ids, c.finish_reason) for c in results], serving


@pytest.mark.parametrize("pages", [150, 45])
@pytest.mark.parametrize("seed", range(6))
def test_looking_ahead_changes_no_token(model, seed, pages):
    serial, _ = storm(model, seed, False, pages)
    ahead, serving = storm(model, seed, True, pages)
    assert ahead == serial and serving.runner.ahead > 3


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
        right = serving.runner.draws
        serving.runner.draws = lambda launched, requests: 1 / 0
        with pytest.raises(ZeroDivisionError):
            serving.step()
        serving.runner.draws = right
        check_scheduler(serving.scheduler)
        session.append([13])
        left.append(session.ids + session.sample(SamplingParams(max_tokens=9)).token_ids)
    assert left[0] == left[1] and len(left[0]) >= 5 + steps + 1
