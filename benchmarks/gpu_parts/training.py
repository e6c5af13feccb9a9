"""A GRPO step beside what `train.py --plan` says, and NCCL with one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engine import seconds
from benchmarks.gpu_parts import Part, by_kernels
from benchmarks.gpu_parts.engine import TINY
from nanorchestra.config import Config
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model import lora
from nanorchestra.model.hf_config import PRESETS
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.sharded import local
from nanorchestra.settings import load_config
from nanorchestra.training.build import as_configured, build_engine, build_trainer, publish
from nanorchestra.training.costs import GB, peak_flops
from nanorchestra.training.objectives import group_advantages, objective_of
from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.plan import Setup, memory, peak
from nanorchestra.training.ranks import Ranks, shard_model
from nanorchestra.training.trainer import Trainer, TrainerSettings

# Rows of 64, which a base in 4 bits divides into groups.
SMALL = replace(
    TINY,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)

MOST_STEPS = 4
NIBBLE_SPREAD = 4.6  # standard deviation of 0 .. 15


def small(part: Part) -> None:
    """Qwen3-0.6B, all weights."""
    grpo_step(part, "qwen3-0.6b")


def large(part: Part) -> None:
    """Qwen3-4B: all weights where --plan says that they fit, else adapters."""
    grpo_step(part, "qwen3-4b")


def grpo_step(part: Part, name: str, **changes: Any) -> None:
    """Steps of a shipped config: publishing, rollout, update. The last one is measured.

    That is the second at the earliest, and the first whose rollout captures no graph.

    changes: settings in place of the config's, by "section.name". The rehearsal takes a model of
    two layers, and otherwise what a GPU takes: kernels, FSDP2 over one rank, bf16, and the config's
    checkpointing, objective and optimizer.
    """
    length, prompt = (4, 12) if part.rehearse else (512, 512)
    settings = {
        "grpo.prompts": 2 if part.rehearse else 8,
        "grpo.group_size": 2 if part.rehearse else 8,
        "rollout.context_tokens": length + prompt,
        "rollout.turn_tokens": length,
        "rollout.pages": 0,
    }
    if part.rehearse:
        settings["rollout.page_size"] = 16
    config = load_config(name, settings | changes)
    shape = PRESETS[Path(config.model.path).name.lower()]
    if part.rehearse:
        shape = replace(SMALL, tie_word_embeddings=shape.tie_word_embeddings)
    if not part.rehearse:
        torch.cuda.reset_peak_memory_stats()
        if peak(Setup(config, 1, shape)) > torch.cuda.mem_get_info()[0]:
            config = config.replace({"lora.rank": 32})
    # A base in 4 bits is not sharded, as in train.py.
    ranks = Ranks.start(part.device, sharded=config.lora.base != "int4")
    try:
        with by_kernels(part):
            _measured_step(part, config, shape, ranks)
    finally:
        ranks.close()


def _measured_step(part: Part, config: Config, shape: ModelConfig, ranks: Ranks) -> None:
    tokenizer: Any = SimpleNamespace(
        vocab_size=shape.vocab_size, eos_ids=(), decode=lambda ids, skip_special: ""
    )
    dtype, grpo = torch.bfloat16, config.grpo
    model = trained_model(config, shape, ranks, dtype)
    trainer = build_trainer(config, model, tokenizer, ranks, dtype)
    adamw = {"beta2": grpo.beta2, "weight_decay": grpo.weight_decay}
    trainer.prepare(grpo.optimizer, grpo.kl_coef > 0, **adamw)
    engine = build_engine(config, shape, tokenizer, ranks, dtype, model)
    rng = random.Random(0)
    given = config.rollout.context_tokens - config.rollout.turn_tokens
    prompts = [[rng.randrange(shape.vocab_size) for _ in range(given)] for _ in range(grpo.prompts)]
    for number in range(MOST_STEPS):
        step = _one_step(config, trainer, engine, dtype, prompts)
        if number and not step.captured:
            break
    assert not step.captured, f"graphs were still captured in step {MOST_STEPS}"
    times, metrics = step.times, step.metrics
    figures = {f"{phase}_s": taken for phase, taken in times.items()}
    figures["rollout_tokens_per_s"] = step.sampled / times["rollout"]
    limit = peak_flops(ranks.device, dtype) if not part.rehearse else None
    if limit:
        figures["mfu"] = metrics["flops"] / times["update"] / limit
    planned = {part: max(pair) / GB for part, pair in memory(Setup(config, 1, shape)).items()}
    figures["planned_gb"] = peak(Setup(config, 1, shape)) / GB
    if not part.rehearse:
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / GB
        figures["reserved_gb"] = torch.cuda.max_memory_reserved() / GB
    part.note("step", weights="adapters" if config.lora.rank else "all", **figures)
    part.note("plan, GB", **planned)
    part.note("agreement", logprob_gap=metrics["logprob_gap"], most=metrics["logprob_gap_max"])


def trained_model(config: Config, shape: ModelConfig, ranks: Ranks, dtype: torch.dtype) -> Qwen3:
    """A sharded model with random weights, drawn where they lie."""
    with torch.device("meta"):
        model = as_configured(Qwen3(shape), config, ranks, dtype)
    model.to_empty(device=ranks.device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                local(parameter).fill_(1.0)
            else:
                local(parameter).normal_(0.0, parameter.shape[-1] ** -0.5)
        for _, module in linears(model, QuantisedLinear):
            module.values.random_(256)
            module.scales.fill_(module.in_features**-0.5 / NIBBLE_SPREAD)
    lora.reset(model, config.run.seed)
    return model


@dataclass
class Step:
    """A measured step: seconds by phase, the trainer's metrics, and how many ids were sampled.

    captured: whether the rollout captured a graph, or met a size of step for the first time.
    """

    times: dict[str, float]
    metrics: dict[str, float]
    sampled: int
    captured: bool


def _one_step(
    config: Config, trainer: Trainer, engine: Engine, dtype: torch.dtype, prompts: list[list[int]]
) -> Step:
    times: dict[str, float] = {}
    size, length = config.grpo.group_size, config.rollout.turn_tokens
    objective = objective_of(config.grpo)

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        results = []
        times[phase] = seconds(lambda: results.append(work()), trainer.ranks.device)
        return results[0]

    def published() -> None:
        publish(config, trainer.model, engine, dtype)
        engine.wake()

    timed("publish", published)
    texts = [text for text in prompts for _ in range(size)]
    params = [
        SamplingParams(max_tokens=length, seed=seed, ignore_eos=True) for seed in range(len(texts))
    ]
    known = engine.runner.sizes_known
    done = timed("rollout", lambda: engine.generate(texts, params))
    captured = engine.runner.sizes_known != known
    engine.sleep()

    groups = []
    for i, text in enumerate(prompts):
        members, fine = done[i * size : (i + 1) * size], [True] * size
        rewards = [sum(member.token_ids) % 97 / 97 for member in members]
        advantages, _ = group_advantages(rewards, fine, fine, objective, 0.0)
        samples = [
            Sample(
                text + member.token_ids,
                [False] * len(text) + [True] * len(member.token_ids),
                [0.0] * len(text) + member.logprobs,
                advantage,
            )
            for member, advantage in zip(members, advantages, strict=True)
        ]
        groups.append(Group(samples, len(text)))
    metrics = timed("update", lambda: trainer.policy_step(groups, 1e-6, objective)).metrics
    assert "skipped" not in metrics, "the loss or the gradient is not finite"
    return Step(times, metrics, sum(len(member.token_ids) for member in done), captured)


def nccl(part: Part) -> None:
    """One rank under NCCL (gloo in the rehearsal): a collective, and a sharded step."""
    ranks = Ranks.start(part.device, sharded=True)
    try:
        with by_kernels(part):
            _all_reduce(part, ranks)
            _sharded_step(part, ranks)
    finally:
        ranks.close()


def _all_reduce(part: Part, ranks: Ranks) -> None:
    x = torch.ones(1 << 10 if part.rehearse else 1 << 28, device=part.device)
    torch.distributed.all_reduce(x)  # makes the communicator
    assert x[-1].item() == 1.0, f"all_reduce over one rank changed 1 to {x[-1].item()}"
    taken = seconds(lambda: torch.distributed.all_reduce(x), ranks.device)
    part.note("all_reduce", seconds=taken, gb=x.nbytes / GB, backend=str(x.device.type))


def _sharded_step(part: Part, ranks: Ranks) -> None:
    """The same supervised step on plain and on sharded weights."""
    shape, norms = SMALL if part.rehearse else PRESETS["nano"], []
    for sharded in (False, True):
        model = Qwen3(shape)
        model.init_weights(0)
        model.to(part.device)
        mine = ranks if sharded else Ranks(device=part.device)
        if sharded:
            model = shard_model(model, mine, torch.float32)
        trainer = Trainer(
            model, vocab_limit=shape.vocab_size, ranks=mine, settings=TrainerSettings()
        )
        ids = [*range(5, 30), *range(40, 60)]
        demonstration = Group([Sample(ids, [False] * 25 + [True] * 20, [0.0] * 45)], 25)
        metrics = trainer.supervised_step([demonstration], 1e-4)
        norms.append((metrics["loss"], metrics["grad_norm"]))
    part.note("step", loss=norms[0][0], sharded_loss=norms[1][0])
    assert all(abs(a - b) < 1e-3 * abs(a) for a, b in zip(*norms, strict=True)), norms
