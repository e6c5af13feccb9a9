"""Draws domain tasks that fit a small context, in memory, from a seed, as they are asked for.

A domain's whole policy and its tools are some thousands of ids of nano's tokenizer. A
prompt here is a tenth of that: one wish, at level 2 with a twist, the tools that it may need and
one other, the rules of these, no expert, and a user who says at once who it is and knows every key.
To do nothing is never right: what depends on a record has to be looked up. Names, numbers and keys
of the held-out split are in no training task. Worlds, checks and scores are those of data_gen.py.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from nanorchestra.errors import UserError
from nanorchestra.schemas import Json
from worlds.toolscale.dataset import DomainWorld
from worlds.toolscale.domain import BUILT_IN, LOOK, Domain, build, introduction
from worlds.toolscale.plan import draw, to_task
from worlds.toolscale.verify import leaves, task_text, verify
from worlds.toolscale.wishes import Scene, UnfitError
from worlds.toolscale.words import mentions

DOMAINS = 3  # domains that a seed chooses, of those that are trained on
LEVELS = ((1, ("plain",)), (2, ("if", "rule", "mind")))  # in turn: a level, and its twists
TASKS = 20_000  # of a split
# Golden calls of a task; characters of its policy and tools, and of what its calls return.
MOST_CALLS, MOST_CHARS, MOST_READ = 2, 1300, 480
MOST_TRIALS = 1000  # of a task
RETURNED = "Tell the user only what the tools return."


@dataclass(frozen=True)
class SmallTasks(Sequence):
    """The tasks of a split. A task is a function of its number, and drawn when it is asked for.

    `name`, which each task's id begins with, seeds the draws. `domains` take turns.
    """

    name: str
    domains: Sequence[Domain]

    def __len__(self) -> int:
        return TASKS

    def __getitem__(self, number: int) -> Json:
        place, which = divmod(number, len(self.domains))
        domain = self.domains[which]
        level, twists = LEVELS[place % len(LEVELS)]
        for trial in range(MOST_TRIALS):
            name = f"{self.name}-{domain.name}-{number}-{trial}"
            rng = random.Random(name)
            try:
                scene = draw(domain, [rng.choice(twists)], rng, keys=True)
            except UnfitError:
                continue
            task = _small(domain, scene, name, level)
            if _fits(domain, scene, task) and not verify(domain, task):
                return task
        none = f"none of {MOST_TRIALS} draws of level {level} fits a small context"
        raise UserError(f"domain {domain.name}: {none}")


def small_world(
    seed: int,
    name: str = "domains",
    chosen: Sequence[str] | None = None,
    spoiled: float = 0.0,
) -> DomainWorld:
    """Returns the tasks of domains, TASKS in each split. UserError for an unknown one.

    chosen: names of built-in domains, or files; without them the seed chooses three of those that
    are trained on. `spoiled` is the share of demonstrations that do one thing wrong.
    """
    if not chosen:
        trained = [each for each in BUILT_IN if not build(each, seed).held_out]
        chosen = random.Random(f"small/{seed}").sample(trained, DOMAINS)
    splits, domains = {}, {}
    for split in ("train", "held_out"):
        built = [build(each, seed, split) for each in chosen]
        if split == "held_out":
            built = [replace(domain, name=f"{domain.name}/{split}") for domain in built]
        splits[split] = SmallTasks(f"{seed}-{split}", built)
        domains |= {domain.name: domain for domain in built}
    splits["all"] = splits["held_out"]  # there is no end to them
    return DomainWorld(splits, domains, seed, name, skill=1.0 - spoiled)


def _small(domain: Domain, scene: Scene, name: str, level: int) -> Json:
    """A task with fewer tools, a policy of its own, and a user who knows its key."""
    task = to_task(domain, scene, name, level)
    criteria, instructions = task["evaluation_criteria"], task["user_scenario"]["instructions"]
    instructions["known_info"] = f"Your {_label(scene.me)} is {scene.key}."
    is_plain = level == 1
    if is_plain and not criteria["communicate_info"]:
        criteria["actions"] = _needed(domain, task)
    offered = scene.offered | {action["name"] for action in criteria["actions"]}
    offered.add(scene.rng.choice([tool for tool in task["tools"] if tool not in offered]))
    rules = [RETURNED, *scene.rules] if is_plain else [RETURNED, LOOK, *scene.rules]
    lines = [introduction(domain.start), *(f"- {rule}" for rule in rules)]
    return task | {
        "tools": [tool for tool in task["tools"] if tool in offered],
        "policy": "\n".join(lines) + "\n",
        "experts": [],
        "preference": {},
        "rules": [rule for rule in task["rules"] if rule["check"] == "made" and not is_plain],
        "kind": _kind(domain, criteria),
    }


def _label(person) -> str:
    """The words for a person's key: "guest id"."""
    return fields(person)[0].name.replace("_", " ")


def _kind(domain, criteria) -> str:
    """What a task asks for."""
    kinds = [domain.kinds[action["name"]] for action in criteria["actions"]]
    looks = "look-up, then " if "read" in kinds else ""
    if "handover" in kinds:
        return f"{looks}hand over"
    if "write" in kinds:
        return f"{looks}write"
    return f"{looks}answer" if criteria["communicate_info"] else f"{looks}refuse"


def _needed(domain, task) -> list[Json]:
    """The golden actions, without reads that return no argument that the text lacks."""
    text, kit = task_text(task), domain.start.copy()
    actions = task["evaluation_criteria"]["actions"]
    returned = [{*leaves(kit.call(each["name"], each["arguments"]))} for each in actions]
    kept, lacking = [], set()
    for action, values in reversed([*zip(actions, returned, strict=True)]):
        if domain.kinds[action["name"]] != "read" or values & lacking:
            kept.insert(0, action)
            given = action["arguments"].values()
            lacking.update(value for value in given if not mentions(text, value))
    return kept


def _fits(domain, scene, task) -> bool:
    """True if the texts of a task are short, whatever comes of its wish."""
    kit, actions = domain.start.copy(), task["evaluation_criteria"]["actions"]
    shown = task["policy"] + json.dumps([domain.functions[name] for name in task["tools"]])
    read = (kit.call(action["name"], action["arguments"]) for action in actions)
    calls = len(actions) if task["level"] == 1 else len({*scene.looks}) + scene.writes
    return (
        calls <= MOST_CALLS
        and len(shown) <= MOST_CHARS
        and sum(len(json.dumps(result)) for result in read) <= MOST_READ
    )
