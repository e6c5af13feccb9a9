"""Makes tasks, proves each and drops duplicates.

A task is a function of the seed, the levels, its domain and its number.
"""

import json
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from nanorchestra.errors import require
from nanorchestra.files import read_json, write_whole
from nanorchestra.schemas import Json
from worlds.toolscale.dataset import split
from worlds.toolscale.domain import Domain
from worlds.toolscale.offers import offer
from worlds.toolscale.plan import TWISTS, draw, plan, to_task
from worlds.toolscale.verify import task_text, verify
from worlds.toolscale.wishes import Scene, UnfitError

DRAWS = 600  # of wishes, in which each rule is kept and broken
WISH_DRAWS = 60  # of one wish, in which a task is proved
MOST_VAIN = 400  # draws in a row that give no new task, until a domain has no more
WAYS = ("plain", *dict.fromkeys(TWISTS))  # to put a wish
PROVED, DUPLICATE = "", "duplicate"
MOST_NAMED = 3  # wishes that the report names beside a reason
Outcomes = Counter[tuple[tuple[str, ...], str]]  # by the wishes DOMAIN.WISH of a draw, and why not


def tasks_of(
    domain: Domain, seed: int, levels: Sequence[int], outcomes: Outcomes
) -> Iterator[Json]:
    """Yields tasks of a domain, of levels in turn, none twice, as long as draws give new ones.

    What comes of the draws is counted in `outcomes`.
    """
    outcomes.update({((f"{domain.name}.{name}",), PROVED): 0 for name in domain.wishes})
    texts, vain_draws, number = set(), 0, 0  # what users say
    while vain_draws < MOST_VAIN:
        rng = random.Random(f"{seed}/{domain.name}/{number}")
        level = levels[len(texts) % len(levels)]
        vain_draws, number = vain_draws + 1, number + 1
        try:
            scene = plan(domain, level, rng)
        except UnfitError as error:
            outcomes[(), f"{domain.name}: {error}"] += 1
            continue
        task = to_task(domain, scene, f"{domain.name}-{seed}-{len(texts)}", level)
        reason = verify(domain, task) or (DUPLICATE if task_text(task) in texts else PROVED)
        outcomes[wishes_of(domain, scene), reason] += 1
        if not reason:
            texts.add(task_text(task))
            vain_draws = 0
            yield task


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
    domains: Sequence[Domain], count: int, seed: int, levels: Sequence[int]
) -> tuple[list[Json], Outcomes]:
    """Makes `count` tasks of the domains in turn, fewer if these give no more.

    Returns them, and what came of all draws. `seed` is also that of the experts on offer.
    """
    tasks, outcomes, drawn = [], Counter(), deque()
    for place, domain in enumerate(domains):
        first = place % len(levels)
        drawn.append(tasks_of(domain, seed, [*levels[first:], *levels[:first]], outcomes))
    with tqdm(total=count, desc="tasks", unit="task", disable=None) as bar:
        while drawn and len(tasks) < count:
            task = next(drawn[0], None)
            if task is None:
                drawn.popleft()
                continue
            tasks.append(task)
            bar.update()
            drawn.rotate(-1)
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
