"""Draws the reward against the calls that were spent to learn it: a table of skills, and GRPO.

    python benchmarks/calls.py runs/nano [runs/nano-long] --tasks 1000 --out calls.png [--json FILE]

The table router asks experts N single questions, writes down who was right at what, and follows the
rule that `informed` follows; it is played on the same held-out tasks for each N, each of which has
one of 20 tables. A run's points are means over the attempts of its GRPO steps, at training tasks
that it met once, as they were sampled; its calls are those of all steps before. The rule that knows
the skills is the line above.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from matplotlib.axes import Axes  # noqa: E402
from tqdm import tqdm  # noqa: E402

from nanorchestra.errors import ArgumentParser, command, require  # noqa: E402
from nanorchestra.files import read_json_lines, read_toml, write_whole  # noqa: E402
from nanorchestra.records import Task  # noqa: E402
from nanorchestra.report.plots import figure  # noqa: E402
from nanorchestra.tools.sandbox import Sandbox  # noqa: E402
from worlds.metrics import Interval, interval, score  # noqa: E402
from worlds.miniature.offers import Offer  # noqa: E402
from worlds.miniature.world import Miniature  # noqa: E402
from worlds.routers import by_table, informed, use_until_sure  # noqa: E402

CALLS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # of the table
FIRST_STEPS = 4  # of a run's first point; a later one has a third of the steps before it

Curve = list[tuple[float, Interval]]  # calls spent, reward


@command("calls.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog="calls.py", description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="*", type=Path, help="directories of runs in the miniature")
    parser.add_argument("--tasks", type=int, default=1000, help="held-out tasks (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="the picture, a .png file")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    require(options.tasks > 0, f"--tasks must be at least 1, not {options.tasks}")
    curves = {run.name: training_curve(run) for run in options.runs}
    with Sandbox() as sandbox:
        world = Miniature(options.seed, sandbox)
        rule = play(world, options.tasks, options.seed, informed)
        table = []
        for calls in tqdm(CALLS, unit="table"):
            order = partial(by_table, calls=calls)
            table.append((calls, play(world, options.tasks, options.seed, order)))
    curves["table of skills"] = table
    for name, curve in curves.items():
        for calls, (mean, low, high) in curve:
            print(f"{name}: {calls:.0f} calls: {mean:.3f} [{low:.3f}, {high:.3f}]")
    print(f"informed: {rule.mean:.3f} [{rule.low:.3f}, {rule.high:.3f}]")
    panel = [lambda axes: draw(axes, curves, rule)]
    write_whole(options.out, figure(panel, "png", width=6.4, height=3.6))
    if options.json:
        write_whole(options.json, json.dumps(curves | {"informed": rule}, indent=2) + "\n")
    print(f"{options.out}: written")
    return 0


def play(
    world: Miniature, count: int, seed: int, order: Callable[[Task], Sequence[Offer]]
) -> Interval:
    """Returns the mean reward of a router on held-out tasks; `order` gives its tools for a task."""
    rewards = []
    for index in range(count):
        task = world.task("held_out", index)
        attempt = use_until_sure(order(task), world.environment(task, seed), seed)
        rewards.append(score(task, attempt).reward)
    return interval(rewards)


def training_curve(run: Path) -> Curve:
    """Returns the points of a run. UserError for a directory that has no GRPO steps."""
    file = run / "metrics.jsonl"
    require(file.is_file(), f"{file}: no such file; name the directory of a run")
    rows = [row for _, row in read_json_lines(file) if row.get("phase") == "grpo"]
    require(len(rows) >= FIRST_STEPS, f"{file}: no {FIRST_STEPS} steps of GRPO, the least to draw")
    grpo = read_toml(run / "config.toml")["grpo"]
    attempts = grpo["prompts"] * grpo["group_size"]
    spent, curve, start = 0.0, [], 0
    while start + FIRST_STEPS <= len(rows):
        width = max(FIRST_STEPS, start // 3)
        part = rows[start : start + width]
        calls = [sum(row["calls"].values()) * attempts for row in part]
        middle = spent + sum(calls) / 2
        curve.append((middle, interval([row["reward"] for row in part])))
        spent += sum(calls)
        start += width
    return curve


def draw(axes: Axes, curves: dict[str, Curve], rule: Interval) -> None:
    """Draws the curves, each point with its interval."""
    for number, (name, curve) in enumerate(curves.items()):
        calls = [point[0] for point in curve]
        means = [point[1].mean for point in curve]
        axes.plot(calls, means, "o-", color=f"C{number}", label=name, markersize=3)
        low, high = ([point[1][place] for point in curve] for place in (1, 2))
        axes.fill_between(calls, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
    axes.axhline(rule.mean, color="0.5", linestyle="--", label="informed")
    axes.set_xscale("log")
    axes.set_xlabel("calls spent to learn")
    axes.set_ylabel("reward")
    axes.legend(loc="lower right")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
