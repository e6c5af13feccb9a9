"""The page of an evaluation has the numbers of its summary, and what a model wrote as text."""

import json
import math
import re

import pytest
from html_page import Page

from nanorchestra.report import plots
from nanorchestra.report.comparison import write_comparison
from nanorchestra.training.run import RunFolder

EVIL = '<script>alert(1)</script><img src="http://evil.example/x.png">'


def scores(reward, **changes):
    return {
        "reward": reward,
        "accuracy": 0.5,
        "exact": 0.5,
        "cost_usd": 0.002,
        "cost_per_correct_usd": 0.004,
        "latency_s": 3.0,
        "intervals": {"accuracy": [0.4, 0.6]},
        "pass_hat": [0.5, 0.3],
        "published": 0.125,
        "most_frequent_answer": {"answer": f"{EVIL}\x1b[2J", "share": 0.75},
        "calls": {"large": 0.5, EVIL: 0.1},
        "calls_by_preference": {"cheap": {"large": 0.25}},
        "seconds_by": {"policy": 1.0},
        "by_preference": {"cheap": {"reward": reward}},
        "behind": {"reward": [0.1, None, None, 0.2]},
        "tasks": 12,
        "attempts": 12,
        "failed": 0,
    } | changes


def attempt(policy, number, reward):
    preference = {"text": f"preference {number}", "cost": 0.5 * (number % 2)}
    task = {"id": f"t{number}", "question": EVIL, "preference": preference}
    row = {"policy": policy, "trial": 0, "reward": reward, "task": task, "turns": []}
    return row | {"cost_usd": 0.1, "latency_s": 1.0, "status": "answered", "answer": EVIL}


def page_of(path, policies, rows=()):
    run = RunFolder.create(path, "seed = 1")
    run.write_json("summary.json", {"partial": EVIL, "worlds": {"desk": policies}})
    (path / "00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_comparison(path)
    return Page(path)


def test_the_page_has_the_numbers_of_the_summary_and_runs_nothing(tmp_path):
    names = ("a/model", "a/model:turns=2", "perfect")
    rows = [attempt("a/model", n, n / 20) for n in range(20)]
    rows += [attempt("a/model:turns=2", n, 0.5) for n in range(20)]
    page = page_of(tmp_path / "one", {name: scores(n / 4) for n, name in enumerate(names)}, rows)
    assert page.loads_and_runs_nothing() and page.text.count(EVIL) > 8
    summary, measures, passes, answers, calls, by_preference, seconds, preferences, behind = range(
        9
    )
    assert page.row("perfect", summary) == {
        "": "perfect",
        "desk, right": "50.0% ±10.0%",
        "cost": "$0.002",
        "time": "3.0 s",
    }
    assert page.row("perfect", answers)["of the attempts"] == "75.0%"
    shown = page.row("perfect", measures)
    assert (shown["reward"], shown["appendix L"], shown["tasks"]) == ("0.500", "0.125", "12")
    assert page.row("perfect", passes)["pass^2"] == "30.0%"
    assert page.row("perfect", calls) == {"": "perfect", EVIL: "0.100", "large": "0.500"}
    assert page.row("perfect, cheap", by_preference) == {"": "perfect, cheap", "large": "0.250"}
    assert page.row("perfect", seconds)["policy"] == "1.0 s"
    assert page.row("perfect", preferences)["cheap"] == "0.500"
    assert page.row("perfect", behind)["reward"] == "+0.100 [-, -] p=0.2"
    assert "outcomes and cost" in page.text and "outcomes and allowed turns" in page.text
    shown = re.findall(r"(\w+): a/model earns (\w+).*\n(preference \d+)\n", page.text)
    assert shown == [
        ("cheap", "more", "preference 19"),
        ("cheap", "less", "preference 1"),
        ("right", "more", "preference 18"),
        ("right", "less", "preference 0"),
    ]


def test_failures_and_missing_prices_stand_in_the_tables(tmp_path):
    failing = {"failed": 3, "failure": EVIL, "cost_usd": None, "cost_per_correct_usd": None}
    page = page_of(tmp_path / "one", {"a": scores(0.2, **failing), "b": scores(0.4)})
    assert f"a: 3 of 12 attempts failed, and are in no mean: {EVIL}" in page.text
    assert page.row("a")["cost"] == page.row("a", 1)["cost"] == "-"
    assert page.row("b")["cost"] == "$0.002"


def test_partial_credit_is_an_outcome_beside_the_share_that_is_exact(tmp_path):
    policies = {"a": scores(0.2), "b": scores(0.4, accuracy=0.72, exact=0.1)}
    page = page_of(tmp_path / "one", policies)
    assert "right" not in {title for table in page.tables for title in table[0]}
    assert page.row("b")["desk, outcome"] == "0.720 ±0.100"
    assert (page.row("b", 1)["outcome"], page.row("b", 1)["exact"]) == ("0.720 ±0.100", "10.0%")
    assert "Outcome on held-out tasks" in plots.frontier(policies)
    assert "Right on held-out tasks" in plots.frontier({"a": policies["a"]})


def test_a_policy_without_a_price_has_no_place_on_the_axis_of_cost():
    policies = {"free": scores(0.1, cost_usd=None), "paid": scores(0.2)}
    image = plots.frontier(policies)
    assert "paid" in image and "free" not in image
    assert "free" in plots.frontier({"free:turns=2": policies["free"]}, turns=True)
    assert plots.frontier({"free": policies["free"]}) == ""


@pytest.mark.parametrize("toward", [0.0, 1.0])
def test_a_mean_that_rounding_puts_outside_of_its_interval_is_drawn(toward):
    same = scores(0.5)
    same["intervals"] |= {"cost_usd": [math.nextafter(same["cost_usd"], toward)] * 2}
    assert plots.frontier({"a": same})
