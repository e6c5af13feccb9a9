"""Makes tasks in batches, proves each and drops duplicates.

A batch is a pure function of (seed, levels, domain, number), so the result does not depend on the
number of workers. What came of the draws is counted by the wishes that they hold.
"""

import itertools
import json
import random
from collections import Counter, defaultdict
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
from worlds.toolscale.plan import TWISTS, draw, plan, to_task
from worlds.toolscale.verify import task_text, verify
from worlds.toolscale.wishes import Scene, UnfitError

BATCH = 50
DRAWS = 600  # of wishes, in which each rule is kept and broken
WISH_DRAWS = 60  # of one wish, in which a task is proved
WAYS = ("plain", *dict.fromkeys(TWISTS))  # to put a wish
PROVED, DUPLICATE = "", "duplicate"
MOST_NAMED = 3  # wishes that the report names beside a reason
Outcomes = Counter[tuple[tuple[str, ...], str]]  # by the wishes DOMAIN.WISH of a draw, and why not
Make = Callable[[str, int], tuple[list[Json], Outcomes]]  # (domain, number) -> batch


@cache
def built(name: str, seed: int) -> Domain:
    """Returns a domain of the seed; a worker draws each once."""
    return build(name, seed)


def make_batch(
    seed: int, levels: Sequence[int], name: str, number: int
) -> tuple[list[Json], Outcomes]:
    """Makes batch `number` of the domain `name`; see `batch_of`."""
    return batch_of(built(name, seed), seed, levels, number)


def batch_of(
    domain: Domain, seed: int, levels: Sequence[int], number: int
) -> tuple[list[Json], Outcomes]:
    """Makes batch `number` of a domain: BATCH tasks of levels in turn.

    It has fewer tasks if 40 times as many attempts give no more. Returns the tasks, and what came
    of the attempts.
    """
    tasks = {}  # by what the user says
    outcomes = Counter({((f"{domain.name}.{name}",), PROVED): 0 for name in domain.wishes})
    for attempt in range(40 * BATCH):
        place = number * BATCH + len(tasks)
        rng = random.Random(f"{seed}/{domain.name}/{number}/{attempt}")
        level = levels[len(tasks) % len(levels)]
        try:
            scene = plan(domain, level, rng)
        except UnfitError as error:
            outcomes[(), f"{domain.name}: {error}"] += 1
            continue
        task = to_task(domain, scene, f"{domain.name}-{seed}-{place}", level)
        reason = verify(domain, task) or (DUPLICATE if task_text(task) in tasks else PROVED)
        outcomes[wishes_of(domain, scene), reason] += 1
        if reason:
            continue
        tasks[task_text(task)] = task
        if len(tasks) == BATCH:
            break
    return list(tasks.values()), outcomes


def wishes_of(domain: Domain, scene: Scene) -> tuple[str, ...]:
    """Returns the wishes DOMAIN.WISH that the user of a scene speaks of, each once."""
    named = domain.wishes.items()
    return tuple(f"{domain.name}.{name}" for name, kind in named if kind in scene.kinds)


def tasks_of_wish(
    domain: Domain, name: str, count: int, seed: int = 0, twists: Sequence[str] = ("plain",)
) -> tuple[list[Json], dict[str, list[str]]]:
    """Makes tasks of one wish, with twists in turn, as many as WISH_DRAWS draws give.

    Returns them, and what users say in those that are thrown away, by the reason; "" where no user
    has the wish.
    """
    tasks, thrown = [], defaultdict(list)
    for number in range(WISH_DRAWS):
        twist = twists[number % len(twists)]
        rng = random.Random(f"{seed}/{domain.name}.{name}/{number}")
        try:
            scene = draw(domain, [twist], rng, among=[domain.wishes[name]])
        except UnfitError as error:
            if twist == "plain":  # others need rules, facts, every or instead
                thrown[str(error)].append("")
            continue
        task = to_task(domain, scene, f"{domain.name}.{name}-{number}", 1)
        if reason := verify(domain, task):
            thrown[reason].append(task_text(task))
        else:
            tasks.append(task)
        if len(tasks) == count:
            break
    return tasks, thrown


