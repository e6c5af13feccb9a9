"""A mixture of worlds: its shares, its tasks and its lessons."""

from __future__ import annotations

import pytest

from nanorchestra.config import TaskSection
from worlds.desk import Desk
from worlds.load import open_world, parse_mixture
from worlds.mixture import Mixture


class Numbers:
    """A world whose tasks are their places."""

    def __init__(self, name):
        self.name = name

    def task(self, split, index):
        return self.name, split, index


def mixture(text):
    shares = parse_mixture(text)
    return Mixture(text, {name: Numbers(name) for name in shares}, shares, 0), shares


@pytest.mark.parametrize("text", ["a=0.99, b=0.01", "a, b, c"])
def test_tasks_come_from_each_world_by_its_share(text):
    mixed, shares = mixture(text)
    assert sum(shares.values()) == pytest.approx(1)
    drawn = [mixed.task("train", index) for index in range(4000)]
    names = [name for name, *_ in drawn]
    for name, share in shares.items():
        assert names.count(name) / 4000 == pytest.approx(share, abs=0.03)
    assert [index for *_, index in drawn] == list(range(4000)), "none twice"
    assert mixture(text)[0].task("train", 2345) == drawn[2345]


def test_a_task_is_that_of_its_world_and_lessons_are_of_every_world(sandbox):
    mixed = open_world(TaskSection("desk=0.8, domains=0.2"), 3, sandbox)
    alone = Desk(3, sandbox)
    for index in range(20):
        task = mixed.task("held_out", index)
        assert task.world == "domains" or task == alone.task("held_out", index)
    lessons = [mixed.lesson(index) for index in range(16)]
    assert {env.task.world for env, _ in lessons} == {"desk", "domains"}
