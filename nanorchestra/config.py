"""The settings of a run: one frozen dataclass per section.

A field holds a setting's type, default, range and help. nanorchestra/settings.py reads them from
TOML and the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DRAWN = "drawn"  # task.preference: another one for each task
DRAFT = "draft"  # model.path: an untrained model of task.world, which the run writes first


def setting(default: Any, help: str, *, least: float = 0) -> Any:
    """Returns a dataclass field; `least` is the smallest value of a number."""
    return dataclasses.field(default=default, metadata={"help": help, "least": least})


@dataclass(frozen=True)
class RunSection:
    """The run's directory, machine and records."""

    name: str = setting("nano", "name of the run's directory")
    root: str = setting("runs", "directory of all runs")
    seed: int = setting(0, "seed of everything that is drawn at random")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "of computing; weights in training stay float32. auto: bfloat16 on a GPU, float32 on a CPU",
    )
    threads: int = setting(
        0, "CPU threads of torch, whatever OMP_NUM_THREADS says; 0: cores / ranks of this machine"
    )
    checkpoint_every: int = setting(10, "steps between checkpoints", least=1)


@dataclass(frozen=True)
class ParallelSection:
    """How the model is spread over GPUs."""

    shard: Literal["all", "node"] = setting(
        "all", "weights are sharded over all ranks, or over those of a node (HSDP)"
    )
    activation_checkpointing: bool = setting(
        False, "keep a layer's input only and recompute the layer in the backward pass"
    )
    cpu_offload: bool = setting(False, "weights, gradients and moments in host memory")


@dataclass(frozen=True)
class ModelSection:
    """The model that training starts from."""

    path: str = setting(
        "",
        "directory in Hugging Face layout, .gguf file, hub id: owner/name, or draft: an untrained "
        "model for task.world, which the run writes first",
    )


@dataclass(frozen=True)
class TaskSection:
    """What the run practises on."""

    world: str = setting(
        "miniature",
        "miniature, domains (a few small databases; domains:bank+clinic names them), "
        "a directory of data_gen.py or tau2-bench, a .jsonl file of tau2 tasks or ToolScale rows, "
        "questions:FILE with a .jsonl file of questions and answers, a .py file with an "
        "environment of your own, agent:FILE.py:FUNCTION with an agent that has tasks of its own, "
        "or a mixture: 'miniature=0.9, data/=0.1'",
    )
    tools: str = setting("", "catalogue of the tools for questions, a file as tools.py describes")
    experts: str = setting(
        "simulated",
        "experts of the catalogue: simulated, real (asked at their endpoints), record:DIR (real, "
        "and each reply is kept in DIR) or replay:DIR (the replies of DIR alone)",
    )
    judge: str = setting(
        "", "expert of the catalogue, then not on offer, that judges what no rule accepts"
    )
    spoiled: float = setting(
        0.0, "share of the demonstrations in small databases that do one thing wrong, 0 to 1"
    )
    user: str = setting(
        "", "expert of the catalogue that plays the users of domains; empty: a script"
    )
    preference: str = setting(
        DRAWN,
        "of rows without one: words, weights and limits (docs/questions.md); drawn: another "
        "for each task, from which obedience is learned; empty: none",
    )
    reward: str = setting(
        "",
        "FILE.py:FUNCTION, a function of yours that pays the attempts of a group in place of "
        "reward.py (docs/worlds.md)",
    )
    agent: str = setting(
        "",
        "what plays the attempts in place of our loop: FILE.py:FUNCTION (docs/agents.md)",
    )
    agent_timeout_s: float = setting(
        600.0, "seconds that an agent has for an attempt, beside the policy's"
    )


@dataclass(frozen=True)
class WarmStartSection:
    """Supervised steps on demonstrations, before GRPO."""

    steps: int = setting(240, "supervised steps before GRPO")
    prompts: int = setting(16, "demonstrated tasks per step", least=1)
    optimizer: Literal["adamw", "muon"] = setting("muon", "optimizer of the warm start")
    learning_rate: float = setting(4e-3, "peak learning rate")


