"""The command: makes worlds and tasks with one of the two authors, proves each task, writes them, and says what was made and thrown away.

    python data_gen.py --tasks 10000 --seed 1 --out data/        python data_gen.py --show 3

Tasks are made in batches, each a pure function of (domain, seed, number), by worker processes; which worker made which, and how many there
are, leaves no trace. A finished batch is kept in OUT/parts until all is done, so that a run that is killed goes on with what it had.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Callable, NoReturn, Sequence

from tqdm import tqdm

from nanorchestra.errors import UserError
from nanorchestra.files import write_whole
from worlds.toolscale.domains import BUILT_IN, build
from worlds.toolscale.score import Scorer
from worlds.toolscale.tasks import changes, generate, to_task
from worlds.toolscale.verify import DUPLICATE, altered, mentions, signature, task_text, verify
from worlds.toolscale.world import World

BATCH = 50
Part = dict[str, Any]  # tasks, signatures, rejected, and what was measured on the tasks


def make_batch(domain: str, seed: int, levels: Sequence[int], number: int) -> Part:
    """Batch `number` of a domain by the built-in author: BATCH proved tasks of levels in turn (fewer if 40 times as many attempts give no more)."""
    world, words = build(domain, seed)
    tasks: list[dict[str, Any]] = []
    seen: set[str] = set()
    rejected: Counter[str] = Counter()
    for attempt in range(40 * BATCH):
        if len(tasks) == BATCH:
            break
        rng = random.Random(f"{seed}/{world.domain}/{number}/{attempt}")
        draft, act = generate(
            world, words, rng, levels[len(tasks) % len(levels)], number * BATCH + len(tasks)
        )
        task = to_task(
            world, words, draft, act, f"{world.domain}-{seed}-{number * BATCH + len(tasks)}"
        )
        reason = verify(world, task) or (DUPLICATE if signature(task) in seen else None)
        if reason:
            rejected[reason] += 1
        else:
            seen.add(signature(task))
            tasks.append(task)
    return measured(world, tasks, rejected)


def measured(world: World, tasks: list[dict[str, Any]], rejected: Counter[str]) -> Part:
    """A part: the tasks, and how many of them score 1 by their golden calls, by doing nothing, and with one golden argument altered."""
    part: Part = {
        "tasks": tasks,
        "rejected": dict(rejected),
        "golden": 0,
        "nothing": 0,
        "altered": 0,
        "steps": 0,
        "seconds": 0.0,
        "patterns": sorted({pattern(task) for task in tasks}),
    }
    for task in json.loads(json.dumps(tasks)):  # as who loads the file will find them
        scorer = Scorer(world, task)
        calls, said = scorer.golden_calls(), task["evaluation_criteria"]["communicate_info"] or []
        start = time.process_time()
        scorer.replay(calls)
        part["seconds"] += time.process_time() - start
        part["steps"] += len(calls)
        part["golden"] += scorer.score(calls, said).reward == 1
        part["nothing"] += scorer.score([], []).reward == 1
        part["altered"] += (
            scorer.score(altered(world, calls, random.Random(task["id"])), said).reward == 1
        )
    return part


def run(
    domains: dict[str, int],
    make: Callable[[str, int], Part],
    out: Path,
    settings: dict[str, Any],
    executor: Executor | None,
    patience: int = 4,
) -> tuple[list[dict[str, Any]], Part]:
    """`domains[d]` tasks of each domain from batches of `make(domain, number)`, near duplicates across batches thrown away: (tasks in turn, totals).

    Batches are taken in the order of their numbers, whoever makes them. A domain with `patience` empty batches in a row is left as it is.
    """
    parts = out / "parts"
    _resume(parts, settings)
    kept: dict[str, list[dict[str, Any]]] = {domain: [] for domain in domains}
    seen: set[str] = set()
    totals: Part = {
        "rejected": Counter(),
        "patterns": set(),
        **dict.fromkeys(("golden", "nothing", "altered", "steps", "seconds", "made"), 0),
    }
    following, barren = dict.fromkeys(domains, 0), dict.fromkeys(domains, 0)
    with tqdm(
        total=sum(domains.values()), desc="tasks", unit="task", dynamic_ncols=True, disable=None
    ) as bar:
        while True:
            wanted = {
                d: -(-(count - len(kept[d])) // (BATCH - 2))
                for d, count in domains.items()
                if len(kept[d]) < count and barren[d] < patience
            }
            if not wanted:
                break
            jobs = [
                (d, following[d] + k)
                for k in range(max(wanted.values()))
                for d in wanted
                if k < wanted[d]
            ]
            for (domain, number), part in zip(jobs, _parts(jobs, make, parts, executor)):
                following[domain] = number + 1
                new = [
                    task
                    for task in part["tasks"]
                    if not (signature(task) in seen or seen.add(signature(task)))
                ]
                totals["rejected"].update(
                    part["rejected"]
                    | (
                        {
                            DUPLICATE: part["rejected"].get(DUPLICATE, 0)
                            + len(part["tasks"])
                            - len(new)
                        }
                        if len(new) < len(part["tasks"])
                        else {}
                    )
                )
                for figure in ("golden", "nothing", "altered", "steps", "seconds"):
                    totals[figure] += part[figure]
                totals["patterns"].update(part["patterns"])
                totals["made"] += len(part["tasks"])
                barren[domain] = 0 if new else barren[domain] + 1
                bar.update(min(len(new), max(0, domains[domain] - len(kept[domain]))))
                kept[domain] += new
    kept = {domain: tasks[: domains[domain]] for domain, tasks in kept.items()}
    longest = max(map(len, kept.values()), default=0)
    return [tasks[i] for i in range(longest) for tasks in kept.values() if i < len(tasks)], totals


def _parts(
    jobs: list[tuple[str, int]],
    make: Callable[[str, int], Part],
    parts: Path,
    executor: Executor | None,
):
    """The part of each job, in order; those on disk are read, the others made (by the executor, if there is one) and kept."""

    def path(domain: str, number: int) -> Path:
        return parts / f"{Path(domain).stem}-{number:05d}.json"

    work = functools.partial(_make_and_keep, make)
    futures: dict[tuple[str, int], Future] = {}
    for job in jobs:
        if executor is not None and not path(*job).exists():
            futures[job] = executor.submit(work, job, path(*job))
    try:
        for job in jobs:
            if job in futures:
                yield futures[job].result()
                continue
            try:
                yield json.loads(path(*job).read_text())
            except OSError:
                yield work(job, path(*job))
            except ValueError:
                tqdm.write(f"{path(*job)}: not whole; made anew", file=sys.stderr)
                yield work(job, path(*job))
    finally:
        for future in futures.values():
            future.cancel()


def _make_and_keep(make: Callable[[str, int], Part], job: tuple[str, int], path: Path) -> Part:
    part = make(*job)
    write_whole(path, json.dumps(part).encode())
    return part


def _resume(parts: Path, settings: dict[str, Any]) -> None:
    """Refuses parts of another run; says so if there are some of this one."""
    parts.mkdir(parents=True, exist_ok=True)
    note = parts / "settings.json"
    if note.exists() and note.read_text() != json.dumps(settings):
        raise UserError(
            f"{parts}: holds the unfinished work of another command ({note.read_text()}); finish that one, give another --out, or remove the directory"
        )
    write_whole(note, json.dumps(settings).encode())
    done = len(list(parts.glob("*-*.json")))
    if done:
        print(f"going on with {done} batches that were there", file=sys.stderr)


# --- what is printed ----------------------------------------------------------------------------------------------------------------------


def pattern(task: dict[str, Any]) -> str:
    """Where each golden argument comes from: t the user's text, r what an earlier call returned."""
    text = task_text(task)
    return " ".join(
        f"{action['name']}({','.join('t' if mentions(text, value) else 'r' for value in action['arguments'].values())})"
        for action in task["evaluation_criteria"]["actions"]
    )


