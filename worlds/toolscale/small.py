"""Draws domain tasks that fit a small context, in memory, from a seed, as they are asked for.

A domain's whole policy and a dozen tools are some 5,000 ids of the miniature's tokenizer. A prompt
here is a tenth of that: one wish, at level 2 with a twist, the tools that it may need and one
other, the rules of these, no expert, and a user who says at once who they are. To do nothing is
never right: what depends on a record has to be looked up. Of each list of sentences the first few
are used. Worlds, checks and scores are those of data_gen.py.
"""

import copy
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from worlds.toolscale.act import UnfitError
from worlds.toolscale.blueprint import BUILT_IN, build
from worlds.toolscale.dataset import DomainWorld
from worlds.toolscale.domain import Domain
from worlds.toolscale.planner import Planner
from worlds.toolscale.program import Json, parse_call, rules
from worlds.toolscale.tasks import to_task
from worlds.toolscale.verify import mentions, task_text, verify
from worlds.toolscale.words import Words

DOMAINS, LEVELS = 3, (1, 2)  # domains that a seed chooses, and levels in turn
TASKS = 20_000  # of a split
SENTENCES = 4  # of each list of a domain's file
# Golden calls of a task; characters of its policy and tools, and of what its calls return.
MOST_CALLS, MOST_CHARS, MOST_READ = 2, 1300, 600
LOOK = "Look up what a wish is about before you do it or refuse it."


@dataclass(frozen=True)
class SmallTasks(Sequence):
    """The tasks of a split. A task is a function of its number, and drawn when it is asked for.

    `name`, which each task's id begins with, seeds the draws. `domains` take turns.
    """

    name: str
    domains: Sequence[tuple[Domain, Words]]

    def __len__(self) -> int:
        return TASKS

    def __getitem__(self, number: int) -> Json:
        place, which = divmod(number, len(self.domains))
        world, words = self.domains[which]
        level = LEVELS[place % len(LEVELS)]
        for draw in itertools.count():
            name = f"{self.name}-{world.name}-{number}-{draw}"
            try:
                task = _small(Planner(world, words, random.Random(name)), level, name)
            except UnfitError:
                continue
            if _fits(world, task) and not verify(world, task):
                return task


def small_world(
    seed: int,
    name: str = "domains",
    chosen: Sequence[str] | None = None,
    spoiled: float = 0.0,
) -> DomainWorld:
    """Returns the tasks of built-in domains, TASKS in each split. UserError for an unknown one.

    chosen: their names; without them the seed chooses three. `spoiled` is the share of
    demonstrations that do one thing wrong.
    """
    chosen = chosen or random.Random(f"small/{seed}").sample(BUILT_IN, DOMAINS)
    built = []
    for domain_name in chosen:
        domain, words = build(domain_name, seed)
        words = copy.deepcopy(words)  # `build` keeps what it returns
        _shorten(words.data["wishes"])
        built.append((domain, words))
    splits = {split: SmallTasks(f"{seed}-{split}", built) for split in ("train", "held_out")}
    domains = {domain.name: domain for domain, _ in built}
    return DomainWorld(splits, domains, seed, name, skill=1.0 - spoiled)


def _shorten(wishes) -> None:
    """Keeps the first sentences of each list that a task without a story may use."""
    for name, value in wishes.items():
        if name in ("say", "no", "to", "else"):
            wishes[name] = [text for text in value if text[0] != "["][:SENTENCES]
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                _shorten(part)


def _small(planner, level, name) -> Json:
    """A task with fewer tools, a policy of its own, and a user who says at once who they are."""
    rng, world, words = planner.rng, planner.domain, planner.words
    act = planner.generate(level, rng.randrange(len(planner.kinds)), known=True)
    task, wishes, kinds = to_task(act, name, level), planner.kinds, {*act.done}
    criteria = task["evaluation_criteria"]
    if act.twists:
        kinds.update(other for kind in act.done for other in wishes[kind].get("or", ()))
    elif not criteria["communicate_info"]:
        criteria = criteria | {"actions": _needed(world, task)}
    offered = {parse_call(call)[0] for kind in kinds for call in wishes[kind].get("do", ())}
    offered |= {action["name"] for action in criteria["actions"]}
    offered.add(rng.choice([name for name in task["tools"] if name not in offered]))
    tools = [name for name in task["tools"] if name in offered]
    kept = [rule for rule in task["rules"] if rule["check"] == "never"]
    instructions = task["user_scenario"]["instructions"]
    told = {"reason_for_call": f"{instructions['known_info']} {instructions['reason_for_call']}"}
    policy = f"You are the agent of {words.business}. Today is {words.today}. "
    policy += "Tell the user only what the tools return.\n"
    for name in tools:
        if said := rules(world.by_name[name]):
            policy += f"- {name}: {' '.join(said)}\n"
    if act.twists:
        policy += f"- {LOOK}\n"
        looks = [name for name, _ in act.calls if world.by_name[name]["kind"] == "read"]
        kept.append({"text": LOOK, "check": "made", "args": {"tools": looks}})
    for rule in sorted({rule for kind in kinds for rule in wishes[kind].get("rules", ())}):
        policy += f"- {words.data['rules'][rule]['text']}\n"
    every = [*range(len(criteria["actions"]))]
    return task | {
        "tools": tools,
        "policy": policy,
        "experts": [],
        "preference": {},
        "user_scenario": task["user_scenario"] | {"instructions": instructions | told},
        "evaluation_criteria": criteria,
        "wishes": [task["wishes"][0] | {"say": told["reason_for_call"], "actions": every}],
        "rules": kept,
        "kind": _kind(world, criteria, act.twists),
    }


def _kind(world, criteria, twists) -> str:
    """What a task asks for."""
    kinds = [world.by_name[action["name"]]["kind"] for action in criteria["actions"]]
    looks = "look-up, then " if "read" in kinds else ""
    if "handover" in kinds:
        return f"{looks}hand over"
    if "write" in kinds:
        return f"{looks}write"
    return f"{looks}answer" if criteria["communicate_info"] else f"{looks}refuse"


def _needed(world, task) -> list[Json]:
    """The golden actions, without reads whose results no argument needs."""
    text, kept = task_text(task), []
    for action in reversed(task["evaluation_criteria"]["actions"]):
        values = [value for other in kept for value in other["arguments"].values()]
        if world.by_name[action["name"]]["kind"] != "read" or not all(
            mentions(text, value) for value in values
        ):
            kept.insert(0, action)
    return kept


def _fits(world, task) -> bool:
    """True if the texts of a task are short."""
    tables, actions = dict(world.tables), task["evaluation_criteria"]["actions"]
    shown = task["policy"] + json.dumps(world.functions(task["tools"]))
    read = (world.invoke(tables, action["name"], action["arguments"]) for action in actions)
    return (
        len(actions) <= MOST_CALLS
        and len(shown) <= MOST_CHARS
        and sum(len(json.dumps(result)) for result in read) <= MOST_READ
    )
