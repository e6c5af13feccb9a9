"""Measures orchestrators on held-out tasks, beside the routers that they must beat.

    python evaluate.py                              the bundled nano, its base and the routers
    python evaluate.py --policy runs/a/model runs/b/model routers --tasks 1000 --trials 4
    python evaluate.py --policy runs/a/model runs/a/model:turns={2,4,8} runs/a/model:none
    python evaluate.py --world questions:frames.jsonl --all --tools FILE --experts real \
        --judge judge --policy gpt-5@https://api.openai.com/v1 --max-usd 20
    python evaluate.py --world tau2:retail --trials 4 --policy PATH --user gpt-4.1-2025-04-14
    python evaluate.py compare runs/A runs/B        two evaluations of the same tasks
    python evaluate.py --record log.jsonl --world questions:FILE --tools FILE --experts real

An evaluation is a directory runs/NAME: config.toml, the attempts as JSON Lines, summary.json,
report.html. The same command continues one that was stopped. docs/evaluate.md has more.
"""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import tomli_w
import torch
from tqdm import tqdm

from nanorchestra.agent.attempts import Player, play
from nanorchestra.agent.world import World
from nanorchestra.config import TaskSection
from nanorchestra.errors import ArgumentParser, UserError, command, require
from nanorchestra.files import read_json_lines, read_text, write_whole
from nanorchestra.records import Task, Trajectory
from nanorchestra.report.comparison import recorded_attempts, write_comparison
from nanorchestra.report.tables import aligned, calls_table, difference, measures_of, table
from nanorchestra.schemas import Json
from nanorchestra.tools.replies import ReplyStore
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from nanorchestra.training.run import RunFolder, path_of_run
from nanorchestra.training.trajectories import from_row, to_row
from nanorchestra.units import dollars, mean_and_ends, percent
from worlds import metrics
from worlds.load import note_on_tools, open_world
from worlds.policies import ROUTERS, RUNS, Policy, parse
from worlds.questions import QuestionWorld, file_of, is_questions
from worlds.recorded import record
from worlds.recorded_programs import CHANCE
from worlds.routers import Router, routers_of
from worlds.user_reward import UserReward, load_reward

TAU2 = "tau2:"  # before a domain that tau2-bench's own package plays
OURS = (
    "tools",
    "judge",
    "preference",
    "experts",
    "reward",
    "record",
    "max_usd",
)  # options that it does not know
TRIAL = 7919  # between the seeds of two trials
TASK = 1_000_003  # between the seeds of two evaluations' attempts
CALLS = "calls of the first, by preference"
KINDS_OF = 2  # policies of which what is right is told by kind of task; summary.json has all
MOST_LABEL = 40  # characters of a policy's name, in a progress bar and the name of a file
FAILING = 4  # more than one attempt in so many that the infrastructure fails ends an evaluation
FREE = ("run", "record", "max_usd")  # options that do not change what is measured
RUN = "evaluation"  # name of the first directory without --run
ASSETS = Path(__file__).parent / "assets"
NO_PRICE = (
    "no price is known for this model: its tokens count as free in reward and preference, its cost "
    "is left out, and --max-usd does not bound it; add :input=X:output=X, US dollars per million "
    "tokens"
)


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
    add("--world", nargs="+", default=["desk"], help="as task.world of train.py")
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
    add("--record", default="", help="FILE for the answers of each expert to each question")
    add("--max-usd", type=float, default=math.inf, help="that endpoints may cost together")
    add("--run", help=f"name of the directory in runs/ (default: {RUN}, or the next free {RUN}-N)")
    options = parser.parse_args(arguments)
    for name in ("tasks", "trials", "parallel"):
        count = getattr(options, name)
        require(count > 0, f"--{name} is {count}; it must be at least 1")
    path_of_run(RUNS, RUN if options.run is None else options.run, "--run")
    return options


