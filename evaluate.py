"""Measures orchestrators on held-out tasks, beside the routers that they must beat.

    python evaluate.py                              the bundled nano, its base and the routers
    python evaluate.py --policy runs/a/model runs/b/model routers --tasks 1000 --trials 4
    python evaluate.py --policy runs/a/model runs/a/model:turns={2,4,8} runs/a/model:none
    python evaluate.py --world questions:frames.jsonl --all --tools FILE --experts real \
        --judge judge --policy gpt-5@https://api.openai.com/v1 --max-usd 20
    python evaluate.py compare runs/A runs/B        two evaluations of the same tasks

An evaluation is a directory runs/NAME: config.toml, the attempts as JSON Lines, summary.json,
report.html and plots. The same command continues one that was stopped. docs/evaluate.md has more.
"""

import sys

if __name__ == "__main__":  # first, because torch takes seconds to import
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("evaluate.py")

import argparse
import json
import math
import os
import subprocess
from collections import defaultdict
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import count, product
from pathlib import Path

import tomli_w
import torch
from tqdm import tqdm

from nanorchestra.agent.load import NANO
from nanorchestra.config import TaskSection
from nanorchestra.errors import ArgumentParser, UserError, command, require
from nanorchestra.files import read_json_lines, read_text, refuse_links, write_whole
from nanorchestra.report.evaluation import attempts, write_evaluation
from nanorchestra.report.run import Run, label, table
from nanorchestra.schemas import Json
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from nanorchestra.training.trajectories import from_row, to_row
from worlds import evaluation
from worlds.miniature.probe import probe
from worlds.miniature.world import environment
from worlds.mixture import Worlds
from worlds.policies import parse
from worlds.routers import TRAINED, routers_of

RUNS = Path("runs")
ROUTERS = "routers"  # all of a world, in --policy
TRIAL = 7919  # between the seeds of two trials
FAILING = 4  # more than one attempt in so many that the infrastructure fails ends an evaluation
NO_PRICE = (
    "no price is known for this model: its tokens count as free in reward and preference, its cost "
    "is left out, and --max-usd does not bound it; add :input=X:output=X, US dollars per million "
    "tokens"
)
OPTIONS = (  # name, default, help
    ("tasks", 480, "of each world at most"),
    ("trials", 1, "attempts at each task"),
    ("parallel", 128, "attempts at a time"),
    ("seed", 0, "of tasks, sampling and simulations"),
    ("max-usd", math.inf, "that endpoints may cost together"),
    ("run", "evaluation", "name of the directory in runs/"),
)
SETTINGS = fields(TaskSection)[1:]  # options of the same name; the first one is the world
EXPERTS = ("simulated", "real")
NO_WISH = ""  # a benchmark is played as it is, unless wishes are wanted; training draws them
FREE = ("run", "max_usd")  # options that do not change what is measured


