"""A mixture of worlds: its shares, its tasks and its lessons."""

from __future__ import annotations

import pytest

from nanorchestra.agent.world import demonstrates
from nanorchestra.config import TaskSection
from worlds.desk import Desk
from worlds.load import open_world, parse_mixture
from worlds.mixture import Mixture


class Numbers:
    """A world whose tasks are their places."""

    def __init__(self, name, end=None):
        self.name, self.end = name, end

    def size(self, split):
        return self.end

    def task(self, split, index):
        return self.name, split, index


def mixture(text, seed=0, **ends):
    shares = parse_mixture(text)
    worlds = {name: Numbers(name, ends.get(name)) for name in shares}
    return Mixture(text, worlds, shares, seed), shares


@pytest.mark.parametrize("text", ["a=0.99, b=0.01", "a=5, b=3, c=2", "a, b, c"])
def test_tasks_come_from_each_world_by_its_share(text):
    mixed, shares = mixture(text)
    assert sum(shares.values()) == pytest.approx(1)
    drawn = [mixed.task("train", index) for index in range(4000)]
    names = [name for name, *_ in drawn]
    for name, share in shares.items():
        assert names.count(name) / 4000 == pytest.approx(share, abs=0.03)
    assert [index for *_, index in drawn] == list(range(4000)), "none twice"
    assert mixture(text)[0].task("train", 2345) == drawn[2345]
    other = mixture(text, seed=7)[0]
    assert [other.task("train", index)[0] for index in range(4000)] != names


def test_the_size_is_that_of_all_worlds_if_each_has_an_end():
    assert mixture("a, b", a=3, b=4)[0].size("train") == 7
    assert mixture("a, b", a=3)[0].size("train") is None


def test_a_mixture_demonstrates_if_one_of_its_worlds_does(sandbox):
    assert not demonstrates(mixture("a, b")[0])
    assert demonstrates(open_world(TaskSection("desk, domains"), 0, sandbox))


def test_a_task_is_that_of_its_world(sandbox):
    mixed = open_world(TaskSection("desk=0.8, domains=0.2"), 3, sandbox)
    alone = Desk(3, sandbox)
    tasks = [mixed.task("held_out", index) for index in range(40)]
    assert 25 <= sum(task.world == "desk" for task in tasks) < 40
    for index, task in enumerate(tasks):
        assert task.world != "desk" or task == alone.task("held_out", index)
    for task in tasks[:10]:
        assert mixed.environment(task, 0).task == task


def test_lessons_are_of_every_world_that_demonstrates(sandbox):
    mixed = open_world(TaskSection("desk, domains"), 0, sandbox)
    lessons = [mixed.lesson(index) for index in range(16)]
    assert {env.task.world for env, _ in lessons} == {"desk", "domains"}