def vain(domain: Domain) -> list[str]:
    """Returns what a domain's file states in vain: wishes never proved, rules without a use.

    Raises ToolError for a wish that is allowed and cannot be done.
    """
    problems = []
    for name in domain.wishes:
        tasks, thrown = tasks_of_wish(domain, name, 1)
        if not tasks:
            problems.append(f"the wish {name} is never proved: {why(thrown)}")
    judged = set()
    for seed in range(DRAWS):
        rng = random.Random(seed)
        scene = Scene(domain.start, domain.start.copy(), rng.choice(domain.people), rng)
        try:
            wish, _ = scene.draw(rng.choice([*domain.wishes.values()]))
        except UnfitError:
            continue
        judged.update(wish.rules)
        if wish.allowed:
            scene.act(wish)
    for text in domain.rules:
        for kept, word in ((True, "keeps"), (False, "breaks")):
            if (kept, text) not in judged:
                problems.append(f"no wish {word} the rule {text!r}")
    return problems


def why(thrown: dict[str, list[str]]) -> str:
    """Returns why tasks were thrown away, with what a user says in one of each kind."""
    lines = []
    for reason, (text, *_) in thrown.items():
        lines.append(f"{reason}: {text!r}" if text else reason)
    return "; ".join(lines)


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
    workers: Callable[[Make, Iterable[str], Iterable[int]], Iterable[tuple[list[Json], Outcomes]]],
) -> tuple[list[Json], Outcomes]:
    """Makes `wanted[d]` tasks of each domain; returns them, and what came of all draws.

    `workers` maps `make` over domains and numbers, in order; `seed` is that of the experts on
    offer. Duplicates across batches are dropped.
    """
    kept = {domain: [] for domain in wanted}
    lacking, first = dict(wanted), 0
    outcomes, seen = Counter(), set()
    with tqdm(total=sum(wanted.values()), desc="tasks", unit="task", disable=None) as bar:
        while most := max(lacking.values()):
            numbers = range(first, first - -most // BATCH)
            jobs = [(d, number) for number in numbers for d in wanted if lacking[d]]
            first = numbers.stop
            parts = workers(make, [d for d, _ in jobs], [number for _, number in jobs])
            for (domain, _), (made, came) in zip(jobs, parts, strict=True):
                new = [task for task in made if task_text(task) not in seen]
                seen.update(map(task_text, new))
                outcomes.update(came)
                outcomes[(), DUPLICATE] += len(made) - len(new)
                taken = new[: lacking[domain]]
                kept[domain] += taken
                bar.update(len(taken))
                # A domain that gives nothing new is left as it is.
                lacking[domain] = lacking[domain] - len(taken) if new else 0
    tasks = [task for turn in itertools.zip_longest(*kept.values()) for task in turn if task]
    for name, part in split(tasks).items():
        for task in part:
            offer(task, name, seed)
    return tasks, outcomes


def report(tasks: Sequence[Json], outcomes: Outcomes, seconds: float) -> str:
    """Returns the figures of a run: how many tasks, what was thrown away, and for which wishes.

    Beside a reason stand the wishes of which the largest share was thrown away for it.
    """
    drawn, proved, reasons, thrown = Counter(), Counter(), Counter(), defaultdict(Counter)
    for (wishes, reason), count in outcomes.items():
        counted = dict.fromkeys(wishes, count)
        drawn.update(counted)
        if reason:
            reasons[reason] += count
            thrown[reason].update(counted)
        else:
            proved.update(counted)
    lines = [f"{len(tasks)} tasks in {seconds:.1f} s, thrown away: {reasons.total()}"]
    for reason, count in (+reasons).most_common():
        shares = {wish: f"{thrown[reason][wish]} of {drawn[wish]}" for wish in thrown[reason]}
        worst = sorted(shares, key=lambda wish: -thrown[reason][wish] / drawn[wish])[:MOST_NAMED]
        named = ", ".join(f"{wish} {shares[wish]}" for wish in worst)
        lines.append(f"  {count:6d}  {reason}" + (f" ({named})" if named else ""))
    lines += [f"  never proved: {wish}" for wish in proved if drawn[wish] and not proved[wish]]
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
