"""The run directory survives kills, resumes exactly and never keeps half a line."""

import json
import math
import os

import pytest

from nanorchestra.errors import UserError
from nanorchestra.training.run import RunFolder

CONFIG = 'seed = 7\npreset = "nano"\n'


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "one", CONFIG)


def test_create_makes_the_run_and_nothing_else(run, tmp_path):
    assert (run.path / "config.toml").read_text() == CONFIG
    with pytest.raises(UserError, match="not empty.*; resume that run or choose another"):
        RunFolder.create(run.path, "other")
    (run.path / "config.toml").rename(run.path / "notes.txt")
    with pytest.raises(UserError, match="not empty.*; it holds no run; choose another run name"):
        RunFolder.create(run.path, "other")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/one: .*\); .*file must be a directory that can be"):
        RunFolder.create(tmp_path / "file" / "one", "other")
    with pytest.raises(UserError, match="holds no config.toml"):
        RunFolder.open(tmp_path)


def test_a_row_can_be_read_as_soon_as_it_is_appended(run):
    assert list(run.rows("metrics")) == []
    for step in range(3):
        row = {"step": step, "text": "line\nbreak \u2028 \ud83d <b>"}
        run.append("metrics", row)
        assert list(RunFolder.open(run.path).rows("metrics"))[step:] == [row]


def test_numbers_that_are_not_finite_become_null(run):
    run.append("metrics", {"step": 1, "loss": math.nan, "inner": [math.inf, 2.0]})
    text = (run.path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=pytest.fail)
    assert row == {"step": 1, "loss": None, "inner": [None, 2.0]}


def test_the_last_rows_are_the_whole_ones_in_the_last_bytes(run):
    for step in range(3):
        run.append("metrics", {"step": step})  # 12 bytes with the newline
    for last_bytes in (0, 1, 11, 12, 13, 24, 35, 36, 100):
        steps = [row["step"] for row in run.rows("metrics", last_bytes)]
        assert steps == [0, 1, 2][max(0, 3 - last_bytes // 12) :]


def test_resume_repeats_no_row(run):
    """After a kill both logs read as if the steps since the checkpoint had not happened."""
    for step in range(5):
        run.append("metrics", {"step": step})
        run.append("trajectories", {"step": step, "ids": list(range(step))})
    offsets = json.loads(json.dumps(run.offsets()))
    logs = {name: (run.path / f"{name}.jsonl").read_bytes() for name in offsets}
    run.append("metrics", {"step": 5})
    with (run.path / "trajectories.jsonl").open("ab") as file:
        file.write(b'{"half')
    assert len(list(run.rows("trajectories"))) == 5, "readers skip the half line"

    resumed = RunFolder.open(run.path)
    resumed.truncate(offsets)
    assert {name: (run.path / f"{name}.jsonl").read_bytes() for name in offsets} == logs
    assert resumed.offsets() == offsets
    resumed.append("metrics", {"step": "again"})
    assert [row["step"] for row in resumed.rows("metrics")] == [0, 1, 2, 3, 4, "again"]


def test_a_log_that_has_lost_rows_is_refused_and_no_log_is_cut(run):
    for name in ("metrics", "trajectories"):
        run.append(name, {"step": 1})
    offsets = run.offsets()
    os.truncate(run.path / "trajectories.jsonl", 4)
    run.append("metrics", {"step": 2})
    with pytest.raises(UserError, match="trajectories.jsonl: has 4 bytes; .* were written"):
        run.truncate(offsets)
    assert len(list(run.rows("metrics"))) == 2
    (run.path / "trajectories.jsonl").unlink()  # as the message says
    run.truncate(offsets)
    assert len(list(run.rows("metrics"))) == 1


def test_a_run_has_one_writer(run):
    run.lock()
    with pytest.raises(UserError, match="another process"):
        RunFolder.open(run.path).lock()
    run._lock.close()
    RunFolder.open(run.path).lock()
