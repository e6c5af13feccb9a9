"""A mixture of worlds: its shares, its order, and one line for what is wrong."""

from __future__ import annotations

import json

import pytest

from nanorchestra.agent.world import demonstrates
from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError
from worlds.load import open_world, parse_mixture
from worlds.miniature.world import Miniature
from worlds.mixture import CARDS, Mixture


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


@pytest.mark.parametrize("text", ["a=0.99, b=0.01", "a=5, b=3, c=2", "a, b, c", "a=1, b=1e-6"])
def test_a_deck_holds_each_world_by_its_share_and_each_goes_through_its_tasks(text):
    for seed in range(3):
        mixed, shares = mixture(text, seed)
        assert sum(shares.values()) == pytest.approx(1)
        drawn = [mixed.task("train", index) for index in range(3 * CARDS)]
        for name, share in shares.items():
            own = [task[2] for task in drawn if task[0] == name]
            assert own == list(range(len(own))), "in order, none twice"
            for start in range(0, 3 * CARDS, CARDS):
                deck = [task for task in drawn[start : start + CARDS] if task[0] == name]
                assert abs(len(deck) - share * CARDS) <= 1 and deck
        again, _ = mixture(text, seed)
        assert again.task("train", 2345) == drawn[2345], "without the places before it"
        other, _ = mixture(text, seed + 7)
        assert [other.task("train", index)[0] for index in range(3 * CARDS)] != [
            name for name, *_ in drawn
        ]


def test_a_mixture_is_a_shuffle_and_each_deck_is_another():
    mixed, _ = mixture("a, b")
    names = [mixed.task("train", index)[0] for index in range(2 * CARDS)]
    assert names[:CARDS] != names[CARDS:]
    changes = sum(here != there for here, there in zip(names[:-1], names[1:], strict=True))
    assert 0.45 < changes / len(names) < 0.55, "neither sorted nor in turn"


def test_the_size_is_that_of_all_worlds_if_each_has_an_end():
    assert mixture("a, b", a=3, b=4)[0].size("train") == 7
    assert mixture("a, b", a=3)[0].size("train") is None


def test_a_mixture_demonstrates_if_one_of_its_worlds_does(sandbox):
    assert not demonstrates(mixture("a, b")[0])
    assert demonstrates(open_world(TaskSection("miniature, domains"), 0, sandbox))


def test_the_miniature_keeps_its_sequence_whatever_is_mixed_in(sandbox):
    mixed = open_world(TaskSection("miniature=0.8, domains=0.2"), 3, sandbox)
    alone = Miniature(3, sandbox)
    tasks = [mixed.task("held_out", index) for index in range(40)]
    ours = [task for task in tasks if task.world == "miniature"]
    assert ours == [alone.task("held_out", index) for index in range(len(ours))]
    assert 25 <= len(ours) < 40
    for task in tasks[:10]:
        assert mixed.environment(task, 0).task == task


def test_first_lessons_are_the_miniatures_alone(sandbox):
    mixed = open_world(TaskSection("miniature, domains"), 0, sandbox)
    few = [mixed.lesson(index, 1) for index in range(16)]
    every = [mixed.lesson(index) for index in range(16)]
    assert {env.task.world for env, _ in few} == {"miniature"}
    assert {env.task.world for env, _ in every} == {"miniature", "domains"}


@pytest.mark.parametrize(
    "text",
    [*(f"a={weight}" for weight in ("0", "-1", "nan", "inf", "much")), "", "a,", "a, a=2", "=1"],
)
def test_a_wrong_mixture_is_named_in_one_line(text):
    with pytest.raises(UserError, match=f"task.world is '{text}'; .*each world once.*above 0"):
        parse_mixture(text)


def test_a_world_that_is_missing_or_empty_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").write_text("\n")
    criteria = {"actions": [], "reward_basis": ["NL_ASSERTION"], "nl_assertions": ["kind"]}
    task = {"id": "t", "domain": "shop", "evaluation_criteria": criteria}
    (tmp_path / "bare.jsonl").write_text(json.dumps(task))
    for name in ("minature", tmp_path / "empty", tmp_path / "none.jsonl", tmp_path / "bare.jsonl"):
        with pytest.raises(UserError, match=str(name)):
            open_world(TaskSection(str(name)), 0, None)
