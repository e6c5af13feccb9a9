"""The settings of a run: one frozen dataclass per section.

A field holds a setting's type and default, its comment is the help of `train.py --help`.
nanorchestra/settings.py reads the settings from TOML and the command line, `check` is for both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanorchestra.errors import require

DRAWN = "drawn"  # task.preference: another one for each task
DRAFT = "draft"  # model.path: an untrained model of task.world, which the run writes first


@dataclass(frozen=True)
class RunSection:
    """The run's directory, machine and records."""

    name: str = "nano"  # name of the run's directory
    root: str = "runs"  # directory of all runs
    seed: int = 0  # seed of everything that is drawn at random
    # of computing; weights in training stay float32. auto: bfloat16 on a GPU, float32 on a CPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # CPU threads of torch, whatever OMP_NUM_THREADS says; 0: cores / ranks of this machine
    threads: int = 0
    checkpoint_every: int = 10  # steps between checkpoints


@dataclass(frozen=True)
class ParallelSection:
    """How the model is spread over GPUs."""

    # weights are sharded over all ranks, or over those of a node (HSDP)
    shard: Literal["all", "node"] = "all"
    # keep a layer's input only and recompute the layer in the backward pass
    activation_checkpointing: bool = False
    cpu_offload: bool = False  # weights, gradients and moments in host memory


@dataclass(frozen=True)
class ModelSection:
    """The model that training starts from."""

    # directory in Hugging Face layout, .gguf file, hub id: owner/name, or draft: an untrained model
    # for task.world, which the run writes first
    path: str = ""


@dataclass(frozen=True)
class TaskSection:
    """What the run practises on."""

    # desk (questions whose next step stands in a result), desk:unseen (the same, with held-out
    # tasks about words that no training task has), domains (a few small databases;
    # domains:bank+clinic names them), a directory of data_gen.py, a .jsonl file of ToolScale's
    # rows, questions:FILE with a table of questions and answers (.jsonl, .csv, .tsv, .parquet),
    # frames or hle as the hub has them, recorded:FILE with answers that were given before, a .py
    # file with an environment of your own, or a mixture: 'desk=0.9, data/=0.1'
    world: str = "desk"
    tools: str = ""  # catalogue of the tools for questions, a file as tools.py describes
    # experts of the catalogue: simulated, real (asked at their endpoints), record:DIR (real, and
    # each reply is kept in DIR) or replay:DIR (the replies of DIR alone)
    experts: str = "simulated"
    judge: str = ""  # expert of the catalogue, then not on offer, that judges what no rule accepts
    # share of the demonstrations in small databases that do one thing wrong, 0 to 1
    spoiled: float = 0.0
    user: str = ""  # expert of the catalogue that plays the users of domains; empty: a script
    # of rows without one: words, weights and limits (docs/worlds.md); drawn: another for each
    # task, from which obedience is learned; empty: none
    preference: str = DRAWN
    # FILE.py:FUNCTION, a function of yours that pays the attempts of a group in place of reward.py
    # (docs/worlds.md)
    reward: str = ""
    # what plays the attempts in place of our loop: FILE.py:FUNCTION (docs/training.md)
    agent: str = ""
    agent_timeout_s: float = 600.0  # seconds that an agent has for an attempt, beside the policy's


@dataclass(frozen=True)
class WarmStartSection:
    """Supervised steps on demonstrations, before GRPO."""

    # supervised steps before GRPO, at most: they end when the policy is as close to the teacher as
    # teacher_kl says
    steps: int = 240
    # nats per id by which the loss is above the teacher's entropy when the steps end; 0: all steps
    teacher_kl: float = 0.0005
    prompts: int = 16  # demonstrated tasks per step
    optimizer: Literal["adamw", "muon"] = "muon"  # optimizer of the warm start
    learning_rate: float = 4e-3  # peak learning rate


