"""A GRPO step, with NCCL and FSDP2 over one rank, beside what `train.py --plan` says.

It is made of the trainer's and the engine's own calls, without a world: train.py, whose loop has
more around them, imports more than a machine for a day may have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engine import seconds
from benchmarks.gpu_parts import Part, by_kernels
from benchmarks.gpu_parts.engine import TINY
from nanorchestra.config import Config, GrpoSection
from nanorchestra.engine.engine import Completion, SamplingParams
from nanorchestra.model import lora
from nanorchestra.model.checkpoint import PRESETS
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.sharded import local
from nanorchestra.report.plan import Setup, memory, peak
from nanorchestra.settings import load_config
from nanorchestra.training.build import as_configured, build_engine, build_trainer, publish
from nanorchestra.training.costs import GB, peak_flops
from nanorchestra.training.distributed import Ranks, backward
from nanorchestra.training.grpo import OBJECTIVES, Objective, group_advantages
from nanorchestra.training.packing import Group, Sample, samples_in
from nanorchestra.training.trainer import Trainer, UpdateMetrics

# Rows of 64, which a base in 4 bits divides into groups.
SMALL = replace(
    TINY,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
STEPS = 2  # of which the first warms up
NIBBLE_SPREAD = 4.6  # standard deviation of 0 .. 15


def small(part: Part) -> None:
    """Qwen3-0.6B, all weights."""
    grpo_step(part, "qwen3-0.6b")


def large(part: Part) -> None:
    """Qwen3-4B: all weights where --plan says that they fit, else adapters."""
    grpo_step(part, "qwen3-4b")


def in_small(part: Part) -> None:
    """Qwen3-8B's config with the exact KL, for a model of two layers: on a GPU too."""
    grpo_step(part, "qwen3-8b", in_small=True, **{"grpo.kl_coef": 1e-3})


def grpo_step(part: Part, name: str, in_small: bool = False, **changes: Any) -> None:
    """Measures the second step of a shipped config: publishing, rollout, update.

    changes: settings in place of the config's, by "section.name". In small, as in the rehearsal, it
    takes a model of two layers, and otherwise what a GPU takes: kernels, FSDP2 over one rank
    (gloo's on a CPU), bf16, and the config's checkpointing, objective and optimizer.
    """
    in_small |= part.rehearse
    length, prompt = (4, 12) if in_small else (512, 512)
    settings = {
        "grpo.prompts": 2 if in_small else 8,
        "grpo.group_size": 2 if in_small else 8,
        "rollout.context_tokens": length + prompt,
        "rollout.turn_tokens": length,
        "rollout.pages": 0,
    }
    if in_small:
        settings["rollout.page_size"] = 16
    config = load_config(name, settings | changes)
    shape = PRESETS[Path(config.model.path).name.lower()]
    if in_small:
        shape = replace(SMALL, tie_word_embeddings=shape.tie_word_embeddings)
    elif peak(Setup(config, 1, shape)) > torch.cuda.mem_get_info()[0]:
        config = config.replace({"lora.rank": 32})
    # A base in 4 bits is not sharded, as in train.py.
    ranks = Ranks.start(part.device, mixed_precision=config.lora.base != "int4")
    try:
        with by_kernels(part):
            _measured_step(part, config, shape, ranks)
    finally:
        ranks.close()


