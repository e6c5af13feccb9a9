"""Six checks that run beside docs/walk.md: `python docs/walk.py` lists them, `... 3` runs one.

Each computes something with the project, and the same by other means: with plain code in this file,
from text alone, on paper, or from outside by HTTP. It says what it found and what it compared with,
and ends with status 1 if the two differ. To see one fail, break the function that it names.
"""

from __future__ import annotations

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("docs/walk.py")

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import walk_run
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from nanorchestra import Engine, SamplingParams, load_model
from nanorchestra.errors import command, require
from nanorchestra.model.native import pack
from nanorchestra.records import Preference, Trajectory
from nanorchestra.training.advantages import group_advantages
from nanorchestra.training.objectives import OBJECTIVES
from reward import POLICY, PRICES, group_rewards
from train import policy_loss

ROOT = walk_run.ROOT
NANO, BASE = ROOT / "assets" / "nano", ROOT / "assets" / "base"
ROUNDING = 1e-4  # nats: the engine computes in float32, the plain decoder in float64
HOT = 2.0  # temperature: draws unlikely tokens too, whose log-probabilities are far from 0
START_S = 180  # until the server listens: importing torch takes seconds, on a busy machine more


@dataclass(frozen=True)
class Finding:
    """What a check found, what it compared that with, and whether the two agree."""

    found: str
    compared: str
    agree: bool