def figures(
    tasks: list[dict[str, Any]], totals: Part, worlds: dict[str, World], seconds: float
) -> str:
    """The report of a run, as printed."""
    sequences = [
        tuple(action["name"] for action in task["evaluation_criteria"]["actions"]) for task in tasks
    ]
    lengths = Counter(map(len, sequences))
    groups = Counter(zip(sequences, (task.get("template") for task in tasks)))
    crowded = sum(count for count in groups.values() if count - 1 > 0.01 * (len(tasks) - 1))
    thrown, made = totals["rejected"], max(totals["made"], 1)
    lines = [
        f"{len(tasks)} tasks in {len(worlds)} domains, {seconds:.1f} s",
        f"thrown away: {sum(thrown.values())}"
        + "".join(
            f"\n  {count:6d}  {reason}"
            for reason, count in sorted(thrown.items(), key=lambda item: -item[1])
        ),
        f"score 1: {100 * totals['golden'] / made:.2f}% by their golden calls, {100 * totals['nothing'] / made:.2f}% by doing nothing, {100 * totals['altered'] / made:.2f}% with one golden argument altered",
        f"replay: {totals['steps'] / max(totals['seconds'], 1e-9):,.0f} environment steps per second of one core",
        f"distinct tool sequences: {len(set(sequences))}",
        f"distinct argument patterns: {len(totals['patterns'])}",
        f"tasks whose sequence and wording more than 1% of the others share: {100 * crowded / max(len(tasks), 1):.2f}%",
        "golden calls a task: "
        + ", ".join(
            f"{length}: {100 * count / len(tasks):.1f}%"
            for length, count in sorted(lengths.items())
        ),
        "share of the golden calls, by tool:",
    ]
    for domain, world in worlds.items():
        used = Counter(
            name
            for task, names in zip(tasks, sequences)
            if task["domain"] == domain
            for name in names
        )
        shares = ", ".join(
            f"{name} {100 * used[name] / max(sum(used.values()), 1):.1f}%"
            for name in sorted(world.by_name, key=lambda name: -used[name])
        )
        unused = [name for name in world.by_name if not used[name]]
        lines.append(
            f"  {domain} ({len(world.by_name)} tools, {sum(map(len, world.tables.values()))} records{'; UNUSED: ' + ', '.join(unused) if unused else ''}): {shares}"
        )
    return "\n".join(lines)


