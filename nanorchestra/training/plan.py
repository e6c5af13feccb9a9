"""Before a run: memory by part, seconds by phase, and the fewest GPUs for each way to train.

    python train.py --plan --config qwen3-8b --gpus 8 --memory 80

Memory is of one GPU in GB of 1e9 bytes, for a full token budget. Seconds are of a step whose
attempts fill TYPICAL of their context: the roofline, and that divided by an efficiency.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from nanorchestra.config import DRAFT, Config
from nanorchestra.errors import UserError, require
from nanorchestra.model.hf_config import PRESETS, read_config
from nanorchestra.model.hub import find, is_model, names_model
from nanorchestra.model.qwen3 import ModelConfig
from nanorchestra.training.costs import GB, GPUS, Costs, Gpu

LIBRARIES, FRAGMENTS = 1.5 * GB, 0.05  # CUDA and NCCL; of what is allocated
LOSS = 1.5 * GB  # logits and gradients of activations, a chunk or a layer of each
TYPICAL, PROMPT, SAMPLED = 0.25, 0.375, 0.25  # of the context; of the ids of an attempt
TRAINING, ROLLOUT = 0.40, 0.65  # efficiency; torchtitan reports 0.33 to 0.39 for Llama-3.1-8B
PER_NODE = 8  # GPUs
# Of a base in 4 bits: bytes of a number with its share of a scale; AutoAWQ's zero points are a byte
# for 128 numbers more. Then its bytes in memory while its matrix is widened to bf16, and those that
# are read and written meanwhile.
IN_4_BITS, WIDENED, WIDENING = 1 / 2 + 2 / 128, 5, 12
FULL = {"lora.base": "full"}
OFFLOADED = {"parallel.cpu_offload": True}
WAYS = ({}, OFFLOADED, {"lora.rank": 32}, {"lora.rank": 32, "lora.base": "int4"})
WAYS_FROM_4_BITS = ({}, FULL, FULL | OFFLOADED)


@dataclass(frozen=True)
class Setup:
    """A config and a model on a number of GPUs."""

    config: Config
    gpus: int
    model: ModelConfig

    @property
    def costs(self) -> Costs:
        """What the model computes and holds."""
        return Costs.of(self.model)

    @property
    def trained(self) -> int:
        """How many numbers are trained."""
        rank = self.config.lora.rank
        return rank * self.costs.adapter_numbers if rank else self.costs.numbers

    @property
    def spread(self) -> int:
        """How many numbers the engine's adapters have: those of q, k, v, gate and up are spread."""
        shape, rank = self.model, self.config.lora.rank
        heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
        zeros = 2 * heads * shape.head_dim + 2 * shape.intermediate_size
        return self.trained + shape.num_hidden_layers * rank * zeros

    @property
    def in_4_bits(self) -> bool:
        """Whether the layers are frozen in 4 bits; trainer and engine then share them."""
        return self.config.lora.base == "int4"

    @property
    def in_layers(self) -> int:
        """How many numbers are in matrices of the layers."""
        return self.costs.token_flops // 2

    @property
    def base_bytes(self) -> float:
        """Bytes of the weights in bf16, or of those that are not in 4 bits."""
        in_4_bits = self.in_layers if self.in_4_bits else 0
        return IN_4_BITS * in_4_bits + 2 * (self.costs.numbers - in_4_bits)

    @property
    def shards(self) -> int:
        """How many GPUs divide the weights."""
        return min(self.gpus, PER_NODE) if self.config.parallel.shard == "node" else self.gpus