@dataclass(frozen=True)
class GrpoSection:
    """Reinforcement learning on groups of attempts at the same task."""

    # GRPO steps in all. With --resume a larger number extends the run; the learning rate then
    # follows the schedule of the new number
    steps: int = 100
    prompts: int = 16  # groups per step
    group_size: int = 8  # attempts per group
    epochs: int = 0  # times over the world's training tasks, instead of steps; 0: steps
    # samples of an update, of which a step makes several; 0: one update a step. A sample is an
    # attempt, with rebuilt context a turn
    mini_batch: int = 0
    optimizer: Literal["adamw", "muon"] = "adamw"  # optimizer of GRPO
    beta2: float = 0.95  # AdamW's decay of squared gradients
    weight_decay: float = 0.0  # AdamW's weight decay
    momentum: float = 0.95  # of Muon, below 1; AdamW has none
    learning_rate: float = 3e-4  # peak learning rate
    warmup_steps: int = 5  # steps over which the learning rate rises to its peak
    # share of the steps at the peak learning rate, which then falls to a tenth of it; 1: no fall
    hold: float = 0.0
    # advantage, loss and filters (docs/training.md)
    objective: Literal["grpo", "dr_grpo", "toolorchestra"] = "grpo"
    # extrema of the reward's parts: of the group (the paper), or of the price list
    bounds: Literal["group", "task"] = "group"
    min_std: float = 0.05  # groups whose rewards spread less are left out
    kl_coef: float = 0.0  # weight of the KL divergence from the model before GRPO
    # entropy in nats that the policy must have at an id for it to be in the gradient: where it
    # chooses, not where it copies; 0: any
    min_entropy: float = 0.0
    # cap of the trainer/sampler importance weight, at least 1; 0: no such weight
    importance_cap: float = 0.0
    token_budget: int = 16384  # packed tokens of a micro-batch


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters."""

    rank: int = 0  # rank of the adapters that are trained, 0: train the model itself
    alpha: float = 32.0  # adapters are scaled by alpha / rank
    # the frozen base: in the dtype of computing, or in 4 bits (QLoRA), one copy that trainer and
    # engine of one process share
    base: Literal["full", "int4"] = "full"


@dataclass(frozen=True)
class RolloutSection:
    """Sampling of attempts."""

    # of the engine: in the dtype of computing, or matrices in int8, rounded anew after each update
    weights: Literal["full", "int8"] = "full"
    temperature: float = 1.0  # sampling temperature of GRPO's attempts
    turns: int = 50  # turns of an attempt at most
    calls_per_turn: int = 4  # calls of a turn that are run at most
    turn_tokens: int = 160  # tokens of a turn at most
    context_tokens: int = 1024  # tokens of an attempt's context at most
    page_size: int = 16  # tokens of a KV page
    pages: int = 0  # KV pages, 0: as many as a step can need
    max_batch_tokens: int = 4096  # tokens of an engine step at most
    lockstep: bool = True  # no engine step while a tool runs: reproducible from the seed


@dataclass(frozen=True)
class EvaluationSection:
    """Attempts at held-out tasks."""

    tasks: int = 480  # held-out tasks before and after GRPO
    temperature: float = 1.0  # sampling temperature, 0: greedy


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

    def values(self) -> dict[str, Any]:
        """Returns all values by "section.name"."""
        sections = dataclasses.asdict(self).items()
        return {
            f"{section}.{name}": value
            for section, table in sections
            for name, value in table.items()
        }

    def replace(self, values: Mapping[str, Any]) -> Config:
        """Returns a copy with some values changed; keys are "section.name"."""
        config = self
        for name, value in values.items():
            section, key = name.split(".")
            changed = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section: changed})
        return config


# The smallest values of numbers, where it is not 0.
LEAST = {"grpo.group_size": 2, "lora.alpha": 0.01, "rollout.temperature": 0.01} | dict.fromkeys(
    (
        "run.checkpoint_every",
        "warm_start.prompts",
        "grpo.prompts",
        "grpo.token_budget",
        "rollout.turns",
        "rollout.calls_per_turn",
        "rollout.turn_tokens",
        "rollout.context_tokens",
        "rollout.page_size",
        "rollout.max_batch_tokens",
        "evaluation.tasks",
    ),
    1,
)


def check(config: Config) -> None:
    """Checks what no type says. UserError names the setting, its value and what is right."""
    for name, value in config.values().items():
        least = LEAST.get(name, 0)
        require(
            not isinstance(value, int | float) or least <= value < math.inf,
            f"{name} is {value}; it must be at least {least}",
        )
    rollout, cap = config.rollout, config.grpo.importance_cap
    context, pages = rollout.context_tokens, -(-rollout.context_tokens // rollout.page_size)
    require(
        cap == 0 or cap >= 1,
        f"grpo.importance_cap is {cap}; it must be at least 1, or 0 for no such weight",
    )
    momentum, hold = config.grpo.momentum, config.grpo.hold
    require(momentum < 1, f"grpo.momentum is {momentum}; it must be below 1")
    require(hold <= 1, f"grpo.hold is {hold}; it must be at most 1, a share of the steps")
    if rollout.weights == "int8":
        require(
            cap,
            "grpo.importance_cap is 0; with rollout.weights int8 it must be at least 1: attempts "
            "are sampled by other weights than learn from them",
        )
        require(
            config.lora.base != "int4",
            "rollout.weights is int8; with lora.base int4 it must be full: the engine shares the "
            "weights",
        )
    require(
        rollout.turn_tokens < context,
        f"rollout.turn_tokens is {rollout.turn_tokens}; it must be below rollout.context_tokens, "
        f"{context}",
    )
    require(
        rollout.pages == 0 or rollout.pages >= pages,
        f"rollout.pages is {rollout.pages}; it must be 0, or at least {pages}: those of one "
        f"attempt of rollout.context_tokens = {context}",
    )
    if config.lora.base == "int4":
        require(
            config.lora.rank,
            "lora.rank is 0; with lora.base int4 it must be 1 or more: adapters alone are trained",
        )
        require(
            not config.parallel.cpu_offload,
            "parallel.cpu_offload is true; with lora.base int4 it must be false: the engine shares "
            "the weights",
        )
