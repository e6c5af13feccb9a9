"""Configuration: one frozen dataclass a section, read from TOML, overridden by `--section.key value`, checked, written back resolved."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

from nanorchestra.errors import UserError
from nanorchestra.files import is_utf8
from worlds.mixture import parse_mixture


@dataclass(frozen=True)
class RunConfig:
    name: str = "nano"
    root: str = "runs"
    seed: int = 0
    device: str = "auto"  # auto, cpu or cuda
    dtype: str = "auto"  # of computing: auto (float32 on cpu, bfloat16 on cuda), float32, bfloat16; the weights trained are float32
    threads: int = 0  # CPU threads of torch; 0: as many as there are cores, divided by the ranks of the machine
    checkpoint_every: int = 10  # steps
    keep_checkpoints: int = 2
    record_groups: int = 1  # groups a step whose trajectories are written in full
    skip_limit: int = (
        3  # steps in a row with a loss or gradient that is not finite: so many end the run
    )
    attention: str = "auto"  # of training on a GPU: triton, flash-attn, or auto: whichever is measured to be faster
    log_to: str = (
        ""  # tensorboard, wandb, or both with a comma between: metrics.jsonl goes there too
    )
    report_every: float = (
        120.0  # seconds between two reports while the run goes on; 0: only at its end
    )


@dataclass(frozen=True)
class ParallelSection:
    shard: str = "all"  # who holds the weights between them: all ranks, or those of a node (HSDP: each node has a replica)
    activation_checkpointing: bool = (
        False  # keep a layer's input only, and compute the layer again in the backward
    )
    cpu_offload: bool = (
        False  # master weights, gradients and moments in host memory; needs a GPU or several ranks
    )
    timeout: float = (
        1800.0  # seconds that ranks wait for one another; a rank that dies is missed sooner
    )


@dataclass(frozen=True)
class ModelSection:
    path: str = ""  # a Hugging Face directory to start from; empty: the preset with random weights
    preset: str = "nano"
    vocab_size: int = 896  # of the tokenizer that is trained when there is no path
    tokenizer_tasks: int = 600  # demonstrations it is trained on


@dataclass(frozen=True)
class WorldSection:
    avoid_share: float = 0.45  # of the tasks of GRPO in which the user forbids a tool; of lessons and held-out tasks it stays 0.45
    avoid_favourite: float = (
        0.0  # of these bans, those that hit the very tool that common sense would choose
    )


@dataclass(frozen=True)
class TaskSection:
    world: str = "miniature"  # or domains (small, made at once), a directory that data_gen.py wrote, a .jsonl of tau2 tasks; or "miniature=0.9, data/=0.1"
    experts: int = 3  # that each task of a directory or a file offers, simulated


@dataclass(frozen=True)
class WarmStartSection:
    steps: int = 240
    sensible: float = 0.8  # probability that the teacher chooses with common sense,
    heedful: float = 0.7  # that it leaves alone what is forbidden,
    quits: float = 0.15  # and that it gives up without asking anybody
    first_tools: int = 1  # on offer in the first lessons; then one more, up to two; then all
    few_steps: int = 120  # so many steps at most with each of these numbers of tools,
    few_loss: float = 0.12  # fewer after a step with a loss below this
    prompts: int = 16  # tasks a step
    samples: int = 1  # demonstrations a task
    optimizer: str = "muon"  # adamw or muon
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    hold: float = 0.5  # of the steps are at the full learning rate: copying appears suddenly, and sometimes late
    trajectories: str = ""  # runs, or their trajectories.jsonl, separated by commas: imitates the best of these instead of the teacher
    keep_outcome: float = 1.0  # of them, those with at least this outcome
    keep_reward: float = 0.0  # and this reward,
    keep_best: int = 4  # and of each task so many at most, the best; 0: all


@dataclass(frozen=True)
class Objective:
    """Settings of the policy loss; nanorchestra/training/objectives.py has the formulas."""

    surrogate: str = "clip"  # clip, gspo or cispo
    aggregation: str = "token"  # mean over ids (token) or attempts (sequence), or over attempts times context_tokens (constant)
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # bounds the loss where the advantage is negative; 0: no bound
    importance_cap: float = 0.0  # truncated importance sampling between sampler and trainer; 0: the ratio is to the sampler
    kl_coef: float = 0.0
    kl: str = "full"  # full, k2 or k3


@dataclass(frozen=True)
class GrpoSection(Objective):
    steps: int = 100
    prompts: int = 16  # groups a step
    group_size: int = 8
    optimizer: str = "adamw"  # adamw or muon
    learning_rate: float = 3e-4
    warmup_steps: int = 5
    final_fraction: float = 0.1  # of the learning rate, at the last step
    objective: str = "grpo"  # one of OBJECTIVES: sets those of the settings below that make it
    bounds: str = "group"  # extrema of the reward: group (the paper) or task (known from the task's price list)
    normalise_std: bool = True
    min_std: float = 0.01  # groups whose rewards spread less are left out
    advantage_clip: float = 3.0
    drop_invalid_format: bool = (
        False  # true: as published; false: bad format is pushed down by its reward of 0
    )
    resample: int = 0  # further rollouts a step, at most, while groups that teach are missing
    overlong_share: float = 0.0  # of rollout.context_tokens; within it a reward is lowered, by 1 at its end or if the attempt was cut
    drop_overlong: bool = False  # attempts cut by a limit are left out
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    token_budget: int = 16384  # packed tokens of a micro-batch


@dataclass(frozen=True)
class LoraSection:
    rank: int = (
        0  # of the adapters that are trained instead of the model (lora.py); 0: the model itself
    )
    alpha: float = 32.0  # their product is scaled by alpha / rank


@dataclass(frozen=True)
class RolloutSection:
    temperature: float = 1.0
    turns: int = 50
    turn_tokens: int = 160
    context_tokens: int = 1024
    page_size: int = 16
    pages: int = 0  # 0: as many as the rollout of a step can need
    max_batch_tokens: int = 4096
    retries: int = (
        1  # attempts that fail for reasons of the infrastructure are made again so many times,
    )
    failed_share: float = (
        0.5  # then left out; more than this share of a step's attempts ends the run
    )
    attention: str = "auto"  # of prefill on a GPU, as run.attention
    lockstep: bool = (
        True  # no engine step while a tool runs: the run is a pure function of its seed
    )
    context: str = "append"  # one growing session; or (rebuild) a prompt composed afresh each turn (rebuild.py), and every turn its own sample
    overlap: bool = False  # make the next step's rollout while the trainer works, by weights one update old: needs grpo.importance_cap
    only: int = 0  # make so many steps' rollouts, record all of them and train nothing; 0: train
    endpoint: str = ""  # base URL of an OpenAI-compatible server: with `only`, its model makes the attempts instead (endpoint.py)
    model: str = ""  # its name there
    input_usd_per_million: float = 0.0  # what the server's tokens cost
    output_usd_per_million: float = 0.0


@dataclass(frozen=True)
class EvaluationSection:
    tasks: int = 480
    temperature: float = 1.0  # as in training; 0 is greedy
    domain_tasks: int = 24  # of the domains that are mixed in with the miniature, judged apart
    every: int = 0  # GRPO steps between evaluations while training goes on; 0: none
    every_tasks: int = (
        64  # in each of them; held-out tasks that the evaluations before and after do not use
    )
    best: str = "reward"  # by which of BEST they choose the checkpoint that model-best/ has


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    model: ModelSection = field(default_factory=ModelSection)
    world: WorldSection = field(default_factory=WorldSection)
    task: TaskSection = field(default_factory=TaskSection)
    warm_start: WarmStartSection = field(default_factory=WarmStartSection)
    grpo: GrpoSection = field(default_factory=GrpoSection)
    lora: LoraSection = field(default_factory=LoraSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)


_PLAIN = {
    "surrogate": "clip",
    "aggregation": "token",
    "normalise_std": True,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 0.0,
    "resample": 0,
    "overlong_share": 0.0,
    "drop_overlong": False,
}
# What grpo.objective sets in [grpo]; whatever stands beside it, in the same file or on the same command line, is kept. Papers: nanorchestra/training/objectives.py.
OBJECTIVES: dict[str, dict[str, Any]] = {
    name: _PLAIN | changes
    for name, changes in {
        "grpo": {},
        "toolorchestra": {
            "dual_clip": 10.0,
            "bounds": "group",
            "advantage_clip": 3.0,
            "min_std": 0.1,
            "drop_invalid_format": True,
            "kl": "k2",
            "kl_coef": 1e-4,
        },
        "dr_grpo": {"normalise_std": False, "aggregation": "constant"},
        "dapo": {"resample": 3, "overlong_share": 0.2},
        "gspo": {
            "surrogate": "gspo",
            "aggregation": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        "cispo": {
            "surrogate": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
        },  # no lower bound, as published; the upper one is ScaleRL's (2510.13786)
    }.items()
}

BEST = {
    "reward": 1,
    "accuracy": 1,
    "preference": 1,
    "cost_per_correct_usd": -1,
}  # measures of an evaluation; -1: less is better
_CHOICES = {
    ("evaluation", "best"): tuple(BEST),
    ("grpo", "objective"): tuple(OBJECTIVES),
    ("grpo", "surrogate"): ("clip", "gspo", "cispo"),
    ("grpo", "aggregation"): ("token", "sequence", "constant"),
    ("parallel", "shard"): ("all", "node"),
    ("run", "device"): ("auto", "cpu", "cuda"),
    ("run", "dtype"): ("auto", "float32", "bfloat16"),
    ("run", "attention"): ("auto", "triton", "flash-attn"),
    ("rollout", "attention"): ("auto", "triton", "flash-attn"),
    ("grpo", "bounds"): ("group", "task"),
    ("grpo", "kl"): ("full", "k2", "k3"),
    ("rollout", "context"): ("append", "rebuild"),
    ("warm_start", "optimizer"): ("adamw", "muon"),
    ("grpo", "optimizer"): ("adamw", "muon"),
}
LARGEST = (
    2**53
)  # of any number: seeds and what is derived from them stay in 64 bits, and a float holds it exactly
_AT_MOST = {("run", "threads"): 1024, ("model", "vocab_size"): 2**20}
_POSITIVE = {
    ("run", "checkpoint_every"),
    ("run", "keep_checkpoints"),
    ("run", "skip_limit"),
    ("parallel", "timeout"),
    ("model", "vocab_size"),
    ("model", "tokenizer_tasks"),
    ("warm_start", "first_tools"),
    ("warm_start", "prompts"),
    ("warm_start", "samples"),
    ("grpo", "prompts"),
    ("grpo", "token_budget"),
    ("grpo", "advantage_clip"),
    ("grpo", "grad_clip"),
    ("lora", "alpha"),
    ("rollout", "turns"),
    ("rollout", "turn_tokens"),
    ("rollout", "context_tokens"),
    ("rollout", "page_size"),
    ("rollout", "max_batch_tokens"),
    ("rollout", "temperature"),
    ("evaluation", "tasks"),
    ("evaluation", "domain_tasks"),
    ("evaluation", "every_tasks"),
}


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), whole: bool = False
) -> Config:
    """The config of a TOML file (None: the defaults) with overrides ["--section.key", "value", ...]. UserError on anything unknown, and if the file
    is said to be `whole`, on a key that it lacks."""
    values: dict[str, dict[str, Any]] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); give a TOML file such as configs/nano.toml"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path}: not TOML ({error})") from None
    config = _apply(Config(), values, str(path))
    for section, key in (
        (section, key)
        for section in _fields(config)
        for key in _fields(getattr(config, section))
        if whole
    ):
        if key not in values.get(section, {}):
            raise UserError(
                f"{path}: {section}.{key} is missing; a run goes on with the whole config that it was begun with: restore the file, or add the key"
            )
    return _apply(config, _parse(overrides, config), "command line")


def _parse(overrides: Sequence[str], config: Config) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    words = list(overrides)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name.count(".") != 1:
            raise UserError(
                f"command line: {word!r} is not understood; an override is --section.key value, for instance --grpo.steps 50"
            )
        if not equals:
            if not words:
                raise UserError(f"command line: {name} has no value")
            value = words.pop(0)
        section, key = name[2:].split(".")
        kind = _fields(getattr(config, section, None)).get(key)
        if kind is not str:
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                pass  # left as text: _apply says what would be right
        values.setdefault(section, {})[key] = value
    return values


def _fields(section: Any) -> dict[str, type]:
    return typing.get_type_hints(type(section)) if dataclasses.is_dataclass(section) else {}


def _apply(config: Config, values: dict[str, Any], source: str) -> Config:
    for section, entries in values.items():
        if section not in _fields(config):
            raise UserError(
                f"{source}: unknown section [{section}]; the sections are {', '.join(_fields(config))}"
            )
        if not isinstance(entries, dict):
            raise UserError(f"{source}: [{section}] must be a table of settings, not {entries!r}")
        current = getattr(config, section)
        hints = _fields(current)
        if section == "grpo" and isinstance(entries.get("objective"), str):
            entries = OBJECTIVES.get(entries["objective"], {}) | entries
        for key, value in entries.items():
            if key not in hints:
                raise UserError(
                    f"{source}: unknown key {section}.{key}; [{section}] has {', '.join(hints)}"
                )
            kind = hints[key]
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and not 0 <= value <= LARGEST
            ):
                raise UserError(
                    f"{source}: {section}.{key} is {value}; it must be a finite number, 0 or more and at most {LARGEST}"
                )
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = entries[key] = float(value)
            if type(value) is not kind:
                raise UserError(
                    f"{source}: {section}.{key} is {value!r}; it must be a {_NAMES[kind]}"
                )
            _check(source, section, key, value)
        config = dataclasses.replace(config, **{section: dataclasses.replace(current, **entries)})
    if config.grpo.group_size < 2:
        raise UserError(
            f"{source}: grpo.group_size is {config.grpo.group_size}; a group compares at least 2 attempts"
        )
    grpo = config.grpo
    if grpo.clip_low > 1:
        raise UserError(
            f"{source}: grpo.clip_low is {grpo.clip_low}; it must lie in 0..1: the ratio's lower bound is 1 - clip_low"
        )
    if grpo.dual_clip and (
        grpo.surrogate not in ("clip", "gspo") or grpo.dual_clip <= 1 + grpo.clip_high
    ):
        raise UserError(
            f"{source}: grpo.dual_clip is {grpo.dual_clip}; it must be 0, or above 1 + grpo.clip_high with grpo.surrogate clip or gspo"
        )
    if 0 < grpo.importance_cap < 1:
        raise UserError(
            f"{source}: grpo.importance_cap is {grpo.importance_cap}; it must be 0 (off) or at least 1, the weight of ids that sampler and trainer agree on"
        )
    if config.rollout.overlap and not grpo.importance_cap:
        raise UserError(
            f"{source}: rollout.overlap is true, so attempts come from weights one update old; grpo.importance_cap is 0, it must be at least 1 (2, say) to correct for it"
        )
    if 0 < config.rollout.pages * config.rollout.page_size < config.rollout.context_tokens:
        raise UserError(
            f"{source}: rollout.pages is {config.rollout.pages}; of {config.rollout.page_size} tokens each they must hold one attempt at least: "
            f"{-(-config.rollout.context_tokens // config.rollout.page_size)} for rollout.context_tokens = {config.rollout.context_tokens}"
        )
    if config.rollout.turn_tokens >= config.rollout.context_tokens:
        raise UserError(
            f"{source}: rollout.turn_tokens is {config.rollout.turn_tokens}; it must be below rollout.context_tokens ({config.rollout.context_tokens})"
        )
    return config


_NAMES = {int: "whole number", float: "number", str: "text", bool: "boolean (true or false)"}


def _check(source: str, section: str, key: str, value: Any) -> None:
    where = (section, key)
    if isinstance(value, str) and not is_utf8(value):
        raise UserError(f"{source}: {section}.{key} is {value!r}; it must be text in UTF-8")
    if where in _CHOICES and value not in _CHOICES[where]:
        raise UserError(
            f"{source}: {section}.{key} is {value!r}; it must be one of {', '.join(_CHOICES[where])}"
        )
    if where == ("run", "name") and (
        not value.strip(". ") or "/" in value or not value.isprintable()
    ):
        raise UserError(
            f"{source}: run.name is {value!r}; it must be the name of a directory, without a path (that is run.root)"
        )
    if where == ("task", "world"):
        parse_mixture(value, f"{source}: task.world")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value > _AT_MOST.get(where, LARGEST):
            raise UserError(
                f"{source}: {section}.{key} is {value}; it must be at most {_AT_MOST[where]}"
            )
        if where in _POSITIVE and value == 0:
            raise UserError(f"{source}: {section}.{key} is 0; it must be above 0")
    if (
        key.endswith(("_share", "_fraction"))
        or key in ("hold", "sensible", "heedful", "quits", "keep_outcome", "avoid_favourite")
    ) and value > 1:
        raise UserError(f"{source}: {section}.{key} is {value}; it must lie in 0..1")


def scaled_down(config: Config, model: Path) -> Config:
    """The same run in small, for a trial on CPUs: the miniature in the directory `model`, its lengths, two steps of each phase, little
    evaluation. How it is sharded, checkpointed and optimised stays."""
    small = {
        "run": {
            "device": "cpu",
            "dtype": "float32",
            "name": f"{config.run.name}-dry-run",
            "threads": 1,
        },
        "model": {"path": str(model)},
        "warm_start": {"steps": min(config.warm_start.steps, 2), "prompts": 2, "trajectories": ""},
        "grpo": {"steps": 2, "prompts": 2, "group_size": 4, "min_std": 0.0, "token_budget": 2048},
        "rollout": {
            "turns": 2,
            "turn_tokens": 96,
            "context_tokens": 1024,
            "page_size": 16,
            "pages": 0,
            "max_batch_tokens": 1024,
        },
        "evaluation": {"tasks": 4, "every_tasks": 4},
    }
    return dataclasses.replace(
        config,
        **{
            name: dataclasses.replace(getattr(config, name), **values)
            for name, values in small.items()
        },
    )


def to_toml(config: Config) -> str:
    """Every value, resolved, as TOML that load_config reads back to an equal config."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        for name, value in dataclasses.asdict(getattr(config, section.name)).items():
            text = json.dumps(value, ensure_ascii=False).replace(
                "\x7f", "\\u007f"
            )  # TOML knows no surrogate pairs, and no bare DEL
            lines.append(f"{name} = {text}")
        lines.append("")
    return "\n".join(lines)