def show(world: World, task: dict[str, Any]) -> str:
    """One task as a person would read it: scenario, tools, golden calls, what they change."""
    scenario, criteria = task["user_scenario"], task["evaluation_criteria"]
    lines = [f"=== {task['id']} (level {task.get('level', '-')}) " + "=" * 40, ""]
    lines += [
        f"{title}: {words}"
        for title, words in (
            ("Persona", scenario["persona"]),
            ("Wants", scenario["instructions"]["reason_for_call"]),
            ("Knows", scenario["instructions"]["known_info"]),
            ("Does not know", scenario["instructions"]["unknown_info"]),
            ("Manner", scenario["instructions"]["task_instructions"]),
        )
        if words
    ]
    scorer = Scorer(world, task)
    lines += ["", "Tools: " + ", ".join(task.get("tools") or world.by_name), "", "Golden calls:"]
    lines += [
        f"  {number}. {name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for number, (name, arguments) in enumerate(scorer.golden_calls(), 1)
    ]
    lines += (
        ["", "Must be told: " + ", ".join(criteria["communicate_info"])]
        if criteria["communicate_info"]
        else []
    )
    lines += ["", "Changes in the database:"]
    for table, key, old, new in changes(scorer.start(), scorer.gold):
        what = (
            f"new: {new}"
            if old is None
            else "deleted"
            if new is None
            else ", ".join(
                f"{field}: {old[field]!r} -> {new[field]!r}"
                for field in new
                if old[field] != new[field]
            )
        )
        lines.append(f"  {table} {key}: {what}")
    return (
        "\n".join(lines if lines[-1] != "Changes in the database:" else [*lines, "  none"]) + "\n"
    )


