"""A mixture of worlds: its shares, its order, its rewards, and one line for what is wrong."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError
from nanorchestra.records import Trajectory
from worlds import metrics, mixture
from worlds.miniature.world import World
from worlds.mixture import Worlds, open_world, parse_mixture, places


class Domains:
    def task(self, split, number):
        return split, number


@pytest.fixture
def worlds(monkeypatch):
    monkeypatch.setattr(mixture, "open_world", lambda *_: Domains())
    return lambda text, seed=0: Worlds(TaskSection(text), seed, sandbox=None)


def test_any_run_of_places_holds_each_world_by_its_share_and_goes_through_its_tasks():
    for text in ("a=0.99, b=0.01", "a=5, b=3, c=2", "a, b, c, d=0.1"):
        shares = parse_mixture(text)
        assert sum(shares.values()) == pytest.approx(1)
        for seed in range(3):
            found = places(shares, seed, 6000)
            names = [name for name, _ in found]
            for name, share in shares.items():
                numbers = [number for other, number in found if other == name]
                assert numbers == list(range(len(numbers)))
                for start in range(0, 6000 - 500, 137):
                    assert abs(names[start : start + 500].count(name) - 500 * share) < 4
        assert found != places(shares, 6, 6000)


def test_the_miniature_keeps_its_sequence_whatever_is_mixed_in(worlds):
    mixed, alone = worlds("miniature=0.8, d=0.2", 3), worlds("miniature", 3)
    tasks = [task for start in range(0, 96, 16) for task in mixed.tasks(16, start)]
    ours = [task for task in tasks if not isinstance(task, tuple)]
    assert ours == alone.tasks(len(ours), 0) and 75 <= len(ours) <= 78


def test_lessons_and_held_out_tasks(worlds):
    mixed = worlds("miniature=0.5, d=0.5")
    few, every = (mixed.lesson_tasks(8, 0, most_tools) for most_tools in (1, 0))
    assert [len(task.data["tools"]) for task in few] == [1] * 4
    assert len(every) == 8 and sum(isinstance(task, tuple) for task in every) == 4
    held_out = mixed.held_out(6)
    assert [task for task in held_out if isinstance(task, tuple)] == [
        ("held_out", n) for n in range(3)
    ]
    assert worlds("miniature").held_out(6) == World(0).tasks("held_out", 6)
    assert worlds("d").tasks(6, 2) == [("train", number) for number in range(2, 8)]
    both = [("held_out", number) for number in range(3)] * 2
    assert sorted(worlds("d, e").held_out(6)) == sorted(both)


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
            open_world(str(name), 0, None, TaskSection())


def test_measures_leave_out_what_the_infrastructure_failed():
    worlds = Worlds(TaskSection(), 0, sandbox=None)
    (task,) = worlds.tasks(1, 0)
    calls = {task.data["tools"][0]["name"]: 1}

    def attempts(*statuses):
        made = []
        for outcome, status in statuses:
            made.append(Trajectory(task.id, 0, status=status, outcome=outcome))
            made[-1].calls = calls
            metrics.score(task, made[-1])
        return made

    right, wrong, failed = (1.0, "answered"), (0.0, "answered"), (0.0, "infrastructure")
    made = attempts(right, wrong, failed, right, (1.0, "token_limit"), right)
    row = worlds.measure([task] * 6, made, 3)
    assert row["accuracy"] == 0.8 and sum(row["calls"].values()) == pytest.approx(1.0)
    assert row["statuses"] == {"answered": 4 / 6, "infrastructure": 1 / 6, "token_limit": 1 / 6}
    assert sum(row["reward_parts"].values()) == pytest.approx(row["reward"], abs=0.5)
    assert row["reward"] == pytest.approx(fmean(t.reward for t in made if t is not made[2]))
    none = worlds.measure([task] * 3, attempts(failed, failed, failed), 3)
    assert none["accuracy"] == none["group_std"] == 0
    assert worlds.training_rewards(task, made[:3], "task") == [t.reward for t in made[:3]]
    assert worlds.training_rewards(task, made[:3], "group")[1:] == [0.0, 0.0]
