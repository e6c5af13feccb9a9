"""Figures of recorded attempts: how sure they are, what they count, what they leave out."""

from __future__ import annotations

from statistics import stdev

import pytest

from nanorchestra.errors import UserError
from nanorchestra.records import Bounds, Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from worlds.metrics import (
    Finished,
    differences,
    interval,
    measure,
    p_value,
    pass_hat,
    score,
    summarise,
)

BOUNDS = Bounds((0.0, 10.0), (0.0, 100.0))
PREFERENCE = Preference("Be quick.", 0.2, 0.4, 0.4, {"bad": -1.0})


def make_task(number=0, preference=PREFERENCE, kind="sums"):
    offers = {"a": "large", "b": "small", "bad": "large"}
    return Task(f"t{number}", "?", preference, BOUNDS, "w", kind, offers)


def make_attempt(task, outcome=1.0, cost_usd=1.0, latency_s=10.0, **fields):
    attempt = Trajectory(task.id, 0, outcome=outcome, calls_usd=cost_usd, **fields)
    attempt.latency_s = latency_s
    return score(task, attempt)


def failed(task):
    return make_attempt(task, outcome=0.0, status="infrastructure")


def test_intervals_tests_and_repeated_trials():
    mean, low, high = interval([0.0] * 50 + [1.0] * 50)
    assert low == pytest.approx(0.4, abs=0.03) and high == pytest.approx(0.6, abs=0.03)
    assert mean == 0.5 and interval([0.3]).mean == 0.3
    assert p_value([0.0, 0.0]) == 1.0 and p_value([0.1] * 20) < 0.01 < p_value([1, -1, 1, -1, 1])
    assert pass_hat([(4, 4), (2, 4), (0, 4)], 1) == 0.5
    assert pass_hat([(4, 4), (2, 4), (0, 4)], 2) == pytest.approx((1 + 1 / 6) / 3)


def test_figures_read_the_recorded_reward_and_never_compute_it():
    """A training step's reward is the group's, which no single attempt tells."""
    tasks = [make_task(number) for number in (0, 0, 1, 1)]
    attempts = [make_attempt(task) for task in tasks]
    for attempt, reward in zip(attempts, (0.9, 0.1, 0.4, 0.6), strict=True):
        attempt.reward = reward
    row = measure(tasks, attempts, group_size=2)
    assert row["reward"] == pytest.approx(0.5)
    assert row["group_std"] == pytest.approx((stdev((0.9, 0.1)) + stdev((0.4, 0.6))) / 2)


def test_no_mean_holds_what_the_infrastructure_failed():
    tasks = [make_task(number) for number in (0, 0, 1, 1)]
    attempts = [make_attempt(task) for task in tasks]
    attempts[1] = failed(tasks[1])
    row = measure(tasks, attempts, group_size=2)
    assert row["accuracy"] == 1.0 and row["statuses"] == {"answered": 0.75, "infrastructure": 0.25}
    assert row["group_std"] == 0.0
    summary = summarise(tasks, attempts)
    assert (summary["tasks"], summary["attempts"], summary["failed"]) == (2, 4, 1)
    assert summary["accuracy"] == 1.0 and summary["failure"] == "no reason is recorded"
    ours = list(zip(tasks, attempts, strict=True))
    theirs = [(tasks[0], failed(tasks[0])), (tasks[2], make_attempt(tasks[2], outcome=0.0))]
    behind = differences(Finished.of(ours), Finished.of(theirs))["accuracy"]
    assert behind.mean == 1.0, "on the task that both finished"
    with pytest.raises(UserError, match="all 1 attempts failed"):
        summarise(tasks[1:2], attempts[1:2])


def test_summaries_split_by_preference_and_kind_and_count_what_is_behind_a_name():
    """Of calls that run side by side the slowest takes the time; refused ones count nowhere."""
    cheap = make_task(0, Preference("Be cheap.", 0.5, 0.5, tools={"bad": -1.0}), kind="sums")
    right = make_task(1, Preference("Be right."), kind="facts")
    calls = [ToolCall("a", {}), ToolCall("bad", {}), ToolCall("b", {})]
    results = [
        ToolResult("", 0.5, 3.0),
        ToolResult("", 0.25, 8.0, waited_s=3.0),
        ToolResult("", error=True, refused=True),
    ]
    turns = [Turn(0, 1, "stop", calls, results)]
    used = make_attempt(cheap, 0.0, 0.75, policy_usd=0.25, turns=turns)
    used.calls = {"a": 1, "bad": 1}
    summary = summarise([cheap, right], [used, make_attempt(right, cost_usd=0.0, policy_usd=1.0)])
    accuracies = {name: means["accuracy"] for name, means in summary["by_preference"].items()}
    assert accuracies == {"cheap": 0.0, "right": 1.0}
    assert summary["calls"] == {"large": 1.0}
    assert summary["costs_usd"] == {"large": 0.375, "policy": 0.625}
    assert summary["seconds_by"] == {"large": 2.5, "policy": 6.0, "waiting": 1.5}
