"""Makes tasks in batches, proves each and drops near duplicates.

A batch of the built-in author is a pure function of (seed, levels, domain, number), so the result
does not depend on the number of workers. A finished batch is kept in OUT/parts until all is done,
so that a run that was stopped goes on with what it had.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from nanorchestra.errors import require
from nanorchestra.files import read_json, write_whole
from worlds.toolscale.domains import build
from worlds.toolscale.plan import Planner
from worlds.toolscale.score import Scorer
from worlds.toolscale.shapes import Json
from worlds.toolscale.tasks import to_task
from worlds.toolscale.verify import DUPLICATE, altered, signature, verify
from worlds.toolscale.world import World, write_json

BATCH = 50
Make = Callable[[str, int], Json]  # (domain, number) -> batch


def make_batch(seed: int, levels: Sequence[int], domain: str, number: int) -> Json:
    """Makes batch `number` of a domain: BATCH tasks of levels in turn.

    It has fewer tasks if 40 times as many attempts give no more. Returns the tasks, how many were
    thrown away for each reason, and how many score 1 by their golden calls, by doing nothing, and
    with one golden argument altered.
    """
    world, words = build(domain, seed)
    tasks: list[Json] = []
    rejected, counts, seen = Counter(), Counter(), set()
    for attempt in range(40 * BATCH):
        place = number * BATCH + len(tasks)
        rng = random.Random(f"{seed}/{world.domain}/{number}/{attempt}")
        level = levels[len(tasks) % len(levels)]
        draft, act = Planner(world, words, rng).generate(level, place)
        task = to_task(draft, act, f"{world.domain}-{seed}-{place}")
        reason = verify(world, task) or (DUPLICATE if signature(task) in seen else None)
        if reason:
            rejected[reason] += 1
            continue
        seen.add(signature(task))
        tasks.append(task)
        counts.update(_scores(world, json.loads(json.dumps(task))))  # as a reader will find it
        if len(tasks) == BATCH:
            break
    return {"tasks": tasks, "rejected": rejected, "counts": counts}


def _scores(world: World, task: Json) -> dict[str, int]:
    scorer, told = Scorer(world, task), task["evaluation_criteria"]["communicate_info"]
    calls = scorer.golden_calls()
    wrong = altered(world, calls, random.Random(task["id"]))
    return {
        "made": 1,
        "golden": scorer.score(calls, told).reward == 1,
        "nothing": scorer.score([], []).reward == 1,
        "altered": scorer.score(wrong, told).reward == 1,
    }


def claim(out: Path, settings: Json) -> None:
    """Makes OUT a place for tasks of these settings. Raises UserError if it holds others."""
    require(not out.exists() or out.is_dir(), f"--out {out}: is a file; give a directory")
    note, found = out / "settings.json", dict.fromkeys(settings, "unknown")
    if note.exists():
        found = read_json(note)
    elif not (out / "tasks.jsonl").exists():
        found = settings
    other = ", ".join(f"{name} {found[name]}" for name in settings if found[name] != settings[name])
    require(not other, f"--out {out}: holds tasks of another run ({other}); give another --out")
    (out / "parts").mkdir(parents=True, exist_ok=True)
    write_json(note, settings)


def make_all(
    wanted: dict[str, int],
    make: Make,
    out: Path,
    workers: Callable[[Callable, Iterable], Iterable[Json]] = map,
) -> tuple[list[Json], dict[str, Counter[str]]]:
    """Makes `wanted[d]` tasks of each domain; returns them, and {"rejected", "counts"}.

    `workers` maps a function over batches, in order. Near duplicates across batches are dropped.
    """
    if done := len(list((out / "parts").iterdir())):
        print(f"going on with {done} batches that were there", file=sys.stderr)
    kept: dict[str, list[Json]] = {domain: [] for domain in wanted}
    lacking, following = dict(wanted), Counter()
    rejected, counts, seen = Counter(), Counter(), set()
    with tqdm(total=sum(wanted.values()), desc="tasks", unit="task", disable=None) as bar:
        while any(lacking.values()):
            # Two of a batch may be near duplicates of tasks in another.
            batches = {domain: -(-count // (BATCH - 2)) for domain, count in lacking.items()}
            rounds = range(max(batches.values()))
            jobs = [(d, following[d] + k) for k in rounds for d in batches if k < batches[d]]
            parts = workers(partial(_kept, make, out), jobs)
            for (domain, _), part in zip(jobs, parts, strict=True):
                new = [task for task in part["tasks"] if signature(task) not in seen]
                seen.update(map(signature, new))
                counts.update(part["counts"])
                rejected.update(part["rejected"])
                rejected[DUPLICATE] += len(part["tasks"]) - len(new)
                following[domain] += 1
                kept[domain] += new[: lacking[domain]]
                bar.update(min(len(new), lacking[domain]))
                # A domain that gives nothing new is left as it is.
                lacking[domain] = max(lacking[domain] - len(new), 0) if new else 0
    tasks = [task for turn in itertools.zip_longest(*kept.values()) for task in turn if task]
    return tasks, {"rejected": rejected, "counts": counts}


def _kept(make: Make, out: Path, job: tuple[str, int]) -> Json:
    """The batch of a job: read, if a run before this one has made it."""
    domain, number = job
    path = out / "parts" / f"{Path(domain).stem}-{number:05d}.json"
    if not path.exists():
        write_whole(path, json.dumps(make(domain, number)))
    return read_json(path)
