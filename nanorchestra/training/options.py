"""The options of train.py. No torch, so that --help and a mistake cost no seconds."""

from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from nanorchestra import settings
from nanorchestra.errors import ArgumentParser, require
from nanorchestra.files import read_toml

GPUS = tuple(read_toml(Path(__file__).with_name("gpus.toml")))  # their names


def parse(arguments: list[str], description: str | None = None) -> Namespace:
    """Returns the options. UserError."""
    parser = ArgumentParser(
        prog="train.py",
        usage="train.py [options]",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    changes = ", ".join(settings.RESUMABLE)
    add(
        "--config",
        help="a TOML file, or the name of one in configs/ (default: nano); sets the defaults below",
    )
    add(
        "--resume",
        metavar="RUN",
        help=f"a run to continue: its directory, or its name in runs/; may change {changes}",
    )
    add(
        "--dry-run",
        action="store_true",
        help="the run in small, of two steps, on CPUs, in run.name-dry-run",
    )
    add("--plan", action="store_true", help="print the memory of a GPU by part; no training")
    add("--gpus", type=int, help="for --plan: how many GPUs (default: 1)")
    add("--gpu", choices=GPUS, help="for --plan (default: h100)")
    add("--memory", type=float, metavar="GB", help="for --plan: of one GPU (default: as sold)")
    config = None
    if {"-h", "--help"} & set(arguments):  # which states the values of the preset
        first = ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config", default="nano")
        config = settings.load_config(first.parse_known_args(arguments)[0].config)
    settings.add_settings(parser, config)
    options = parser.parse_args(arguments)
    planning = [name for name in ("gpus", "gpu", "memory") if getattr(options, name) is not None]
    require(options.plan or not planning, f"--{' --'.join(planning)}: only for --plan; add --plan")
    fixed = [name for name in settings.given_settings(options) if name not in settings.RESUMABLE]
    fixed += [name for name in ("config", "dry_run") if getattr(options, name)]
    require(
        not (options.resume and fixed),
        f"--resume continues with the run's own config.toml; it cannot change {', '.join(fixed)}, "
        f"only {changes}",
    )
    return options
