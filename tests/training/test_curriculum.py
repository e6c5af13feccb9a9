"""The curriculum: what comes how often, in which order, and that it goes on exactly."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest

from nanorchestra.training.curriculum import Curriculum


def bucket(place: int) -> str:
    return "rare" if place % 10 == 0 else ("easy", "hard", "middle")[place % 3]


def taught(**rates) -> Curriculum:
    curriculum = Curriculum(1, 0.2)
    for name, rate in rates.items():
        for _ in range(200):
            curriculum.learn(name, [1.0] * round(10 * rate) + [0.0] * round(10 - 10 * rate))
    return curriculum


def test_buckets_come_by_their_share_and_weight_and_none_disappears():
    curriculum = taught(easy=1.0, hard=0.0, middle=0.5, rare=0.9)
    assert curriculum.weight("middle") == pytest.approx(1) and curriculum.weight(
        "rare"
    ) == pytest.approx(0.36, abs=1e-4)
    assert (
        curriculum.weight("easy") == curriculum.weight("hard") == 0.2
        and curriculum.weight("never seen") == 1
    )
    drawn = curriculum.draw(20000, bucket)
    counts, natural = Counter(map(bucket, drawn)), Counter(map(bucket, range(30000)))
    whole = sum(natural[name] * curriculum.weight(name) for name in natural)
    for name in natural:
        assert counts[name] / 20000 == pytest.approx(
            natural[name] * curriculum.weight(name) / whole, abs=0.01
        )


def test_within_a_bucket_all_tasks_come_once_and_in_order():
    curriculum = taught(easy=1.0, hard=0.1)
    drawn = curriculum.draw(300, bucket)
    curriculum.learn(
        "easy", [0.0] * 200
    )  # what came seldom may come often later: nothing was lost on the way
    drawn += curriculum.draw(300, bucket)
    for name in ("easy", "hard", "middle", "rare"):
        given = [place for place in drawn if bucket(place) == name]
        assert (
            given
            == [place for place in range(curriculum.place) if bucket(place) == name][: len(given)]
            and given
        )


def test_before_anything_is_known_the_order_is_the_runs_own():
    curriculum = Curriculum(0, 0.1, 40)
    assert curriculum.draw(50, bucket) == list(range(40, 90)) and set(
        curriculum.weights().values()
    ) == {1.0}


def test_rates_follow_the_newest_groups_and_start_at_one_half():
    curriculum = Curriculum(0, 0.05)
    curriculum.learn("a", [1.0, 1.0])
    assert curriculum.rates["a"] == [0.75, 1]
    for _ in range(60):
        curriculum.learn("a", [0.0, 0.0])
    assert curriculum.rates["a"][0] < 0.03 and curriculum.weight("a") == pytest.approx(
        0.1, abs=0.05
    )
    for _ in range(30):
        curriculum.learn("a", [1.0, 0.0, 0.0, 1.0])
    assert curriculum.weight("a") > 0.9


def test_a_resumed_curriculum_draws_what_the_unbroken_one_draws():
    def steps(curriculum, count):
        drawn = []
        for _ in range(count):
            places = curriculum.draw(8, bucket)
            for place in places:
                curriculum.learn(
                    bucket(place), [float(place % 7 < 3 or bucket(place) == "easy")] * 4
                )
            drawn += places
        return drawn

    straight, cut = Curriculum(3, 0.1, 16), Curriculum(3, 0.1, 16)
    expected = steps(straight, 40)
    found = steps(cut, 13)
    resumed = Curriculum(
        **json.loads(json.dumps(asdict(cut)))
    )  # as a checkpoint's notes are written and read
    assert found + steps(resumed, 27) == expected and asdict(resumed) == asdict(straight)
    assert steps(Curriculum(4, 0.1, 16), 40) != expected
