"""`python -m kernels.compile` and `python -m kernels.bench`."""

import json

import pytest
import torch
from kernel_check import DEVICE

from kernels import bench, compile


@pytest.mark.parametrize("command", [compile, bench], ids=["compile", "bench"])
def test_an_unknown_kernel_is_refused_in_one_line(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--kernel", "bogus"])
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and error.count("\n") == 1
    assert "bogus" in error and "swiglu, decode_attention" in error


@pytest.mark.skipif(DEVICE == "cuda", reason="says what happens without a GPU")
def test_a_benchmark_without_a_gpu_says_so_and_writes_nothing(tmp_path, capsys):
    assert bench.main(["--kernel", "swiglu", "--json", str(tmp_path / "f.json")]) == 1
    out, error = capsys.readouterr()
    assert not out and not list(tmp_path.iterdir())
    assert error == "there is no GPU here: nothing was measured, nothing was written\n"


def test_the_benchmark_writes_figures(tmp_path, monkeypatch, capsys):
    """On a device where each call takes a millisecond."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench, "ceilings", lambda: (1e12, 1e14))
    monkeypatch.setattr(bench, "do_bench", lambda run, return_mode: 1.0)
    monkeypatch.setattr(bench, "DEVICE", "meta")
    figures = tmp_path / "f.json"
    assert bench.main(["--kernel", "swiglu", "--json", str(figures)]) == 0
    assert "swiglu" in capsys.readouterr().out
    (result,) = json.loads(figures.read_text())["results"]
    assert result["limit"] == "bandwidth" and result["share"] == pytest.approx(1.61, abs=0.01)
    assert set(result["ms"]) >= {"own", "eager", "compiled"}