def _measured_step(part: Part, config: Config, shape: ModelConfig, ranks: Ranks) -> None:
    tokenizer: Any = SimpleNamespace(
        vocab_size=shape.vocab_size, eos_ids=(), decode=lambda ids, skip_special: ""
    )
    dtype, grpo = torch.bfloat16, replace(config.grpo, mini_batch=0)  # one update is measured
    model = trained_model(config, shape, ranks, dtype)
    trainer = build_trainer(config, model, tokenizer, ranks, dtype)
    trainer.begin_grpo(grpo)
    engine = build_engine(config, model, tokenizer, ranks, dtype)
    size, objective = grpo.group_size, OBJECTIVES[grpo.objective]
    rng = random.Random(0)
    prompt_tokens = config.rollout.context_tokens - config.rollout.turn_tokens
    prompts, params = [], []
    for _ in range(grpo.prompts):
        prompts += [[rng.randrange(shape.vocab_size) for _ in range(prompt_tokens)]] * size
    for seed in range(len(prompts)):
        params.append(SamplingParams(config.rollout.turn_tokens, seed=seed, ignore_eos=True))
    times: dict[str, float] = {}

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        results = []
        times[phase] = seconds(lambda: results.append(work()), ranks.device)
        return results[0]

    for _ in range(STEPS):
        timed("publish", lambda: publish(config, model, engine, dtype))
        done = timed("rollout", lambda: engine.generate(prompts, params))
        rewards = [sum(completion.token_ids) % 97 / 97 for completion in done]
        groups = groups_of(prompts, done, rewards, size, objective)
        update = timed("update", lambda groups=groups: policy_update(trainer, groups, grpo))
        assert not update["skipped"], "the loss or the gradient is not finite"

    figures = {f"{phase}_s": elapsed for phase, elapsed in times.items()}
    sampled = sum(len(completion.token_ids) for completion in done)
    figures["rollout_tokens_per_s"] = sampled / times["rollout"]
    setup = Setup(config, 1, shape)
    figures["planned_gb"] = peak(setup) / GB
    if not part.rehearse:
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / GB
        figures["reserved_gb"] = torch.cuda.max_memory_reserved() / GB
        limit = peak_flops(ranks.device, dtype)
        if limit:
            figures["mfu"] = update["flops"] / times["update"] / limit
    part.note("step", weights="adapters" if config.lora.rank else "all", **figures)
    part.note("plan, GB", **{name: max(pair) / GB for name, pair in memory(setup).items()})
    part.note(
        "agreement",
        logprob_gap=update["logprob_gap"],
        most=update["logprob_gap_max"],
    )


def policy_update(trainer: Trainer, groups: list[Group], grpo: GrpoSection) -> dict[str, float]:
    """Makes one optimizer step, as train.py's does at a ratio of 1; returns its metrics."""
    loss_ids = sum(sample.loss_ids for sample in samples_in(groups))
    sums = UpdateMetrics(loss_ids)
    micro_batches = trainer.micro_batches(groups)
    for batch in micro_batches:
        kind = OBJECTIVES[grpo.objective].kl if grpo.kl_coef else None
        logprobs, _, kl = trainer.logprobs(batch, kl=kind)
        losses = -batch.advantages * logprobs
        if kl is not None:
            losses = losses + grpo.kl_coef * kl
        last = batch is micro_batches[-1]
        backward(losses.sum() / loss_ids, trainer.model, trainer.ranks, last=last)
        sums.add(loss=losses)
        sums.add_mismatch(batch.sampler_logprobs, logprobs.detach())
        sums.flops += trainer.flops(batch, reference=bool(grpo.kl_coef))
    update = sums.read(trainer.ranks)
    return update | trainer.optimizer_step(1e-6, finite=math.isfinite(update["loss"]))


def trained_model(config: Config, shape: ModelConfig, ranks: Ranks, dtype: torch.dtype) -> Qwen3:
    """Makes a sharded model with random weights, drawn where they lie."""
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


def groups_of(
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    size: int,
    objective: Objective = OBJECTIVES["grpo"],
) -> list[Group]:
    """Makes the trainer's groups of `size` neighbouring completions with their prompts."""
    groups = []
    for start in range(0, len(prompts), size):
        members = range(start, start + size)
        scores = [rewards[i] for i in members]
        advantages = group_advantages(scores, 0.0, objective) or [0.0] * size
        samples = []
        for i, advantage in zip(members, advantages, strict=True):
            prompt, sampled = prompts[i], completions[i]
            sample = Sample(
                prompt + sampled.token_ids,
                [False] * len(prompt) + [True] * len(sampled.token_ids),
                [0.0] * len(prompt) + sampled.logprobs,
                advantage,
            )
            samples.append(sample)
        groups.append(Group(samples, len(prompts[start])))
    return groups
