"""Before a run: memory by part, seconds by phase, and the smallest set-up for each way to train.

    python train.py --plan --config qwen3-8b --gpus 8 --memory 80

No GPU is needed. Memory is of one GPU in GB of 1e9 bytes, for a full token budget. Seconds are of a
step whose attempts fill TYPICAL of their context, without waiting for tools: the roofline by data
sheets, and that divided by the efficiency to expect.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanorchestra.config import Config
from nanorchestra.errors import require
from nanorchestra.model.hf_config import read_config
from nanorchestra.model.lora import parameters_of
from nanorchestra.model.qwen3 import PRESETS, ModelConfig, Qwen3
from nanorchestra.training.costs import GB, GPUS, Costs, Gpu, activation_numbers

LIBRARIES, FRAGMENTS = 1.5 * GB, 0.05  # CUDA and NCCL; of what is allocated
LOSS = 0.5 * GB  # a chunk of logits and its gradient
TYPICAL = 0.25  # of the context that an attempt fills
PROMPT, SAMPLED = 0.375, 0.25  # of the ids of an attempt; the rest are observations
TRAINING, ROLLOUT = 0.40, 0.65  # efficiency; torchtitan reports 0.33 to 0.39 for Llama-3.1-8B
PER_NODE = 8  # GPUs
WAYS = ({}, {"parallel.cpu_offload": True}, {"lora.rank": 32})
Table = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Setup:
    """A config on a number of GPUs; its model, and how many numbers that and a layer have."""

    config: Config
    gpus: int
    model: ModelConfig
    total: int
    layer: int

    @property
    def trained(self) -> int:
        """How many numbers are trained."""
        rank = self.config.lora.rank
        return parameters_of(self.model, rank) if rank else self.total

    @property
    def shards(self) -> int:
        """How many GPUs divide the weights."""
        return min(self.gpus, PER_NODE) if self.config.parallel.shard == "node" else self.gpus


def memory(setup: Setup) -> Table:
    """Returns the bytes of one GPU by part: while it rolls out, and while it trains."""
    model, config, total, trained = setup.model, setup.config, setup.total, setup.trained
    grpo, rollout, full = config.grpo, config.rollout, not config.lora.rank
    layers, hidden = model.num_hidden_layers, model.hidden_size
    share = 0 if config.parallel.cpu_offload else 1 / setup.shards
    weights = (4 * total if full else 2 * total + 4 * trained) * share
    reference = 4 * total * share if grpo.kl_coef and full else 0  # of adapters it is the base
    # in bf16 a layer, the next one and the root; of full weights also their gradients
    root = total - layers * setup.layer
    gathered = 2 * (2 * setup.layer + root) + full * (6 * setup.layer + 2 * root)
    recomputed = config.parallel.activation_checkpointing
    numbers = (
        activation_numbers(model) * (1 if recomputed else layers) + layers * hidden * recomputed
    )
    numbers += 2 * (hidden + model.intermediate_size)  # gradients of activations
    attempts = -(-grpo.prompts // setup.gpus) * grpo.group_size
    pages = rollout.pages or attempts * -(-rollout.context_tokens // rollout.page_size) + 64
    kv = pages * rollout.page_size * Costs.of(model).kv_bytes
    parts = {
        "weights": (weights, weights),
        "moments": (8 * trained * share, 8 * trained * share),
        "reference": (reference, reference),
        "gradients": (0, 4 * trained * share),
        "gathered layers": (0, gathered),
        "activations": (0, 2 * grpo.token_budget * numbers),
        "loss": (0, LOSS + 4 * hidden * grpo.token_budget * SAMPLED / (1 - PROMPT)),
        "engine's copy": (2 * total, 2 * total),
        "KV pages": (kv, kv if rollout.overlap else 0),  # else lent to the trainer
    }
    sums = (sum(column) for column in zip(*parts.values(), strict=True))
    return parts | {"CUDA and fragments": tuple(LIBRARIES + FRAGMENTS * used for used in sums)}


def peak(setup: Setup) -> float:
    """Returns the bytes of one GPU at its fullest."""
    return max(map(sum, zip(*memory(setup).values(), strict=True)))


def seconds(setup: Setup, gpu: Gpu) -> Table:
    """Returns the seconds of a step by phase: the roofline, and what to expect.

    Backward counts twice a forward (once with adapters), recomputation once. bf16 weights are
    gathered twice and float32 gradients reduced once per micro-batch, behind the training.
    """
    config, costs, shards = setup.config, Costs.of(setup.model), setup.shards
    groups = config.grpo.prompts / setup.gpus
    attempts = groups * config.grpo.group_size
    length = TYPICAL * config.rollout.context_tokens
    prompt, own, sampled = (part * length for part in (PROMPT, 1 - PROMPT, SAMPLED))
    tokens = groups * prompt + attempts * own
    pairs = groups * prompt**2 / 2 + attempts * own * (prompt + own / 2)
    flops = tokens * costs.token_flops + pairs * costs.pair_flops
    forward = (flops + attempts * sampled * costs.logit_flops) / gpu.flops
    reads = sampled * (groups * prompt + attempts * own / 2) * costs.kv_bytes / gpu.bandwidth
    rollout = max(sampled * costs.weight_bytes / gpu.bandwidth, forward) + reads
    passes = (2 if config.lora.rank else 3) + config.parallel.activation_checkpointing
    training, batches = forward * passes, max(1.0, tokens / config.grpo.token_budget)
    link = gpu.link if shards <= PER_NODE else gpu.network
    gathering = batches * 4 * (setup.total + setup.trained) * (shards - 1) / shards / link
    optimizer = 28 * setup.trained / shards / gpu.bandwidth
    if config.parallel.cpu_offload:
        optimizer = (4 * setup.trained + batches * 8 * setup.total) / shards / gpu.host
    return {
        "rollout": (rollout, rollout / ROLLOUT),
        "training": (training, training / TRAINING),
        "gathering": (gathering, max(0.0, gathering - training / TRAINING)),
        "optimizer": (optimizer, optimizer),
    }


def smallest(setup: Setup, way: dict[str, object], limit: float) -> str:
    """Returns the fewest GPUs of `limit` bytes for a way to train, and its options; "" if none."""
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        for changes in (way, way | {"parallel.activation_checkpointing": True}):
            tried = replace(setup, gpus=gpus, config=setup.config.replace(changes))
            if peak(tried) <= limit:
                options = " ".join(f"--{name} {str(x).lower()}" for name, x in changes.items())
                used = f"{peak(tried) / GB:.1f} of {limit / GB:g} GB"
                return f"  {gpus:3} x {used:18}{options or 'all weights, as configured'}"
    return ""


def plan(config: Config, gpus: int, limit: float | None, name: str) -> tuple[str, bool]:
    """Returns the plan as text, and whether the config fits. UserError.

    limit: bytes of one GPU, None: as sold. model.path need only end in the name of a preset.
    """
    require(gpus > 0, f"--gpus is {gpus}; it must be 1 or more")
    require(name in GPUS, f"--gpu is {name!r}; it must be one of {', '.join(GPUS)}")
    limit = GPUS[name].memory if limit is None else limit
    require(0 < limit < float("inf"), f"--memory is {limit / GB:g}; it must be the GB of one GPU")
    path = Path(config.model.path or "nano")
    model = PRESETS.get(path.name.lower())
    if model is None or (path / "config.json").exists():
        model = read_config(path)
    with torch.device("meta"):
        decoder = Qwen3(model)
    total, layer = (sum(p.numel() for p in x.parameters()) for x in (decoder, decoder.layers[0]))
    setup = Setup(config, gpus, model, total, layer)

    lines = [f"{total / 1e9:.2f} B parameters, {setup.trained / 1e9:.2f} B trained"]
    lines += [f"{gpus} x {name.upper()} of {limit / GB:g} GB"]
    lines += ["", f"{'GB on each GPU':20}{'rollout':>10}{'training':>10}"]
    lines += [f"  {k:18}{a / GB:10.2f}{b / GB:10.2f}" for k, (a, b) in memory(setup).items()]
    lines += ["", f"{'seconds of a step':20}{'roofline':>10}{'expected':>10}"]
    phases = seconds(setup, GPUS[name]).items()
    lines += [f"  {k:18}{a:10.3g}{b:10.3g}" for k, (a, b) in phases]
    fits = peak(setup) <= limit
    lines += ["", f"{peak(setup) / GB:.1f} of {limit / GB:g} GB: {'fits' if fits else 'too much'}"]
    found = [smallest(setup, way, limit) for way in WAYS]
    if not any(found):
        found = [smallest(setup, WAYS[-1], size * GB) for size in (24, 40, 48, 80, 141, 192)]
        found = [min(filter(None, found), key=lambda line: line[:5], default="")]  # fewest GPUs
    return "\n".join([*lines, "The smallest set-ups that fit:", *filter(None, found)]), fits
