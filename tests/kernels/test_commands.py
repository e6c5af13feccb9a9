"""`python -m benchmarks.gpu_parts.compile`, and the first day on a GPU."""

import json

import pytest
import torch
from kernel_check import DEVICE

from benchmarks import gpu
from benchmarks.gpu_parts import NotHereError, Part, compile, timing
from benchmarks.gpu_parts.cases import select


def test_an_unknown_kernel_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        compile.main(["--kernel", "bogus"])
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and error.count("\n") == 1
    assert "bogus" in error and "swiglu, decode_attention" in error


@pytest.mark.skipif(DEVICE == "cuda", reason="says what happens without a GPU")
def test_a_day_on_a_gpu_without_one_says_so_and_writes_nothing(capsys):
    before = set(gpu.ROOT.glob("benchmarks/*"))
    assert gpu.main([]) == 2
    out, error = capsys.readouterr()
    assert not out and set(gpu.ROOT.glob("benchmarks/*")) == before
    assert error == "gpu.py: there is no GPU here; --rehearse runs in small on the CPU\n"


def test_a_kernel_is_timed_as_a_share_of_its_ceiling(monkeypatch):
    """On a device where each call takes a millisecond."""
    monkeypatch.setattr(timing, "do_bench", lambda run, return_mode: 1.0)
    monkeypatch.setattr(timing, "DEVICE", "meta")
    (case,) = select("swiglu")
    row = timing.measure(case, (1e12, 1e14))
    assert row["limit"] == "bandwidth" and row["share"] == pytest.approx(1.61, abs=0.01)
    assert set(row["ms"]) >= {"own", "eager", "compiled"}


def test_a_part_that_fails_loses_no_other_and_is_done_again(monkeypatch, tmp_path, capsys):
    """Each part in a process of its own; a second call does what is left."""
    calls = []

    def run_part(name, rehearse, limit, file):
        calls.append(name)
        failed = name == "decode" and len(calls) <= len(gpu.PARTS)
        status = {"decode": "failed" if failed else "done", "vllm": "not here"}.get(name, "done")
        return {"status": status, "seconds": 1.0, "figures": {}}

    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "machine", lambda rehearse: {"card": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.main([]) == 1 and calls == list(gpu.PARTS)
    report = tmp_path / "benchmarks" / "gpu-h200.json"
    assert json.loads(report.read_text())["parts"]["decode"]["status"] == "failed"
    assert gpu.main([]) == 0 and calls[len(gpu.PARTS) :] == ["decode"]
    assert gpu.main(["--minutes", "0.01", "--only", "steps"]) == 0
    assert "not reached" in capsys.readouterr().out


def test_a_part_ends_with_its_reason(tmp_path, monkeypatch, capfd):
    """What it noted before stays; a library that is missing is no failure."""

    def work(part: Part) -> None:
        part.note("first", speed=1.0)
        raise NotHereError("vllm is not installed") if part.rehearse else ValueError("too slow")

    monkeypatch.setattr("benchmarks.gpu_parts.engine.steps", work)
    file = tmp_path / "figures.json"
    assert gpu.child("steps", True, file) == 3 and gpu.child("steps", False, file) == 1
    assert json.loads(file.read_text()) == {"first": {"speed": 1.0}}
    assert "ValueError: too slow" in capfd.readouterr().err
