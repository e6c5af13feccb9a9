"""Before a run: what memory it takes by part, what a step computes and how long that lasts, and what to change where it does not fit.

    python train.py --plan --config qwen3-8b --gpus 8 --memory 80

Nothing is allocated and no GPU is needed. Memory is that of one GPU at its fullest, in GB of 1e9 bytes: weights, gradients and moments are
sharded over all ranks (FSDP2), or over those of a node where each node has a replica (HSDP), and computed with in bf16, each rank has a whole
engine, and the engine's KV pages are lent to the trainer.
Times are rooflines by data sheets, and beside them what to expect of them; a pool so small that attempts wait is not in them. The lengths of
attempts are not known before a run: memory is planned for a full token budget, times for attempts that fill TYPICAL of their context.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.model.hf_config import read_config
from nanorchestra.model.lora import parameters_of
from nanorchestra.model.qwen3 import PRESETS, ModelConfig
from nanorchestra.training.logprobs import WORKSPACE

GB = 1e9
CONTEXT = 1.5 * GB  # of CUDA, NCCL and the libraries, as nvidia-smi shows them
FRAGMENTED = 0.05  # of what is allocated, that the allocator cannot use
TYPICAL = 0.25  # of the context that an attempt fills, for times
PROMPT, SAMPLED = 0.375, 0.25  # of its ids; the rest are observations
TURNS = 6  # they come in
OF_COMPUTE = 0.40  # of the peak that training reaches: torchtitan reports 33% for Llama-3.1-8B on H100s, 39% compiled, recomputation not counted
OF_ROLLOUT = 0.65  # of the roofline that decoding reaches; see benchmarks
LORA_RANK = 32  # where the planner proposes it
SHORTEST = 4096  # context that it proposes
PER_NODE = 8  # GPUs of a machine, at most


@dataclass(frozen=True)
class Device:
    """What bounds a step: bytes and FLOPs a second as measured on large copies and matrix products, and bytes for the KV pool."""

    bandwidth: float
    flops: float
    pool_bytes: float


@dataclass(frozen=True)
class Costs:
    """What a decoder of this shape takes in bf16: a token in the linear layers, a row of logits, a pair of query and key, KV."""

    weight_bytes: float
    token_flops: float
    logit_flops: float
    pair_flops: float
    kv_bytes: float

    @classmethod
    def of(cls, config) -> Costs:
        """Of a ModelConfig."""
        heads, kv_heads, dim, layers = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.num_hidden_layers,
        )
        linear = (
            layers
            * config.hidden_size
            * ((2 * heads + 2 * kv_heads) * dim + 3 * config.intermediate_size)
        )
        head = config.vocab_size * config.hidden_size
        return cls(
            2 * (linear + head),
            2 * linear,
            2 * head,
            4 * layers * heads * dim,
            2 * 2 * layers * kv_heads * dim,
        )


@dataclass
class Episode:
    """One attempt: a prompt, then turns of (tokens sampled, seconds the tool takes, tokens given after it). Equal `group`: equal prompt."""

    group: int
    prompt: int
    turns: list[tuple[int, float, int]]

    @property
    def sampled(self) -> int:
        return sum(sampled for sampled, _, _ in self.turns)


def lower_bound(episodes: list[Episode], costs: Costs, device: Device) -> float:
    """Seconds that any schedule takes: the larger of two bounds.

    Work: every token through the linear layers once (prompts once a group), at full FLOPs or at one reading of the weights for each of the
    longest episode's tokens; each decoded token reads its own KV, a group's prompt is read as often as its longest member has tokens.
    Path: an episode alone, its tools' time included.
    """
    prompts = {e.group: e.prompt for e in episodes}
    longest: dict[int, int] = {}
    tokens, kv, pairs, path = (
        sum(prompts.values()),
        0.0,
        sum(n * (n + 1) / 2 for n in prompts.values()),
        0.0,
    )
    for episode in episodes:
        longest[episode.group] = max(
            longest.get(episode.group, 0), episode.sampled - len(episode.turns)
        )
        length, alone = 0, 0.0  # beyond the prompt
        for turn, (sampled, wait, _) in enumerate(episode.turns):
            given = (
                episode.turns[turn - 1][2] + 1 if turn else 0
            )  # and the last sampled token of the turn before
            tokens += given + sampled - 1
            pairs += given * (episode.prompt + length + (given + 1) / 2)
            kv += sum(range(length + given + 1, length + given + sampled)) + (
                length + episode.prompt if turn else 0
            )
            length += given + sampled - 1
            alone += sampled * costs.weight_bytes / device.bandwidth + (
                wait if turn + 1 < len(episode.turns) else 0.0
            )
        path = max(path, alone)
    kv += sum(prompts[group] * count for group, count in longest.items())
    samples = sum(e.sampled for e in episodes)
    linear = max(
        max(e.sampled for e in episodes) * costs.weight_bytes / device.bandwidth,
        (tokens * costs.token_flops + samples * costs.logit_flops) / device.flops,
    )
    return max(
        path,
        linear + kv * costs.kv_bytes / device.bandwidth + pairs * costs.pair_flops / device.flops,
    )


@dataclass(frozen=True)
class Rates:
    """A GPU by its data sheet: dense bf16 FLOPs and bytes of memory a second, bytes a second to GPUs of its node, to those of others and to the host
    (each way), bytes."""

    flops: float
    bandwidth: float
    link: float
    network: float
    host: float
    memory: float


RATES = {  # of NVIDIA's data sheets; the network is that of its DGX
    "h100": Rates(
        989e12, 3.35e12, 450e9, 50e9, 64e9, 80 * GB
    ),  # H100 SXM: NVLink 900 GB/s both ways, PCIe 5 x16; DGX H100: 400 Gb/s a GPU
    "h200": Rates(989e12, 4.8e12, 450e9, 50e9, 64e9, 141 * GB),  # H200 SXM, DGX H200
    "a100": Rates(
        312e12, 2.039e12, 300e9, 25e9, 32e9, 80 * GB
    ),  # A100 80GB SXM: NVLink 600 GB/s both ways, PCIe 4 x16; DGX A100: 200 Gb/s a GPU
    "4090": Rates(
        165.2e12, 1.008e12, 32e9, 1.5e9, 32e9, 24 * GB
    ),  # Ada whitepaper, appendix A (fp32 accumulation); no NVLink; if eight share 100 Gb/s
}


@dataclass(frozen=True)
class Choices:
    """What the planner may change."""

    gpus: int
    checkpointing: bool
    offload: bool
    rank: int
    token_budget: int
    pages: int
    context: int
    node: bool = False  # parallel.shard: the GPUs of a node hold the weights between them, not all

    @property
    def shards(self) -> int:
        """How many GPUs hold the weights between them. Nodes have equally many GPUs and are as few as can be."""
        return (
            next(n for n in range(min(self.gpus, PER_NODE), 0, -1) if self.gpus % n == 0)
            if self.node
            else self.gpus
        )

    @property
    def replicas(self) -> int:
        return self.gpus // self.shards


@dataclass(frozen=True)
class Shape:
    """What is given: the model and the step. `attempts` are those of a whole step."""

    model: ModelConfig
    prompts: int
    group_size: int
    page_size: int
    reference: bool
    overlap: bool = False  # rollouts go on while the trainer works: their KV is not lent

    @property
    def attempts(self) -> int:
        return self.prompts * self.group_size


def parameters(config: ModelConfig) -> tuple[int, int]:
    """Numbers in one layer, and in the whole model."""
    heads, kv, dim, hidden = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )
    rows = (heads + 2 * kv) * dim
    layer = (
        hidden * (rows + heads * dim + 3 * config.intermediate_size)
        + 2 * hidden
        + 2 * dim
        + (rows + hidden if config.attention_bias else 0)
    )
    return layer, config.num_hidden_layers * layer + hidden + config.vocab_size * hidden * (
        1 if config.tie_word_embeddings else 2
    )


def activation_numbers(config: ModelConfig, kernels: bool = True) -> int:
    """How many numbers a layer keeps of one token for its backward pass.

    4 hidden: its input, the sum after attention, and both after their norms. qkv, its normalised and its rotated queries and keys, and the
    output of attention. gate and up, and their product. Without the kernels for norms and SwiGLU the normalised rows before the norm's weight,
    twice, and silu(gate) as well.
    """
    heads, kv, dim, wide = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
    )
    numbers = (
        4 * config.hidden_size
        + (heads + 2 * kv) * dim
        + 2 * (heads + kv) * dim
        + heads * dim
        + 3 * wide
    )
    return numbers if kernels else numbers + 2 * config.hidden_size + wide


def loss_workspace(config: ModelConfig, tokens: int, kernels: bool = True) -> float:
    """Bytes that the log-probabilities of `tokens` sampled ids take above hidden states and weights, forward and backward. The kernels: a chunk of
    logits and its gradient, and the gradient of the hidden states in fp32; else head.WORKSPACE."""
    return (
        512e6 + 4 * tokens * config.hidden_size if kernels else float(WORKSPACE)
    )  # kernels/logprob_backward.py, CHUNK_BYTES


def states(shape: Shape, choices: Choices) -> dict[str, float]:
    """Bytes of a replica by part, which its GPUs hold between them, or their hosts with offload."""
    total = parameters(shape.model)[1]
    trained = parameters_of(shape.model, choices.rank) if choices.rank else total
    weights = (
        {"base in bf16, adapters": 2.0 * total + 4 * trained}
        if choices.rank
        else {"weights, trained": 4.0 * total}
    )
    reference = (
        4.0 * total if shape.reference and not choices.rank else 0.0
    )  # with adapters it is the base
    return weights | {
        "gradients, fp32": 4.0 * trained,
        "moments, fp32": 8.0 * trained,
        "reference, fp32": reference,
    }


def memory(shape: Shape, choices: Choices) -> dict[str, tuple[float, float]]:
    """Bytes of one GPU by part: while it rolls out, and while it trains."""
    config, tokens = shape.model, choices.token_budget
    layer, total = parameters(config)
    root = total - config.num_hidden_layers * layer
    unsharded = 2 * 2 * layer + 2 * root  # this layer and the next; the root
    if not choices.rank:
        unsharded += (
            2 + 4
        ) * layer + 2 * root  # gradients: the layer's, and that in fp32 on its way; the root's
        unsharded += (
            2 * (layer + root) if shape.reference else 0
        )  # its last layer and its root stay gathered until the update
    per_token = 2 * activation_numbers(config)
    kept = config.num_hidden_layers * (
        2 * config.hidden_size if choices.checkpointing else per_token
    ) + (per_token if choices.checkpointing else 0)
    costs = Costs.of(config)
    parts = {}
    for name, size in states(shape, choices).items():
        gradients = (
            name == "gradients, fp32"
        )  # replicas add theirs up on the GPU until the step's last micro-batch, then all-reduce
        held = (
            size / choices.shards
            if not choices.offload or gradients and choices.replicas > 1
            else 0.0
        )
        parts[name] = (0.0 if gradients else held, held)
    parts |= {
        "layers gathered, bf16": (0.0, float(unsharded)),
        "activations" + (", checkpointed" if choices.checkpointing else ""): (
            0.0,
            float(
                tokens * (kept + 2 * 2 * config.hidden_size + 2 * (2 * config.intermediate_size))
            ),
        ),
        "loss": (0.0, loss_workspace(config, round(tokens * SAMPLED / (1 - PROMPT)))),
        "engine, bf16": (2.0 * total, 2.0 * total),
        "KV pages": (
            choices.pages * shape.page_size * costs.kv_bytes,
            choices.pages * shape.page_size * costs.kv_bytes if shape.overlap else 0.0,
        ),
    }
    used = tuple(sum(part[i] for part in parts.values()) for i in range(2))
    parts["CUDA and fragments"] = tuple(CONTEXT + FRAGMENTED * x for x in used)
    return parts


def peak(parts: dict[str, tuple[float, float]]) -> float:
    return max(sum(part[i] for part in parts.values()) for i in range(2))


def host_memory(shape: Shape, choices: Choices) -> float:
    """Bytes of all hosts together that hold what is offloaded."""
    return choices.replicas * sum(states(shape, choices).values()) if choices.offload else 0.0


def step_tokens(shape: Shape, context: int) -> tuple[float, float]:
    """A typical step's ids in the packs, where a group's prompt stands once; and those sampled."""
    length = TYPICAL * context
    return shape.prompts * PROMPT * length + shape.attempts * (
        1 - PROMPT
    ) * length, shape.attempts * SAMPLED * length


def step_flops(
    costs: Costs,
    linear: tuple[float, float],
    attention: tuple[float, float],
    head: tuple[float, float],
) -> float:
    """Of a training step: packed tokens, attended pairs and sampled ids, each with how many forwards' worth of FLOPs they take."""
    return (
        linear[0] * costs.token_flops * linear[1]
        + attention[0] * costs.pair_flops * attention[1]
        + head[0] * costs.logit_flops * head[1]
    )


