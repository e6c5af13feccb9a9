"""Makes tasks in batches, proves each and drops duplicates.

A batch is a pure function of (seed, levels, domain, number), so the result does not depend on the
number of workers.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from tqdm import tqdm

from nanorchestra.errors import require
from nanorchestra.files import read_json, write_whole
from nanorchestra.schemas import Json
from worlds.toolscale.dataset import split
from worlds.toolscale.domain import Domain, build
from worlds.toolscale.offers import offer
from worlds.toolscale.plan import plan, to_task
from worlds.toolscale.verify import task_text, verify
from worlds.toolscale.wishes import UnfitError

BATCH = 50
DUPLICATE = "duplicate"
Make = Callable[[str, int], Json]  # (domain, number) -> batch


@cache
def built(name: str, seed: int) -> Domain:
    """Returns a domain of the seed; a worker draws each once."""
    return build(name, seed)


def make_batch(seed: int, levels: Sequence[int], name: str, number: int) -> Json:
    """Makes batch `number` of the domain `name`; see `batch_of`."""
    return batch_of(built(name, seed), seed, levels, number)


def batch_of(domain: Domain, seed: int, levels: Sequence[int], number: int) -> Json:
    """Makes batch `number` of a domain: BATCH tasks of levels in turn.

    It has fewer tasks if 40 times as many attempts give no more. Returns the tasks, and how many
    were thrown away for each reason.
    """
    tasks = {}  # by what the user says
    rejected = Counter()
    for attempt in range(40 * BATCH):
        place = number * BATCH + len(tasks)
        rng = random.Random(f"{seed}/{domain.name}/{number}/{attempt}")
        level = levels[len(tasks) % len(levels)]
        try:
            scene = plan(domain, level, rng)
        except UnfitError as error:
            rejected[str(error)] += 1
            continue
        task = to_task(domain, scene, f"{domain.name}-{seed}-{place}", level)
        reason = verify(domain, task) or (DUPLICATE if task_text(task) in tasks else None)
        if reason:
            rejected[reason] += 1
            continue
        tasks[task_text(task)] = task
        if len(tasks) == BATCH:
            break
    return {"tasks": list(tasks.values()), "rejected": rejected}


def claim(out: Path, settings: Json) -> None:
    """Makes OUT a place for tasks of these settings. Raises UserError if it holds others."""
    require(not out.is_file(), f"--out {out}: is a file; give a directory")
    note = out / "settings.json"
    held = note.exists() or (out / "tasks.jsonl").exists()
    present = read_json(note) if held else settings
    require(
        present == settings,
        f"--out {out}: holds tasks of another run ({json.dumps(present)}); give another --out",
    )
    out.mkdir(parents=True, exist_ok=True)
    write_whole(note, json.dumps(settings, indent=1) + "\n")


def make_all(
    wanted: dict[str, int],
    make: Make,
    seed: int,
    workers: Callable[[Make, Iterable[str], Iterable[int]], Iterable[Json]],
) -> tuple[list[Json], Counter[str]]:
    """Makes `wanted[d]` tasks of each domain; returns them, and how many were thrown away why.

    `workers` maps `make` over domains and numbers, in order; `seed` is that of the experts on
    offer. Duplicates across batches are dropped.
    """
    kept = {domain: [] for domain in wanted}
    lacking, first = dict(wanted), 0
    rejected, seen = Counter(), set()
    with tqdm(total=sum(wanted.values()), desc="tasks", unit="task", disable=None) as bar:
        while most := max(lacking.values()):
            numbers = range(first, first - -most // BATCH)
            jobs = [(d, number) for number in numbers for d in wanted if lacking[d]]
            first = numbers.stop
            parts = workers(make, [d for d, _ in jobs], [number for _, number in jobs])
            for (domain, _), part in zip(jobs, parts, strict=True):
                new = [task for task in part["tasks"] if task_text(task) not in seen]
                seen.update(map(task_text, new))
                rejected.update(part["rejected"])
                rejected[DUPLICATE] += len(part["tasks"]) - len(new)
                taken = new[: lacking[domain]]
                kept[domain] += taken
                bar.update(len(taken))
                # A domain that gives nothing new is left as it is.
                lacking[domain] = lacking[domain] - len(taken) if new else 0
    tasks = [task for turn in itertools.zip_longest(*kept.values()) for task in turn if task]
    for name, part in split(tasks).items():
        for task in part:
            offer(task, name, seed)
    return tasks, rejected


def report(tasks: Sequence[Json], rejected: Counter[str], seconds: float) -> str:
    """Returns the figures of a run: how many tasks, and what was thrown away."""
    lines = [f"{len(tasks)} tasks in {seconds:.1f} s, thrown away: {rejected.total()}"]
    lines += [f"  {count:6d}  {reason}" for reason, count in (+rejected).most_common()]
    return "\n".join(lines)


def show(task: Json) -> str:
    """Returns a task as text to read: scenario, tools and golden calls."""
    criteria, words = task["evaluation_criteria"], dict(task["user_scenario"]["instructions"])
    words["must_be_told"] = ", ".join(criteria["communicate_info"])
    lines = [f"=== {task['id']} (level {task['level']}) " + "=" * 40, ""]
    lines += [f"{field}: {text}" for field, text in words.items() if text]
    lines += ["", f"tools: {', '.join(task['tools'])}", "", "golden calls:"]
    for number, action in enumerate(criteria["actions"], 1):
        given = ", ".join(f"{key}={value!r}" for key, value in action["arguments"].items())
        lines.append(f"  {number}. {action['name']}({given})")
    return "\n".join([*lines, ""])
