"""Evaluates a checkpoint on held-out tasks of the miniature, beside the fixed routers it must beat.

    python evaluate.py --model assets/nano --tasks 480 --seed 0 [--probes] [--json FILE]

It prints rewards, accuracy, costs and latencies, with 95% intervals, and with --probes what the
policy reads: prices, aliases, bans, phrases, difficulty.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # first, because torch takes seconds to import
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("evaluate.py")

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanorchestra import SamplingParams
from nanorchestra.agent.load import NANO, load_rollout
from nanorchestra.agent.loop import Limits
from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.files import write_whole
from nanorchestra.records import Trajectory
from nanorchestra.report.run import ROUTERS, number, table
from nanorchestra.settings import load_config
from nanorchestra.tools.sandbox import Sandbox
from worlds.evaluation import Interval, evaluate, interval, summarise
from worlds.miniature.probe import probe
from worlds.miniature.world import World, environment
from worlds.routers import play_routers

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
    add("--probes", action="store_true", help="probe what the policy reads: 24 times as long")
    add("--json", type=Path, metavar="FILE", help="write all the figures there too")
    options = parser.parse_args(arguments)
    require(options.tasks > 0, f"--tasks is {options.tasks}; it must be at least 1")
    SamplingParams(temperature=options.temperature)  # refuses what is no temperature
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the summaries of checkpoint and routers, their differences, and the probes."""
    seed, settings = options.seed, load_config(CONFIG).rollout
    limits = Limits(settings.turns, settings.turn_tokens, settings.context_tokens)
    rollout = load_rollout(options.model, limits, options.temperature, ROWS)
    tasks = World(seed).tasks("held_out", options.tasks)
    with Sandbox() as sandbox:
        make = partial(environment, sandbox=sandbox)
        with tqdm(total=len(tasks), desc="held-out tasks", unit="task", dynamic_ncols=True) as bar:
            attempts = evaluate(rollout, tasks, seed, make, lambda _: bar.update())
        played = play_routers(tasks, seed, sandbox)
        return {
            "policy": summarise(tasks, attempts),
            "routers": {name: summarise(tasks, theirs) for name, theirs in played.items()},
            "policy_minus": {name: _lead(attempts, theirs) for name, theirs in played.items()},
            "probes": probe(rollout, seed, options.tasks, make) if options.probes else {},
        }


def _lead(ours: Sequence[Trajectory], theirs: Sequence[Trajectory]) -> Interval:
    """The mean difference in reward on the same tasks, with its interval."""
    return interval([a.reward - b.reward for a, b in zip(ours, theirs, strict=True)])


def show(name: str, figures: dict[str, Any]) -> None:
    """Prints the table, the differences, and what the policy spends by preference."""
    print(table({"held_out": {"routers": {name: figures["policy"]} | figures["routers"]}}))
    print("reward above the routers, paired by task (mean, 95% interval):")
    for router, lead in figures["policy_minus"].items():
        print(f"  {ROUTERS.get(router, router):32} {_text(lead)}")
    by_wish = figures["policy"]["by_preference"]
    costs = (f"{wish} ${number(row['cost_usd'])}" for wish, row in by_wish.items())
    print(f"cost per task by preference: {', '.join(costs)}")
    for probed, found in figures["probes"].items():
        rows = {"": found} if isinstance(found, tuple) else found
        for row, values in rows.items():
            parts = values.items() if isinstance(values, dict) else [("", values)]
            print(f"{probed} {row}:", ", ".join(f"{key} {_text(v)}".strip() for key, v in parts))


def _text(found: Interval) -> str:
    mean, low, high = found
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


@command("evaluate.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = parse(arguments)
    figures = measure(options)
    show(min(str(options.model), os.path.relpath(options.model), key=len), figures)
    if options.json:
        given = {"model": str(options.model), "seed": options.seed, "tasks": options.tasks}
        write_whole(options.json, (json.dumps(given | figures, indent=2) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
