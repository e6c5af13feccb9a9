"""The pages of a run and of an evaluation show their numbers, and what a model wrote as text."""

import json
from html.parser import HTMLParser

import pytest

from nanorchestra.report.comparison import write_comparison
from nanorchestra.report.page import write_report
from nanorchestra.report.tables import AFTER_CALLS, held_out_text
from nanorchestra.training.run import RunFolder

EVIL = '</pre></script><script>alert(1)</script><img src="http://evil.example" onerror="alert(2)">'
SCORES = {"reward": 0.25, "accuracy": 0.7, "cost_usd": 0.002, "latency_s": 2.0}
SCORES["most_frequent_answer"] = {"answer": "42", "share": 0.5}
SCORES["calls_by_preference"] = {"cheap": {"ant": 0.5}}
BETTER = SCORES | {"reward": 0.5, "intervals": {"reward": [0.4, 0.6]}}
HELD_OUT = {
    "before": SCORES | {"by_preference": {"cheap": SCORES}, "by_kind": {"chain": SCORES}},
    "after": BETTER | {"by_preference": {"cheap": BETTER}, "by_kind": {"chain": BETTER}},
    "routers": {EVIL: SCORES},
}
SUMMARY = {"seconds": 431.0, "parameters": 1_480_000, "held_out": HELD_OUT}
MEASURED = BETTER | {
    "pass_hat": [0.5, 0.3],
    "calls": {"large": 0.5, EVIL: 0.1},
    "seconds_by": {"policy": 1.0},
    "by_preference": {"cheap": {"reward": 0.5}},
    "behind": {"reward": [0.1, None, None, 0.2]},
    "tasks": 12,
    "attempts": 12,
    "failed": 0,
}
ACTIVE = {"script", "img", "link", "iframe", "a", "object", "form", "foreignobject"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Page(HTMLParser):
    """What a browser makes of report.html: names of elements, text, rows of texts of each table."""

    def __init__(self, path):
        super().__init__()
        self.text, self.tables, self.meta = "", [], {}
        self.feed((path / "report.html").read_text())
        self.close()
        assert self.meta["Content-Security-Policy"] == POLICY

    def handle_starttag(self, tag, attributes):
        assert tag not in ACTIVE, "the page loads or runs something"
        if tag == "meta":
            given = dict(attributes)
            self.meta[given.get("http-equiv") or given.get("name")] = given.get("content")
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        self.text += data
        if self.lasttag in ("td", "th"):
            self.tables[-1][-1][-1] += data.strip("\n")

    def row(self, name, table=0):
        """The texts of a row by the title of their column."""
        heads, *rows = self.tables[table]
        (found,) = [row for row in rows if row[0] == name]
        return dict(zip(heads, found, strict=True))


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "one", 'seed = 7\npreset = "nano"\n')


def attempt(**changes):
    task = {"id": "t", "question": EVIL, "preference": {"text": EVIL, "cost": 0.5}}
    return {
        "step": 1, "task_id": "t", "text": [{"role": "tool", "text": EVIL}], "task": task,
        "turns": [], "reward": 0.25, "cost_usd": 0.002, "latency_s": 1.5, "advantage": 1.5,
        "status": "answered", "answer": EVIL,
    } | changes  # fmt: skip


def test_the_page_of_a_run_shows_what_there_is_at_every_stage(run):
    write_report(run.path, live=True)
    page = Page(run.path)
    assert page.meta["refresh"] == "60" and "goes on" in page.text and not page.tables
    write_report(run.path, phase="warm start")
    again = f"(warm start); go on with: python train.py --resume {run.path}"
    assert again in Page(run.path).text
    for step in (1, 2, 3):
        row = {"phase": "warm_start", "step": step, "seconds": 1.0, "loss": 4 / step}
        run.append("metrics", row)
    for step in range(1, 31):
        numbers = {"calls": {EVIL: 0.3, "$\\frac{$": step / 60}, "loss": None}
        run.append("metrics", SCORES | numbers | {"phase": "grpo", "step": step, "seconds": 2.0})
    for phase in ("before", "grpo", "after"):
        run.append("trajectories", attempt(phase=phase, reward=float(phase == "after")))
    run.write_json("summary.json", SUMMARY)
    write_report(run.path)
    page = Page(run.path)
    assert "refresh" not in page.meta and "Calls per trajectory, by kind of tool" in page.text
    assert "GRPO loss" not in page.text, "a panel without numbers is left out"
    assert page.text.count(EVIL) > 10 and "$\\frac{$" in page.text
    shown = {"": "after GRPO", "reward": "0.500 ±0.100", "right": "70.0%", "cost": "$0.002"}
    assert page.row("after GRPO") == shown | {"time": "2.0 s"}
    assert page.row(EVIL)["reward"] == "0.250"
    assert page.row("after GRPO", table=1)["of the attempts"] == "50.0%"
    assert page.row("cheap", table=2)["reward"] == "0.250 → 0.500"
    assert page.row("chain", table=3)["right"] == "70.0% → 70.0%"
    assert page.row("cheap", table=4)["ant"] == "0.50" and "At the desk" in page.text


def test_a_run_elsewhere_says_nothing_of_the_desk_and_nothing_of_calls_without_any(tmp_path):
    run = RunFolder.create(tmp_path / "one", '[task]\nworld = "questions:desk.jsonl=0.9, data/"\n')
    after = HELD_OUT["after"] | {"calls_by_preference": {"cheap": {}}, "tasks": 3}
    summary = SUMMARY | {"held_out": HELD_OUT | {"after": after, "tasks": 3}}
    run.write_json("summary.json", summary)
    write_report(run.path)
    page = Page(run.path)
    assert "At the desk" not in page.text and "Calls per task after GRPO" not in page.text
    assert AFTER_CALLS not in held_out_text(summary)


def test_the_page_of_an_evaluation_has_the_numbers_of_its_summary(run):
    failing = {"failed": 3, "failure": EVIL, "cost_usd": None}
    policies = {"a": MEASURED | {"reward": 0.25}, "perfect": MEASURED, EVIL: MEASURED | failing}
    run.write_json("summary.json", {"partial": EVIL, "worlds": {"desk": policies}})
    rows = [attempt(policy=policy, trial=0, reward=len(policy)) for policy in ("a", "perfect")]
    (run.path / "00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_comparison(run.path)
    page = Page(run.path)
    assert page.text.count(EVIL) > 8
    assert f"{EVIL}: 3 of 12 attempts failed, and are in no mean: {EVIL}" in page.text
    summary, _, passes, _, calls, _, seconds, preferences, behind = range(9)
    shown = {"": "perfect", "desk, right": "70.0%", "cost": "$0.002", "time": "2.0 s"}
    assert page.row("perfect", summary) == shown and page.row(EVIL, summary)["cost"] == "-"
    assert page.row("perfect", passes)["pass^2"] == "30.0%"
    assert page.row("perfect", calls) == {"": "perfect", EVIL: "0.100", "large": "0.500"}
    assert page.row("perfect", seconds)["policy"] == "1.0 s"
    assert page.row("perfect", preferences)["cheap"] == "0.500"
    assert page.row("perfect", behind)["reward"] == "+0.100 [-, -] p=0.2"
