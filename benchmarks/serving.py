"""Measures the HTTP server beside the engine it runs, vLLM's and llama.cpp's, on one model.

    python benchmarks/serving.py [--model assets/nano] [--rounds 3] [--home runs/peers] [--json F]

Every side works with one thread; load, server and engine take turns on this machine. Prompts are
ids, and streams go on past the end of the text. Works: 64 streams of 256 tokens; the first token of
an idle server; 256 requests of 16 to 256 tokens at once; 500 connections dropped at random moments.
A round runs the engine, each server, and the engine again; the figures are medians of the rounds,
ratios medians of each round's own. CPU seconds stand beside the times: those of the load are not
the server's, and a busy machine changes them least. vLLM's server is measured where
`benchmarks/engine.py --peers --install` has put it under --home, and llama.cpp's as
HOME/llama-server, built from the sdist of llama-cpp-python:

    cmake -G Ninja -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF vendor/llama.cpp
    cmake --build build --target llama-server && cp build/bin/llama-server HOME
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles
from urllib.error import URLError
from urllib.request import urlopen

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engine import cpu_name  # noqa: E402
from benchmarks.peers import python_of  # noqa: E402
from nanorchestra import Engine, SamplingParams, load_model  # noqa: E402
from nanorchestra.model.native import pack  # noqa: E402

STREAMS, TOKENS, PROMPT, FIRSTS, START_S = 64, 256, 100, 20, 180
LLAMA = "--threads 1 --parallel 256 --no-kv-unified --ctx-size 131072 --batch-size 2048 --no-warmup"
VLLM = "--dtype float32 --enforce-eager --max-model-len 2048 --max-num-seqs 256 --disable-log-stats"


def llama_command(model: Path, home: Path, folder: Path) -> list[str]:
    """The command of llama-server for the model, which is written to `folder` in its format."""
    copy = shutil.copytree(model, folder / model.name)
    call = (
        "import pathlib, sys, peer_sides as p; p.write_gguf(pathlib.Path(sys.argv[1]), 'float32')"
    )
    subprocess.run(
        [python_of("llama.cpp", home), "-c", call, copy], check=True, cwd=ROOT / "benchmarks"
    )
    file = str(copy / "float32.gguf")
    return [str(home / "llama-server"), "-m", file, "--alias", model.name, *LLAMA.split()]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(PROMPT)] for _ in range(count)]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its children have used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for t in tasks for child in (t / "children").read_text().split()]
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(
        map(cpu_seconds, children)
    )


class Side:
    """A server of the model, in a process of its own with one thread for its arithmetic."""

    def __init__(self, model: Path, command: list[str]):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.model, self.errors = model.name, tempfile.TemporaryFile("w+")  # noqa: SIM115
        core = str(min(os.sched_getaffinity(0)))
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": core}
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            cwd=ROOT,
            env=os.environ | settings | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
            stdout=self.errors,
            stderr=self.errors,
        )

    def wait(self) -> None:
        """Waits until it answers. RuntimeError if it does not."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except (URLError, OSError):
                time.sleep(0.2)
        self.errors.seek(0)
        raise RuntimeError(self.errors.read()[-1500:])

    async def stream(self, prompt: list[int], tokens: int, drop_s: float = 1e9) -> list[float]:
        """Asks for a stream; returns when each chunk came, in seconds from the request on."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        raw = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        start, times, last = time.perf_counter(), [], b""
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        try:
            async with asyncio.timeout(drop_s):
                while line := await reader.readline():
                    if line.startswith(b"data: [DONE]"):
                        break
                    if line.startswith(b"data: "):
                        times.append(time.perf_counter() - start)
                        last = line
            counted = (json.loads(last[6:]).get("usage") or {}).get("completion_tokens")
            assert counted == tokens, f"{counted} tokens of {tokens}: {last!r}"
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
        return times[:-1]

    async def streams(self, seed: int) -> None:
        """Reads STREAMS streams at once."""
        await asyncio.gather(*(self.stream(ids, TOKENS) for ids in prompts(STREAMS, seed)))

    async def first(self, seed: int) -> float:
        """Seconds to the first chunk of an idle server; a median."""
        return median([(await self.stream(ids, 2))[0] for ids in prompts(FIRSTS, seed)])

    async def mixed(self) -> dict[str, float]:
        """Gaps between the chunks of 256 streams, and how long all of them take."""
        rng, start = random.Random(1), time.perf_counter()
        asked = [self.stream(ids, rng.choice((16, 64, 256))) for ids in prompts(256, 99)]
        gaps = []
        for times in await asyncio.gather(*asked):
            gaps += [after - before for before, after in zip(times, times[1:], strict=False)]
        middle, high = median(gaps), quantiles(gaps, n=100)[98]
        whole = time.perf_counter() - start
        return {"s": whole, "median gap, ms": middle * 1e3, "p99 gap / median": high / middle}

    async def drops(self) -> dict[str, float]:
        """500 streams, each left at a random moment; then a whole one, and the pages in use."""
        rng = random.Random(2)
        asked = [self.stream(ids, 200, rng.random() * 2) for ids in prompts(500, 98)]
        await asyncio.gather(*asked)
        await self.stream(prompts(1, 97)[0], 20)
        await asyncio.sleep(0.2)
        text = urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode()
        return {"pages in use": float(dict(row.split() for row in text.splitlines())[PAGES])}

    def measure(self, seed: int) -> dict[str, float]:
        """Figures of the works that every round repeats."""
        start, own, load = time.perf_counter(), cpu_seconds(self.process.pid), time.process_time()
        asyncio.run(self.streams(seed))
        seconds = time.perf_counter() - start
        load = time.process_time() - load
        own = cpu_seconds(self.process.pid) - own
        first = asyncio.run(self.first(seed + 1))
        return figures(seconds, first) | {"CPU s": own, "CPU s of the load": load}


PAGES = "nanorchestra_pages_used"


def figures(seconds: float, first: float) -> dict[str, float]:
    """The figures that engine and servers share."""
    return {"tokens/s": STREAMS * TOKENS / seconds, "first token, ms": first * 1e3}


def engine_alone(engine: Engine, seed: int) -> dict[str, float]:
    """The figures of the same works without a server."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    start, cpu = time.perf_counter(), time.process_time()
    engine.generate(prompts(STREAMS, seed), params)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    times = []
    for prompt in prompts(FIRSTS, seed + 1):
        start = time.perf_counter()
        request = engine.submit(prompt, params)
        engine.step()
        times.append(time.perf_counter() - start)
        engine.abort(request)
    return figures(seconds, median(times)) | {"CPU s": cpu}


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Medians as lines of Markdown, with each round's throughput beside its engine's."""
    rows = defaultdict(dict)
    for side in rounds[0]:
        for row in rounds[0][side]:
            rows[row][side] = median(found[side][row] for found in rounds)
        ratios = [found[side]["tokens/s"] / found["engine"]["tokens/s"] for found in rounds]
        rows["of the engine's tokens/s"][side] = median(ratios)
    lines = [f"| | {' | '.join(rounds[0])} |", "|---" * (len(rounds[0]) + 1) + "|"]
    for row, found in rows.items():
        cells = (f"{found[side]:,.4g}" if side in found else "" for side in rounds[0])
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the rounds' medians as a table, then the works that run once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "nano")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", type=Path, default=Path("runs/peers"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = str(options.model)
    commands = {"server": [sys.executable, "serve.py", "--http", "--model", path]}
    if (python := python_of("vLLM", options.home)).exists():
        served = ["--model", path, "--served-model-name", options.model.name]
        entry = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        commands["vLLM"] = [*entry, *served, *VLLM.split()]
    folder = tempfile.TemporaryDirectory()
    if (options.home / "llama-server").exists():
        commands["llama.cpp"] = llama_command(options.model, options.home, Path(folder.name))
    sides = {name: Side(options.model, command) for name, command in commands.items()}
    try:
        model, tokenizer = load_model(path)
        pack(model)
        engine, rounds, once = Engine(model, tokenizer), [], {}
        for side in sides.values():
            side.wait()
        for number in range(options.rounds + 1):
            found = {"engine": engine_alone(engine, 100 * number)}
            for place, (name, side) in enumerate(sides.items()):
                found[name] = side.measure(100 * number + 10 * place + 10)
            again = engine_alone(engine, 100 * number + 50)
            found["engine"] = {k: (v + again[k]) / 2 for k, v in found["engine"].items()}
            rounds += [found] if number else []  # the first warms up
            print(json.dumps(found), file=sys.stderr, flush=True)
        for name, side in sides.items():
            once[name] = asyncio.run(side.mixed())
        once["server"] |= asyncio.run(sides["server"].drops())
    finally:
        for side in sides.values():
            side.process.terminate()
        statuses = {name: side.process.wait(60) for name, side in sides.items()}
        folder.cleanup()
    cores = len(os.sched_getaffinity(0))
    print(
        f"\n{cpu_name()}, {cores} cores, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n"
    )
    print(table(rounds))
    print("\n256 requests at once, and 500 dropped connections:")
    for name, values in once.items():
        shown = ", ".join(f"{key} {value:.3g}" for key, value in values.items())
        print(f"{name}: {shown}; exit status {statuses[name]}")
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "once": once}, indent=1) + "\n")


if __name__ == "__main__":
    main()
