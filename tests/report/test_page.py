"""The report can be written at every stage of a run, and runs nothing that a model wrote."""

import math
import re

import pytest
from matplotlib.figure import Figure
from test_browser import TEXTS, data_of, drawn, needs_node, row

from nanorchestra.report import plots
from nanorchestra.report.page import SCRIPTS, write_report
from nanorchestra.report.run import Run

SCORES = {"reward": 0.5, "accuracy": 0.7, "cost_usd": 0.002, "latency_s": 2.0}
SIDE = SCORES | {"by_preference": {"cheap": SCORES}, "by_kind": {"chain": SCORES}}
HELD_OUT = {"tasks": 480, "before": SIDE, "after": SIDE, "routers": {"strongest": SCORES}}


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "one", 'seed = 7\npreset = "nano"\n')


def record(run, stage):
    for step in range(1, 31) if stage != "empty" else ():
        metrics = {"loss": 4 * math.exp(-step / 9), "seconds": 1.1, "tokens_per_s": 21000.0}
        run.append("metrics", {"phase": "warm_start", "step": step} | metrics)
    for step in range(1, 31 if stage == "whole" else 2) if stage in ("one", "whole") else ():
        nested = {"calls": {"search": 0.3, "small": step / 60}, "filtered": {"homogeneous": 0.1}}
        run.append("metrics", SCORES | nested | {"phase": "grpo", "step": step, "kl": None})
        run.append("trajectories", row())
    if stage == "whole":
        for _ in range(12):
            run.append("trajectories", row(phase="after"))
        run.write_json("summary.json", {"seconds": 431.0, "held_out": HELD_OUT})


def report(run):
    """The page that is written of a run."""
    write_report(run.path)
    return (run.path / "report.html").read_text()


@pytest.mark.parametrize("stage", ["empty", "warm", "one", "whole"])
def test_the_report_can_be_written_at_every_stage(run, stage):
    record(run, stage)
    page = report(run)
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    data = data_of(page)
    assert "simulated" in page and bool(data["browser"]["count"]) == (stage in ("one", "whole"))
    assert [*data["run"]["held_out"]] == ["before", "after", "strongest"] * (stage == "whole")
    assert data["run"]["live"] == (stage != "whole"), "a page of a run looks again"


@needs_node
def test_the_tables_show_the_scores_of_every_side_and_router(run):
    record(run, "whole")
    texts = drawn(report(run), TEXTS)
    for text in (
        "0.500",
        "70.0",
        "2.00",
        "always the strongest",
        "cheap, after",
        "431 s (7.2 min)",
    ):
        assert text in texts
    assert "NaN" not in str(texts) and "undefined" not in str(texts)


def test_the_report_loads_nothing_and_runs_nothing(run):
    """What a model or a tool wrote is text, whatever it looks like."""
    evil = '<script>alert(1)</script><img src="http://evil.example/x.png">'
    names = dict.fromkeys(("question", "answer", "task_id", "status"), evil)
    run.append("trajectories", row(**names, calls={evil: 1}))
    run.append("metrics", SCORES | {"phase": "grpo", "step": 1, "calls": {evil: 1}})
    page = report(run)
    assert not re.search(r"<(link|iframe|object|a)\b|<[^>]* on\w+=", page)
    images = re.findall(r"<img[^>]*>", page)
    assert images and all(' src="data:image/svg+xml;base64,' in image for image in images)
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, flags=re.DOTALL)
    assert "default-src 'none'" in page and len(re.findall("<script", page)) == len(scripts) == 3
    assert data_of(page)["browser"]["groups"][0][0]["question"] == evil
    assert [body for attributes, body in scripts if not attributes] == SCRIPTS


def test_the_mismatch_of_sampler_and_trainer_and_the_reward_trained_on_are_curves():
    """The panels name keys of a metrics row; a key that is not there gives an empty panel."""
    shown = {
        "mismatch_kl": 2e-4,
        "mismatch_ratio": 1.0,
        "mismatch_ratio_max": 1.3,
        "staleness": 0.5,
    }
    rows = [SCORES | shown | {"step": step, "reward_parts": {"cost": 0.1}} for step in (1, 2, 3)]
    last = {}
    for panel in plots.curves(rows, "health") + plots.curves(rows, "learning"):
        axis = Figure().subplots()
        panel(axis)
        last[axis.get_title()] = [float(line.get_ydata()[-1]) for line in axis.lines[::2]]
    assert last["KL(sampler || trainer), nats per token"] == [2e-4]
    assert last["Probability, trainer / sampler"] == [1.0, 1.3]
    assert last["Staleness of the sampled ids, updates"] == [0.5]
    assert last["Reward that is trained on"] == [SCORES["reward"]]
    assert last["Parts of the reward by the price list"] == [0.1]
