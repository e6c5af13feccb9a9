"""Trains the preset without each of its parts, and compares what the variants earn.

    python benchmarks/recipe.py --seeds 0 1 2 [--parallel 2] [--variants NAME ...] [--json FILE]
    python benchmarks/recipe.py --config nano --seeds 0 --list

A run is runs/recipe-VARIANT-SEED, of one thread. Finished runs are not made again and stopped ones
are resumed, so the command goes on where it was. All variants of a seed play the same held-out
tasks at the end; rewards are compared task by task, over all seeds, with 95% bootstrap intervals
over tasks, and once more by the means of the seeds, whose spread tasks alone do not show.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from nanorchestra.errors import ArgumentParser, UserError, command, require  # noqa: E402
from nanorchestra.files import write_whole  # noqa: E402
from nanorchestra.report.run import Run  # noqa: E402
from nanorchestra.schemas import Json  # noqa: E402
from worlds.metrics import interval  # noqa: E402

PRESET = "preset"
WITHOUT = {  # what is taken away -> its settings
    "kl": {"grpo.kl_coef": "0"},
    "min_entropy": {"grpo.min_entropy": "0"},
    "bounds": {"grpo.bounds": "group"},
    "muon": {"grpo.optimizer": "adamw"},
    "temperature": {"rollout.temperature": "1"},
}
TOGETHER = {**WITHOUT["kl"], **WITHOUT["min_entropy"], **WITHOUT["bounds"]}
VARIANTS = {PRESET: {}, **WITHOUT, "all": TOGETHER | WITHOUT["temperature"] | WITHOUT["muon"]}


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
    shared = ["--run.threads", "1", "--run.root", str(options.root)]
    for setting in options.set:
        name, equals, value = setting.partition("=")
        require(equals, f"--set {setting}: write NAME=VALUE, such as grpo.steps=40")
        shared += [f"--{name}", value]
    names = list(dict.fromkeys([PRESET, *options.variants]))
    runs = {(name, seed): f"recipe-{name}-{seed}" for seed in options.seeds for name in names}
    commands = []
    for (name, seed), run in runs.items():
        settings = [word for pair in VARIANTS[name].items() for word in (f"--{pair[0]}", pair[1])]
        own = ["--run.name", run, "--run.seed", str(seed), *settings]
        commands.append((options.root / run, ["--config", options.config, *own, *shared]))
    if options.list:
        print("\n".join(f"python train.py {' '.join(words)}" for _, words in commands))
        return 0
    with ThreadPoolExecutor(options.parallel) as pool:
        list(tqdm(pool.map(partial(_train), *zip(*commands, strict=True)), total=len(commands)))
    rewards = {key: _rewards(options.root / run) for key, run in runs.items()}
    table = {name: compared(rewards, name, options.seeds) for name in names}
    print(f"{'without':12} {'reward':>8}  {'minus preset, paired':26} by seed")
    for name, row in table.items():
        mean, low, high = row["difference"]
        by_seed = " ".join(f"{value:+.3f}" for value in row["by_seed"])
        print(f"{name:12} {row['reward']:8.3f}  {mean:+.3f} [{low:+.3f}, {high:+.3f}]   {by_seed}")
    if options.json:
        write_whole(options.json, json.dumps(table, indent=2) + "\n")
    return 0


def compared(rewards: dict[tuple[str, int], list[float]], name: str, seeds: Sequence[int]) -> Json:
    """Returns mean reward of a variant, and what it earns more than the preset.

    rewards: of each variant and seed, one for each held-out task. `spread` is the standard
    deviation of the differences over seeds, None for a single one.
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
        "spread": stdev(by_seed) if by_seed[1:] else None,
    }


def _train(run: Path, settings: list[str]) -> None:
    """Makes or finishes a run, with its output in RUN.log. UserError if it fails."""
    if (run / "summary.json").is_file():
        return
    if (run / "config.toml").is_file():
        settings = ["--resume", str(run)]
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".log").open("w") as log:
        words = [sys.executable, str(ROOT / "train.py"), *settings]
        failed = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if failed:
        raise UserError(f"{run.with_suffix('.log')}: the run ended with status {failed}")


def _rewards(run: Path) -> list[float]:
    """Returns the rewards of the held-out tasks after training."""
    return [row["reward"] for row in Run.open(run).rows("trajectories") if row["phase"] == "after"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
