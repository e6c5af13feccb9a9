"""`python -m kernels.compile` and `python -m kernels.bench`."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from kernel_check import DEVICE

from kernels import bench


def run(module, *arguments):
    command = [sys.executable, "-m", f"kernels.{module}", *arguments]
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, env=clean)


@pytest.mark.parametrize("module", ["compile", "bench"])
def test_an_unknown_kernel_is_refused_in_one_line(module):
    done = run(module, "--kernel", "bogus")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "bogus" in done.stderr and "swiglu, decode_attention" in done.stderr


@pytest.mark.skipif(DEVICE == "cuda", reason="says what happens without a GPU")
def test_a_benchmark_without_a_gpu_says_so_and_writes_nothing(tmp_path):
    done = run("bench", "--kernel", "swiglu", "--json", str(tmp_path / "f.json"))
    assert done.returncode == 1 and "374.6 us at least on an H200" in done.stdout
    assert done.stderr == "there is no GPU here: nothing was measured, nothing was written\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_compile_reports_registers_spills_and_shared_memory():
    done = run("compile", "--kernel", "swiglu", "--arch", "80", "90")
    assert done.returncode == 0, done.stderr
    line = r"sm_(80|90)  swiglu +_swiglu\w* +\d+ registers +0 B spilled +\d+ B shared"
    assert re.fullmatch(rf"({line} *\n){{4}}", done.stdout)


def test_the_benchmark_writes_figures_and_plot(tmp_path, monkeypatch, capsys):
    """On a device where each call takes a millisecond."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench, "ceilings", lambda: (1e12, 1e14))
    monkeypatch.setattr(bench, "do_bench", lambda run, return_mode: 1.0)
    monkeypatch.setattr(bench, "DEVICE", "meta")
    figures, plot = tmp_path / "f.json", tmp_path / "f.png"
    assert bench.main(["--kernel", "swiglu", "--json", str(figures), "--plot", str(plot)]) == 0
    assert "swiglu" in capsys.readouterr().out and plot.stat().st_size > 0
    (result,) = json.loads(figures.read_text())["results"]
    assert result["limit"] == "bandwidth" and result["share"] == pytest.approx(1.61, abs=0.01)
    assert set(result["ms"]) >= {"own", "eager", "compiled"}