def memory(setup: Setup) -> dict[str, tuple[float, float]]:
    """Returns the bytes of one GPU by part: while it rolls out, and while it trains."""
    config, costs, total, trained = setup.config, setup.costs, setup.costs.numbers, setup.trained
    grpo, rollout, full = config.grpo, config.rollout, not config.lora.rank
    layers, hidden = setup.model.num_hidden_layers, setup.model.hidden_size
    share = 0 if config.parallel.cpu_offload else 1 / setup.shards
    weights = (4 * total if full else setup.base_bytes + 4 * trained) * share
    reference = 4 * total * share if grpo.kl_coef and full else 0  # of adapters it is the base
    # in bf16 a layer, the next one and the root; of full weights also their gradients
    gathered = 2 * (1 + full) * (total - (1 - (2 + full) / layers) * costs.token_flops / 2)
    engine = 2 * total
    widened = 0.0
    if setup.in_4_bits:
        gathered = 0.0  # one process
        engine = 2 * setup.spread
        widened = WIDENED * 2 * hidden * setup.model.intermediate_size  # gate and up
    kept = layers * costs.activations
    if config.parallel.activation_checkpointing:
        kept = layers * hidden + costs.activations
    attempts = -(-grpo.prompts // setup.gpus) * grpo.group_size
    pages = rollout.pages or attempts * -(-rollout.context_tokens // rollout.page_size)
    kv = pages * rollout.page_size * costs.kv_bytes
    parts = {
        "weights": (weights, weights),
        "moments": (8 * trained * share,) * 2,
        "reference": (reference, reference),
        "gradients": (0, 4 * trained * share),
        "gathered layers": (0, gathered),
        "activations": (0, 2 * grpo.token_budget * kept + LOSS),
        "widened matrix": (widened, widened),
        "engine's copy": (engine, engine),
        "KV pages": (kv, kv),
    }
    both = (LIBRARIES + FRAGMENTS * sum(column) for column in zip(*parts.values(), strict=True))
    return parts | {"CUDA and fragments": tuple(both)}


def peak(setup: Setup) -> float:
    """Returns the bytes of one GPU at its fullest."""
    return max(map(sum, zip(*memory(setup).values(), strict=True)))


def seconds(setup: Setup, gpu: Gpu) -> dict[str, tuple[float, float]]:
    """Returns the seconds of a step by phase: the roofline, and what to expect.

    Backward counts twice a forward (once with adapters), recomputation once. Per micro-batch bf16
    weights are gathered twice and float32 gradients reduced once, while the GPU computes. A base in
    4 bits is widened in every pass.
    """
    config, costs, shards = setup.config, setup.costs, setup.shards
    groups = config.grpo.prompts / setup.gpus
    attempts, length = groups * config.grpo.group_size, TYPICAL * config.rollout.context_tokens
    tokens, sampled = length * (PROMPT * groups + (1 - PROMPT) * attempts), SAMPLED * length
    flops = tokens * costs.token_flops + attempts * length**2 / 2 * costs.pair_flops
    forward = (flops + attempts * sampled * costs.logit_flops) / gpu.flops
    read = costs.weight_bytes
    if setup.in_4_bits:
        read += setup.base_bytes - 2 * costs.numbers + 2 * setup.spread
    reads = sampled * (read + attempts * length / 2 * costs.kv_bytes)
    rollout = max(reads / gpu.bandwidth, forward)
    passes = (2 if config.lora.rank else 3) + config.parallel.activation_checkpointing
    passes += config.grpo.mini_batch > 0  # the old log-probabilities
    training, batches = forward * passes, max(1.0, tokens / config.grpo.token_budget)
    widening = 0.0
    if setup.in_4_bits:
        computed = 2 + config.parallel.activation_checkpointing  # times that a layer is
        widening = batches * computed * WIDENING * setup.in_layers / gpu.bandwidth
    link = gpu.link if shards <= PER_NODE else gpu.network
    gathering = batches * 4 * (costs.numbers + setup.trained) * (shards - 1) / shards / link
    optimizer = 28 * setup.trained / shards / gpu.bandwidth
    if config.parallel.cpu_offload:
        optimizer = (4 * setup.trained + batches * 8 * costs.numbers) / shards / gpu.host
    return {
        "rollout": (rollout, rollout / ROLLOUT),
        "training": (training + widening, training / TRAINING + widening),
        "gathering": (gathering, max(0.0, gathering - training / TRAINING)),
        "optimizer": (optimizer, optimizer),
    }


def smallest(setup: Setup, way: dict[str, object], limit: float) -> str:
    """Returns a line with the fewest GPUs of `limit` bytes, up to 64, for a way to train."""
    config = setup.config.replace(way)
    counts = [1] if config.lora.base == "int4" else [2**n for n in range(7)]
    setups = [replace(setup, gpus=gpus, config=config) for gpus in counts]
    fits = next((f"{x.gpus} x {peak(x) / GB:.1f} GB" for x in setups if peak(x) <= limit), "none")
    options = " ".join(f"--{name} {str(value).lower()}" for name, value in way.items())
    return f"  {fits:14}{options or 'as configured'}"


def plan(config: Config, gpus: int, memory_gb: float | None, name: str) -> tuple[str, bool]:
    """Returns the plan as text, and whether the config fits in the memory of a GPU. UserError.

    Without `memory_gb` it is the GPU's as sold. Of a hub id config.json alone is downloaded. Where
    that fails, or model.path does not exist, the name at its end may be that of a preset.
    """
    require(gpus > 0, f"--gpus is {gpus}; it must be 1 or more")
    in_4_bits = config.lora.base == "int4"
    require(
        gpus == 1 or not in_4_bits,
        f"--gpus is {gpus}; with lora.base int4 it must be 1: engine and trainer of one process "
        "share the base",
    )
    limit = GPUS[name].memory if memory_gb is None else memory_gb * GB
    require(limit > 0, f"--memory is {limit / GB:g}; it must be the GB of one GPU")
    path = config.model.path
    model, origin, fits_disk = _shape("nano" if path in ("", DRAFT) else path)
    setup = Setup(config, gpus, model)
    fits, numbers = peak(setup) <= limit, setup.costs.numbers
    lines = [
        *origin,
        f"{numbers / GB:.2f} B numbers, {setup.trained / GB:.2f} B trained, {gpus} x {name}\n",
        f"{'GB on each GPU':20}{'rollout':>10}{'training':>10}",
        *(f"  {part:18}{a / GB:10.2f}{b / GB:10.2f}" for part, (a, b) in memory(setup).items()),
        f"\n{'seconds of a step':20}{'roofline':>10}{'expected':>10}",
        *(f"  {k:18}{a:10.3g}{b:10.3g}" for k, (a, b) in seconds(setup, GPUS[name]).items()),
        f"\n{peak(setup) / GB:.1f} of {limit / GB:g} GB: {'fits' if fits else 'too much'}",
        f"The fewest GPUs of {limit / GB:g} GB:",
    ]
    ways = WAYS_FROM_4_BITS if in_4_bits else WAYS
    return "\n".join(lines + [smallest(setup, way, limit) for way in ways]), fits and fits_disk


def _shape(word) -> tuple[ModelConfig, list[str], bool]:
    """Returns the shape of a model, lines on where it is from, and if the disk has room for it."""
    preset = PRESETS.get(Path(word.partition("@")[0]).name.lower())
    if preset and not is_model(Path(word)) and (os.path.lexists(word) or not names_model(word)):
        return preset, [], True
    try:
        source = find(word)
    except UserError as error:
        if preset is None:
            raise
        return preset, [f"{error}; planned with the sizes of the preset"], True
    require(
        not (source.missing and source.hub_id.file),
        f"{word}: the sizes are in the file, which is not here yet; plan with the repository that "
        "it was converted from",
    )
    lines = []
    if source.hub_id:
        lines.append(source.summary + ("" if source.fits_disk else ": too much"))
    return read_config(source.path), lines, source.fits_disk