def model_flops(
    config: ModelConfig,
    tokens: int,
    pairs: int,
    drawn: int,
    adapters: bool = False,
    reference: bool = False,
) -> float:
    """FLOPs that a step's mathematics asks for, as MFU counts them (PaLM, arXiv 2204.02311, appendix B): forward 1, backward 2, nothing for what is
    computed again. With adapters the weights of the base have no gradient, and the backward of their products is 1. A reference adds its forward.
    The vocabulary counts for sampled ids only, and an id that samples share in their pack counts once."""
    passes = 3 + reference
    return step_flops(
        Costs.of(config), (tokens, passes - adapters), (pairs, passes), (drawn, passes - adapters)
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOPs a second that MFU takes for all there is. CUDA: the data sheet's bf16; None for a GPU that RATES does not have, or another dtype.
    CPU: no data sheet, but the best of five float32 products of 1024 x 1024 with the threads that training has, here and now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        slower = any(
            word in name for word in ("h100 pcie", "nvl", "laptop")
        )  # siblings that share a name, not a data sheet
        return next(
            (
                rates.flops
                for gpu, rates in RATES.items()
                if gpu in name and not slower and dtype == torch.bfloat16
            ),
            None,
        )
    matrix, seconds = torch.ones(1024, 1024), []
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(seconds)


def times(shape: Shape, choices: Choices, rates: Rates) -> dict[str, tuple[float, float]]:
    """Seconds of a typical step by phase: the roofline, and what to expect of it. Waiting for tools and experts is not in it.

    rollout     lower_bound of this GPU's groups: tokens through the layers once, weights and KV read for every decoded token
    training    FLOPs / peak; forward 1, backward 2 (1 with adapters: the base has no gradient), recomputation 1; attention's backward 2.5; the head 4
                (forward, recomputed logits, two gradients), for sampled ids only
    gathering   a micro-batch gathers bf16 weights twice and reduces fp32 gradients once, as fast as the network if the shards are on several nodes;
                replicas all-reduce theirs over it, once a step. Prefetched, so only what exceeds training is expected
    optimizer   28 bytes a number: weights, moments and gradients read, weights and moments written; offloaded: fp32 gradients to the host, weights back
    weights     bf16 gathered and written into the engine
    """
    config, ranks, costs = shape.model, choices.gpus, Costs.of(shape.model)
    total = parameters(config)[1]
    trained = parameters_of(config, choices.rank) if choices.rank else total
    length = TYPICAL * choices.context
    prompt, rest = PROMPT * length, (1 - PROMPT) * length
    sampled, given = SAMPLED * length / TURNS, (1 - PROMPT - SAMPLED) * length / TURNS
    groups = -(-shape.prompts // ranks)
    episodes = [
        Episode(g, round(prompt), [(max(1, round(sampled)), 0.0, round(given))] * TURNS)
        for g in range(groups)
        for _ in range(shape.group_size)
    ]
    rollout = lower_bound(
        episodes,
        costs,
        Device(rates.bandwidth, rates.flops, choices.pages * shape.page_size * costs.kv_bytes),
    )

    tokens, drawn = step_tokens(shape, choices.context)
    pairs = shape.prompts * (prompt**2 / 2 + shape.group_size * rest * (prompt + rest / 2))
    again = 1 if choices.checkpointing else 0
    linear, attention = (2 if choices.rank else 3) + again, 3.5 + again
    training = (
        step_flops(costs, (tokens, linear), (pairs, attention), (drawn, 4)) / ranks / rates.flops
    )

    shards, replicas = choices.shards, choices.replicas
    apart = (shards - 1) / shards / (rates.link if shards <= PER_NODE else rates.network)
    micro_batches = -(-tokens // (ranks * choices.token_budget))
    gathering = (
        micro_batches * (2 * 2 * total + 4 * trained) * apart
        + 2 * (replicas - 1) / replicas * 4 * trained / shards / rates.network
    )
    step = 28 * trained / shards / rates.bandwidth
    if choices.offload:
        weights = 2 * total + 4 * trained if choices.rank else 4 * total
        step = (4 * trained + micro_batches * 2 * weights) / shards / rates.host
    sync = 2 * total * (apart + 1 / rates.bandwidth)
    return {
        "rollout": (rollout, rollout / OF_ROLLOUT),
        "training": (training, training / OF_COMPUTE),
        "gathering": (gathering, max(0.0, gathering - training / OF_COMPUTE)),
        "optimizer": (step, step),
        "weights to the engine": (sync, sync),
    }


def fit(shape: Shape, choices: Choices, limit: float) -> tuple[Choices, list[str]] | None:
    """Changes that make it fit, those that lose least first, each in words with its option; None if none do on these GPUs."""

    def fits(tried: Choices) -> bool:
        return peak(memory(shape, tried)) <= limit

    budgets = [
        b for b in (choices.token_budget // 2**k for k in range(1, 12)) if b >= choices.context
    ] or [choices.context]
    pools = [
        choices.pages // 2**k
        for k in range(1, 12)
        if choices.pages // 2**k * shape.page_size >= choices.context
    ]
    shorter = [choices.context // 2**k for k in range(1, 5) if choices.context // 2**k >= SHORTEST]
    ladder: list[tuple[str, list[dict]]] = [
        (
            "--parallel.activation_checkpointing true: a layer keeps its input and is computed again; a third more training FLOPs",
            [dict(checkpointing=True)],
        ),
        (
            "--grpo.token_budget {token_budget}: smaller micro-batches; weights are gathered more often",
            [dict(token_budget=b) for b in budgets if b < choices.token_budget],
        ),
        (
            "--rollout.pages {pages}: a smaller KV pool; attempts that do not fit wait",
            [dict(pages=p) for p in pools],
        ),
        (
            "--parallel.shard all: weights, gradients and moments divided by all GPUs, not those of a node; gathered over the network",
            [dict(node=False)],
        ),
        (
            "--parallel.cpu_offload true: weights, gradients and moments in host memory; the optimizer waits for PCIe",
            [dict(offload=True)],
        ),
        (
            f"--lora.rank {LORA_RANK}: trains adapters, at about ten times the learning rate",
            [dict(rank=LORA_RANK)],
        ),
        (
            "--rollout.context_tokens {context} --grpo.token_budget {token_budget}: shorter attempts",
            [dict(context=n, token_budget=n) for n in shorter],
        ),
    ]
    taken: list[tuple[str, dict]] = []
    tried = choices
    for words, values in ladder:
        for change in values:
            changed = replace(tried, **change)
            if changed == tried or peak(memory(shape, changed)) >= peak(memory(shape, tried)):
                continue
            if taken and taken[-1][0] == words:
                taken.pop()
            taken.append((words, change))
            tried = changed
            if fits(tried):
                break
        if fits(tried):
            break
    if not fits(tried):
        return None
    for entry in list(taken):  # an earlier one may not be needed any more
        fewer = choices
        for words, change in taken:
            if (words, change) != entry:
                fewer = replace(fewer, **change)
        if fits(fewer):
            taken.remove(entry)
    final = choices
    for _, change in taken:
        final = replace(final, **change)
    return final, [words.format(**vars(final)) for words, _ in taken]


def model_of(config: Config) -> ModelConfig:
    """Of model.path if there is a checkpoint, or of the preset that has the name of its last part; else of model.preset. UserError."""
    path = Path(config.model.path)
    if not config.model.path:
        return PRESETS["nano"]
    if (path / "config.json").is_file() or path.name.lower() not in PRESETS:
        return read_config(path)
    return PRESETS[path.name.lower()]


def plan(
    config: Config, gpus: int = 1, limit: float | None = None, gpu: str = "h100"
) -> tuple[str, bool]:
    """The whole plan as text, and whether the config fits as it is. `limit`: bytes of one GPU. UserError for what cannot be planned."""
    if gpus < 1:
        raise UserError(f"--gpus is {gpus}; it must be 1 or more")
    if gpu not in RATES:
        raise UserError(f"--gpu is {gpu!r}; it must be one of {', '.join(RATES)}")
    rates = RATES[gpu]
    limit = rates.memory if limit is None else limit
    if not 0 < limit < float("inf"):
        raise UserError(f"--memory is {limit / GB:g}; it must be the GB of one GPU")
    section, rollout, parallel = config.grpo, config.rollout, config.parallel
    shape = Shape(
        model_of(config),
        section.prompts,
        section.group_size,
        rollout.page_size,
        bool(section.kl_coef),
        rollout.overlap,
    )
    rows = -(-section.prompts // gpus) * section.group_size
    choices = Choices(
        gpus,
        parallel.activation_checkpointing,
        parallel.cpu_offload,
        config.lora.rank,
        section.token_budget,
        rollout.pages or rows * -(-rollout.context_tokens // rollout.page_size) + 64,
        rollout.context_tokens,
        parallel.shard == "node",
    )
    total = parameters(shape.model)[1]
    tokens, drawn = step_tokens(shape, choices.context)
    lines = [
        f"{total / 1e9:.2f} B parameters"
        + (
            f", {parameters_of(shape.model, choices.rank) / 1e6:.0f} M of adapters trained"
            if choices.rank
            else ", all trained"
        )
        + f"; {gpus} x {gpu.upper()} of {limit / GB:g} GB"
        + (f", a replica on every {choices.shards}" if choices.replicas > 1 else ""),
        "",
        f"a step: {shape.prompts} groups of {shape.group_size}; if attempts fill {TYPICAL:.0%} of {choices.context:,} ids: {tokens:,.0f} packed tokens, {drawn:,.0f} sampled",
        "",
    ]
    fits = peak(memory(shape, choices)) <= limit
    lines += _memory_table(shape, choices, limit)
    fixed = None if fits else fit(shape, choices, limit)
    if not fits:
        lines.append("")
        if fixed:
            lines.append("What makes it fit:")
            lines += [f"  {words}" for words in fixed[1]]
            lines += ["", "With that:"] + _memory_table(shape, fixed[0], limit)
        else:
            more = next(
                (
                    n
                    for n in (2 * gpus, 4 * gpus, 8 * gpus, 16 * gpus)
                    if fit(shape, replace(choices, gpus=n), limit)
                ),
                None,
            )
            lines.append(
                "Nothing makes it fit on these GPUs"
                + (
                    f"; {more} of them can hold it: --gpus {more}"
                    if more
                    else ", nor on more of them: the engine's copy of the model alone must fit one GPU"
                )
            )
    chosen = fixed[0] if fixed else choices
    if fits or fixed:
        lines += ["", f"{'seconds a step':24}{'roofline':>10}{'expected':>10}"]
        phases = times(shape, chosen, rates)
        lines += [
            f"  {name:22}{_seconds(a):>10}{_seconds(b):>10}" for name, (a, b) in phases.items()
        ]
        lines.append(
            f"  {'without waiting for tools':22}{_seconds(sum(b for _, b in phases.values())):>17}"
        )
    return "\n".join(lines), fits


def _memory_table(shape: Shape, choices: Choices, limit: float) -> list[str]:
    parts = memory(shape, choices)
    lines = [f"{'GB on each GPU':24}{'rollout':>10}{'training':>10}"]
    lines += [f"  {name:22}{_gb(a):>10}{_gb(b):>10}" for name, (a, b) in parts.items() if a or b]
    sums = [sum(part[i] for part in parts.values()) for i in range(2)]
    verdict = "fits" if max(sums) <= limit else f"{(max(sums) - limit) / GB:.1f} GB too much"
    lines.append(
        f"  {'in all':22}{_gb(sums[0]):>10}{_gb(sums[1]):>10}   of {limit / GB:g}: {verdict}"
    )
    host = host_memory(shape, choices)
    return lines + ([f"  and {host / GB:.0f} GB in the memory of the hosts"] if host else [])


def _gb(count: float) -> str:
    return f"{count / GB:.2f}" if count < 10 * GB else f"{count / GB:.1f}"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
