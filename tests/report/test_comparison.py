"""The report of an evaluation: plots of all worlds, a page that loads nothing and runs no text."""

from __future__ import annotations

import json
import math
import re

from test_browser import CUT, data_of

from nanorchestra.report import plots
from nanorchestra.report.comparison import write_comparison
from nanorchestra.report.run import Run

EVIL = '<script>alert(1)</script><img src="http://evil.example/x.png">'


def scores(reward):
    return {
        "reward": reward,
        "accuracy": 0.5,
        "cost_usd": 0.002,
        "latency_s": 3.0,
        "intervals": {"accuracy": [0.4, 0.6]},
        "pass_hat": [0.5, 0.3],
        "calls": {"large": 0.5, EVIL: 0.1},
        "by_preference": {"cheap": {"reward": reward}},
        "behind": {"reward": [0.1, None, None, 0.2]},
        "tasks": 12,
        "failed": 0,
    }


def attempt(policy, number, reward):
    preference = {"text": f"preference {number}", "cost": 0.5 * (number % 2)}
    task = {"id": f"t{number}", "question": EVIL, "preference": preference}
    row = {"policy": policy, "trial": 0, "reward": reward, "task": task, "turns": []}
    return row | {"cost_usd": 0.1, "status": "answered", "answer": EVIL}


def written(path):
    """The page of an evaluation of three policies."""
    run = Run.create(path, "seed = 1")
    names = ("a/model", "a/model:turns=2", "perfect")
    worlds = {"miniature": {name: scores(n / 4) for n, name in enumerate(names)}}
    run.write_json("summary.json", {"partial": EVIL, "worlds": worlds})
    rows = [attempt("a/model", n, n / 20) for n in range(20)]
    rows += [attempt("a/model:turns=2", n, 0.5) for n in range(20)]
    (path / "00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_comparison(path)
    return (path / "report.html").read_text()


def test_the_page_shows_where_the_first_two_differ_and_runs_nothing(tmp_path):
    page = written(tmp_path / "one")
    assert EVIL not in page and "default-src 'none'" in page
    assert len(re.findall("<script", page)) == 4 and not re.search(r"<(link|iframe|a|img)\b", page)
    shown = [(p["wish"], p["preference"], p["won"]) for p in data_of(page)["pairs"]]
    assert shown == [
        ("cheap", "preference 19", True),
        ("cheap", "preference 1", False),
        ("right", "preference 18", True),
        ("right", "preference 0", False),
    ]
    for name in ("frontier", "turns"):
        assert (tmp_path / "one" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_policy_without_a_price_has_no_place_on_the_axis_of_cost():
    policies = {"free": scores(0.1) | {"cost_usd": None}, "paid": scores(0.2)}
    drawn = plots.figure([plots.frontier(policies)], "svg").decode()
    assert "paid" in drawn and "free" not in drawn
    swept = plots.frontier({"free:turns=2": policies["free"]}, turns=True)
    assert "free" in plots.figure([swept], "svg").decode()
    plots.figure([plots.frontier({"free": policies["free"]})], "svg")  # no point at all


def test_failures_and_missing_prices_stand_in_the_tables(tmp_path, opened):
    run = Run.create(tmp_path / "one", "seed = 1")
    failing = {"failed": 3, "failure": EVIL, "cost_usd": None, "cost_per_correct_usd": None}
    worlds = {"miniature": {"a/model": scores(0.2) | failing, "b/model": scores(0.4)}}
    run.write_json("summary.json", {"partial": "", "worlds": worlds})
    (tmp_path / "one" / "00000.jsonl").write_text("")
    write_comparison(tmp_path / "one")
    text = opened(tmp_path / "one").inner_text("body")
    assert f"a/model, the first that failed: {EVIL}" in text
    assert (
        "a/model\t50.0\u00a0±10.0\t-\t0.0500" in text and "b/model\t50.0\u00a0±10.0\t0.200" in text
    )
    assert "NaN" not in text and "undefined" not in text


def test_the_page_is_written_where_all_attempts_cost_the_same(tmp_path):
    """Rounding may then put a mean outside of its interval, on either side."""
    for name, toward in (("above", 1.0), ("below", 0.0)):
        run, same = Run.create(tmp_path / name, "seed = 1"), scores(0.5)
        same["intervals"] |= {"cost_usd": [math.nextafter(same["cost_usd"], toward)] * 2}
        policies = {"a/model": same, "b/model:turns=2": same}
        run.write_json("summary.json", {"partial": "", "worlds": {"w": policies}})
        write_comparison(tmp_path / name)
        assert (tmp_path / name / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_show_every_policy_and_how_sure_a_difference_is(tmp_path, opened):
    written(tmp_path / "one")
    text = opened(tmp_path / "one").inner_text("body")
    for part in (
        "a/model",
        "perfect (the best",
        "50.0\u00a0±10.0",
        "+0.100 [-, -] p = 0.200",
        "pass^2, %",
    ):
        assert part in text
    assert re.search(r"large\na/model\t0.10\t0.50\n", text) and f"Partial: {EVIL}" in text
    narrow = opened(tmp_path / "one", 390, "dark")
    assert narrow.evaluate(CUT) == [] and narrow.locator(".frontier g").count() == 4