# --- the command ----------------------------------------------------------------------------------------------------------------------------


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message} (--help shows the usage)")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="data_gen.py",
        description="Makes worlds (databases, tools, policies) and verified multi-step tool-calling tasks in them.",
    )
    parser.add_argument(
        "--tasks",
        type=int,
        default=1000,
        metavar="N",
        help="how many tasks, over all domains (default: 1000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of worlds and tasks (default: 0)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where tasks.jsonl and worlds/ are written"
    )
    parser.add_argument(
        "--show", type=int, metavar="N", help="print N tasks to read, write nothing"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="worker processes; the result does not depend on them (default: one a core)",
    )
    parser.add_argument(
        "--domains",
        default=",".join(BUILT_IN),
        metavar="A,B",
        help="built-in names or blueprint files (default: all ten); with --author llm, any words",
    )
    parser.add_argument(
        "--difficulty",
        default="1-5",
        metavar="LEVELS",
        help="1 to 5, or a range such as 2-4 (default: 1-5)",
    )
    parser.add_argument(
        "--author",
        choices=("builtin", "llm"),
        default="builtin",
        help="who writes (default: builtin, which needs no network)",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="with --author llm: the base URL of an OpenAI-compatible server",
    )
    parser.add_argument(
        "--model",
        default="gpt-5",
        metavar="NAME",
        help="with --author llm: the model to ask for (default: gpt-5)",
    )
    parser.error = _refuse
    options = parser.parse_args(arguments)
    for name, least in (("tasks", 1), ("workers", 1), ("show", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}; it must be at least {least}")
    low, _, high = options.difficulty.partition("-")
    if not (
        low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low) <= 5
    ):
        raise UserError(
            f"--difficulty is {options.difficulty!r}; it must be a level from 1 to 5, or a range such as 2-4"
        )
    options.levels = tuple(range(int(low), int(high or low) + 1))
    options.domains = [name.strip() for name in options.domains.split(",") if name.strip()]
    if not options.domains or len({Path(name).stem for name in options.domains}) < len(
        options.domains
    ):
        raise UserError("--domains must name at least one domain, and none twice")
    if (options.author == "llm") != bool(options.endpoint):
        raise UserError("--author llm needs --endpoint, and --endpoint needs --author llm")
    if options.show is None and options.out is None:
        raise UserError(
            "--out is missing: give a directory for the tasks, or --show 3 to look at some"
        )
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out}: is a file; give a directory")
    return options


def main(arguments: Sequence[str]) -> int:
    """The command line of data_gen.py. Returns the exit status."""
    try:
        options = _options(arguments)
        started = time.monotonic()
        count = options.show or options.tasks
        counts = {
            domain: count // len(options.domains) + (i < count % len(options.domains))
            for i, domain in enumerate(options.domains)
        }
        builtin = options.author == "builtin"
        if builtin:
            worlds = {domain: build(domain, options.seed)[0] for domain in counts}
            make = functools.partial(_builtin, options.seed, options.levels)
        else:
            from worlds.toolscale.author import (
                Author,  # requests, which the built-in author does not need
            )

            author = Author(options.endpoint, options.model, options.seed, options.levels)
            worlds, make = (
                author.worlds(list(counts), options.out / "worlds" if options.out else None),
                author.make_batch,
            )
            counts = {domain: counts[domain] for domain in worlds}
        if options.show:
            for i, domain in enumerate(domain for domain in worlds if counts[domain]):
                first = (
                    i + 1 if builtin else 0
                )  # the first wishes of built-in tasks are of the same kinds in all domains
                print(
                    "\n".join(
                        show(worlds[domain], task)
                        for task in make(domain, 0)["tasks"][first : first + counts[domain]]
                    )
                )
            return 0
        executor = (
            ThreadPoolExecutor(options.workers)
            if not builtin
            else ProcessPoolExecutor(options.workers)
            if options.workers > 1
            else None
        )
        for world in worlds.values():
            world.save(options.out / "worlds" / world.domain)
        settings = {
            "seed": options.seed,
            "domains": options.domains,
            "levels": options.levels,
            "author": options.author,
        }
        try:
            tasks, totals = run(counts, make, options.out, settings, executor)
        finally:
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)
        write_whole(
            options.out / "tasks.jsonl",
            "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks).encode(),
        )
        shutil.rmtree(options.out / "parts")
        print(
            figures(
                tasks,
                totals,
                {world.domain: world for world in worlds.values()},
                time.monotonic() - started,
            )
        )
        if len(tasks) < count:
            print(f"data_gen.py: only {len(tasks)} of {count} tasks could be made", file=sys.stderr)
            return 1
        return 0
    except UserError as error:
        print(f"data_gen.py: {error}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print(
            "data_gen.py: a worker process was killed (out of memory?); the same command goes on with what is there",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("data_gen.py: stopped; the same command goes on with what is there", file=sys.stderr)
        return 130


def _builtin(seed: int, levels: Sequence[int], domain: str, number: int) -> Part:
    return make_batch(domain, seed, levels, number)