def plain_logits(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Returns the logits [T, vocab] of nano, by the equations of Qwen3: one sequence, no cache."""
    eps, theta, heads, kv_heads, size = 1e-6, 1e6, 6, 2, 32

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def rotate(x):  # [heads, T, size]: pair i is x[i] and x[i + size / 2]
        speed = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = weights["model.embed_tokens.weight"][ids]
    future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for layer in range(4):
        w = {k.split(".", 3)[3]: v for k, v in weights.items() if f"layers.{layer}." in k}
        y = norm(x, w["input_layernorm.weight"])
        q, k, v = (
            (y @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(0, 1)
            for name in "qkv"
        )
        q, k = norm(q, w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (rotate(k), v))
        scores = (rotate(q) @ k.transpose(1, 2) / size**0.5).masked_fill(future, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + out @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"])
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


def plain_weights(path) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint in float64, by the names of its file."""
    return {name: w.double() for name, w in load_file(path / "model.safetensors").items()}


def plain_logprobs(weights, ids: list[int], start: int, temperature: float = 1.0) -> Tensor:
    """Returns log p(ids[t] | ids[:t]) for t from `start` on."""
    logp = (plain_logits(weights, ids) / temperature).log_softmax(-1)
    return logp[range(start - 1, len(ids) - 1), ids[start:]]


def prompt_ids() -> list[int]:
    """Returns the ids of the walk's prompt, by the tokenizers package."""
    text = json.loads(walk_run.RECORD.read_text(encoding="utf-8"))["prompt"]
    return Tokenizer.from_file(str(NANO / "tokenizer.json")).encode(text).ids


@cache
def group() -> walk_run.Walk:
    """Returns the walk's group, played now."""
    return walk_run.play_group()


def decoder() -> Finding:
    """The log-probabilities of engine (native.c) and trainer (qwen3.py) are those of plain code."""
    model, tokenizer = load_model(str(NANO))
    prompt, params = prompt_ids(), SamplingParams(max_tokens=60, temperature=HOT, seed=3)
    weights, gaps = plain_weights(NANO), []

    def compare(ids, logprobs, temperature=HOT):
        plain = plain_logprobs(weights, prompt + ids, len(prompt), temperature)
        gaps.append(float((plain - torch.tensor(logprobs, dtype=torch.float64)).abs().max()))

    engine = Engine(model, tokenizer, num_pages=64)
    (done,) = engine.generate([prompt], params)  # by PyTorch, token by token
    compare(done.token_ids, done.logprobs)
    (scores,) = engine.score([prompt + done.token_ids])  # in one pass, as the trainer computes
    compare(done.token_ids, scores[len(prompt) - 1 :], temperature=1.0)
    pack(model)
    (done,) = Engine(model, tokenizer, num_pages=64).generate([prompt], params)  # by C
    compare(done.token_ids, done.logprobs)
    return Finding(
        f"{len(done.token_ids)} sampled tokens; largest difference {max(gaps):.1e} nats",
        "plain_logits, one sequence in float64 without a cache",
        max(gaps) < ROUNDING,
    )


def loop() -> Finding:
    """An attempt's calls, cost, time and sampled tokens (agent/loop.py) follow from its text."""
    walk = group()
    own = PRICES[POLICY]
    wrong = []
    for number, attempt in enumerate(walk.attempts):
        text = walk.tokenizer.decode(attempt.ids)
        terms = {
            name: (int(seconds), int(cents) * 1e-7)  # cents for 100,000 tokens
            for seconds, cents, name in re.findall(r'"(\d\d)s (\d\d)c \w+ ([-\w]+)"', text)
        }
        said = re.findall(r"assistant\n(<think>.*?<\|im_end\|>)", text, re.DOTALL)
        calls = re.findall(r"<tool_call>\n(\{.*?\})\n</tool_call>", "".join(said))
        names = [json.loads(call)["name"] for call in calls]
        results = [result for turn in attempt.turns for result in turn.results]
        sampled = sum(attempt.sampled)
        usd = own.cost(len(attempt.ids) - sampled, sampled)
        for name, result in zip(names, results, strict=True):
            usd += terms[name][1] * (result.input_tokens + result.output_tokens)
        seconds = 0.01 * sampled + sum(result.latency_s for result in results)
        by_id = [i for i, is_own in zip(attempt.ids, attempt.sampled, strict=True) if is_own]
        agree = (
            walk.tokenizer.decode(by_id) == "".join(said)
            and sum(attempt.calls.values()) == len(names)
            and attempt.answer == said[-1].split("\n\n")[1].removesuffix("<|im_end|>")
            and abs(attempt.cost_usd - usd) < 1e-9
            and abs(attempt.latency_s - seconds) < 1e-6
        )
        wrong += [] if agree else [number + 1]
    total = sum(sum(attempt.calls.values()) for attempt in walk.attempts)
    return Finding(
        f"{len(walk.attempts)} attempts, {total} calls, "
        f"{sum(attempt.cost_usd for attempt in walk.attempts) * 1e3:.2f} m$",
        "calls and prices read from the text" + f"; attempts {wrong} differ" * bool(wrong),
        not wrong,
    )


def rewards() -> Finding:
    """Rewards (reward.py) and advantages (training/advantages.py) are those worked out on paper.

    Three attempts; the user weighs a right answer 1, low cost 1 and little time 0.5.

        outcome  cost   time     Mn: outcome  cost  time     R = outcome * (Mn . P)
        1        10 m$  10 s         1        0     1        1 * (1 + 0 + 0.5) = 1.5
        1         2 m$  30 s         1        1     0        1 * (1 + 1 + 0)   = 2
        0         6 m$  20 s         0        0.5   0.5      0

    Their mean is 7/6, the deviations are 2/6, 5/6 and -7/6, and the standard deviation is
    sqrt((4 + 25 + 49) / 36 / 2) = sqrt(13 / 12).
    """
    played = ((1, 0.010, 10), (1, 0.002, 30), (0, 0.006, 20))
    attempts = [Trajectory("", 0, outcome=o, cost_usd=c, latency_s=s) for o, c, s in played]
    R = group_rewards(attempts, Preference("", outcome=1, cost=1, latency=0.5))  # noqa: N806
    found = [a.value for a in group_advantages(R, [True] * 3, OBJECTIVES["grpo"], 0.0)]
    paper = [sixths / 6 / (13 / 12) ** 0.5 for sixths in (2, 5, -7)]
    gaps = [abs(a - b) for a, b in zip([*R, *found], [1.5, 2, 0, *paper], strict=True)]
    values = ", ".join(f"{value:+.3f}" for value in found)
    return Finding(
        f"rewards {', '.join(f'{value:g}' for value in R)}; advantages {values}",
        "the paper's equations, worked out by hand in the docstring of this check",
        max(gaps) < 1e-5,
    )


def pages() -> Finding:
    """The engine holds one page for each different prefix (block_manager.py, scheduler.py)."""
    walk = group()
    size = walk.engine.blocks.page_size
    wrong = []
    for step in walk.steps:
        prefixes, part_filled = set(), 0
        for attempt, computed in zip(walk.attempts, step["computed"], strict=True):
            for end in range(size, computed + 1, size):
                prefixes.add(tuple(attempt.ids[:end]))
            part_filled += computed % size > 0
        if len(prefixes) + part_filled != step["held"]:
            wrong.append(step["step"])
    tokens = sum(step["tokens"] for step in walk.steps)
    turns = [turn for attempt in walk.attempts for turn in attempt.turns]
    most = max(walk.steps, key=lambda step: step["held"])
    unshared = sum(len(table) for table in most["tables"])
    return Finding(
        f"{len(walk.steps)} steps; at most {most['held']} pages (unshared {unshared}); {tokens} "
        f"tokens computed, where each turn by itself takes {sum(turn.end for turn in turns)}",
        "the set of prefixes of the attempts' ids" + f"; {len(wrong)} steps differ" * bool(wrong),
        not wrong,
    )


def grpo_step() -> Finding:
    """The gradient of the loss (train.py's policy_loss, packing.py) is a difference quotient.

    One weight is moved by +-1e-4, and the loss -sum A exp(log p - log p_old) / N is computed anew
    with the plain decoder: every attempt by itself, in float64, without packing.
    """
    walk = group()
    temperature, layer = walk.config.rollout.temperature, 2
    (batch,) = walk.trainer.micro_batches([walk.group])
    logprobs, entropy = walk.trainer.logprobs(walk.trainer.hidden(batch), batch, temperature)
    count = len(batch.targets)
    loss, _ = policy_loss(logprobs, entropy, None, batch, OBJECTIVES["grpo"], count)
    (gradient,) = torch.autograd.grad(loss, walk.model.layers[layer].down_proj.weight)
    place = divmod(int(gradient.abs().argmax()), gradient.shape[1])

    weights = plain_weights(BASE)
    moved = weights[f"model.layers.{layer}.mlp.down_proj.weight"]
    losses = []
    for change in (1e-4, -2e-4):
        moved[place] += change
        total = 0.0
        for attempt in walk.attempts:
            plain = plain_logprobs(weights, attempt.ids, 1, temperature)
            ratio = (plain - torch.tensor(attempt.logprobs[1:], dtype=torch.float64)).exp()
            total -= attempt.advantage * float(ratio[torch.tensor(attempt.sampled[1:])].sum())
        losses.append(total / count)
    quotient = (losses[0] - losses[1]) / 2e-4
    found = float(gradient[place])
    return Finding(
        f"d loss / d layers.{layer}.down_proj[{place[0]}, {place[1]}] = {found:.4e}",
        f"the difference quotient of the plain loss, {quotient:.4e}",
        abs(found - quotient) < 1e-3 * abs(quotient),
    )


def serving() -> Finding:
    """A server (serve.py --http) answers a plain HTTP client with the decoder's log-probabilities.

    It is started as a process of its own, on a free port, and ended by SIGTERM.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "serve.py"), "--http", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    prompt = prompt_ids()
    body = {"model": "nano", "prompt": prompt, "max_tokens": 40, "temperature": HOT, "seed": 7}
    body |= {"logprobs": 1, "return_token_ids": True}
    try:
        answer = post(server, port, "/v1/completions", body)
    finally:
        server.terminate()
        try:
            status = server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            status = server.wait()
    (choice,) = answer["choices"]
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    plain = plain_logprobs(plain_weights(NANO), prompt + ids, len(prompt), HOT)
    gap = float((plain - torch.tensor(logprobs, dtype=torch.float64)).abs().max())
    return Finding(
        f"{len(ids)} tokens by HTTP; largest difference {gap:.1e} nats; exit status {status}",
        "plain_logits on the ids that came back",
        gap < ROUNDING and answer["usage"]["prompt_tokens"] == len(prompt) and status == 0,
    )


def post(server: subprocess.Popen, port: int, path: str, body: dict) -> dict:
    """Returns the JSON that a server answers, as soon as it listens. UserError if it never does."""
    end = time.monotonic() + START_S
    while True:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = client.getresponse()
            text = response.read().decode()
            require(response.status == 200, f"POST {path}: status {response.status}: {text[:200]}")
            return json.loads(text)
        except ConnectionRefusedError:
            require(server.poll() is None, f"serve.py ended with status {server.poll()}")
            require(time.monotonic() < end, f"port {port}: no server listens after {START_S} s")
            time.sleep(0.2)
        finally:
            client.close()


CHECKS: list[Callable[[], Finding]] = [decoder, loop, rewards, pages, grpo_step, serving]


@command("docs/walk.py")
def main(arguments: list[str]) -> int:
    """Lists the checks, or runs those that are named by number; returns the exit status."""
    numbers = [str(number) for number in range(1, len(CHECKS) + 1)]
    unknown = [word for word in arguments if word not in numbers]
    names = ", ".join(map(repr, unknown))
    require(not unknown, f"there is no check {names}; there are 1 to {len(CHECKS)}")
    status = 0
    for number, check in zip(numbers, CHECKS, strict=True):
        says = check.__doc__.partition("\n")[0]
        if not arguments or number in arguments:
            print(f"{number}  {check.__name__}: {says}")
        if number in arguments:
            started = time.monotonic()
            finding = check()
            print(f"   found     {finding.found}")
            print(f"   compared  {finding.compared}")
            verdict = "they agree" if finding.agree else "THEY DIFFER"
            print(f"   {verdict} ({time.monotonic() - started:.1f} s)")
            status |= not finding.agree
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
