"""The options of evaluate.py. No torch, so that --help and a mistake cost no seconds."""

import math
import os
from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from nanorchestra.errors import ArgumentParser, require
from nanorchestra.report.run import path_of_run

RUNS = Path("runs")
RUN = "evaluation"  # name of the first directory without --run
ROUTERS = "routers"  # all of a world, in --policy
ASSETS = Path(__file__).parents[1] / "assets"


def read_options(arguments: list[str], description: str | None = None) -> Namespace:
    """Returns the options, or those of `evaluate.py compare`, which are `runs` alone. UserError."""
    if arguments[:1] == ["compare"]:
        parser = ArgumentParser(prog="evaluate.py compare")
        parser.add_argument("runs", nargs=2, type=Path)
        return parser.parse_args(arguments[1:])
    formatter = RawDescriptionHelpFormatter
    parser = ArgumentParser(prog="evaluate.py", description=description, formatter_class=formatter)
    nano, base = (os.path.relpath(ASSETS / name) for name in ("nano", "base"))
    add = parser.add_argument
    add("--policy", nargs="+", default=[nano, base, ROUTERS], help="what to compare, ours first")
    add("--world", nargs="+", default=["miniature"], help="as task.world of train.py")
    add("--all", action="store_true", help="not every fifth task of a file, but all")
    add("--tools", default="", help="catalogue of the tools for questions, as task.tools")
    add("--experts", default="simulated", help="simulated, real, record:DIR or replay:DIR")
    add("--judge", default="", help="expert of the catalogue that judges what no rule accepts")
    add("--user", default="", help="expert of the catalogue that plays users; empty: a script")
    add("--user-args", default="{}", help="of a tau2:DOMAIN: arguments of its user, as JSON")
    add("--preference", default="", help="of tasks without one, as task.preference; empty: none")
    add("--reward", default="", help="FILE.py:FUNCTION that pays attempts, as task.reward")
    add("--tasks", type=int, default=480, help="of each world at most (default: 480)")
    add("--trials", type=int, default=1, help="attempts at each task (default: 1)")
    add("--parallel", type=int, default=128, help="attempts at a time (default: 128)")
    add("--seed", type=int, default=0, help="of tasks, sampling and simulations (default: 0)")
    add("--max-usd", type=float, default=math.inf, help="that endpoints may cost together")
    add("--run", help=f"name of the directory in runs/ (default: {RUN}, or the next free {RUN}-N)")
    options = parser.parse_args(arguments)
    least = min(options.tasks, options.trials, options.parallel)
    require(least > 0, f"--tasks, --trials and --parallel must be at least 1, not {least}")
    path_of_run(RUNS, RUN if options.run is None else options.run, "--run")
    return options
