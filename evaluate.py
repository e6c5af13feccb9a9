"""Evaluates a checkpoint on held-out tasks of the miniature, beside the fixed routers it must beat.

    python evaluate.py --model assets/nano --tasks 480 --seed 0 [--json FILE]

It prints rewards, accuracy, costs and latencies, and whether the policy reacts to prices.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # first, because torch takes seconds to import
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("evaluate.py")

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanorchestra import SamplingParams
from nanorchestra.agent.load import NANO, load_rollout
from nanorchestra.agent.loop import Limits
from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.files import write_whole
from nanorchestra.report.run import number, table
from nanorchestra.settings import load_config
from nanorchestra.tools.sandbox import Sandbox
from worlds.evaluation import evaluate, summarise
from worlds.miniature.probe import price_probe
from worlds.miniature.world import World, environment
from worlds.routers import evaluate_routers

CONFIG = Path(__file__).parent / "configs" / "nano.toml"  # its limits hold for an evaluation
ROWS = 128  # attempts at a time


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options. UserError."""
    parser = ArgumentParser(
        prog="evaluate.py",
        description="Evaluates a checkpoint and the fixed routers on the same held-out tasks of "
        "the miniature. 480 tasks take about 20 seconds on two CPU cores.",
    )
    add = parser.add_argument
    add("--model", type=Path, default=NANO, metavar="PATH", help="checkpoint (default: nano)")
    add("--tasks", type=int, default=480, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    add("--seed", type=int, default=0, help="of tasks and simulated experts (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write all the figures there too")
    options = parser.parse_args(arguments)
    require(options.tasks > 0, f"--tasks is {options.tasks}; it must be at least 1")
    SamplingParams(temperature=options.temperature)  # refuses what is no temperature
    return options


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the summary of the checkpoint, and that of each router by its name."""
    seed, settings = options.seed, load_config(CONFIG).rollout
    limits = Limits(settings.turns, settings.turn_tokens, settings.context_tokens)
    rollout = load_rollout(options.model, limits, options.temperature, ROWS)
    tasks = World(seed).tasks("held_out", options.tasks)
    with Sandbox() as sandbox:
        make = partial(environment, sandbox=sandbox)
        with tqdm(total=len(tasks), desc="held-out tasks", unit="task", dynamic_ncols=True) as bar:
            attempts = evaluate(rollout, tasks, seed, make, lambda _: bar.update())
        scores = summarise(tasks, attempts)
        scores["price_x10"] = price_probe(rollout, tasks, seed, make)
        return scores, evaluate_routers(tasks, seed, sandbox)


def show(name: str, scores: dict[str, Any], routers: dict[str, Any]) -> None:
    """Prints the table, and what the policy does with preferences and prices."""
    print(table({"held_out": {"routers": {name: scores} | routers}}))
    costs = (f"{key} ${number(row['cost_usd'])}" for key, row in scores["by_preference"].items())
    print(f"cost per task by preference: {', '.join(costs)}")
    if scores["price_x10"]:
        shares = ", ".join(f"{share:.0%}" for share in scores["price_x10"].values())
        print(f"asks the large expert at a tenth of its price, as it is, at ten times: {shares}")


@command("evaluate.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = parse(arguments)
    scores, routers = measure(options)
    show(min(str(options.model), os.path.relpath(options.model), key=len), scores, routers)
    if options.json:
        given = {"model": str(options.model), "seed": options.seed, "tasks": options.tasks}
        figures = given | {"policy": scores, "routers": routers}
        write_whole(options.json, (json.dumps(figures, indent=2) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
