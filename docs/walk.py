"""Three checks that run beside docs/walk.md: `python docs/walk.py` lists them, `... 3` runs one.

Each computes something with the project, and the same by other means: with plain code in this file,
or on paper. It says what it found and what it compared with, and ends with status 1 if the two
differ. To see one fail, break the function that it names.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from torch import Tensor

from nanorchestra import Engine, SamplingParams, chat, load_model
from nanorchestra.errors import command, require
from nanorchestra.model.native import pack
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Trajectory
from nanorchestra.training.grpo import group_advantages
from reward import group_rewards
from worlds.desk import Desk

NANO = Path(__file__).parents[1] / "assets" / "nano"
TASK = 30  # of the training tasks, which the page follows
ATTEMPTS = 8
ROUNDING = 1e-3  # nats, or units of a key: the engine computes in float32, plain code in float64
HOT = 2.0  # temperature: draws unlikely tokens too, whose log-probabilities are far from 0


@dataclass(frozen=True)
class Finding:
    """What a check found, what it compared that with, and whether the two agree."""

    found: str
    compared: str
    agree: bool


def plain_decoder(weights: dict[str, Tensor], ids: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the logits [T, vocab] of nano, and its keys [layers, heads, T, size].

    By the equations of Qwen3: one sequence, no cache. The keys are normed and rotated, as queries
    are multiplied by them.
    """
    eps, theta, heads, kv_heads, size = 1e-6, 1e6, 4, 1, 32

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def rotate(x):  # [heads, T, size]: pair i is x[i] and x[i + size / 2]
        speed = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = weights["model.embed_tokens.weight"][ids]
    keys = []
    future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for layer in range(4):
        w = {k.split(".", 3)[3]: v for k, v in weights.items() if f"layers.{layer}." in k}
        y = norm(x, w["input_layernorm.weight"])
        q, k, v = (
            (y @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(0, 1)
            for name in "qkv"
        )
        q, k = norm(q, w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])
        keys.append(rotate(k))
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (keys[-1], v))
        scores = (rotate(q) @ k.transpose(1, 2) / size**0.5).masked_fill(future, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + out @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"])
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
    x = norm(x, weights["model.norm.weight"])
    return x @ weights["model.embed_tokens.weight"].T, torch.stack(keys)


def plain_weights() -> dict[str, Tensor]:
    """Returns the weights of nano in float64, by the names of its file."""
    return {name: w.double() for name, w in load_file(NANO / "model.safetensors").items()}


def plain_logprobs(weights, ids: list[int], start: int, temperature: float, drawn: int) -> Tensor:
    """Returns log p(ids[t] | ids[:t]) for t from `start` on, of the first `drawn` ids."""
    logits, _ = plain_decoder(weights, ids)
    logp = (logits[:, :drawn] / temperature).log_softmax(-1)
    return logp[range(start - 1, len(ids) - 1), ids[start:]]


def largest_gap(plain: Tensor, found) -> float:
    """Returns the largest difference of two tensors, or of a tensor and numbers."""
    return float((plain - torch.as_tensor(found, dtype=torch.float64)).abs().max())


def prompt_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the walk's prompt: the tools of the desk, and the question."""
    desk = Desk(0, None)
    env = desk.environment(desk.task("train", TASK), 0)
    return chat.encode(tokenizer, env.messages, env.tools)


def decoder() -> Finding:
    """The log-probabilities of engine (native.c) and trainer (qwen3.py) are those of plain code."""
    model, tokenizer = load_model(str(NANO))
    prompt, params = prompt_ids(tokenizer), SamplingParams(max_tokens=60, temperature=HOT, seed=1)
    weights, gaps = plain_weights(), []

    def compare(ids, logprobs, temperature=HOT):
        drawn = tokenizer.vocab_size  # the decoder has rows of padding beyond
        plain = plain_logprobs(weights, prompt + ids, len(prompt), temperature, drawn)
        gaps.append(largest_gap(plain, logprobs))

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
        "plain_decoder, one sequence in float64 without a cache",
        max(gaps) < ROUNDING,
    )


def advantage() -> Finding:
    """Rewards (reward.py) and advantages (training/grpo.py) are those worked out on paper.

    Three attempts; the user weighs a right answer 1, low cost 1 and little time 0.5.

        outcome  cost   time     Mn: outcome  cost  time     R = outcome * (Mn . P)
        1        $0.01  10 s         1        0     1        1 * (1 + 0 + 0.5) = 1.5
        1        $0.002 30 s         1        1     0        1 * (1 + 1 + 0)   = 2
        0        $0.006 20 s         0        0.5   0.5      0

    Their mean is 7/6, the deviations are 2/6, 5/6 and -7/6, and the standard deviation is
    sqrt((4 + 25 + 49) / 36 / 2) = sqrt(13 / 12).
    """
    played = ((1, 0.010, 10), (1, 0.002, 30), (0, 0.006, 20))
    attempts = [Trajectory("", 0, outcome=o, calls_usd=c, latency_s=s) for o, c, s in played]
    R = group_rewards(attempts, Preference("", outcome=1, cost=1, latency=0.5))  # noqa: N806
    found = group_advantages(R, min_std=0.0)
    paper = [sixths / 6 / (13 / 12) ** 0.5 for sixths in (2, 5, -7)]
    gaps = [abs(a - b) for a, b in zip([*R, *found], [1.5, 2, 0, *paper], strict=True)]
    values = ", ".join(f"{value:+.3f}" for value in found)
    return Finding(
        f"rewards {', '.join(f'{value:g}' for value in R)}; advantages {values}",
        "the paper's equations, worked out by hand in the docstring of this check",
        max(gaps) < 1e-5,
    )


def page() -> Finding:
    """A page holds the keys of its tokens, and all attempts read the same one (block_manager.py).

    Eight attempts at one prompt are sampled until each has 24 ids whose keys are stored.
    """
    model, tokenizer = load_model(str(NANO))
    prompt = prompt_ids(tokenizer)
    engine = Engine(model, tokenizer, num_pages=256)
    attempts = []
    for seed in range(ATTEMPTS):
        params = SamplingParams(max_tokens=60, temperature=0.7, seed=seed)
        attempts.append(engine.submit(prompt, params).sequence)
    while min(attempt.num_computed for attempt in attempts) < len(prompt) + 24:
        engine.step()

    size = engine.blocks.page_size
    weights, gaps = plain_weights(), []
    held, prefixes, part_filled = set(), set(), 0
    for attempt in attempts:
        _, keys = plain_decoder(weights, attempt.ids)
        for number in range(attempt.num_computed // size):
            tokens = slice(number * size, (number + 1) * size)
            stored = engine.runner.kv_cache[0, :, attempt.block_table[number]]
            gaps.append(largest_gap(keys[:, :, tokens], stored))
            prefixes.add(tuple(attempt.ids[: tokens.stop]))
        held |= set(attempt.block_table)
        part_filled += attempt.num_computed % size > 0
    unshared = sum(len(attempt.block_table) for attempt in attempts)
    different = len(prefixes) + part_filled
    return Finding(
        f"{len(held)} pages held (unshared {unshared}); largest difference of a key "
        f"{max(gaps):.1e}",
        f"plain_decoder's keys; {different} different prefixes of the attempts' ids",
        max(gaps) < ROUNDING and len(held) == different,
    )


CHECKS: list[Callable[[], Finding]] = [decoder, advantage, page]


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
