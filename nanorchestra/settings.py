"""Reads the settings of a run from TOML and the command line.

tyro makes the options from the dataclasses of config.py, and reads both sources by them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro import _errors  # private: requirements.txt names the version
from tyro.conf import FlagConversionOff
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from nanorchestra.config import Config, check
from nanorchestra.errors import UserError, nearest, require
from nanorchestra.files import read_toml

CONFIGS = Path(__file__).parents[1] / "configs"
KINDS = {"INT": "a whole number", "FLOAT": "a number", "STR": "text"}
SMALL = read_toml(Path(__file__).with_name("dry_run.toml"))
DRY_RUN = "-dry-run"  # at the end of the name of such a run
Settings = FlagConversionOff[Config]  # whose bools have a value
WRITTEN = ConstructorRegistry()
T = TypeVar("T")


@WRITTEN.primitive_rule
def _truth(info):
    """Returns how a bool is read and shown: as in TOML, where tyro has True and False."""
    if info.type is not bool:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false}",
        choices=("true", "false"),
        instance_from_str=lambda words: words[0] == "true",
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
    )


def read(kind: type[T], words: Sequence[str], names: Iterable[str] = (), **options: Any) -> T:
    """Returns what the words of a command line say, by tyro.cli. UserError in place of its box.

    `names` are options beside the settings, which a misspelt one may be like.
    """

    def refuse(event):
        if isinstance(event, _errors.UnrecognizedArgs):
            word = event.tokens[0].partition("=")[0]
            known = [f"--{name}" for name in (*Config().values(), *names)]
            raise UserError(f"{word}: there is no such option{nearest(word, known)}")
        option, given = event.argument, "no value is given"
        right = KINDS.get(option.lowered.metavar, option.lowered.metavar)
        if isinstance(event, _errors.InvalidChoice):
            given = repr(event.value)
        if isinstance(event, _errors.InstantiationFailure):
            given = event.message.rpartition(": ")[2]  # the word that int or float names last
        raise UserError(f"{option.display_name()} must be {right}: {given}")

    with _errors.on_parse_error(refuse):
        return tyro.cli(kind, args=words, use_underscores=True, registry=WRITTEN, **options)


def load_config(name: str | Path | None, changes: Mapping[str, Any] = {}) -> Config:
    """Returns the config of a TOML file, or of configs/`name`.toml, changed by `changes`.

    None: the defaults. Keys of `changes` are "section.name". UserError for a file that cannot be
    read, for unknown names, and for values of the wrong type or outside their range.
    """
    config = Config()
    if name:
        path = _find(str(name))
        sections = read_toml(path)
        try:
            config = read(Settings, list(_words(sections)))
            check(config)
        except UserError as error:
            raise UserError(f"{path}: {str(error).replace('--', '')}") from None
    config = config.replace(changes)
    check(config)
    return config


def _find(name) -> Path:
    shipped = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
    path, near = shipped.get(name, Path(name)), nearest(name, shipped)
    right = f"give a TOML file, or one of {', '.join(shipped)}"
    require(path.is_file(), f"{name}: no such file; {right}{near}")
    return path


def _words(table, prefix="--") -> Iterator[str]:
    """Yields the options that say the same as a table of TOML."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _words(value, f"{prefix}{name}.")
        else:
            text = str(value).lower() if isinstance(value, bool) else value
            yield f"{prefix}{name}={text}"


def scaled_down(config: Config, model: str) -> Config:
    """Returns the same run in small for a dry run on CPUs, with `model`, the base.

    Sharding, checkpoints and optimizers stay as they are.
    """
    name, steps = f"{config.run.name}{DRY_RUN}", min(config.warm_start.steps, 2)
    changes = {"run.name": name, "warm_start.steps": steps, "model.path": model}
    return config.replace(SMALL | changes)


def is_dry_run(config: Config) -> bool:
    """Returns whether `scaled_down` made this config, by the name that it gave the run."""
    return config.run.name.endswith(DRY_RUN)
