"""Reads the settings of a run from TOML and the command line, checks them, and writes TOML."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w

from nanorchestra.config import SMALLEST, Config
from nanorchestra.errors import UserError, require

CONFIGS = Path(__file__).parents[1] / "configs"
TYPES = {int: "whole number", float: "number", str: "text", bool: "boolean (true or false)"}

SMALL = {  # of a dry run: the lengths of the miniature, two steps of each phase
    "run.device": "cpu",
    "run.dtype": "float32",
    "run.threads": 1,
    "warm_start.prompts": 2,
    "warm_start.trajectories": "",
    "grpo.steps": 2,
    "grpo.prompts": 2,
    "grpo.group_size": 4,
    "grpo.min_std": 0.0,
    "grpo.token_budget": 2048,
    "rollout.turns": 2,
    "rollout.turn_tokens": 96,
    "rollout.context_tokens": 1024,
    "rollout.page_size": 16,
    "rollout.pages": 0,
    "rollout.max_batch_tokens": 1024,
    "evaluation.tasks": 4,
    "evaluation.every_tasks": 4,
}


def _all_settings() -> dict[str, tuple[dataclasses.Field, Any]]:
    """The field and type of each setting by "section.name"."""
    found = {}
    for section, kind in get_type_hints(Config).items():
        types = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            found[f"{section}.{field.name}"] = field, types[field.name]
    return found


SETTINGS = _all_settings()


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds an option --section.name for each setting. The namespace has those that are given."""
    groups: dict[str, Any] = {}
    for name, (field, kind) in SETTINGS.items():
        section = name.split(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        default = str(field.default).lower() if kind is bool else field.default
        text = field.metadata["help"].replace("%", "%%")
        groups[section].add_argument(
            f"--{name}",
            type=_boolean if kind is bool else str if get_args(kind) else kind,
            choices=get_args(kind) or None,
            default=argparse.SUPPRESS,
            metavar=None if get_args(kind) else kind.__name__.upper(),
            help=f"{text} (default: {default or repr(default)})",
        )


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that the command line gives, by "section.name"."""
    return {name: value for name, value in vars(options).items() if name in SETTINGS}


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return text == "true"


def find_config(name: str) -> Path:
    """Returns the file `name`, or configs/`name`.toml. UserError if there is neither."""
    shipped = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
    require(
        name in shipped or Path(name).is_file(),
        f"--config {name}: there is no such file; give a TOML file, or one of {', '.join(shipped)}",
    )
    return Path(name) if Path(name).is_file() else shipped[name]


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of a TOML file (None: the defaults), changed by `overrides`.

    Keys of `overrides` are "section.name". UserError for a file that cannot be read, for unknown
    names, and for values of the wrong type or outside their range.
    """
    config = Config()
    for source, values in ((path, _read(path)), ("command line", overrides or {})):
        config = config.replace({k: _checked(f"{source}: {k}", k, v) for k, v in values.items()})
    _check_together(config, "command line" if overrides else str(path))
    return config


def _read(path: str | Path | None) -> dict[str, Any]:
    """The values of a TOML file by "section.name"."""
    try:
        sections = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: not TOML ({error})") from None
    loose = [name for name, entries in sections.items() if not isinstance(entries, dict)]
    require(not loose, f"{path}: {', '.join(loose)} stands outside of a [section]")
    return {f"{s}.{name}": value for s, keys in sections.items() for name, value in keys.items()}


def _checked(where: str, name: str, value: Any) -> Any:
    """The value in its setting's type. UserError: unknown, of another type, out of range."""
    require(name in SETTINGS, f"{where} is not a setting; train.py --help lists all")
    field, kind = SETTINGS[name]
    if get_origin(kind) is Literal:
        choices = ", ".join(get_args(kind))
        require(value in get_args(kind), f"{where} is {value!r}; it must be one of {choices}")
        return value
    if kind is float and type(value) is int:
        value = float(value)
    require(type(value) is kind, f"{where} is {value!r}; it must be a {TYPES[kind]}")
    if kind in (int, float):
        least, most = field.metadata["least"], field.metadata["most"]
        low = "above 0" if least == SMALLEST else f"at least {least}"
        require(least <= value <= most, f"{where} is {value}; it must be {low} and at most {most}")
    return value


def _check_together(config: Config, source: str) -> None:
    """Checks what no setting alone can tell. UserError."""
    run, grpo, rollout = config.run, config.grpo, config.rollout
    require(
        run.name.strip(". ") and "/" not in run.name,
        f"{source}: run.name is {run.name!r}; it must be the name of a directory, without a path",
    )
    require(
        grpo.importance_cap == 0 or grpo.importance_cap >= 1,
        f"{source}: grpo.importance_cap is {grpo.importance_cap}; it must be 0 or at least 1",
    )
    require(
        grpo.importance_cap or not rollout.overlap,
        f"{source}: rollout.overlap is true, so attempts come from weights one update old; "
        "grpo.importance_cap is 0, it must be at least 1 (2, say) to correct for it",
    )
    require(
        rollout.turn_tokens < rollout.context_tokens,
        f"{source}: rollout.turn_tokens is {rollout.turn_tokens}; it must be below "
        f"rollout.context_tokens ({rollout.context_tokens})",
    )
    needed = -(-rollout.context_tokens // rollout.page_size)
    require(
        rollout.pages == 0 or rollout.pages >= needed,
        f"{source}: rollout.pages is {rollout.pages}; it must be at least {needed}, one attempt of "
        f"rollout.context_tokens = {rollout.context_tokens}",
    )


def scaled_down(config: Config, model: str) -> Config:
    """Returns the same run in small for a dry run on CPUs, with the miniature's `model`.

    Sharding, checkpoints and optimizers stay as they are.
    """
    name, steps = f"{config.run.name}-dry-run", min(config.warm_start.steps, 2)
    changes = {"run.name": name, "warm_start.steps": steps, "model.path": model}
    return config.replace(SMALL | changes)


def to_toml(config: Config) -> str:
    """Returns all settings as TOML that load_config reads back to an equal config."""
    return tomli_w.dumps(dataclasses.asdict(config))
