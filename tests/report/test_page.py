"""The report can be written at every stage of a run, and runs nothing that a model wrote."""

import base64
import dataclasses
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser

import pytest

from nanorchestra.records import ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.report.page import write_report
from nanorchestra.report.run import Run

SCORES = {"reward": 0.5, "accuracy": 0.7, "cost_usd": 0.002, "latency_s": 2.0}
SPLIT = {"by_preference": {"cheap": SCORES}, "by_kind": {"chain": SCORES}}
SUMMARY = {
    "seconds": 431.0,
    "held_out": {
        "tasks": 480,
        "before": SCORES | SPLIT,
        "after": SCORES | SPLIT,
        "routers": {"strongest": SCORES},
    },
}


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "one", 'seed = 7\npreset = "nano"\n')


def trajectory(phase="grpo", **changes):
    """One row of trajectories.jsonl: a call, its result, an answer."""
    call, result = ToolCall("alpha-9", {}), ToolResult("214 m", cost_usd=0.0021, latency_s=1.7)
    turns = [Turn(330, 380, "stop", [call], [result]), Turn(400, 420, "stop")]
    sampled = [False] * 330 + [True] * 90
    record = Trajectory("t-17", 3, 330, [*range(420)], sampled, [-0.1] * 420, [4] * 420, turns)
    record.answer, record.outcome, record.reward = "214 m", 1.0, random.random()
    text = "<think>\nA fact.\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    return (
        dataclasses.asdict(record)
        | {
            "step": 2,
            "phase": phase,
            "question": "How tall is the Ormond tower?",
            "preference_text": "Be cheap.",
            "tools": [{"name": "alpha-9", "kind": "frontier", "description": "An expert."}],
            "text": [
                {"role": "assistant", "text": text},
                {"role": "tool", "text": "214 m"},
                {"role": "assistant", "text": "214 m"},
            ],
        }
        | changes
    )


def record(run, stage):
    for step in range(1, 31) if stage != "empty" else ():
        row = {"loss": 4 * math.exp(-step / 9), "seconds": 1.1, "tokens_per_s": 21000.0}
        run.append("metrics", {"phase": "warm_start", "step": step} | row)
    for step in range(1, 31 if stage == "whole" else 2) if stage in ("one", "whole") else ():
        row = SCORES | {"phase": "grpo", "step": step, "calls": {"search": 0.3, "small": step / 60}}
        run.append("metrics", row | {"seconds": 5.1, "kl": None, "filtered": {"homogeneous": 0.1}})
        run.append("trajectories", trajectory())
    if stage == "whole":
        run.append("metrics", SCORES | {"phase": "evaluation", "step": 30})
        for _ in range(12):
            run.append("trajectories", trajectory("after"))
        run.write_json("summary.json", SUMMARY)


@pytest.mark.parametrize("stage, samples", [("empty", 0), ("warm", 0), ("one", 1), ("whole", 8)])
def test_the_report_can_be_written_at_every_stage(run, stage, samples):
    record(run, stage)
    page = write_report(run.path).read_text()
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "simulated" in page and page.count("<article>") == samples
    assert ("always the strongest" in page) == ("cheap, after" in page) == (stage == "whole")
    assert ("location.reload()" in page) == (stage != "whole"), "a page of a run looks again"


def test_the_report_loads_nothing_and_runs_nothing(run):
    """What a model or a tool wrote is text, whatever it looks like."""
    evil = '<script>alert(1)</script><img src="http://evil.example/x.png">'
    text = [
        {"role": "assistant", "text": f"<think>{evil}</think>{evil}<tool_call>{evil}"},
        {"role": "tool", "text": evil + "\ud83d"},
    ]
    names = dict.fromkeys(("question", "answer", "task_id", "preference_text", "status"), evil)
    tools = [{"name": evil, "kind": evil, "description": evil}]
    run.append("trajectories", trajectory(**names, text=text, tools=tools, calls={evil: 1}))
    page = write_report(run.path).read_text()
    seen = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: seen.append((tag, dict(attributes)))
    parser.feed(page)
    assert not {tag for tag, _ in seen} & {"link", "iframe", "object", "a"}
    assert not any(name.startswith("on") for _, attributes in seen for name in attributes)
    for tag, attributes in seen:
        assert tag != "img" or attributes["src"].startswith("data:image/svg+xml;base64,")
    assert "default-src 'none'" in page and "&lt;script&gt;" in page
    allowed = re.search(r"script-src ([^;\"]*)", page).group(1)
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == len(re.findall("<script", page)) == 3 and "unsafe" not in allowed
    for attributes, body in scripts:  # data, or the report's own by the hash of its text
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in allowed or ("json" in attributes and json.loads(body))
