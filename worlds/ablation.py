"""Trains nano without each part of the reward, over seeds; ablation.toml has the variants."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from nanorchestra.config import Config
from nanorchestra.errors import ArgumentParser
from nanorchestra.files import read_json, read_toml
from nanorchestra.records import Task, Trajectory
from nanorchestra.report.run import TITLES, Run, table
from nanorchestra.settings import add_settings, given_settings, load_config, to_toml
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.phases import train
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.run import TrainingRun
from worlds.evaluation import score
from worlds.mixture import Worlds

Factors = dict[str, float]


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


def ablate(arguments: list[str], root: Path, sandbox: Sandbox) -> None:
    """Trains every variant for each seed, and prints their means. UserError.

    What is finished in runs/ablation-... is not trained again.
    """
    parser = ArgumentParser(prog="evaluate.py ablate", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    add_settings(parser)
    options, scores = parser.parse_args(arguments), {}
    for seed in range(options.seeds):
        base = load_config("nano", given_settings(options) | {"run.seed": seed})
        for name, factors in read_toml(Path(__file__).with_suffix(".toml")).items():
            config = base.replace({"grpo.bounds": factors.get("bounds", base.grpo.bounds)})
            path = root / f"ablation-{seed}-{name.replace(' ', '-')}"
            scores.setdefault(name, []).append(held_out(config, path, factors, sandbox))
    means = {}
    for name, found in scores.items():
        known = {key: [each[key] for each in found] for key in TITLES["columns"]}
        known = {key: values for key, values in known.items() if None not in values}
        means[name] = {key: fmean(values) for key, values in known.items()}
        means[name]["intervals"] = {key: (min(v), max(v)) for key, v in known.items()}
    print(table({"held_out": {"routers": means}}))
    print(f"mean of {options.seeds} seeds ± half of their range")


def held_out(config: Config, path: Path, factors: Factors, sandbox: Sandbox) -> dict[str, Any]:
    """Returns the held-out summary of a run after training, which it trains if it has not yet."""
    if not (path / "summary.json").exists():
        shutil.rmtree(path, ignore_errors=True)  # of a run that was interrupted
        folder = Run.create(path, to_toml(config))
        worlds = Ablated(config.task, config.run.seed, sandbox)
        worlds.factors = factors
        train(TrainingRun(config, folder, Ranks(), worlds, SimpleNamespace(asked=False)))
    return read_json(path / "summary.json")["held_out"]["after"]
