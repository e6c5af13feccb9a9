"""Measures the HTTP server beside the engine that it runs, and vLLM's server, on one model.

    python benchmarks/serving.py [--model assets/nano] [--rounds 3] [--home runs/peers] [--json F]

Every side works with one thread; load, server and engine share this machine. Prompts are ids, and
streams go on past the end of the text. Works: 64 streams of 256 tokens; the first token of an idle
server; 256 requests of 16 to 256 tokens at once. A round runs the engine, each server, and the
engine again; figures are medians of the rounds. CPU seconds stand beside the times: those of the
load are not the server's, and a busy machine changes them least. vLLM's server is measured where
HOME/vLLM has it (peers.py says how to install it).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from urllib.error import URLError
from urllib.request import urlopen

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engine import machine, sampling  # noqa: E402
from benchmarks.peers import python_of  # noqa: E402
from nanorchestra import Engine, formats, load_model, pack  # noqa: E402

STREAMS, TOKENS, PROMPT, FIRSTS = 64, 256, 100, 20
START_S = 180  # seconds at most until a server answers
VLLM = "--dtype float32 --enforce-eager --max-model-len 2048 --max-num-seqs 256 --disable-log-stats"

Figures = dict[str, float]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Returns prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(PROMPT)] for _ in range(count)]


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process and its children have used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                used += cpu_seconds(int(child))
    except OSError:  # it has ended
        return 0.0
    return used


class ServerProcess:
    """A server of the model, in a process of its own with one thread for its arithmetic."""

    def __init__(self, model: Path, command: list[str]):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.model, self.errors = model.name, tempfile.TemporaryFile("w+")  # noqa: SIM115
        core = str(min(os.sched_getaffinity(0)))
        settings = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": core,
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            cwd=ROOT,
            env=os.environ | settings,
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

    async def stream(self, prompt: list[int], tokens: int) -> list[float]:
        """Asks for a stream; returns when each chunk came, in seconds from the request on."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        raw = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        start, times, last = time.perf_counter(), [], b""
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                times.append(time.perf_counter() - start)
                last = line
        writer.close()
        counted = json.loads(last[6:])["usage"]["completion_tokens"]
        assert counted == tokens, f"{counted} tokens of {tokens}: {last!r}"
        return times[:-1]

    async def streams(self, seed: int) -> None:
        """Reads all streams at once."""
        await asyncio.gather(*(self.stream(ids, TOKENS) for ids in prompts(STREAMS, seed)))

    async def first(self, seed: int) -> float:
        """Returns the median seconds to the first chunk of an idle server."""
        return median([(await self.stream(ids, 2))[0] for ids in prompts(FIRSTS, seed)])

    async def mixed(self) -> Figures:
        """Measures the gaps between the chunks of 256 streams, and how long all of them take."""
        rng, start = random.Random(1), time.perf_counter()
        requests = [self.stream(ids, rng.choice((16, 64, 256))) for ids in prompts(256, 99)]
        gaps = []
        for times in await asyncio.gather(*requests):
            gaps += [after - before for before, after in zip(times, times[1:], strict=False)]
        middle, high = median(gaps), quantiles(gaps, n=100)[98]
        whole = time.perf_counter() - start
        return {"s": whole, "median gap, ms": middle * 1e3, "p99 gap / median": high / middle}

    def measure(self, seed: int) -> Figures:
        """Runs the works that every round repeats."""
        start, own, load = time.perf_counter(), cpu_seconds(self.process.pid), time.process_time()
        asyncio.run(self.streams(seed))
        seconds = time.perf_counter() - start
        return {
            "tokens/s": STREAMS * TOKENS / seconds,
            "CPU s": cpu_seconds(self.process.pid) - own,
            "CPU s of the load": time.process_time() - load,
            "first token, ms": 1e3 * asyncio.run(self.first(seed + 1)),
        }


def engine_alone(engine: Engine, seed: int) -> Figures:
    """Runs the same works without a server."""
    start, cpu = time.perf_counter(), time.process_time()
    engine.generate(prompts(STREAMS, seed), sampling(TOKENS))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    firsts = []
    for prompt in prompts(FIRSTS, seed + 1):
        start = time.perf_counter()
        engine.generate([prompt], sampling(1))
        firsts.append(time.perf_counter() - start)
    return {
        "tokens/s": STREAMS * TOKENS / seconds,
        "CPU s": cpu,
        "first token, ms": 1e3 * median(firsts),
    }


def print_medians(rounds: list[dict[str, Figures]]) -> None:
    """Prints medians, and that of each round's throughput beside its engine's."""
    for side in rounds[0]:
        medians = []
        for name in rounds[0][side]:
            medians.append(f"{name} {median(each[side][name] for each in rounds):,.4g}")
        ratios = [each[side]["tokens/s"] / each["engine"]["tokens/s"] for each in rounds]
        print(f"{side}: {', '.join(medians)}, {median(ratios):.1%} of the engine's tokens/s")


def main() -> None:
    """Prints the rounds' medians, then the works that run once."""
    parser = argparse.ArgumentParser(prog="benchmarks/serving.py")
    parser.add_argument("--model", default=ROOT / "assets" / "nano")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", type=Path, default=Path("runs/peers"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.model = formats.directory_of(options.model)
    torch.set_num_threads(1)
    path = str(options.model)
    commands = {"server": [sys.executable, "serve.py", "--http", "--model", path]}
    vllm = python_of("vLLM", options.home).absolute()
    if vllm.exists():
        served = ["--model", path, "--served-model-name", options.model.name]
        entry = [str(vllm), "-m", "vllm.entrypoints.openai.api_server"]
        commands["vLLM's server"] = [*entry, *served, *VLLM.split()]
    servers = {name: ServerProcess(options.model, command) for name, command in commands.items()}
    rounds: list[dict[str, Figures]] = []
    once: dict[str, Figures] = {}
    try:
        model, tokenizer = load_model(path)
        pack(model)
        engine = Engine(model, tokenizer)
        for server in servers.values():
            server.wait()
        for number in range(options.rounds + 1):
            figures = {"engine": engine_alone(engine, 100 * number)}
            for i, (name, server) in enumerate(servers.items(), 1):
                figures[name] = server.measure(100 * number + 10 * i)
            again = engine_alone(engine, 100 * number + 50)
            for name, value in again.items():
                figures["engine"][name] = (figures["engine"][name] + value) / 2
            if number:  # the first round warms up
                rounds.append(figures)
        for name, server in servers.items():
            once[name] = asyncio.run(server.mixed())
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait(60)
    print(", ".join(f"{name} {value}" for name, value in machine(1).items()))
    print_medians(rounds)
    print("256 requests at once:")
    for name, figures in once.items():
        print(f"{name}: {', '.join(f'{key} {value:.3g}' for key, value in figures.items())}")
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "once": once}, indent=1) + "\n")


if __name__ == "__main__":
    main()
