"""Trains the preset without each of its parts, and compares what the variants earn.

    python benchmarks/recipe.py --seeds 0 1 2 [--parallel 2] [--variants NAME ...] [--json FILE]
    python benchmarks/recipe.py --config nano --seeds 0 --list

A run is runs/recipe-VARIANT-SEED, of one thread. Finished runs are not made again and stopped ones
are resumed, so the command goes on where it was; for other settings name another --root. All
variants of a seed play the same held-out tasks at the end. Rewards are compared task by task, with
95% bootstrap intervals over the tasks of all seeds, and by the means of the seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from nanorchestra.errors import ArgumentParser, command, require  # noqa: E402
from nanorchestra.files import write_whole  # noqa: E402
from nanorchestra.report.run import Run  # noqa: E402
from nanorchestra.schemas import Json  # noqa: E402
from nanorchestra.settings import load_config  # noqa: E402
from worlds.metrics import interval  # noqa: E402

PRESET = "preset"
WITHOUT = {  # what is taken away -> its settings
    "kl": {"grpo.kl_coef": 0.0},
    "min_entropy": {"grpo.min_entropy": 0.0},
    "bounds": {"grpo.bounds": "group"},
    "muon": {"grpo.optimizer": "adamw"},
    "temperature": {"rollout.temperature": 1.0},
}
LEASHES = WITHOUT["kl"] | WITHOUT["min_entropy"] | WITHOUT["bounds"]  # what holds a policy back
ALL = {name: value for settings in WITHOUT.values() for name, value in settings.items()}
VARIANTS = {PRESET: {}, **WITHOUT, "leashes": LEASHES, "all": ALL}

Rewards = dict[tuple[str, int], list[float]]  # (variant, seed) -> of each held-out task


@command("recipe.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog="recipe.py", description=__doc__, formatter_class=formatter)
    parser.add_argument("--config", default="nano", help="the preset (default: nano)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="of the runs")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of all runs")
    parser.add_argument("--list", action="store_true", help="print the commands alone")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    require(options.parallel > 0, f"--parallel must be at least 1, not {options.parallel}")
    shared = {"run.threads": 1, "run.root": str(options.root)}
    for setting in options.set:
        name, equals, value = setting.partition("=")
        require(equals, f"--set {setting}: write NAME=VALUE, such as grpo.steps=40")
        shared[name] = _value(value)
    names = list(dict.fromkeys([PRESET, *options.variants]))
    runs = {}
    for seed in options.seeds:
        for name in names:
            own = {"run.name": f"recipe-{name}-{seed}", "run.seed": seed}
            runs[name, seed] = own | VARIANTS[name] | shared
    if options.list:
        for settings in runs.values():
            print(f"python train.py {' '.join(_words(options.config, settings))}")
        return 0
    with ThreadPoolExecutor(options.parallel) as pool:
        made = [pool.submit(_train, options.config, settings) for settings in runs.values()]
        for run in tqdm(made, unit="run"):
            run.result()
    rewards = {key: _rewards(_folder(settings)) for key, settings in runs.items()}
    table = {name: compared(rewards, name, options.seeds) for name in names}
    print(f"{'without':12} {'reward':>8}  {'minus preset, paired':26} by seed")
    for name, row in table.items():
        mean, low, high = row["difference"]
        by_seed = " ".join(f"{value:+.3f}" for value in row["by_seed"])
        print(f"{name:12} {row['reward']:8.3f}  {mean:+.3f} [{low:+.3f}, {high:+.3f}]   {by_seed}")
    if options.json:
        write_whole(options.json, json.dumps(table, indent=2) + "\n")
    return 0


def compared(rewards: Rewards, name: str, seeds: Sequence[int]) -> Json:
    """Returns the mean reward of a variant, and what it earns more than the preset.

    `difference` has the mean over all tasks and its interval, which takes the tasks of all seeds as
    drawn alike; `by_seed` the means of the seeds, whose spread the interval does not know.
    """
    differences, by_seed = [], []
    for seed in seeds:
        pairs = zip(rewards[name, seed], rewards[PRESET, seed], strict=True)
        of_seed = [ours - preset for ours, preset in pairs]
        differences += of_seed
        by_seed.append(fmean(of_seed))
    return {
        "reward": fmean(value for seed in seeds for value in rewards[name, seed]),
        "difference": list(interval(differences)),
        "by_seed": by_seed,
    }


def _value(text: str) -> Any:
    """Returns a number or a boolean that a text is, else the text."""
    with suppress(ValueError):
        return json.loads(text)
    return text


def _folder(settings) -> Path:
    return Path(settings["run.root"]) / settings["run.name"]


def _words(config: str, settings: Json) -> list[str]:
    """Returns the options of train.py for a run."""
    named = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return ["--config", config, *named]


def _train(config: str, settings: Json) -> None:
    """Makes or finishes a run, with its output in RUN.log.

    UserError if it fails, or if a run of this name has other settings.
    """
    run = _folder(settings)
    words = _words(config, settings)
    if (run / "config.toml").is_file():
        same = load_config(run / "config.toml") == load_config(config, settings)
        require(same, f"{run}: has other settings; name another --root, or remove it")
        words = ["--resume", str(run)]
    if (run / "summary.json").is_file():
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".log").open("w") as log:
        program = [sys.executable, str(ROOT / "train.py"), *words]
        failed = subprocess.run(
            program, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    require(not failed, f"{run.with_suffix('.log')}: the run ended with status {failed}")


def _rewards(run: Path) -> list[float]:
    """Returns the rewards of the held-out tasks after training."""
    return [row["reward"] for row in Run.open(run).rows("trajectories") if row["phase"] == "after"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
