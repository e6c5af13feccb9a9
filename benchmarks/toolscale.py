"""Figures of ToolScale's tasks: `python -m benchmarks.toolscale --tasks 40`, for each domain.

Prints how long tasks and conditions are, how often conditions hold, what an agent gets that makes
every call that is spoken of and no tool refuses, and how much domains have in common.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import re
import time
from collections import Counter, defaultdict

from worlds.toolscale.domains import BUILT_IN, build
from worlds.toolscale.plan import LEVELS, Planner
from worlds.toolscale.program import METHODS, Json, parse, rules
from worlds.toolscale.tasks import to_task
from worlds.toolscale.world import World


def masked(text: str) -> list[str]:
    """Returns the words of a text, with # for numbers and codes and X for names."""
    text = re.sub(r"\S*\d[\w.:-]*", "#", text)
    text = re.sub(r"(?<![.!?] )(?<!^)\b[A-Z]\w*", "X", text)
    return re.sub(r"X( X)+", "X", text).split()


def grams(words: list[str], size: int = 4) -> set[tuple[str, ...]]:
    """Returns the runs of so many words."""
    return {tuple(words[at : at + size]) for at in range(len(words) - size + 1)}


def roles(world: World, task: Json) -> tuple[str, ...]:
    """Returns the golden calls by what their tools' programs do, step by step."""
    programs = (world.by_name[a["name"]]["program"] for a in task["evaluation_criteria"]["actions"])
    return tuple(" ".join(map(operation, program)) for program in programs)


def operation(line: str) -> str:
    """Returns what a step of a program does."""
    match parse(line):
        case ast.Return():
            return "return"
        case ast.stmt(value=ast.Call(func=ast.Name(id=name))) if name in METHODS - {
            "sum",
            "next_id",
        }:
            return name
    return "compute"


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", type=int, default=40, help="of a domain")
    count = parser.parse_args().tasks
    twists, passed, total = Counter(), defaultdict(list), Counter()
    sequences, texts, templates = {}, defaultdict(set), defaultdict(set)
    started = time.process_time()
    for name in BUILT_IN:
        world, words = build(name, 0)
        split = "held_out" if words.data.get("held_out") else "train"
        enforced = {rule for t in world.tools for rule in rules(t)}
        total["rules"] += len(enforced) + len(words.data["rules"])
        total["own rules"] += len(words.data["rules"])
        sequences[name] = set()
        for number in range(count):
            level = 1 + number % len(LEVELS)
            rng = random.Random(f"figures/{name}/{number}")
            act = Planner(world, words, rng).generate(level, number)
            task = to_task(act, f"{name}-{number}", level)
            twists.update(act.twists)
            passed[level].append(act.naive == act.tables)
            reason = task["user_scenario"]["instructions"]["reason_for_call"]
            total += Counter(
                tasks=1,
                words=len(reason.split()),
                conditions=bool(act.twists),
                nothing=act.tables == world.tables,
            )
            sequences[name].add(roles(world, task))
            texts[split] |= grams(masked(reason))
            wishes = [" ".join(masked(wish["say"])) for wish in task["wishes"]]
            templates[split].update(wishes)
    seconds = time.process_time() - started
    print(f"{total['tasks']} tasks, {1000 * seconds / total['tasks']:.0f} ms of CPU a task")
    print(f"words of the reason for the call: {total['words'] / total['tasks']:.0f}")
    print(f"tasks with a condition: {total['conditions'] / total['tasks']:.0%}")
    for twist in sorted({name for name, _ in twists}):
        true, false = twists[twist, True], twists[twist, False]
        print(f"  {twist}: {true + false}, true in {true / (true + false):.0%}")
    true = sum(count for (_, truth), count in twists.items() if truth)
    print(f"conditions that are true: {true / twists.total():.0%}")
    print(f"tasks in which nothing is changed: {total['nothing'] / total['tasks']:.0%}")
    print(f"rules that the agent must keep by itself: {total['own rules'] / total['rules']:.0%}")
    rates = (f"{level}: {sum(won) / len(won):.0%}" for level, won in sorted(passed.items()))
    print("pass@1 of an agent that tries everything, by level: " + ", ".join(rates))
    shares = {
        (a, b): len(sequences[a] & sequences[b]) / min(len(sequences[a]), len(sequences[b]))
        for a, b in itertools.combinations(sequences, 2)
    }
    pair = max(shares, key=shares.get)
    print(
        f"role sequences that two domains share at most: {shares[pair]:.0%} ({' and '.join(pair)})"
    )
    common = len(texts["held_out"] & texts["train"]) / len(texts["held_out"])
    print(f"4-grams of held-out domains that stand in others: {common:.0%}")
    common = len(templates["held_out"] & templates["train"]) / len(templates["held_out"])
    print(f"patterns of held-out wishes that stand in others: {common:.0%}")


if __name__ == "__main__":
    main()