def _read(arguments):
    """Returns the options. UserError."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog="evaluate.py", description=__doc__, formatter_class=formatter)
    add, base = parser.add_argument, NANO.with_name("base")
    policies = [os.path.relpath(NANO), os.path.relpath(base), ROUTERS]
    add("--policy", nargs="+", default=policies, help="what to compare, ours first")
    add("--world", nargs="+", default=["miniature"], help="as task.world of train.py")
    add("--all", action="store_true", help="not every fifth task of a file, but all")
    add("--probes", action="store_true", help="probe what the first policy reads: takes long")
    for name, default, text in OPTIONS:
        add(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default})")
    for field in SETTINGS:
        kinds = EXPERTS if field.name == "experts" else None
        default = NO_WISH if field.name == "preference" else field.default
        text = f"{field.metadata['help']} (default: {default!r})"
        add(f"--{field.name}", default=default, choices=kinds, help=text)
    options = parser.parse_args(arguments)
    least = min(options.tasks, options.trials, options.parallel)
    require(least > 0, f"--tasks, --trials and --parallel must be at least 1, not {least}")
    return options


def _open_world(name, options, sandbox, spending):
    """Returns a world, its tasks and its routers. UserError."""
    given = {field.name: getattr(options, field.name) for field in SETTINGS}
    worlds = Worlds(TaskSection(name, **given), options.seed, sandbox, spending)
    splits = [world.splits for world in worlds.domains.values()]
    routers = routers_of(worlds, options.seed)
    for split in splits if options.all else ():
        split["held_out"] = [*split["train"], *split["held_out"]]
        routers.pop(TRAINED, None)
    tasks = worlds.held_out(min([options.tasks, *(len(split["held_out"]) for split in splits)]))
    return worlds, tasks, routers


def _open_run(options, policies):
    """Makes the directory, or opens it to go on. UserError if it holds another evaluation."""
    worlds = [world.removeprefix("questions:") for world in options.world]
    names = [*options.tools.split(","), *worlds, *(policy.base for policy in policies)]
    homes = [Path(name) for name in names if name]
    files = [f for home in homes for f in sorted([home, *home.glob("*")]) if f.is_file()]
    text = tomli_w.dumps(
        {
            "options": {name: value for name, value in vars(options).items() if name not in FREE},
            "limits": {policy.name: policy.settings for policy in policies},
            "files": _lines("sha256sum", *files),
            "code": _lines("git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"),
            "versions": [sys.version, torch.__version__],
        }
    )
    path = RUNS / options.run
    if not (path / "config.toml").exists():
        Run.create(path, text)
    other = f"{path}: holds another evaluation (its config.toml differs); give another --run"
    require(read_text(path / "config.toml") == text, other)
    refuse_links(path)
    return Run(path)


def _lines(*command):
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.splitlines()


def _play(options, policies, run, spending, opened):
    """Yields (world, policy, tasks and attempts) of each block. UserError if it has to stop.

    What is recorded is not played again. The attempts of a block run side by side and are recorded
    together, so that a resumed evaluation is the same as an unbroken one.
    """
    files = (run.path / f"{number:05}.jsonl" for number in count())
    for (world, (worlds, tasks, routers)), policy in product(opened.items(), policies):
        if policy.router and policy.base not in routers:
            continue
        player, size = None, options.parallel
        blocks = [*product(range(options.trials), range(0, len(tasks), size))]
        for trial, start in tqdm(blocks, desc=policy.name, unit="block"):
            file, block = next(files), tasks[start : start + size]
            spending.trial, seed = trial, options.seed + TRIAL * trial
            if not file.exists():
                player = player or routers.get(policy.base) or policy.load(spending, size)
                if engine := getattr(player, "engine", None):  # forgets what it has prefilled
                    engine.reset_prefix_cache()
                make = partial(policy.open, worlds)
                tried = evaluation.evaluate(player, block, seed, make, start=start)
                _check(policy.name, tried, spending)
                spent = round(spending.spent, 9)  # in whatever order it was added up
                more = {"policy": policy.name, "priced": policy.priced}
                more |= {"trial": trial, "spent_usd": spent}
                rows = (to_row(*pair) | more for pair in zip(block, tried, strict=True))
                write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))
            rows = [row for _, row in read_json_lines(file)]
            spending.spent = rows[-1]["spent_usd"]
            yield world, policy.name, list(map(from_row, rows))


def _check(name, tried, spending):
    """Raises UserError if the dollars are spent, or an endpoint is gone, of a policy or expert."""
    require(not spending.refused, f"--max-usd {spending.most:g} is reached; give more to go on")
    failed = [t.failure for t in tried if t.failure]
    text = f"{name}: {len(failed)} of {len(tried)} attempts failed: {''.join(failed[:1])}"
    require(len(failed) * FAILING <= len(tried), text)


def _measure(options, sandbox):
    """Plays, records and reports. UserError, also if it has to stop half-way."""
    spending = Spending(options.max_usd, RUNS / "replies")
    opened = {name: _open_world(name, options, sandbox, spending) for name in options.world}
    known = [name for _, _, routers in opened.values() for name in routers]
    texts = [t for text in options.policy for t in (known if text == ROUTERS else [text])]
    policies = [parse(text, known) for text in dict.fromkeys(texts)]
    for policy in policies:
        if not policy.router:
            print(f"{policy.name}: {policy.settings}", file=sys.stderr)
        if not policy.priced:
            print(f"{policy.name}: {NO_PRICE}", file=sys.stderr)
    run, problem, played = _open_run(options, policies), "", {}
    try:
        for world, policy, pairs in _play(options, policies, run, spending, opened):
            played.setdefault(world, {}).setdefault(policy, []).extend(pairs)
    except UserError as error:
        problem = f"{error}. {run.path} has what was measured; the same command goes on"
    unpriced = [policy.name for policy in policies if not policy.priced]
    summary = {world: evaluation.compare(found, unpriced) for world, found in played.items()}
    probes = {}
    if options.probes and not problem:
        make = partial(environment, sandbox=sandbox)
        player = policies[0].load(spending, options.parallel)
        probes = probe(player, options.seed, options.tasks, make)
    run.write_json("summary.json", {"partial": problem, "worlds": summary, "probes": probes})
    write_evaluation(run.path)
    show(summary, probes)
    require(not problem, problem)
    print(f"{run.path}: report.html and plots")


def show(worlds: Json, probes: Json) -> None:
    """Prints the tables, what failed, by how much the first policy leads, and the probes."""
    for world, found in worlds.items():
        print(f"{world}\n{table(found)}")
        for name, scores in found.items():
            if scores["failed"]:
                print(
                    f"{label(name)}: the infrastructure failed {scores['failed']} of "
                    f"{scores['attempts']} attempts, which count nowhere; the first: "
                    f"{' '.join(scores['failure'].split())}"
                )
        ours, *others = found
        for name in others:
            print(f"{label(ours)} minus {label(name)}:", _text(found[name]["behind"]))
    for name, found in (probes.pop("reward", {}) | probes).items():
        print(f"{name}:", _text(found))


def _text(found):
    """Means with their intervals and p, by name."""
    if isinstance(found, dict):
        return ", ".join(f"{name} {_text(value)}" for name, value in found.items())
    mean, low, high, *p = found
    return f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]" + "".join(f" p={x:.2g}" for x in p)


def _compare(arguments):
    """Prints by how much the policies of the first evaluation lead those of the second."""
    parser = ArgumentParser(prog="evaluate.py compare")
    parser.add_argument("runs", nargs=2, type=Path)
    ours, theirs, unpriced = defaultdict(list), defaultdict(list), set()
    for path, found in zip(parser.parse_args(arguments).runs, (ours, theirs), strict=True):
        with suppress(KeyError, TypeError):  # rows that are no attempts
            for row in attempts(path):
                pair = from_row(row)
                found[row["policy"]].append(pair)
                if not row.get("priced", True):
                    unpriced.add(row["policy"])
        require(found, f"{path}: holds no attempts; give two directories of evaluate.py")
    same = {name: name for name in ours if name in theirs} or {[*ours][0]: [*theirs][0]}
    for name, other in same.items():
        known = {task.id: task for task, _ in ours[name]}
        shared = [pair for pair in theirs[other] if known.get(pair[0].id) == pair[0]]
        require(shared, f"{name}: the two evaluations have no task in common")
        found = evaluation.differences(ours[name], shared)
        if {name, other} & unpriced:
            found.pop("cost_usd", None)
        text = _text(found)
        print(f"{name} minus {other} on the {len(shared)} attempts at the same tasks: {text}")


@command("evaluate.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if arguments[:1] == ["compare"]:
        _compare(arguments[1:])
        return 0
    with Sandbox() as sandbox:
        _measure(_read(arguments), sandbox)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
