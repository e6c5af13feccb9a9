"""Draws domain tasks that fit a small context, in memory, from a seed, as they are asked for.

A domain's whole policy and a dozen tools are some 5,000 ids of the miniature's tokenizer. A prompt
here is a tenth of that: one wish, at level 2 with a twist, the tools that it may need and one
other, the rules of these, no expert, and a user who says at once who they are. To do nothing is
never right: what depends on a record has to be looked up. Of each list of sentences the first few
are used. Worlds, checks and scores are those of data_gen.py.
"""

import ast
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
from worlds.toolscale.program import Json, evaluate, parse, parse_call, rules
from worlds.toolscale.records import holds
from worlds.toolscale.tasks import to_task
from worlds.toolscale.verify import mentions, task_text, verify
from worlds.toolscale.words import Words

DOMAINS, LEVELS = 3, (1, 2)  # domains that a seed chooses, and levels in turn
TASKS = 20_000  # of a split
SENTENCES = 4  # of each list of a domain's file
# Golden calls of a task; characters of its policy and tools, and of what its calls return.
MOST_CALLS, MOST_CHARS, MOST_READ = 2, 1300, 600
MOST_DRAWS = 60  # of a task with a condition
# Worlds: domains as they are, and with more conditions.
SMALL = AS_THEY_ARE, CONDITIONS = "domains", "domains-conditions"
DECIDES, CONDITIONAL = ("if", "rule"), 2 / 3  # what a look-up decides, and its share
MIND, MINDED = ("mind",), 0.08  # the share of users who have thought better of it
SAYS_LOOK = "I look first."
SIGNS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
}
LOOK = "Look up what a wish is about before you do it or refuse it."


@dataclass(frozen=True)
class SmallTasks(Sequence):
    """The tasks of a split. A task is a function of its number, and drawn when it is asked for.

    `name`, which each task's id begins with, seeds the draws. `domains` take turns. With
    `conditions` two of three tasks have a fact or a rule that has to be looked up, and the teacher
    says what it reads.
    """

    name: str
    domains: Sequence[tuple[Domain, Words]]
    conditions: bool = False

    def __len__(self) -> int:
        return TASKS

    def __getitem__(self, number: int) -> Json:
        place, which = divmod(number, len(self.domains))
        world, words = self.domains[which]
        level, twists = LEVELS[place % len(LEVELS)], ()
        if self.conditions:
            place = random.Random(f"{self.name}/{number}").random()
            if place < CONDITIONAL + MINDED:
                twists = DECIDES if place < CONDITIONAL else MIND
            level = 2 if twists else 1
        for draw in itertools.count():
            if draw == MOST_DRAWS:  # its conditions need more look-ups than fit
                level, twists = 1, ()
            name = f"{self.name}-{world.name}-{number}-{draw}"
            planner = Planner(world, words, random.Random(name))
            if twists:
                shares = planner.twists
                planner.twists = {twist: shares[twist] for twist in twists if twist in shares}
            try:
                task = _small(planner, level, name)
            except UnfitError:
                continue
            if not self.conditions:
                del task["thoughts"]
            if _fits(world, task) and not verify(world, task):
                return task


def small_world(
    seed: int,
    name: str = "domains",
    chosen: Sequence[str] | None = None,
    spoiled: float = 0.0,
) -> DomainWorld:
    """Returns the tasks of built-in domains, TASKS in each split. UserError for an unknown one.

    chosen: their names; without them the seed chooses three. With a `name` that begins with
    CONDITIONS two of three tasks have a condition. `spoiled` is the share of demonstrations that do
    one thing wrong.
    """
    chosen = chosen or random.Random(f"small/{seed}").sample(BUILT_IN, DOMAINS)
    built = []
    for domain_name in chosen:
        domain, words = build(domain_name, seed)
        words = copy.deepcopy(words)  # `build` keeps what it returns
        _shorten(words.data["wishes"])
        built.append((domain, words))
    conditions = name.partition(":")[0] == CONDITIONS
    splits = {
        split: SmallTasks(f"{seed}-{split}", built, conditions) for split in ("train", "held_out")
    }
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
        "thoughts": _thoughts(world, criteria, act),
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


def _thoughts(world, criteria, act) -> list[str]:
    """What the teacher thinks first, and when it has looked up what decides."""
    if not act.twists:
        return ["", ""]
    read = [_read(test, scope) for test, scope in act.tests]
    kinds = {world.by_name[action["name"]]["kind"] for action in criteria["actions"]}
    if act.twists[-1][1]:
        decided = "I do it."
    else:
        decided = "I do the other." if kinds - {"read"} else "I leave it."
    return [SAYS_LOOK, f"{' '.join(read)} {decided}".strip()]


def _read(test, scope) -> str:
    """A test as it is read: "credits 15 >= 9: yes."; "" if it is more than one comparison."""
    node = parse(test).value
    if not isinstance(node, ast.Compare):
        return ""
    sign = SIGNS[type(node.ops[0])]
    paths = [each for each in ast.walk(node.left) if isinstance(each, ast.Attribute)]
    try:
        sides = [evaluate(ast.unparse(each), scope) for each in (node.left, *node.comparators)]
        named = []
        for path in paths:
            value = evaluate(ast.unparse(path), scope)
            named.append(path.attr if isinstance(value, list) else f"{path.attr} {value}")
    except (LookupError, TypeError):
        return ""
    if not isinstance(node.left, ast.Attribute):
        named.append(f"= {sides[0]}")
    left, right = " ".join(named), ", ".join(sides[1]) if isinstance(sides[1], list) else sides[1]
    return f"{left} {sign} {right}: {'yes' if holds(test, scope) else 'no'}."


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
