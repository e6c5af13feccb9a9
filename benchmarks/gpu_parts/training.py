"""A GRPO step beside what `train.py --plan` says, and NCCL with one rank."""

from __future__ import annotations

import os
import random
import time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu_parts import Part
from nanorchestra.config import Config
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model import lora
from nanorchestra.model.hf_config import PRESETS
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.weights import named_hf_tensors
from nanorchestra.settings import load_config
from nanorchestra.training.build import build_engine, build_trainer
from nanorchestra.training.costs import GB, peak_flops
from nanorchestra.training.objectives import group_advantages, objective_of
from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.plan import Setup, memory, peak
from nanorchestra.training.ranks import Ranks, shard_model
from nanorchestra.training.trainer import Trainer, TrainerSettings


def small(part: Part) -> None:
    """Qwen3-0.6B, all weights."""
    grpo_step(part, "qwen3-0.6b")


def large(part: Part) -> None:
    """Qwen3-4B: all weights where --plan says that they fit, else adapters."""
    grpo_step(part, "qwen3-4b")


def grpo_step(part: Part, name: str) -> None:
    """Two steps of which the second is measured: rollout, update, weights back to the engine."""
    length, prompt = (8, 24) if part.rehearse else (512, 512)
    shape = PRESETS["nano" if part.rehearse else name]
    settings = {
        "grpo.prompts": 2 if part.rehearse else 8,
        "grpo.group_size": 4 if part.rehearse else 8,
    }
    settings |= {"rollout.context_tokens": length + prompt, "rollout.turn_tokens": length}
    settings |= {"rollout.pages": 0}
    config = load_config(name, settings)
    device = part.device
    if not part.rehearse:
        torch.cuda.reset_peak_memory_stats()
        if peak(Setup(config, 1, shape)) > torch.cuda.mem_get_info()[0]:
            config = config.replace({"lora.rank": 32})
    dtype = torch.float32 if part.rehearse else torch.bfloat16
    ranks = Ranks.start(device, sharded=not part.rehearse)
    tokenizer: Any = SimpleNamespace(
        vocab_size=shape.vocab_size, eos_ids=(), decode=lambda ids, skip_special: ""
    )
    model = trained_model(config, shape, ranks, dtype)
    trainer = build_trainer(config, model, tokenizer, ranks, dtype)
    trainer.prepare("adamw", False)
    engine = build_engine(config, shape, tokenizer, ranks, dtype)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(shape.vocab_size) for _ in range(prompt)] for _ in range(config.grpo.prompts)
    ]
    for _ in range(2):
        times, metrics, sampled = _one_step(config, trainer, engine, dtype, prompts, length)
    figures = {f"{phase}_s": taken for phase, taken in times.items()}
    figures["rollout_tokens_per_s"] = sampled / times["rollout"]
    limit = peak_flops(ranks.device, dtype)
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
    ranks.close()


def trained_model(config: Config, shape: ModelConfig, ranks: Ranks, dtype: torch.dtype) -> Qwen3:
    """A sharded model with random weights, drawn where they lie."""
    with torch.device("meta"):
        model = Qwen3(shape)
        if config.lora.rank:
            model.to(dtype)
            lora.add_adapters(model, config.lora.rank, config.lora.alpha, 0)
        model = shard_model(model, ranks, dtype)
    model.to_empty(device=ranks.device)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if parameter.dim() == 1:
                local.fill_(1.0)
            else:
                local.normal_(0.0, 0.02)
    if config.lora.rank:
        lora.reset(model, 0)
    return model


def _one_step(
    config: Config, trainer: Trainer, engine: Engine, dtype: torch.dtype, prompts: list, length: int
) -> tuple[dict[str, float], dict[str, float], int]:
    """Returns the seconds of each phase, the trainer's metrics, and the sampled ids."""
    times, size, objective = {}, config.grpo.group_size, objective_of(config.grpo)

    def took(phase: str) -> None:
        nonlocal start
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times[phase], start = time.perf_counter() - start, time.perf_counter()

    start = time.perf_counter()
    engine.update_weights(named_hf_tensors(trainer.model, dtype))
    engine.wake()
    took("publish")
    params = [
        SamplingParams(max_tokens=length, seed=seed, ignore_eos=True)
        for seed in range(len(prompts) * size)
    ]
    done = engine.generate([text for text in prompts for _ in range(size)], params)
    took("rollout")
    engine.sleep()
    groups = []
    for i, text in enumerate(prompts):
        members, fine = done[i * size : (i + 1) * size], [True] * size
        rewards = [sum(m.token_ids) % 97 / 97 for m in members]
        advantages, _ = group_advantages(rewards, fine, fine, objective, 0.0)
        samples = [
            Sample(
                text + m.token_ids,
                [False] * len(text) + [True] * len(m.token_ids),
                [0.0] * len(text) + m.logprobs,
                advantage,
            )
            for m, advantage in zip(members, advantages, strict=True)
        ]
        groups.append(Group(samples, len(text)))
    metrics = trainer.policy_step(groups, 1e-6, objective).metrics
    took("update")
    assert "skipped" not in metrics, "the loss or the gradient is not finite"
    return times, metrics, sum(len(m.token_ids) for m in done)


def nccl(part: Part) -> None:
    """One rank under NCCL (gloo in the rehearsal): a collective, and a sharded step."""
    device = part.device
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    ranks = Ranks.start(device, sharded=True)
    x = torch.ones(1 << 10 if part.rehearse else 1 << 28, device=device)
    start = time.perf_counter()
    torch.distributed.all_reduce(x)
    value = x[-1].item()  # waits
    part.note("all_reduce", seconds=time.perf_counter() - start, backend=str(x.device.type))
    assert value == 1.0, f"all_reduce over one rank changed 1 to {value}"
    norms = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Qwen3(PRESETS["nano"])
        model.init_weights(0)
        model.to(device)
        mine = ranks if sharded else Ranks(device=device)
        if sharded:
            model = shard_model(model, mine, torch.float32)
        trainer = Trainer(model, vocab_limit=896, ranks=mine, settings=TrainerSettings())
        ids = [*range(5, 30), *range(40, 60)]
        demonstration = Group([Sample(ids, [False] * 25 + [True] * 20, [0.0] * 45)], 25)
        metrics = trainer.supervised_step([demonstration], 1e-4)
        norms.append((metrics["loss"], metrics["grad_norm"]))
    part.note("step", loss=norms[0][0], sharded_loss=norms[1][0])
    assert all(abs(a - b) < 1e-3 * abs(a) for a, b in zip(*norms, strict=True)), norms
    ranks.close()
