"""`python -m benchmarks.gpu_parts.compile`, and the first day on a GPU."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from kernel_check import DEVICE

from benchmarks import gpu
from benchmarks.gpu_parts import NotHereError, Part, compile, kernels
from benchmarks.gpu_parts.cases import select


def test_an_unknown_kernel_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        compile.main(["--kernel", "bogus"])
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and error.count("\n") == 1
    assert "bogus" in error and "swiglu, decode_attention" in error


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


@pytest.mark.skipif(DEVICE == "cuda", reason="says what happens without a GPU")
def test_a_day_on_a_gpu_without_one_says_so_and_writes_nothing(capsys, tmp_path):
    assert gpu.main(["--out", str(tmp_path / "day")]) == 2
    out, error = capsys.readouterr()
    assert not out and not list(tmp_path.iterdir())
    assert error == "gpu.py: there is no GPU here; --rehearse runs in small on the CPU\n"


def test_a_kernel_is_timed_as_a_share_of_its_ceiling(monkeypatch):
    """On a device where each call takes a millisecond."""
    monkeypatch.setattr(kernels, "do_bench", lambda call, return_mode: 1.0)
    monkeypatch.setattr(kernels, "DEVICE", "meta")
    (case,) = select("swiglu")
    row = kernels.measure(case, (1e12, 1e14))
    assert row["limit"] == "bytes" and row["share"] == pytest.approx(1.61, abs=0.01)
    assert row["us"] == row["eager_us"] == row["compiled_us"] == 1000


def test_a_kernel_that_is_off_is_reported(monkeypatch):
    """Whatever rounds twice, or forgets something, is more than its allowance away."""
    part = Part(rehearse=True)
    (case,) = (case for case in kernels.all_cases(kernels.SMALL) if case.name == "rms_norm")
    exact = kernels.NAIVE["rms_norm"]
    monkeypatch.setitem(kernels.NAIVE, "rms_norm", lambda x, weight, eps: exact(x, weight, 0.1))
    assert [line.split(":")[0] for line in kernels.check(part, case)] == ["rms_norm, result 0"]


@pytest.fixture
def day(monkeypatch, tmp_path):
    """A day on a GPU whose parts do nothing: calls, and the status of parts."""

    class Day:
        calls: list[str] = []
        limits: dict[str, float] = {}
        status = {"vllm": "not here"}
        out = tmp_path / "day"
        report = out / "gpu-h200.json"

        def call(self, *words: str) -> tuple[int, list[str]]:
            """The exit status, and the parts that were run."""
            self.calls.clear()
            return gpu.main(["--out", str(self.out), *words]), list(self.calls)

    made = Day()

    def run_part(name, rehearse, limit, file):
        made.calls.append(name)
        made.limits[name] = limit
        return {"status": made.status.get(name, "done"), "seconds": 1.0, "figures": {}}

    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu, "machine", lambda rehearse: {"card": "NVIDIA H200"})
    return made


def test_a_second_call_does_what_is_left_and_then_what_failed(day):
    """All that a call leaves lies in the folder that it names."""
    day.status |= {"decode": "failed"}
    assert day.call() == (1, list(gpu.PARTS))
    assert json.loads(day.report.read_text())["parts"]["decode"]["status"] == "failed"
    assert {path.name for path in day.out.iterdir()} == {"gpu-h200.json"}

    parts = json.loads(day.report.read_text())["parts"]
    del parts["vllm"]
    day.report.write_text(json.dumps({"parts": parts}))
    assert day.call() == (1, ["vllm", "decode"]), "what has not been tried comes first"
    del day.status["decode"]
    assert day.call() == (0, ["decode"]) and day.call() == (0, [])
    assert day.call("--only", "steps", "grpo") == (0, ["grpo 0.6b", "steps", "grpo 4b"])


def test_a_part_begins_only_if_its_limit_fits_in_the_call(day, capsys):
    assert day.call("--minutes", "1.4") == (1, ["pointwise", *day.calls[1:]])
    assert all(limit == gpu.PARTS[name].limit <= 84 for name, limit in day.limits.items())
    assert "decode" not in day.calls and "quantised products" in day.calls
    assert "not reached: it may take 140 s, and 84 s are left" in capsys.readouterr().out
    assert "decode" in day.call("--only", "decode")[1]


def test_the_parts_of_a_day_fit_in_two_calls():
    """In the first one kernels, a GRPO step and decoding, in this order."""
    minutes = gpu.arguments([]).minutes
    assert minutes <= 9.5, "a call ends within ten minutes, its start included"
    names, limits = list(gpu.PARTS), [work.limit for work in gpu.PARTS.values()]
    first = names.index("decode") + 1
    assert sum(limits[:first]) <= 60 * minutes and sum(limits[first:]) <= 60 * minutes
    modules = [work.module for work in gpu.PARTS.values()]
    assert modules[:first] == ["kernels"] * 5 + ["training", "engine"]


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


@pytest.mark.slow
def test_the_parts_need_nothing_that_a_machine_for_a_day_may_lack():
    """Each module but that of the GRPO steps is imported where the other requirements cannot be."""

    def plain(name: str) -> str:
        return re.sub("[-_.]+", "-", name).lower()

    hidden = set()
    for line in (gpu.ROOT / "requirements.txt").read_text().splitlines():
        name = re.match(r"[\w.-]+", line)
        if name and name[0] not in gpu.NEEDED:
            hidden.add(plain(name[0]))
    absent = []
    for module, owners in packages_distributions().items():
        if hidden & set(map(plain, owners)):
            absent.append(module)
    assert {"tomli_w", "pydantic", "starlette", "faiss", "llguidance", "matplotlib"} <= set(absent)
    code = f"import sys\nfor name in {absent}:\n    sys.modules[name] = None\n"
    modules = {work.module for work in gpu.PARTS.values()} | {"interpreter"}
    for module in sorted(modules - {"training"}):
        code += f"import benchmarks.gpu_parts.{module}\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=gpu.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
