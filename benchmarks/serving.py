"""Measures the HTTP server beside the engine it runs, on the same prompts.

    python benchmarks/serving.py [--model assets/nano] [--rounds 3]
    python benchmarks/serving.py --peer http://127.0.0.1:8080    also another server of the weights

The server and the load are processes of this machine. Prompts are ids, streams go on past the end
of the text. Works: 64 streams of 256 tokens; the first token of an idle server; 256 requests of 16
to 256 tokens at once; 500 connections dropped at random moments. Rounds alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from urllib.request import urlopen

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nanorchestra import Engine, SamplingParams, load_model  # noqa: E402
from nanorchestra.model.native import pack  # noqa: E402

STREAMS, TOKENS, PROMPT, FIRSTS = 64, 256, 100, 20


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(PROMPT)] for _ in range(count)]


async def stream(base: str, prompt: list[int], tokens: int, drop_s: float = 1e9) -> list[float]:
    """Asks for a stream; returns when each chunk came, in seconds from the request on."""
    body = {"model": "nano", "prompt": prompt, "max_tokens": tokens, "stream": True}
    body |= {"ignore_eos": True, "temperature": 1.0, "stream_options": {"include_usage": True}}
    raw, (host, port) = json.dumps(body).encode(), base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    start, times, last = time.perf_counter(), [], b""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    try:
        async with asyncio.timeout(drop_s):
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    break
                if line.startswith(b"data: "):
                    times.append(time.perf_counter() - start)
                    last = line
        counted = json.loads(last[6:]).get("usage", {}).get("completion_tokens")
        assert counted == tokens, f"{counted} tokens of {tokens}: {last!r}"
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    return times[:-1]


async def throughput(base: str, seed: int) -> float:
    """Tokens/s of STREAMS streams."""
    start = time.perf_counter()
    await asyncio.gather(*(stream(base, prompt, TOKENS) for prompt in prompts(STREAMS, seed)))
    return STREAMS * TOKENS / (time.perf_counter() - start)


async def first(base: str, seed: int) -> float:
    """Seconds to the first chunk, the server being idle; a median."""
    times = [(await stream(base, prompt, 2))[0] for prompt in prompts(FIRSTS, seed)]
    return median(times)


async def mixed(base: str) -> dict[str, float]:
    """Gaps between the chunks of 256 streams."""
    rng = random.Random(1)
    asked = [stream(base, prompt, rng.choice((16, 64, 256))) for prompt in prompts(256, 99)]
    gaps = []
    for times in await asyncio.gather(*asked):
        gaps += [after - before for before, after in zip(times, times[1:], strict=False)]
    middle, high = median(gaps), quantiles(gaps, n=100)[98]
    return {"median gap ms": middle * 1e3, "p99 gap ms": high * 1e3, "ratio": high / middle}


async def drops(base: str) -> dict[str, float]:
    """500 streams, each left at a random moment; then a whole one, and the pages in use."""
    rng = random.Random(2)
    asked = [stream(base, prompt, 200, rng.random() * 2) for prompt in prompts(500, 98)]
    await asyncio.gather(*asked)
    await stream(base, prompts(1, 97)[0], 20)
    await asyncio.sleep(0.2)
    metrics = dict(row.split() for row in urlopen(f"{base}/metrics").read().decode().splitlines())
    return {"pages in use": float(metrics["nanorchestra_pages_used"])}


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used: on a busy machine the fairer measure."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_alone(engine: Engine, seed: int) -> tuple[float, float, float]:
    """Tokens/s of STREAMS requests, their CPU seconds, the median seconds to a first token."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    start, cpu = time.perf_counter(), time.process_time()
    engine.generate(prompts(STREAMS, seed), params)
    rate = STREAMS * TOKENS / (time.perf_counter() - start)
    cpu = time.process_time() - cpu
    times = []
    for prompt in prompts(FIRSTS, seed + 1):
        start = time.perf_counter()
        request = engine.submit(prompt, params)
        engine.step()
        times.append(time.perf_counter() - start)
        engine.abort(request)
    return rate, cpu, median(times)


def main() -> None:
    """Prints a row a round, then the other works."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(ROOT / "assets" / "nano"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="base URL of another server of the same weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    pack(model)
    command = [sys.executable, "serve.py", "--http", "--port", "0", "--model", options.model]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    base = server.stdout.readline().split(" at ")[1].split("/v1")[0]
    engine, rows = Engine(model, tokenizer), []
    try:
        asyncio.run(throughput(base, 1)), engine_alone(engine, 2)  # warms up
        for number in range(options.rounds):
            alone, cpu, first_alone = engine_alone(engine, 10 + 4 * number)
            before = cpu_seconds(server.pid)
            served = asyncio.run(throughput(base, 12 + 4 * number))
            before = cpu_seconds(server.pid) - before
            first_served = asyncio.run(first(base, 13 + 4 * number))
            again, more, _ = engine_alone(engine, 1000 + number)
            alone, cpu = (alone + again) / 2, (cpu + more) / 2
            row = [alone, served, first_alone * 1e3, first_served * 1e3, cpu, before]
            if options.peer:
                row.append(asyncio.run(throughput(options.peer, 14 + 4 * number)))
            rows.append(row)
            print(" ".join(f"{value:9.1f}" for value in row), flush=True)
        engine_rate, rate, *rest = (median(column) for column in zip(*rows, strict=True))
        print(
            f"engine {engine_rate:.0f} tokens/s, server {rate:.0f}: {rate / engine_rate - 1:+.1%}"
        )
        print(f"CPU time: engine {rest[2]:.2f} s, server {rest[3]:.2f} s")
        print(f"first token: engine {rest[0]:.1f} ms, server {rest[1]:.1f} ms")
        print("256 at once:", {k: round(v, 2) for k, v in asyncio.run(mixed(base)).items()})
        print("500 dropped:", asyncio.run(drops(base)))
    finally:
        server.terminate()
        print("exit status", server.wait(60))


if __name__ == "__main__":
    main()
