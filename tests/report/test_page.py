"""The page of a run shows its numbers at every stage, and what a model wrote as text."""

import re

import numpy as np
import pytest
from html_page import Page

from nanorchestra.report import page as report_page
from nanorchestra.report import plots
from nanorchestra.report.page import write_report
from nanorchestra.training.run import RunFolder

EVIL = '</pre></script><script>alert(1)</script><img src="http://evil.example" onerror="alert(2)">'
SCORES = {"reward": 0.25, "accuracy": 0.7, "cost_usd": 0.002, "latency_s": 2.0}
SCORES["most_frequent_answer"] = {"answer": "42", "share": 0.5}
SCORES["calls_by_preference"] = {"cheap": {"ant": 0.5}}
BETTER = SCORES | {"reward": 0.5, "intervals": {"reward": [0.4, 0.6]}}
HELD_OUT = {
    "before": SCORES | {"by_preference": {"cheap": SCORES}, "by_kind": {"chain": SCORES}},
    "after": BETTER | {"by_preference": {"cheap": BETTER}, "by_kind": {"chain": BETTER}},
    "routers": {"strongest": SCORES},
}
SUMMARY = {"seconds": 431.0, "parameters": 1_480_000, "held_out": HELD_OUT}


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "one", 'seed = 7\npreset = "nano"\n')


def attempt(phase="grpo", step=1, task="t", question="q", text="", **changes):
    return {
        "phase": phase, "step": step, "task_id": task, "text": [{"role": "tool", "text": text}],
        "task": {"question": question, "preference": {"text": question, "cost": 0.5}},
        "turns": [], "reward": 0.25, "cost_usd": 0.002, "latency_s": 1.5, "advantage": 1.5,
        "status": "answered", "answer": "42",
    } | changes  # fmt: skip


def record(run, stage):
    """Fills a run that is "empty", or has a "warm" start, "one" step of GRPO, or is "whole"."""
    for step in (1, 2, 3) if stage != "empty" else ():
        run.append(
            "metrics", {"phase": "warm_start", "step": step, "seconds": 1.0, "loss": 4 / step}
        )
    for step in range(1, {"one": 2, "whole": 31}.get(stage, 1)):
        numbers = {"calls": {"search": 0.3, "small": step / 60}, "loss": None}
        numbers["group_quartiles"] = {"reward": [0.1, 0.9]}
        run.append("metrics", SCORES | numbers | {"phase": "grpo", "step": step, "seconds": 2.0})
    if stage == "whole":
        run.write_json("summary.json", SUMMARY)


@pytest.mark.parametrize("stage", ["empty", "warm", "one", "whole"])
def test_the_page_can_be_written_at_every_stage(run, stage):
    record(run, stage)
    write_report(run.path)
    page = Page(run.path)
    assert ("Calls per trajectory, by kind of tool" in page.text) == (stage in ("one", "whole"))
    assert ("Loss, nats per token" in page.text) == (stage != "empty")
    assert "GRPO loss" not in page.text, "a panel without numbers is left out"
    assert len(page.tables) == (5 if stage == "whole" else 0)
    assert page.loads_and_runs_nothing() and 'preset = "nano"' in page.text


def test_the_tables_have_the_numbers_of_the_summary(run):
    record(run, "whole")
    write_report(run.path)
    page = Page(run.path)
    assert page.row("after GRPO") == {
        "": "after GRPO",
        "reward": "0.500 ±0.100",
        "right": "70.0%",
        "cost": "$0.002",
        "time": "2.0 s",
    }
    assert page.row("strongest")["reward"] == "0.250"
    assert page.row("after GRPO", table=1)["of the attempts"] == "50.0%"
    assert page.row("cheap", table=2)["reward"] == "0.250 → 0.500"
    assert page.row("chain", table=3)["right"] == "70.0% → 70.0%"
    assert page.row("cheap", table=4)["ant"] == "0.50"
    assert "431 s (7.2 min)" in page.text and "1.48 million" in page.text