@command("evaluate.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = read_options(arguments, __doc__)
    if "runs" in options:
        compare_runs(options.runs)
        return 0
    if any(name.startswith(TAU2) for name in options.world):
        evaluate_by_tau2(options)
        return 0
    with Sandbox() as sandbox:
        if options.record:
            record_answers(options, sandbox)
        else:
            evaluate(options, sandbox)
    return 0


def evaluate(options: Namespace, sandbox: Sandbox) -> None:
    """Plays each policy in each world, records the attempts and reports. UserError.

    The attempts of a block run side by side and are recorded together in a file of their own. A
    file that is there is read, so a resumed evaluation is the same as an unbroken one.
    """
    replies = ReplyStore(RUNS / "replies", tools=False)  # unless --experts names a directory
    spending = Spending(options.max_usd, replies)
    worlds = open_worlds(options, sandbox, spending)
    tasks = {name: tasks_of(world, options) for name, world in worlds.items()}
    routers = {name: routers_of(world) for name, world in worlds.items()}
    policies = read_policies(options.policy, routers)
    tell_strangers(policies, options.world)
    tell_missing_routers(policies, routers)
    user_reward = load_reward(options.reward, next(iter(tasks.values()))[0])
    run = open_run(options, policies)
    spending.keep_in(run.path / "spent.json")

    sides = []
    for name, world in worlds.items():
        for policy in policies:
            if policy.kind != "router" or policy.base in routers[name]:
                router = routers[name].get(policy.base)
                sides.append(Side(len(sides), name, world, tasks[name], policy, router))
    count = sum(len(side.tasks) for side in sides) * options.trials
    bar = tqdm(total=count, unit="attempt", dynamic_ncols=True, disable=None)  # on a terminal only
    done = 0  # attempts of whole blocks; the bar also counts those that are repeated

    played: dict[str, dict[str, list[metrics.Pair]]] = defaultdict(dict)  # by world and policy
    problem = ""
    try:
        for side in sides:
            if side.policy.base == CHANCE:
                first = played.get(side.world_name, {}).get(policies[0].text)
                side.router.play.follow(first)
            bar.set_description(side.policy.text[-MOST_LABEL:])
            for block in play_side(side, run, options, spending, user_reward, bar):
                played[side.world_name].setdefault(side.policy.text, []).extend(block)
                done += len(block)
                bar.update(done - bar.n)
            if bar.disable:
                says = f"{side.world_name}, {side.policy.text}: played; {done} of {count} attempts"
                print(says, file=sys.stderr)
    except UserError as error:
        if not (played or spending.spent):  # frees the name for a corrected command
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        problem = f"{error}. {run.path} has what was measured; the same command goes on"
    finally:
        bar.close()

    unpriced = [policy.text for policy in policies if not policy.priced]
    summaries = {name: metrics.compare(pairs, unpriced) for name, pairs in played.items()}
    run.write_json("summary.json", {"partial": problem, "worlds": summaries})
    write_comparison(run.path)
    show(summaries)
    if spending.bill:
        parts = ", ".join(f"{name} {dollars(usd)}" for name, usd in spending.bill.most_common())
        print(f"paid to endpoints: {dollars(sum(spending.bill.values()))} ({parts})")
    require(not problem, problem)
    print(f"{run.path}: report.html, summary.json")


def record_answers(options: Namespace, sandbox: Sandbox) -> None:
    """Asks each expert of the catalogue each question once; writes a file for recorded:FILE.

    UserError, also for a file in which answers are missing. The same command asks for those alone.
    """
    file = Path(options.record)
    replies = ReplyStore(RUNS / "replies", tools=False)
    spending = Spending(options.max_usd, replies, file.with_name(f"{file.name}.spent.json"))
    world, *others = open_worlds(options, sandbox, spending).values()
    asks = isinstance(world, QuestionWorld) and not others
    require(asks, f"--record: --world is {' '.join(options.world)}; it must be one questions:FILE")
    written, missing = record(world, file, options.parallel)
    require(not spending.replies.missing, spending.replies.missing)
    print(f"{file}: {written} cases; paid {dollars(sum(spending.bill.values()))}")
    why = f"--max-usd {spending.max_usd:g} is reached" if spending.exhausted else "experts failed"
    again = "the same command asks for them" + (", with more dollars" if spending.exhausted else "")
    require(not missing, f"{file}: {missing} cases lack an answer ({why}); {again}")


def evaluate_by_tau2(options: Namespace) -> None:
    """Has tau2-bench's own package play its domains, and reports its figures. UserError.

    Each policy has a folder with a file of tau2-bench's Results for each domain.
    """
    from worlds import tau2  # brings the HTTP server

    others = [name for name in options.world if not name.startswith(TAU2)]
    require(not others, f"--world {' '.join(others)}: {TAU2}DOMAIN stands alone or with others")
    ours = read_options([])
    for name in OURS:
        unknown = f"--{name.replace('_', '-')}: tau2-bench does not know it; leave it out"
        require(getattr(options, name) == getattr(ours, name), unknown)
    user = tau2.user_of(options.user, options.user_args)
    domains = [tau2.open_domain(world, options.tasks) for world in options.world]
    policies = read_policies(options.policy, {})
    tau2.check_policies(policies)
    run = open_run(options, policies)
    summaries = {}
    for domain in domains:
        by_policy = summaries.setdefault(domain.world, {})
        for number, policy in enumerate(policies):
            file = run.path / f"policy-{number}" / f"{domain.file_name}.json"
            by_policy[policy.text] = tau2.play(
                domain, policy, user, file, options.trials, options.parallel, options.seed
            ) | {"trajectories": str(file.relative_to(run.path))}
            run.write_json("summary.json", {"worlds": summaries})
        print("\n".join(tau2.lines_of(domain.world, by_policy)))
    for name, by_policy in summaries.items():
        for text, summary in by_policy.items():
            most = f"{name}: {text}: more than one of {FAILING} attempts failed: "
            few = summary["failed"] * FAILING <= summary["attempts"]
            require(few, most + summary["failure"])
    print(f"{run.path}: policy-N/DOMAIN.json for tau2 submit, summary.json")


# What is compared, on what.


def open_worlds(options: Namespace, sandbox: Sandbox, spending: Spending) -> dict[str, World]:
    """Returns the worlds by the text of --world. UserError."""
    worlds = {}
    for name in options.world:
        settings = TaskSection(
            world=name,
            tools=options.tools,
            experts=options.experts,
            judge=options.judge,
            user=options.user,
            preference=options.preference,
        )
        worlds[name] = open_world(settings, options.seed, sandbox, spending)
    return worlds


def tasks_of(world: World, options: Namespace) -> list[Task]:
    """Returns the tasks to play: held-out ones, or with --all every one."""
    split = "all" if options.all else "held_out"
    size = world.size(split)
    count = options.tasks if size is None else min(options.tasks, size)
    return [world.task(split, index) for index in range(count)]


def read_policies(texts: list[str], routers: dict[str, dict]) -> list[Policy]:
    """Returns the policies that --policy names, and says on stderr what they mean. UserError."""
    known = []
    for of_world in routers.values():
        known += of_world
    named = []
    for text in texts:
        named += known if text == ROUTERS else [text]
    require(named, f"--policy {ROUTERS}: these worlds have none; name a checkpoint or MODEL@URL")
    policies = [parse(text, dict.fromkeys(known)) for text in dict.fromkeys(named)]
    for policy in policies:
        if policy.kind != "router":
            settings = dict(policy.settings)
            origin = settings.pop("from")
            words = ", ".join(f"{name}={value}" for name, value in settings.items())
            print(f"{policy.text}: {words} (from {origin})", file=sys.stderr)
        if not policy.priced:
            print(f"{policy.text}: {NO_PRICE}", file=sys.stderr)
    return policies


def tell_strangers(policies: list[Policy], worlds: list[str]) -> None:
    """Says on stderr of each checkpoint of the desk that it is no policy for a world."""
    bases = [policy.base for policy in policies if policy.kind == "checkpoint"]
    for base, world in product(bases, worlds):
        if note := note_on_tools(base, world, "--policy"):
            print(note, file=sys.stderr)


def tell_missing_routers(policies: list[Policy], routers: dict[str, dict]) -> None:
    """Says on stderr of each world which of the routers it has not, so does not play."""
    for world, known in routers.items():
        missing = [p.text for p in policies if p.kind == "router" and p.base not in known]
        if missing:
            names = ", ".join(missing)
            print(f"{world}: not played by {names}: it has no such router", file=sys.stderr)


def open_run(options: Namespace, policies: list[Policy]) -> RunFolder:
    """Makes the directory, or opens it to go on. UserError if it holds another evaluation."""
    names = options.tools.split(",")
    for world in options.world:
        name = str(file_of(world)) if is_questions(world) else world.removeprefix("recorded:")
        names.append(name)
    names.append(options.reward.rpartition(":")[0])
    names += [policy.base for policy in policies]
    digests = []
    for path in [Path(name) for name in names if name]:
        for file in sorted([path, *path.glob("*")]):
            if file.is_file():
                with file.open("rb") as content:
                    digests.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file}")
    code = ""
    if shutil.which("git"):
        describe = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
        done = subprocess.run(describe, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        code = done.stdout.strip()
    text = tomli_w.dumps(
        {
            "options": {name: value for name, value in vars(options).items() if name not in FREE},
            "policies": {policy.text: policy.settings for policy in policies},
            "files": digests,
            "code": code,
            "versions": [sys.version, torch.__version__],
        }
    )
    path = run_path(options, text)
    if not (path / "config.toml").exists():
        RunFolder.create(path, text)
    other = f"{path}: holds another evaluation (its config.toml differs); give another --run"
    require(read_text(path / "config.toml") == text, other)
    return RunFolder(path)


def run_path(options: Namespace, text: str) -> Path:
    """Returns the directory that --run names, or the first that is free or has this config.toml."""
    if options.run is not None:
        return RUNS / options.run
    path, number = RUNS / RUN, 1
    while os.path.lexists(path):
        config = path / "config.toml"
        if config.is_file() and read_text(config) == text:
            break
        number += 1
        path = RUNS / f"{RUN}-{number}"
    return path


# The attempts of a policy, block by block.


@dataclass(frozen=True)
class Side:
    """A policy in a world, which --world names so. `router` plays it; None: what it loads.

    `number` is its place in the order of playing.
    """

    number: int
    world_name: str
    world: World
    tasks: list[Task]
    policy: Policy
    router: Router | None

    def file_name(self, place: int) -> str:
        """Returns the name of a block's file: in the order of playing, and named by the policy."""
        parts = []
        for text in (self.world_name, self.policy.text):
            parts.append(re.sub(r"[^\w.=-]+", "-", text).strip("-.")[-MOST_LABEL:])
        return f"{self.number:02}-{parts[0]}-{parts[1]}-{place:04}.jsonl"


def play_side(
    side: Side,
    run: RunFolder,
    options: Namespace,
    spending: Spending,
    user_reward: UserReward | None,
    bar: tqdm,
) -> Iterator[list[metrics.Pair]]:
    """Yields the attempts of a side by blocks: played and recorded, or read if they were before.

    Each attempt that is played moves the bar. UserError as `check_block` says.
    """
    player = side.router
    blocks = product(range(options.trials), range(0, len(side.tasks), options.parallel))
    for place, (trial, start) in enumerate(blocks):
        file = run.path / side.file_name(place)
        if not file.exists():
            player = player or side.policy.load(spending, options.parallel)
            player.on_done = lambda attempt: bar.update()
            tasks = side.tasks[start : start + options.parallel]
            seed = options.seed + TRIAL * trial
            attempts = play_block(
                player,
                side.policy,
                side.world,
                tasks,
                seed,
                start,
                user_reward,
                lambda: spending.problem,
            )
            check_block(side.policy, attempts, spending)
            record_block(file, side.policy, tasks, attempts, trial)
        yield [from_row(row) for _, row in read_json_lines(file)]


def play_block(
    player: Player,
    policy: Policy,
    world: World,
    block: list[Task],
    seed: int,
    start: int,
    user_reward: UserReward | None = None,
    problem: Callable[[], str] = lambda: "",
) -> list[Trajectory]:
    """Returns one scored attempt at each task, all in environments of the same seed.

    `start` is the number of the block's first task, so that each attempt has a seed of its own.
    `problem` says why the evaluation has to end, "" if it has not.
    """
    if engine := getattr(player, "engine", None):
        engine.reset_prefix_cache()  # so that a block does not depend on those before

    def environment(i):
        return policy.environment(world, block[i], seed)

    seeds = [seed * TASK + start + i for i in range(len(block))]
    attempts, _ = play(player, environment, seeds, problem)
    scored = zip(block, attempts, strict=True)
    return [metrics.score(task, attempt, user_reward) for task, attempt in scored]


def check_block(policy: Policy, attempts: list[Trajectory], spending: Spending) -> None:
    """Raises UserError if the dollars are spent, or an endpoint is gone, of a policy or expert."""
    require(not spending.replies.missing, spending.replies.missing)
    reached = f"--max-usd {spending.max_usd:g} is reached; give more to go on"
    require(not spending.exhausted, reached)
    failures = [attempt.failure for attempt in attempts if attempt.failure]
    require(
        len(failures) * FAILING <= len(attempts),
        f"{policy.text}: {len(failures)} of {len(attempts)} attempts failed: "
        f"{''.join(failures[:1])}",
    )


def record_block(
    file: Path,
    policy: Policy,
    block: list[Task],
    attempts: list[Trajectory],
    trial: int,
) -> None:
    """Writes the attempts as JSON Lines, the whole file at once."""
    more = {"policy": policy.text, "priced": policy.priced, "trial": trial}
    lines = []
    for task, attempt in zip(block, attempts, strict=True):
        lines.append(json.dumps(to_row(task, attempt) | more) + "\n")
    write_whole(file, "".join(lines))


# What is printed.


def show(worlds: dict[str, Json]) -> None:
    """Prints the scores, what failed, whom the first policy calls, and what it earns more."""
    for world, summaries in worlds.items():
        tasks = max(summary["tasks"] for summary in summaries.values())
        print(table(summaries, f"{world}, {tasks} tasks"))
        kinds = next(iter(summaries.values()))["right_by_kind"]
        known = measures_of(summaries.values())
        if len(kinds) > 1:
            told = list(summaries)[:KINDS_OF]
            word = known["exact" if "exact" in known else "accuracy"].title
            rows = [[f"{word} by kind", "tasks", *(name[:26] for name in told)]]
            for kind, first in kinds.items():
                shares = (summaries[name]["right_by_kind"].get(kind) for name in told)
                rows.append([kind, str(first["tasks"]), *map(_share_text, shares)])
            print("\n".join(["", *aligned(rows)]))
        first, *others = summaries
        by_preference = summaries[first]["calls_by_preference"]
        if any(by_preference.values()):
            print("\n".join(["", *aligned(calls_table(by_preference, CALLS))]))
        if not others:
            continue
        rows = [["reward of the first, minus that of", "mean [95% interval]"]]
        for name in others:
            behind = difference(summaries[name]["behind"], "reward", known["reward"])
            rows.append([name, behind])
        print("\n".join(["", *aligned(rows), ""]))


def compare_runs(paths: list[Path]) -> None:
    """Prints by how much the policies of one evaluation lead those of another. UserError.

    Policies of the same name are paired, or else the first of each, on the tasks that are the same.
    """
    (ours, our_unpriced), (theirs, their_unpriced) = [_read_run(path) for path in paths]
    paired = {name: name for name in ours if name in theirs}
    if not paired:
        paired = {next(iter(ours)): next(iter(theirs))}
    for name, other in paired.items():
        our_tasks = {task.id: task for task, _ in ours[name]}
        shared = [pair for pair in theirs[other] if our_tasks.get(pair[0].id) == pair[0]]
        require(shared, f"{name}: the two evaluations have no task in common")
        done = [
            metrics.Finished.of(ours[name], name not in our_unpriced),
            metrics.Finished.of(shared, other not in their_unpriced),
        ]
        differences, rows = metrics.differences(*done), []
        print(f"{name} minus {other} on the {len(shared)} attempts at the same tasks:")
        for key, measure in measures_of([each.means for each in done]).items():
            if key in differences:
                rows.append([f"  {measure.title}", difference(differences, key, measure)])
        print("\n".join(aligned(rows)))


def _read_run(path: Path) -> tuple[dict[str, metrics.Pairs], set[str]]:
    """Returns the recorded attempts by policy, and the policies without a price. UserError."""
    played, unpriced = defaultdict(list), set()
    try:
        for row in recorded_attempts(path):
            played[row["policy"]].append(from_row(row))
            if not row["priced"]:
                unpriced.add(row["policy"])
    except (KeyError, TypeError):  # rows that are no attempts
        played.clear()
    require(played, f"{path}: holds no attempts; give two directories of evaluate.py")
    return played, unpriced


def _share_text(share: Json | None) -> str:
    """Returns a share of tasks with its interval; "-" for none."""
    if not share:
        return "-"
    whole = partial(percent, decimals=0)
    return mean_and_ends(whole, share["right"], share["low"], share["high"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
