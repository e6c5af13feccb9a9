"""Reads the settings of a run from TOML and the command line, and checks them.

One argparse parser, made from the fields of config.py, checks both sources.
"""

import argparse
import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from nanorchestra.config import Config
from nanorchestra.errors import ArgumentParser, UserError, nearest, require
from nanorchestra.files import read_toml

CONFIGS = Path(__file__).parents[1] / "configs"
KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
SMALL = read_toml(Path(__file__).with_name("dry_run.toml"))
DRY_RUN = "-dry-run"  # at the end of the name of such a run
SETTINGS = {  # field and type of each setting
    f"{section}.{field.name}": (field, get_type_hints(kind)[field.name])
    for section, kind in get_type_hints(Config).items()
    for field in dataclasses.fields(kind)
}
# Those that a file chooses for its objective, and those that may change when a run is resumed.
OF_OBJECTIVE = ("grpo.kl_coef", "grpo.min_std", "grpo.min_entropy")
RESUMABLE = ("run.checkpoint_every", "grpo.steps")


def add_settings(parser: argparse.ArgumentParser, config: Config | None = None) -> None:
    """Adds an option --section.name for each setting. The namespace has those that are given.

    The help has the values of `config` as defaults.
    """
    defaults = dataclasses.asdict(config or Config())
    for name, (field, kind) in SETTINGS.items():
        section, _, key = name.partition(".")
        choices = get_args(kind) or None
        parser.add_argument(
            f"--{name}",
            type=str if choices else _reader(kind, **field.metadata),
            choices=choices,
            default=argparse.SUPPRESS,
            metavar=None if choices else kind.__name__.upper(),
            help=f"{field.metadata['help']} (default: {defaults[section][key]!r})".replace(
                "%", "%%"
            ),
        )


def _reader(kind, help, least) -> Callable[[str], Any]:
    """Returns a function that reads text as a value of `kind`, for argparse."""

    def read(text):
        try:
            value = {"true": True, "false": False}[text] if kind is bool else kind(text)
        except (KeyError, ValueError):
            right = KINDS[kind]
            raise argparse.ArgumentTypeError(f"{text!r} must be {right}") from None
        if kind in (int, float) and not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return value

    return read


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings among the options, by "section.name"."""
    return {name: value for name, value in vars(options).items() if name in SETTINGS}


def load_config(name: str | Path | None, overrides: Mapping[str, Any] = {}) -> Config:
    """Returns the config of a TOML file, or of configs/`name`.toml, changed by `overrides`.

    None: the defaults. Keys of `overrides` are "section.name". With another grpo.objective than the
    file's, the settings OF_OBJECTIVE have their defaults. UserError for a file that cannot be
    read, for unknown names, and for values of the wrong type or outside their range.
    """
    parser = ArgumentParser(allow_abbrev=False)
    add_settings(parser)
    try:
        sections = tomllib.loads(_find(name).read_text(encoding="utf-8")) if name else {}
        words = []
        for section, entries in sections.items():
            require(isinstance(entries, dict), f"{section!r} is no section of settings of a run")
            for key, value in entries.items():
                text = str(value).lower() if isinstance(value, bool) else value
                words.append(f"--{section}.{key}={text}")
        settings = given_settings(parser.parse_args(words))
    except (OSError, ValueError, AttributeError, UserError) as error:
        raise UserError(f"{name}: {error}") from None
    file = Config().replace(settings)
    config = file.replace(overrides)
    if config.grpo.objective != file.grpo.objective:
        defaults = {name: SETTINGS[name][0].default for name in OF_OBJECTIVE}
        config = file.replace(defaults | overrides)
    _check_together(config)
    return config


def _find(name) -> Path:
    shipped = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
    path = shipped.get(str(name), Path(name))
    near = nearest(str(name), shipped)
    require(path.is_file(), f"no such file; give a TOML file, or one of {', '.join(shipped)}{near}")
    return path


def _check_together(config):
    """Checks what no setting alone can tell. UserError."""
    cap, rollout = config.grpo.importance_cap, config.rollout
    context, least = rollout.context_tokens, -(-rollout.context_tokens // rollout.page_size)
    require(
        cap >= 1 or cap == 0,
        f"grpo.importance_cap is {cap}; it must be at least 1, or 0 for no such weight",
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
    require(
        rollout.turn_tokens < context,
        f"rollout.turn_tokens is {rollout.turn_tokens}; it must be below rollout.context_tokens, "
        f"{context}",
    )
    require(
        rollout.pages == 0 or rollout.pages >= least,
        f"rollout.pages is {rollout.pages}; it must be 0, or at least {least}: those of one "
        f"attempt of rollout.context_tokens = {context}",
    )


def scaled_down(config: Config, model: str) -> Config:
    """Returns the same run in small for a dry run on CPUs, with the miniature's `model`.

    Sharding, checkpoints and optimizers stay as they are.
    """
    name, steps = f"{config.run.name}{DRY_RUN}", min(config.warm_start.steps, 2)
    changes = {"run.name": name, "warm_start.steps": steps, "model.path": model}
    return config.replace(SMALL | changes)


def is_dry_run(config: Config) -> bool:
    """Returns whether `scaled_down` made this config, by the name that it gave the run."""
    return config.run.name.endswith(DRY_RUN)
