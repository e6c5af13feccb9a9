"""Trains nano without parts of the reward and the recipe; ablation.toml has the variants.

python -m benchmarks.ablation --seeds 3
"""

import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from evaluate import RUNS, show
from nanorchestra.config import Config
from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.files import read_toml
from nanorchestra.records import Task, Trajectory
from nanorchestra.report.run import Run, to_toml
from nanorchestra.settings import add_settings, given_settings, load_config
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.phases import train
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.run import TrainingRun
from nanorchestra.training.trajectories import from_row
from worlds.evaluation import Pairs, compare, score
from worlds.mixture import Worlds

Factors = dict[str, Any]


class Ablated(Worlds):
    """Worlds whose training rewards have parts scaled by `factors`; scores are as ever."""

    factors: Factors = {}

    def training_rewards(
        self, task: Task, members: Sequence[Trajectory], bounds: str
    ) -> list[float]:
        """Returns the rewards of a group. What cost and latency lose, the outcome gains."""
        wish, factor = task.preference, self.factors.get
        cost, latency = wish.cost * factor("cost", 1), wish.latency * factor("latency", 1)
        tools = {name: weight * factor("tools", 1) for name, weight in wish.tools.items()}
        outcome = wish.outcome + wish.cost - cost + wish.latency - latency
        wish = replace(wish, outcome=outcome, cost=cost, latency=latency, tools=tools)
        task = replace(task, preference=wish)
        return super().training_rewards(task, [score(task, replace(m)) for m in members], bounds)


@command("benchmarks.ablation")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    with Sandbox() as sandbox:
        show({"ablation": compare(ablate(arguments, RUNS, sandbox))}, {})
    return 0


def ablate(arguments: list[str], root: Path, sandbox: Sandbox) -> dict[str, Pairs]:
    """Trains every variant for each seed; returns the held-out tasks and attempts of each variant.

    Prints the mean reward of each run. What is finished in runs/ablation-... is not trained again.
    UserError.
    """
    parser = ArgumentParser(prog="benchmarks.ablation", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    add_settings(parser)
    options, played = parser.parse_args(arguments), defaultdict(list)
    require(options.seeds > 0, f"--seeds must be at least 1, not {options.seeds}")
    for seed in range(options.seeds):
        base = load_config("nano", given_settings(options) | {"run.seed": seed})
        for name, factors in read_toml(Path(__file__).with_suffix(".toml")).items():
            config = base.replace({key: value for key, value in factors.items() if "." in key})
            path = root / f"ablation-{seed}-{name.replace(' ', '-')}"
            pairs = held_out(config, path, factors, sandbox)
            print(f"seed {seed}, {name}: reward {fmean(t.reward for _, t in pairs):.3f}")
            played[name] += pairs
    return played


def held_out(config: Config, path: Path, factors: Factors, sandbox: Sandbox) -> Pairs:
    """Returns the held-out attempts of a run after training, which it trains if it has not yet."""
    if not (path / "summary.json").exists():
        shutil.rmtree(path, ignore_errors=True)  # of a run that was interrupted
        folder = Run.create(path, to_toml(config))
        worlds = Ablated(config.task, config.run.seed, sandbox)
        worlds.factors = factors
        train(TrainingRun(config, folder, Ranks(), worlds, SimpleNamespace(asked=False)))
    rows = Run.open(path).rows("trajectories")
    return [from_row(row) for row in rows if row["phase"] == "after"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
