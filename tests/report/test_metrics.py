"""The run record survives kills, resumes exactly and never leaves half a file; the report reads well at every stage and runs nothing."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from nanorchestra.errors import UserError
from nanorchestra.records import ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.report.page import choose, write_report
from nanorchestra.report.plots import efficient, trailing_mean
from nanorchestra.report.run import Run, number, table

CONFIG = 'seed = 7\npreset = "nano"\n'
KINDS = ("python", "search", "lookup_order", "small", "frontier")


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "runs" / "one", CONFIG)
    yield run
    run.close()


# --- the directory -------------------------------------------------------------------------------------------------------------


def test_create_makes_the_run_and_nothing_else(tmp_path):
    run = Run.create(tmp_path / "runs" / "one", CONFIG)
    assert (run.path / "config.toml").read_text() == CONFIG
    assert os.listdir(tmp_path / "runs") == ["one"] and os.listdir(run.path) == ["config.toml"]


def test_create_refuses_a_directory_that_exists(run):
    with pytest.raises(
        UserError, match=r"already exists; resume that run or choose another"
    ) as error:
        Run.create(run.path, "other")
    assert str(run.path) in str(error.value) and "\n" not in str(error.value)
    assert (run.path / "config.toml").read_text() == CONFIG


def test_create_where_nothing_can_be_made_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the run directory"):
        Run.create(tmp_path / "file" / "deeper" / "one", CONFIG)
    assert os.listdir(tmp_path) == ["file"]


def test_create_that_fails_halfway_leaves_nothing(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        Run.create(tmp_path / "runs" / "one", CONFIG)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name, reason",
    [
        ("absent", "does not exist"),
        ("empty", "holds no config.toml"),
        ("file", "is not a directory"),
    ],
)
def test_open_refuses_what_is_not_a_run(tmp_path, name, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=reason):
        Run.open(tmp_path / name)


# --- the logs ------------------------------------------------------------------------------------------------------------------


def test_a_row_can_be_read_as_soon_as_it_is_appended(run):
    assert list(run.rows("metrics")) == []
    rows = [{"step": step, "text": "line\nbreak \u2028 \ud83d <b>"} for step in range(3)]
    for row in rows:
        run.append("metrics", row)
        assert list(Run.open(run.path).rows("metrics"))[-1] == row
    assert list(run.rows("metrics")) == rows and list(run.rows("trajectories")) == []


def test_an_unknown_log_is_refused(run):
    with pytest.raises(ValueError, match="metrics, trajectories"):
        run.append("metric", {})


def test_numbers_that_are_not_finite_become_null(run):
    run.append("metrics", {"step": 1, "loss": math.nan, "inner": [math.inf, 2.0]})
    assert json.loads((run.path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "inner": [None, 2.0],
    }


def test_a_killed_writer_costs_at_most_its_last_line(tmp_path):
    """A process is killed while it writes; the record stays readable, and the next writer goes on with a line of its own."""
    run = Run.create(tmp_path / "one", CONFIG)
    code = "import sys; from nanorchestra.report.run import Run\nrun = Run.open(sys.argv[1]); step = 0\nwhile True: run.append('metrics', {'step': step, 'x': 'y' * 5000}); step += 1"
    writer = subprocess.Popen([sys.executable, "-c", code, str(run.path)])
    log = run.path / "metrics.jsonl"
    while not log.exists() or log.stat().st_size < 200_000:
        assert writer.poll() is None
    writer.kill()
    writer.wait()
    with log.open("ab") as file:
        file.write(b'{"step": 99')  # the worst moment to be killed
    steps = [row["step"] for row in run.rows("metrics")]
    assert (
        steps == list(range(len(steps))) and len(steps) >= 39
    )  # of 200,000 bytes; the 40th may be cut
    run.append("metrics", {"step": "next"})
    assert [row["step"] for row in Run.open(run.path).rows("metrics")] == steps + ["next"]


def test_a_failed_append_leaves_the_log_as_it_was(run):
    run.append("metrics", {"step": 1})

    class FullDisk:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if len(data) < 10:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:5])

    whole, file = (run.path / "metrics.jsonl").read_bytes(), run._files["metrics"]
    run._files["metrics"] = FullDisk(file)
    with pytest.raises(UserError, match="No space left"):
        run.append("metrics", {"step": 2})
    assert (run.path / "metrics.jsonl").read_bytes() == whole
    run._files["metrics"] = file
    run.append("metrics", {"step": 3})
    assert [row["step"] for row in run.rows("metrics")] == [1, 3]


@pytest.mark.parametrize(
    "name, attempt",
    [
        ("metrics.jsonl", Run.open),
        ("trajectories.jsonl", Run.open),
        (".lock", lambda path: Run.open(path).lock()),
        ("summary.json", lambda path: Run.open(path).summary()),
    ],
)
def test_a_directory_where_a_file_belongs_is_named(run, name, attempt):
    (run.path / name).mkdir()
    with pytest.raises(UserError, match=f"{name}: ") as refused:
        attempt(run.path)
    assert "\n" not in str(refused.value)


def test_a_damaged_line_is_named(run):
    (run.path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: the line at byte 12"):
        list(run.rows("metrics"))


@pytest.mark.parametrize("last_bytes", [0, 1, 11, 12, 13, 24, 35, 36, 100])
def test_the_last_rows_are_the_whole_ones_in_the_last_bytes(run, last_bytes):
    for step in range(3):
        run.append("metrics", {"step": step})  # 12 bytes with the newline
    assert [row["step"] for row in run.rows("metrics", last_bytes)] == [0, 1, 2][
        max(0, 3 - last_bytes // 12) :
    ]


def test_resume_repeats_no_row(run):
    """A run goes on past its checkpoint, is killed and resumed: both logs read as if nothing had happened."""
    for step in range(5):
        run.append("metrics", {"step": step})
        run.append("trajectories", {"step": step, "ids": list(range(step))})
    offsets = json.loads(json.dumps(run.offsets()))
    at_checkpoint = {name: (run.path / f"{name}.jsonl").read_bytes() for name in offsets}
    run.append("metrics", {"step": 5})
    run.append("trajectories", {"step": 5})
    (run.path / "trajectories.jsonl").open("ab").write(b'{"half')

    resumed = Run.open(run.path)
    resumed.truncate(offsets)
    assert {name: (run.path / f"{name}.jsonl").read_bytes() for name in offsets} == at_checkpoint
    assert resumed.offsets() == offsets
    resumed.append("metrics", {"step": "again"})
    assert [row["step"] for row in resumed.rows("metrics")] == [0, 1, 2, 3, 4, "again"]


def test_offsets_leave_out_a_broken_line_and_start_at_zero(run):
    assert run.offsets() == {"metrics": 0, "trajectories": 0}
    run.truncate(run.offsets())
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    assert Run.open(run.path).offsets() == {"metrics": 12, "trajectories": 0}


@pytest.mark.parametrize("metrics", [5, 25, -1, None, "12"])
def test_truncate_refuses_an_offset_that_does_not_fit_and_cuts_nothing(run, metrics):
    run.append("metrics", {"step": 1})
    run.append("trajectories", {"step": 1})
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        run.truncate({"trajectories": 0, "metrics": metrics})
    assert run.offsets() == {"metrics": 12, "trajectories": 12}


def test_files_are_replaced_whole_or_not_at_all(run, monkeypatch):
    run.write_json("summary.json", {"seconds": 1.0, "bad": math.nan})
    assert run.summary() == {"seconds": 1.0, "bad": None}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"summary\.json: cannot write: No space"):
        run.write_json("summary.json", {"seconds": 2.0})
    assert run.summary()["seconds"] == 1.0
    assert sorted(os.listdir(run.path)) == ["config.toml", "summary.json"]


# --- what is shown -------------------------------------------------------------------------------------------------------------


def test_the_table_is_aligned_and_has_units():
    lines = table(synthetic_summary()).splitlines()
    assert len(lines) == 8 and len({len(line) for line in lines}) == 1
    assert "cost/task, m$" in lines[0] and "latency/task, s" in lines[0]
    assert lines[2].startswith("after GRPO") and "78.3" in lines[2] and "2.10" in lines[2]
    assert table({}) == "no held-out results yet"


def test_the_table_says_so_when_nothing_was_right():
    summary = {
        "held_out": {
            "before": {
                "reward": 0.0,
                "accuracy": 0.0,
                "cost_usd": 0.25,
                "cost_per_correct_usd": None,
            }
        }
    }
    assert re.search(r"before \(warm start\) +0\.000 +0\.0 +0\.250 +- +- +- +-$", table(summary))


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0.00"),
        (0.04123, "0.0412"),
        (3.14159, "3.14"),
        (15.92, "15.9"),
        (1234.5, "1,234"),
        (1e-9, "0.000000"),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize("stage", ["empty", "warm", "one step", "before", "whole"])
def test_the_report_can_be_written_at_every_stage(run, stage):
    record(run, stage)
    page = write_report(run.path).read_text()
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "simulated" in page and page.count("<article>") == (
        8 if stage == "whole" else 4 if stage == "one step" else 0
    )
    assert ("always the strongest" in page) == (stage == "whole")
    assert ("location.reload()" in page) == (
        stage != "whole"
    )  # a page of a run that goes on looks again


def test_the_report_loads_nothing_and_runs_nothing(run):
    """What a model or a tool wrote is text, whatever it looks like."""
    record(run, "one step")
    evil = '<script>alert(1)</script><img src="http://evil.example/x.png">'
    text = [
        {"role": "assistant", "text": f"<think>{evil}</think>{evil}<tool_call>{evil}"},
        {"role": "tool", "text": evil + "\ud83d"},
    ]
    row = trajectory(random.Random(0), 1, "grpo") | {
        "question": evil,
        "answer": evil,
        "text": text,
        "task_id": evil,
        "preference_text": evil,
    }
    row["tools"] = [{"name": evil, "kind": evil, "description": evil}]
    row["calls"] = {evil: 1}
    run.append("trajectories", row)
    page = write_report(run.path).read_text()
    seen = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: seen.append((tag, dict(attributes)))
    parser.feed(page)
    assert (
        not {tag for tag, _ in seen} & {"link", "iframe", "object", "a"}
        and "&lt;script&gt;" in page
    )
    allowed = re.search(r"script-src ([^;\"]*)", page).group(1)
    for attributes, body in re.findall(
        r"<script([^>]*)>(.*?)</script>", page, flags=re.DOTALL
    ):  # data, or the report's own by the hash of their text
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert (
            attributes == ' type="application/json" id="attempts"'
            and "alert(1)" in body
            and json.loads(body)
            or f"'sha256-{digest}'" in allowed
        )
    assert len(re.findall("<script", page)) == 3 and "unsafe-inline" not in allowed
    assert all(
        attributes["src"].startswith("data:image/svg+xml;base64,")
        for tag, attributes in seen
        if tag == "img"
    )
    assert not any(name.startswith("on") for _, attributes in seen for name in attributes)
    assert "default-src 'none'" in page


def test_samples_are_distinct_and_show_each_way_of_using_tools():
    rows = [{"reward": reward, "tools": [{"name": "a1", "kind": "small"}, {"name": "b7", "kind": "search"}], "calls": calls} for reward, calls in
            [(0.1, {"a1": 1}), (0.9, {"a1": 2}), (0.5, {"b7": 1}), (0.4, {"a1": 1, "b7": 1}), (0.0, {}), (0.2, {"a1": 1}), (0.3, {"b7": 0})]]  # fmt: skip
    chosen = choose(rows, 8)
    assert len({id(row) for _, row in chosen}) == len(chosen)
    assert [title for title, _ in chosen[:2]] == ["highest reward", "lowest reward"] and [
        row["reward"] for _, row in chosen[:2]
    ] == [0.9, 0.0]
    assert {title.split(" (")[0] for title, _ in chosen[2:]} == {
        "small",
        "search",
        "search, small",
        "no tool",
    }
    assert [row for _, row in choose(rows[:1], 8)] == rows[:1] and len(choose(rows, 3)) == 3


def test_the_efficient_points_are_those_nobody_beats():
    assert efficient([(3, 50), (1, 40), (2, 40), (2, 60), (5, 60), (6, 61)]) == [
        (1, 40),
        (2, 60),
        (6, 61),
    ]
    assert efficient([(1, 40), (1, 50)]) == [(1, 50)] and efficient([]) == []


def test_the_trailing_mean_knows_nothing_of_later_steps():
    assert trailing_mean([1.0, 3.0, 5.0, 9.0], 2) == [1.0, 2.0, 4.0, 7.0]


# --- a synthetic run -----------------------------------------------------------------------------------------------------------


def record(run, stage):
    rng = random.Random(3)
    if stage == "empty":
        return
    for step in range(1, 61):
        run.append(
            "metrics",
            {
                "phase": "warm_start",
                "step": step,
                "loss": 0.3 + 4 * math.exp(-step / 9) + rng.gauss(0, 0.03),
                "tokens_per_s": 21000.0,
                "seconds": 1.1,
            },
        )
    if stage == "before":
        run.write_json(
            "summary.json",
            {"seed": 7, "held_out": {"tasks": 480, "before": scores(0.52, 0.0034, 3.6, 0.41)}},
        )
    steps = {"warm": 0, "before": 0, "one step": 1, "whole": 60}[stage]
    for step in range(1, steps + 1):
        run.append("metrics", grpo_row(rng, step, step / 60))
    for _ in range(40 if stage == "whole" else 4 if steps else 0):
        run.append("trajectories", trajectory(rng, steps, "after" if stage == "whole" else "grpo"))
    if stage == "whole":
        run.write_json("summary.json", synthetic_summary())


def grpo_row(rng, step, t):
    wobble = lambda value, spread: max(0.0, value + rng.gauss(0, spread))  # noqa: E731
    return {
        "phase": "grpo", "step": step, "reward": wobble(0.3 + 0.3 * t, 0.03), "accuracy": min(1.0, wobble(0.5 + 0.28 * t, 0.04)),
        "cost_usd": wobble(0.0034 - 0.0013 * t, 0.0002), "latency_s": wobble(3.5 - 1.2 * t, 0.2), "preference": wobble(0.4 + 0.25 * t, 0.03),
        "avoided_rate": wobble(0.25 - 0.2 * t, 0.03), "well_formed": min(1.0, wobble(0.93 + 0.06 * t, 0.01)), "turns": wobble(2.4 - 0.3 * t, 0.1), "group_std": 0.2,
        "filtered": {"homogeneous": wobble(0.1 + 0.2 * t, 0.04), "invalid_format": wobble(0.02 * (1 - t), 0.005)},
        "calls": dict(zip(KINDS, (0.2 + 0.2 * t, 0.2, 0.3, 0.2 + 0.5 * t, 0.9 - 0.6 * t))), "loss": rng.gauss(0, 0.01), "kl": 0.03 * t, "entropy": 0.6 - 0.3 * t,
        "ratio": rng.gauss(1, 0.001), "clip_fraction": wobble(0.01, 0.004), "grad_norm": wobble(0.8, 0.2), "logprob_gap": wobble(1e-6, 1e-7), "tokens_per_s": 9000.0,
        "seconds": 5.1, "phase_seconds": {"rollout": wobble(2.4, 0.2), "train": wobble(2.5, 0.2), "update": 0.1}, "learning_rate": 3e-4,
    }  # fmt: skip


def trajectory(rng, step, phase):
    names = {"alpha-9": "frontier", "mini-2": "small", "calculator": "python", "find": "search"}
    tool = rng.choice(list(names))
    call = ToolCall(tool, {"question": "How tall is the Ormond tower?"})
    result = ToolResult(
        "The Ormond tower is 214 m tall.",
        cost_usd=0.0021,
        latency_s=1.7,
        input_tokens=40,
        output_tokens=12,
    )
    right = rng.random() < 0.7
    record = Trajectory(
        "lookup-17",
        3,
        330,
        list(range(420)),
        [False] * 330 + [True] * 90,
        [-0.1] * 420,
        [4] * 420,
        [Turn(330, 380, "stop", [call], [result]), Turn(400, 420, "stop")],
    )
    record.answer, record.outcome, record.cost_usd, record.latency_s = (
        "214 m",
        float(right),
        0.0023,
        2.2,
    )
    record.calls, record.reward = (
        ({tool: 1} if rng.random() < 0.8 else {tool: 1, "find": 1}),
        right * rng.random(),
    )
    text = [
        {"role": "assistant", "text": '<think>\nA fact, and not a hard one.\n</think>\n\n<tool_call>\n{"name": "' + tool + '", "arguments": {"question": "How tall is the Ormond tower?"}}\n</tool_call><|im_end|>'},
        {"role": "tool", "text": "\n<|im_start|>user\n<tool_response>\nThe Ormond tower is 214 m tall.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"},
        {"role": "assistant", "text": "<think>\nThat settles it.\n</think>\n\n214 m<|im_end|>"},
    ]  # fmt: skip
    tools = [
        {"name": name, "kind": kind, "description": f"A {kind} tool; 0.3 $ per million tokens."}
        for name, kind in names.items()
    ]
    extra = {
        "step": step,
        "phase": phase,
        "question": "How tall is the Ormond tower, in metres?",
        "preference_text": "Be cheap.",
        "tools": tools,
        "text": text,
    }
    return dataclasses.asdict(record) | extra


def scores(accuracy, cost, latency, preference):
    part = lambda a, c: {
        "reward": a * 0.7,
        "accuracy": min(1.0, accuracy * a),
        "cost_usd": cost * c,
        "latency_s": latency * c,
    }  # noqa: E731
    return {
        "reward": accuracy * 0.8, "accuracy": accuracy, "cost_usd": cost, "latency_s": latency, "preference": preference, "cost_per_correct_usd": cost / accuracy, "avoided_rate": 0.04,
        "by_preference": {"right": part(1.08, 1.5), "cheap": part(0.93, 0.6), "fast": part(0.96, 0.9), "balanced": part(1.0, 1.0)},
        "by_kind": {"knowledge": part(0.9, 1.3), "arithmetic": part(1.15, 0.4), "lookup": part(1.05, 0.9), "chain": part(0.8, 1.4)},
    }  # fmt: skip


def synthetic_summary():
    routers = {"strongest": scores(0.74, 0.0082, 5.1, 0.3), "cheapest": scores(0.36, 0.0004, 1.2, 0.6), "cascade": scores(0.66, 0.0049, 4.4, 0.4),
               "random": scores(0.45, 0.0036, 3.0, 0.35), "rule": scores(0.68, 0.0031, 2.7, 0.5)}  # fmt: skip
    held_out = {
        "tasks": 480,
        "before": scores(0.52, 0.0034, 3.6, 0.41),
        "after": scores(0.783, 0.0021, 2.2, 0.66),
        "routers": routers,
    }
    return {
        "seconds": 431.0,
        "steps": 60,
        "seed": 7,
        "parameters": 2_104_320,
        "peak_memory_mb": 1480,
        "held_out": held_out,
    }


def test_a_run_has_one_writer(tmp_path):
    run = Run.create(tmp_path / "r", "")
    run.lock()
    with pytest.raises(UserError, match="another process"):
        Run.open(tmp_path / "r").lock()
    run.close()
    Run.open(tmp_path / "r").lock()
