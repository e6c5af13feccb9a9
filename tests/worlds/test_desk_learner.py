"""Learners as baselines: they learn from rewards what pays, the same for the same seed."""

from __future__ import annotations

from statistics import fmean

import pytest

from nanorchestra.settings import load_config
from worlds.desk import Desk
from worlds.desk_learner import Learner, Linear, Table
from worlds.metrics import score
from worlds.programs import play_program
from worlds.routers import PRACTISED, routers_of

HELD_OUT = 60


def rewards(learner, world):
    scored = []
    for index in range(HELD_OUT):
        task = world.task("held_out", index)
        attempt = play_program(learner(task), world.environment(task, 0))
        scored.append(score(task, attempt).reward)
    return scored


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Table, Linear])
def test_a_learner_is_better_with_practice_and_a_function_of_the_seed(sandbox, kind):
    world = Desk(0, sandbox)
    before = rewards(Learner(world, kind(), 0), world)
    after = rewards(Learner(world, kind(), 1200), world)
    assert fmean(after) > fmean(before) + 0.05
    assert after == rewards(Learner(world, kind(), 1200), world)


def test_a_learner_practises_on_training_tasks_alone_before_it_first_plays(sandbox):
    seen = []

    class Counting(Desk):
        def environment(self, task, seed):
            seen.append(task.id)
            return super().environment(task, seed)

    world = Counting(0, sandbox)
    learner = Learner(world, Linear(), 20)
    assert not seen
    task = world.task("held_out", 0)
    for _ in range(2):
        learner(task)
    assert seen == [world.task("train", index).id for index in range(20)]


def test_learners_make_as_many_attempts_as_the_preset():
    grpo = load_config("nano").grpo
    assert grpo.steps * grpo.prompts * grpo.group_size == PRACTISED
    assert {f"table-{PRACTISED}", f"linear-{PRACTISED}"} < routers_of(Desk(0, None)).keys()
