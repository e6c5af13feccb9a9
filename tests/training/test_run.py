"""The run directory survives kills, resumes exactly and never keeps half a line."""

import json
import math

import pytest

from nanorchestra.errors import UserError
from nanorchestra.training.run import RunFolder

CONFIG = 'seed = 7\npreset = "nano"\n'


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "one", CONFIG)


def test_a_run_is_made_once_and_has_one_writer(run):
    assert (run.path / "config.toml").read_text() == CONFIG
    with pytest.raises(UserError, match="not empty.*; it holds a run; choose another"):
        RunFolder.create(run.path, "other")
    run.lock()
    with pytest.raises(UserError, match="another process"):
        RunFolder.open(run.path).lock()
    run.unlock()
    RunFolder.open(run.path).lock()


def test_numbers_that_are_not_finite_become_null(run):
    run.append("metrics", {"step": 1, "loss": math.nan, "inner": [math.inf, 2.0]})
    text = (run.path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=pytest.fail)
    assert row == {"step": 1, "loss": None, "inner": [None, 2.0]}


def test_resume_repeats_no_row(run):
    """After a kill both logs read as if the steps since the checkpoint had not happened."""
    for step in range(5):
        run.append("metrics", {"step": step, "text": "line\nbreak \u2028 \ud83d <b>"})
        run.append("trajectories", {"step": step})
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
