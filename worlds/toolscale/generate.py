"""Makes tasks, proves each and drops duplicates.

A task is a function of the seed, the levels, its domain and its number.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from nanorchestra.schemas import Json
from worlds.toolscale.domain import Domain
from worlds.toolscale.plan import TWISTS, draw, plan, to_task
from worlds.toolscale.verify import task_text, verify
from worlds.toolscale.wishes import Scene, UnfitError

DRAWS = 600  # of wishes, in which each rule is kept and broken
WISH_DRAWS = 60  # of one wish, in which a task is proved
MOST_VAIN = 400  # draws in a row that give no new task, until a domain has no more
WAYS = ("plain", *dict.fromkeys(TWISTS))  # to put a wish


def tasks_of(
    domain: Domain, seed: int, levels: Sequence[int], thrown: Counter[str]
) -> Iterator[Json]:
    """Yields tasks of a domain, of levels in turn, none twice, as long as draws give new ones.

    Those that are thrown away are counted in `thrown` by the reason.
    """
    texts, vain_draws, number = set(), 0, 0  # what users say
    while vain_draws < MOST_VAIN:
        rng = random.Random(f"{seed}/{domain.name}/{number}")
        level = levels[len(texts) % len(levels)]
        vain_draws, number = vain_draws + 1, number + 1
        try:
            scene = plan(domain, level, rng)
        except UnfitError as error:
            thrown[f"{domain.name}: {error}"] += 1
            continue
        task = to_task(domain, scene, f"{domain.name}-{seed}-{len(texts)}", level)
        text = task_text(task)
        if reason := verify(domain, task) or ("duplicate" if text in texts else ""):
            thrown[reason] += 1
            continue
        texts.add(text)
        vain_draws = 0
        yield task


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
    """Returns what a domain's file states in vain: wishes never proved, rules without a use."""
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


def make_all(
    domains: Sequence[Domain], count: int, seed: int, levels: Sequence[int]
) -> tuple[list[Json], Counter[str]]:
    """Makes `count` tasks of the domains in turn, fewer if these give no more.

    Returns them, and how many were thrown away by the reason.
    """
    tasks, thrown, drawn = [], Counter(), deque()
    for place, domain in enumerate(domains):
        first = place % len(levels)
        drawn.append(tasks_of(domain, seed, [*levels[first:], *levels[:first]], thrown))
    with tqdm(total=count, desc="tasks", unit="task", disable=None) as bar:
        while drawn and len(tasks) < count:
            task = next(drawn[0], None)
            if task is None:
                drawn.popleft()
                continue
            tasks.append(task)
            bar.update()
            drawn.rotate(-1)
    return tasks, thrown


def report(tasks: Sequence[Json], thrown: Counter[str], seconds: float) -> str:
    """Returns the figures of a run: how many tasks, and what was thrown away."""
    lines = [f"{len(tasks)} tasks in {seconds:.1f} s, thrown away: {thrown.total()}"]
    lines += [f"  {count:6d}  {reason}" for reason, count in thrown.most_common()]
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
