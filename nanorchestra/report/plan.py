"""Before a run: the memory of one GPU by part.

    python train.py --plan --config qwen3-8b --gpus 8 --memory 80

It is in GB of 1e9 bytes, for a full token budget.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernels.paged_decode import split_bounds
from kernels.paged_prefill import LEAST_SPLIT
from kernels.quantised import ROWS
from nanorchestra.config import DRAFT, Config
from nanorchestra.engine.step_inputs import SPLIT_TOKENS
from nanorchestra.errors import UserError, require
from nanorchestra.model.checkpoint import PRESETS, read_config
from nanorchestra.model.qwen3 import ModelConfig
from nanorchestra.training.build import SPARE_PAGES
from nanorchestra.training.costs import GB, GPUS, Costs
from nanorchestra.training.draft import shape_for

LIBRARIES, FRAGMENTS = 1.5 * GB, 0.05  # CUDA and NCCL; of what is allocated
PER_NODE = 8  # GPUs
# Of a base in 4 bits: bytes of a number with its share of a scale; AutoAWQ's zero points are a byte
# for 128 numbers more. Then its bytes in memory while its matrix is widened to bf16.
IN_4_BITS, WIDENED = 1 / 2 + 2 / 128, 5


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
    """Returns the bytes of one GPU by part: while it rolls out, and while it trains.

    It trains at its fullest in the backward pass of a layer's SwiGLU, or where FSDP2 reduces the
    root's gradients. With L numbers in a layer, R in the root and V * h in the output matrix, FSDP2
    (torch/distributed/fsdp/_fully_shard: `foreach_reduce`, `post_backward`) then holds

        2 (R + 2 L)        the root, the layer and the next one, gathered in bf16
        2 V h + 2 L + 4 L  of full weights: the gradients of the output matrix and of the layer, and
                           the float32 input of a reduce-scatter, kept until that of the next layer
        (2 + 4) R          at the end: the gradients of the root, and that input
        2 (R + L)          of a reference: its root and last layer, which stay gathered

    and T tokens have, beside what layers keep, gradients of a layer's output (h) and of gate and up
    (2 I); that of their product takes the place of the product itself. All are in bf16.
    """
    config, costs, total, trained = setup.config, setup.costs, setup.costs.numbers, setup.trained
    grpo, rollout, full = config.grpo, config.rollout, not config.lora.rank
    layers, hidden = setup.model.num_hidden_layers, setup.model.hidden_size
    share = 0 if config.parallel.cpu_offload else 1 / setup.shards
    weights = (4 * total if full else setup.base_bytes + 4 * trained) * share
    reference = 4 * total * share if grpo.kl_coef and full else 0  # of adapters it is the base
    layer, root = setup.in_layers / layers, total - setup.in_layers
    gathered = 2 * (root + 2 * layer)
    if full:
        gathered += costs.logit_flops + (2 + 4) * layer
    attempts = -(-grpo.prompts // setup.gpus) * grpo.group_size
    engine = 2 * total
    gate_up = 2 * hidden * setup.model.intermediate_size
    widened = 0.0
    if setup.in_4_bits:
        gathered = 0.0  # one process
        engine = 2 * setup.spread
        widened = WIDENED * gate_up
    if rollout.weights == "int8":
        head = 0 if setup.model.tie_word_embeddings else costs.logit_flops // 2
        engine -= setup.in_layers + head  # a byte of a number less
        widened = 2 * (max(gate_up, head) if attempts > ROWS else gate_up)
    kept = layers * costs.activations
    if config.parallel.activation_checkpointing:
        kept = layers * hidden + costs.activations
    kept += hidden + 2 * setup.model.intermediate_size
    activations = 2 * grpo.token_budget * kept
    if full:
        gathered = max(gathered, (2 + 4) * root - activations)
    if reference:
        gathered += 2 * (root + layer)
    pages_of_attempt = -(-rollout.context_tokens // rollout.page_size)
    pages = rollout.pages or attempts * pages_of_attempt + SPARE_PAGES
    kv = pages * rollout.page_size * costs.kv_bytes
    # Of the largest captured step: what goes into a layer and what is added to it, gate, up, their
    # product; adapters hold a product with and without theirs. Then the scratch of split attention.
    of_token = 4 * hidden + (4 if setup.in_4_bits else 3) * setup.model.intermediate_size
    decode_splits = attempts * (len(split_bounds(rollout.context_tokens)) - 1)
    prefill_splits = len(split_bounds(rollout.context_tokens, LEAST_SPLIT)) - 1
    prefill_splits *= min(SPLIT_TOKENS, rollout.max_batch_tokens)
    of_split = 4 * setup.model.num_attention_heads * (setup.model.head_dim + 1)
    scratch = max(decode_splits, prefill_splits) * of_split
    graphs = 2 * rollout.max_batch_tokens * of_token + scratch
    parts = {
        "weights": (weights, weights),
        "moments": (8 * trained * share,) * 2,
        "reference": (reference, reference),
        "gradients": (0, 4 * trained * share),
        "gathered layers": (0, gathered),
        "activations": (0, activations),
        # The engine's stays in its graphs; training in 4 bits widens one of its own.
        "widened matrix": (widened, (2 if setup.in_4_bits else 1) * widened),
        "engine's copy": (engine, engine),
        "engine's graphs": (graphs, graphs),
        "KV pages": (kv, kv),
    }
    both = (LIBRARIES + FRAGMENTS * sum(column) for column in zip(*parts.values(), strict=True))
    return parts | {"CUDA and fragments": tuple(both)}


def peak(setup: Setup) -> float:
    """Returns the bytes of one GPU at its fullest."""
    return max(map(sum, zip(*memory(setup).values(), strict=True)))


def plan(
    config: Config, gpus: int, memory_gb: float | None, name: str, open: Callable[..., Path]
) -> tuple[str, bool]:
    """Returns the plan as text, and whether the config fits in the memory of a GPU. UserError.

    Without `memory_gb` it is the GPU's as sold. Of a hub id config.json alone is downloaded. Where
    that fails, or model.path does not exist, the name at its end may be that of a preset.
    """
    require(gpus > 0, f"--gpus is {gpus}; it must be 1 or more")
    require(
        gpus == 1 or config.lora.base != "int4",
        f"--gpus is {gpus}; with lora.base int4 it must be 1: engine and trainer of one process "
        "share the base",
    )
    limit = GPUS[name].memory if memory_gb is None else memory_gb * GB
    require(limit > 0, f"--memory is {limit / GB:g}; it must be the GB of one GPU")
    path = config.model.path
    model, origin = shape_for(config.task.world), []
    if path not in ("", DRAFT):
        model, origin = _shape(path, open)
    setup = Setup(config, gpus, model)
    fits, numbers = peak(setup) <= limit, setup.costs.numbers
    lines = [
        *origin,
        f"{numbers / GB:.2f} B numbers, {setup.trained / GB:.2f} B trained, {gpus} x {name}\n",
        f"{'GB on each GPU':20}{'rollout':>10}{'training':>10}",
        *(f"  {part:18}{a / GB:10.2f}{b / GB:10.2f}" for part, (a, b) in memory(setup).items()),
        f"\n{peak(setup) / GB:.1f} of {limit / GB:g} GB: {'fits' if fits else 'too much'}",
    ]
    return "\n".join(lines), fits


def _shape(word, open) -> tuple[ModelConfig, list[str]]:
    """Returns the shape of a model, and lines on where it is from."""
    preset = PRESETS.get(Path(word.partition("@")[0]).name.lower())
    if preset and "/" not in word:
        return preset, []
    try:
        return read_config(open(word, config_only=True)), []
    except UserError as error:
        if preset is None:
            raise
        return preset, [f"{error}; planned with the sizes of the preset"]
