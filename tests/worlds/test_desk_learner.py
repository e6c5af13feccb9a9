"""Learners as baselines: they learn from rewards what pays, the same for the same seed."""

from __future__ import annotations

from worlds.desk import Desk
from worlds.desk_learner import Learner, Linear


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