@dataclass(frozen=True)
class GrpoSection:
    """Reinforcement learning on groups of attempts at the same task."""

    steps: int = setting(
        100,
        "GRPO steps in all. With --resume a larger number extends the run; the learning rate then "
        "follows the schedule of the new number",
    )
    prompts: int = setting(16, "groups per step", least=1)
    group_size: int = setting(8, "attempts per group", least=2)
    epochs: int = setting(0, "times over the world's training tasks, instead of steps; 0: steps")
    mini_batch: int = setting(
        0,
        "samples of an update, of which a step makes several; 0: one update a step. A sample is an "
        "attempt, with rebuilt context a turn",
    )
    optimizer: Literal["adamw", "muon"] = setting("adamw", "optimizer of GRPO")
    beta2: float = setting(0.95, "AdamW's decay of squared gradients")
    weight_decay: float = setting(0.0, "AdamW's weight decay")
    learning_rate: float = setting(3e-4, "peak learning rate")
    warmup_steps: int = setting(5, "steps over which the learning rate rises to its peak")
    final_fraction: float = setting(0.1, "of the peak learning rate, at the last step")
    objective: Literal["grpo", "toolorchestra"] = setting(
        "grpo",
        "advantage, loss and filters (docs/training.md); another one than the file's does not take "
        "the file's kl_coef, min_std and min_entropy",
    )
    bounds: Literal["group", "task"] = setting(
        "group", "extrema of the reward's parts: of the group (the paper), or of the price list"
    )
    min_std: float = setting(0.05, "groups whose rewards spread less are left out")
    kl_coef: float = setting(0.0, "weight of the KL divergence from the model before GRPO")
    min_entropy: float = setting(
        0.0, "entropy in nats that the policy must have at an id for its advantage to count; 0: any"
    )
    importance_cap: float = setting(
        0.0, "cap of the trainer/sampler importance weight, at least 1; 0: no such weight"
    )
    token_budget: int = setting(16384, "packed tokens of a micro-batch", least=1)


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters."""

    rank: int = setting(0, "rank of the adapters that are trained, 0: train the model itself")
    alpha: float = setting(32.0, "adapters are scaled by alpha / rank", least=0.01)
    base: Literal["full", "int4"] = setting(
        "full",
        "the frozen base: in the dtype of computing, or in 4 bits (QLoRA), one copy that trainer "
        "and engine of one process share",
    )


@dataclass(frozen=True)
class RolloutSection:
    """Sampling of attempts."""

    temperature: float = setting(1.0, "sampling temperature of GRPO's attempts", least=0.01)
    turns: int = setting(50, "turns of an attempt at most", least=1)
    calls_per_turn: int = setting(4, "calls of a turn that are run at most", least=1)
    turn_tokens: int = setting(160, "tokens of a turn at most", least=1)
    context_tokens: int = setting(1024, "tokens of an attempt's context at most", least=1)
    page_size: int = setting(16, "tokens of a KV page", least=1)
    pages: int = setting(0, "KV pages, 0: as many as a step can need")
    max_batch_tokens: int = setting(4096, "tokens of an engine step at most", least=1)
    lockstep: bool = setting(True, "no engine step while a tool runs: reproducible from the seed")
    context: Literal["append", "rebuild"] = setting(
        "append", "one growing session, or a prompt composed anew each turn"
    )


@dataclass(frozen=True)
class EvaluationSection:
    """Attempts at held-out tasks."""

    tasks: int = setting(480, "held-out tasks before and after GRPO", least=1)
    temperature: float = setting(1.0, "sampling temperature, 0: greedy")


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    run: RunSection = RunSection()
    parallel: ParallelSection = ParallelSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    warm_start: WarmStartSection = WarmStartSection()
    grpo: GrpoSection = GrpoSection()
    lora: LoraSection = LoraSection()
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()

    def replace(self, values: Mapping[str, Any]) -> Config:
        """Returns a copy with some values changed; keys are "section.name"."""
        config = self
        for name, value in values.items():
            section, key = name.split(".")
            changed = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section: changed})
        return config
