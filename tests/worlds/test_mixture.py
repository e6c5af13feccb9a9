"""A mixture of worlds: its shares, its order, and one line for what is wrong."""

from __future__ import annotations

import json
import types

import pytest
from worlds.practice import Practice, open_world

from nanorchestra.config import load_config
from nanorchestra.errors import UserError
from nanorchestra.records import Trajectory
from worlds.evaluation import score
from worlds.miniature.world import World
from worlds.mixture import Mixture, parse_mixture


def test_any_run_of_places_holds_each_world_by_its_share():
    for text in ("a=0.99, b=0.01", "a=5, b=3, c=2", "a, b, c, d=0.1"):
        weights = parse_mixture(text, "x")
        assert abs(sum(weights.values()) - 1) < 1e-12
        for seed in range(3):
            names = [name for name, _ in Mixture(weights, seed).places(6000)]
            for start in range(0, 6000 - 500, 137):
                for name, share in weights.items():
                    assert abs(names[start : start + 500].count(name) - 500 * share) < 4


def test_every_world_goes_through_its_own_tasks_and_places_are_a_pure_function():
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    whole = Mixture(weights, 5).places(1000)
    for name in weights:
        assert [number for found, number in whole if found == name] == list(
            range(sum(found == name for found, _ in whole))
        )
    later = Mixture(weights, 5)  # asked out of order, as after a resume, or for more sampling
    assert (
        later.places(30, 700) == whole[700:730]
        and later.places(30, 10) == whole[10:40]
        and later.places(100, 850) == whole[850:950]
    )
    assert Mixture(weights, 6).places(1000) != whole
    assert Mixture({"a": 1.0}, 5).places(7, 40) == [("a", number) for number in range(40, 47)]


def test_the_miniature_keeps_its_sequence_whatever_is_mixed_in():
    class Domains:
        def task(self, split, number):
            return ("domain", split, number)

    miniature = World(3)
    house = types.SimpleNamespace(
        domains={"domains": Domains()},
        mixture=Mixture({"miniature": 0.8, "domains": 0.2}, 3),
        miniature=miniature,
    )
    tasks = [task for start in range(0, 96, 16) for task in Practice.tasks(house, 16, start)]
    domains = [task for task in tasks if isinstance(task, tuple)]
    assert (
        domains == [("domain", "train", number) for number in range(len(domains))]
        and 18 <= len(domains) <= 21
    )
    assert [task for task in tasks if not isinstance(task, tuple)] == miniature.tasks(
        "train", 96 - len(domains)
    )


def test_held_out_are_the_miniatures_tasks_and_those_of_the_domains_apart(monkeypatch):
    class Domains:
        def task(self, split, number):
            return (split, number)

    monkeypatch.setattr("worlds.practice.open_world", lambda name, config: Domains())

    def practice(text):
        return Practice(load_config(None, ["--task.world", text]), sandbox=None)

    mixed = practice("miniature=0.5, d=0.5")
    few, all_tools = (mixed.lesson_tasks(8, 0, most_tools) for most_tools in (1, 0))
    assert (
        [len(task.data["tools"]) for task in few] == [1] * 4
        and len(all_tools) == 8
        and sum(isinstance(task, tuple) for task in all_tools) == 4
    )
    assert (
        practice("miniature").judged_by(6) == World(0).tasks("held_out", 6)
        and practice("miniature").has_miniature
    )
    mixed = practice("miniature=0.9, d=0.1")
    assert mixed.judged_by(6) == World(0).tasks("held_out", 6) and mixed.of_domains(3) == [
        ("held_out", number) for number in range(3)
    ]
    assert (
        practice("d").judged_by(6, 2) == [("held_out", number) for number in range(2, 8)]
        and not practice("d").has_miniature
    )
    assert sorted(practice("d, e").judged_by(6)) == sorted(
        [("held_out", number) for number in range(3)] * 2
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("miniature=0", ["weight of 'miniature' is '0'", "above 0"]),
        ("miniature=-1, domains=2", ["'-1'", "above 0"]),
        ("miniature=nan", ["'nan'"]),
        ("miniature=inf", ["'inf'"]),
        ("miniature=much", ["'much'", "number"]),
        ("miniature=", ["weight of 'miniature' is ''"]),
        ("miniature, miniature=2", ["'miniature' is there twice"]),
        ("miniature=1,", ["no world"]),
        ("", ["no world", "miniature=0.9"]),
    ],
)
def test_what_is_wrong_with_the_weights_is_named_before_there_is_a_run(text, words):
    with pytest.raises(UserError) as error:
        load_config(None, ["--task.world", text])
    assert "\n" not in str(error.value) and all(
        word in str(error.value) for word in ["task.world", *words]
    )


def test_worlds_that_are_not_there_or_hold_nothing_to_train_on_are_named(tmp_path):
    def refused(name, *words):
        with pytest.raises(UserError) as error:
            open_world(str(name), load_config(None))
        assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), (
            error.value
        )

    refused("minature", "'minature'", "miniature, domains")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "tasks.jsonl", "cannot be read")
    (tmp_path / "none.jsonl").write_text("\n")
    refused(tmp_path / "none.jsonl", "none.jsonl", "no task")
    task = {
        "id": "t",
        "domain": "shop",
        "user_scenario": {"instructions": "You want a book."},
        "evaluation_criteria": {
            "actions": [],
            "reward_basis": ["DB", "NL_ASSERTION"],
            "nl_assertions": ["kind"],
        },
    }
    (tmp_path / "bare.jsonl").write_text(json.dumps(task))
    refused(
        tmp_path / "bare.jsonl", "bare.jsonl", "task t", "evaluation_criteria", "cannot be scored"
    )
    (tmp_path / "bare.jsonl").write_text(json.dumps(task | {"evaluation_criteria": {}}))
    refused(tmp_path / "bare.jsonl", "bare.jsonl", "line 1", "evaluation_criteria")


def test_measures_leave_out_what_the_infrastructure_failed_and_count_how_attempts_ended():
    practice = Practice(load_config(None, ["--grpo.group_size", "3"]), sandbox=None)
    task = practice.tasks(1, 0)[0]
    name = task.data["tools"][0]["name"]

    def attempt(outcome, status="answered"):
        return score(
            task,
            Trajectory(
                task.id,
                0,
                0,
                [],
                [],
                [],
                [],
                outcome=outcome,
                status=status,
                calls={name: 1},
                cost_usd=0.0,
            ),
        )

    measured = practice.measure(
        [task] * 6,
        [
            attempt(1.0),
            attempt(0.0),
            attempt(0.0, "infrastructure"),
            attempt(1.0),
            attempt(1.0, "token_limit"),
            attempt(1.0),
        ],
    )
    assert measured["accuracy"] == 0.8 and sum(measured["calls"].values()) == pytest.approx(1.0)
    assert measured["statuses"] == pytest.approx(
        {"answered": 4 / 6, "infrastructure": 1 / 6, "token_limit": 1 / 6}
    )
    failed = practice.measure(
        [task] * 3, [attempt(0.0, "infrastructure")] * 3
    )  # nothing else to show
    assert failed["accuracy"] == 0 and failed["group_std"] == 0
