"""`python -m benchmarks.gpu_parts.compile`, and the first day on a GPU."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_parts import Part, compile, first, kernels


def test_a_kernel_that_breaks_its_budget_is_named():
    """One that spills, that another instruction multiplies, or whose loop waits for its loads."""
    good = compile.Report("_attend_splits", 168, 0, 71680, programs=3, product="HMMA", loads=1)
    assert compile.faults(good, 90) == []
    bad = dataclasses.replace(good, spilled=8, programs=1, product="HGMMA", loads=18)
    assert compile.faults(bad, 90) == [
        "spills",
        "expected 2 programs",
        "expected HMMA",
        "expected 1 loads",
    ]
    assert compile.faults(dataclasses.replace(good, kernel="_new"), 90) == ["has no budget"]
    wide = dataclasses.replace(good, kernel="_attend_chunks", product="UTCHMMA", spilled=8)
    assert compile.faults(wide, 100) == []
    assert compile.faults(wide, 90) == ["spills", "expected HGMMA"]


def test_loads_are_counted_in_the_shortest_loop_with_a_product():
    code = """
        /*0010*/ LDG.E R1, [R2] ;
        /*0020*/ LDGSTS.E.128 [R3], [R4] ;
        /*0030*/ @!P0 LDG.E R5, [R6] ;
        /*0040*/ HMMA.16816.F32.BF16 R8, R9, R10, R8 ;
        /*0050*/ @P1 BRA 0x20 ;
        /*0060*/ @P2 BRA 0x10 ;
        /*0064*/ HFMA2.MMA R1, -RZ, RZ, 0, 0 ;
        /*0068*/ @P2 BRA 0x64 ;
        /*0070*/ BRA 0x70 ;
    """
    loop = compile.product_loop(code)
    assert [line.split(".")[0] for line in loop] == ["LDGSTS", "@!P0 LDG", "HMMA", "@P1 BRA 0x20"]


def test_a_kernel_that_is_off_is_reported(monkeypatch):
    """Whatever rounds twice, or forgets something, is more than its allowance away."""
    part = Part(rehearse=True)
    (case,) = (case for case in kernels.all_cases(kernels.SMALL) if case.name == "rms_norm")
    exact = kernels.NAIVE["rms_norm"]
    monkeypatch.setitem(kernels.NAIVE, "rms_norm", lambda x, weight, eps: exact(x, weight, 0.1))
    assert [line.split(":")[0] for line in kernels.check(part, case)] == ["rms_norm, result 0"]


def test_parts_are_run_by_a_word_of_their_name_and_the_others_stay(monkeypatch, tmp_path):
    """A part that failed makes the exit status; one that is not here does not."""
    status = {"decode": "failed", "vllm": "not here"}
    called = []

    def run_part(name, rehearse, limit, file):
        called.append(name)
        return {"status": status.get(name, "done")}

    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu, "machine", lambda rehearse: {"card": "NVIDIA H200"})
    out = ["--out", str(tmp_path / "day")]
    assert gpu.main(out) == 1 and called == list(gpu.PARTS)
    called.clear()
    status.clear()
    assert gpu.main([*out, "--only", "deco", "grpo"]) == 0
    assert called == ["grpo 0.6b", "grpo 4b", "decode"]
    (report,) = (tmp_path / "day").iterdir()
    results = json.loads(report.read_text())
    assert report.name == "gpu-h200.json" and list(results) == list(gpu.PARTS)
    assert results["decode"] == {"machine": {"card": "NVIDIA H200"}, "status": "done"}


@pytest.mark.slow
def test_the_first_parts_pass_in_small_and_find_a_product_that_is_rounded(monkeypatch):
    """Beside them --first runs an engine and a GRPO step, which other tests run in small."""
    for name, work in gpu.FIRST.items():
        module, function = work.split(".")
        if module == "first":
            part = Part(rehearse=True)
            getattr(first, function)(part)
            assert part.figures, name
    product = first.wide_product

    def rounded(a, b, out):
        out.copy_(product(a, b).bfloat16())

    monkeypatch.setattr(first, "wide_product", rounded)
    with pytest.raises(AssertionError, match="a product is off by"):
        first.wide_products(Part(rehearse=True))


@pytest.mark.slow
def test_the_parts_import_no_world_server_or_index():
    modules = {work.split(".")[0] for work in (gpu.FIRST | gpu.PARTS).values()}
    code = f"import sys, {', '.join(f'benchmarks.gpu_parts.{name}' for name in modules)}\n"
    code += "print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=gpu.ROOT, capture_output=True, text=True, check=True
    )
    imported = done.stdout.split()
    around = ("worlds", "train", "tools", "reward", "faiss", "nanorchestra.serving")
    around += ("nanorchestra.tools", "nanorchestra.formats")
    assert not [name for name in imported if name.startswith(around)]


def test_a_part_that_hangs_is_ended_with_all_its_processes(tmp_path, monkeypatch):
    """What it noted before it hung is kept."""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import json, pathlib, subprocess, sys, time\n"
        "file = pathlib.Path(sys.argv[sys.argv.index('--file') + 1])\n"
        "file.write_text(json.dumps({'first': 1}))\n"
        "inner = subprocess.Popen(['sleep', '60'])\n"
        "file.with_name('pid').write_text(str(inner.pid))\n"
        "inner.wait()\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    result = gpu.run_part("steps", False, 1.0, tmp_path / "figures.json")
    assert result["status"] == "failed" and result["reason"] == "it ran longer than 1 s"
    assert result["figures"] == {"first": 1} and result["seconds"] < 30
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    end = time.monotonic() + 20
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end, "its own process goes on"