def lines(image, colour):
    """The places [points, 2] of each line of that colour in an SVG."""
    paths = re.findall(rf'<path d="([^"]*)"[^>]* style="fill: none; stroke: {colour};', image)
    pairs = [re.findall(r"[ML] (\S+) (\S+)", path) for path in paths]
    return [np.array(path, float) for path in pairs]


def test_the_curves_are_the_numbers_of_the_metrics():
    rng = np.random.default_rng(0)
    values = rng.permutation(40) / 40
    rows = [{"step": 2 * i, "kl": None, "cost_usd": value} for i, value in enumerate(values)]
    (image,) = plots.curves(rows, plots.LEARNING)
    faint, strong = lines(image, plots.COLOURS[0])
    x, y = faint.T
    assert np.corrcoef(x, [row["step"] for row in rows])[0, 1] == pytest.approx(1)
    assert np.corrcoef(y, values)[0, 1] == pytest.approx(-1), "up is a smaller y"
    means = [values[max(0, i - 3) : i + 1].mean() for i in range(40)]  # of a tenth of the steps
    scale, start = np.polyfit(values, y, 1)
    assert strong[:, 1] == pytest.approx(start + scale * np.array(means), abs=1e-3)


def test_every_line_of_a_chart_has_a_colour_or_dash_of_its_own():
    names = [f"tool{number:02}" for number in range(15)]
    rows = [{"step": step, "calls": dict.fromkeys(names, step)} for step in (1, 2)]
    (image,) = plots.curves(rows, plots.TOOLS)
    lines = re.findall(r'style="fill: none; (stroke[^"]*stroke-width: 1.6[^"]*)"', image)
    assert len({*lines}) == len(names)


def test_hostile_text_stays_text(run):
    calls = {EVIL: 1, "$\\frac{$": 2}
    run.append("metrics", {"phase": "grpo", "step": 1, "seconds": 2.0, "calls": calls})
    hostile = {"question": EVIL, "text": EVIL, "answer": EVIL, "status": EVIL}
    for phase in ("before", "grpo", "after"):
        run.append("trajectories", attempt(phase, reward=float(phase == "after"), **hostile))
    held_out = HELD_OUT | {"routers": {EVIL: SCORES}}
    run.write_json("summary.json", SUMMARY | {"held_out": held_out})
    write_report(run.path)
    page = Page(run.path)
    assert page.loads_and_runs_nothing() and page.row(EVIL)["reward"] == "0.250"
    assert page.text.count(EVIL) > 10 and "$\\frac{$" in page.text


def test_the_last_groups_and_what_changed_most_are_shown(run, monkeypatch):
    monkeypatch.setattr(report_page, "SHOWN_GROUPS", 2)
    rewards = {"risen": (0.1, 0.9), "fallen": (0.6, 0.2), "same": (0.5, 0.5), "less": (0.1, 0.3)}
    for task, (before, _) in rewards.items():
        run.append("trajectories", attempt("before", 0, task, task, reward=before))
    for step in (1, 2, 3):
        for reward in (0.25, 0.75):
            run.append("trajectories", attempt(step=step, text=f"said {step}", reward=reward))
    write_report(run.path)
    text = Page(run.path).text
    assert "said 1" not in text and text.index("said 3") < text.index("said 2")
    assert "step 3, rewards 0.250 to 0.750: q" in text
    assert "attempt 2: reward 0.750, advantage +1.50, $0.002, 1.5 s, answered: 42" in text
    for task, (_, after) in rewards.items():
        run.append("trajectories", attempt("after", 3, task, task, reward=after))
    write_report(run.path)
    pairs = re.findall(r"cheap: after earns (\w+): (\w+)", Page(run.path).text)
    assert pairs == [("more", "risen"), ("less", "fallen")]


def test_only_the_page_of_a_run_that_goes_on_loads_itself_again(run):
    write_report(run.path, live=True)
    assert Page(run.path).meta["refresh"] == "60" and "goes on" in Page(run.path).text
    write_report(run.path)
    assert "refresh" not in Page(run.path).meta and "has stopped" in Page(run.path).text
    run.write_json("summary.json", SUMMARY)
    write_report(run.path)
    assert "refresh" not in Page(run.path).meta and "has stopped" not in Page(run.path).text
