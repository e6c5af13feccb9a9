"""Domain tasks that fit a small context, made in memory from a seed: one wish, the golden tools and one or two others, the rules of these alone.

A domain's whole policy and a dozen tools are some 5,000 ids of the miniature's tokenizer. Here a prompt is a tenth of that: the user says at once who
they are, the policy is cut to the tools on offer, and no expert is. Worlds, tools, checks and scores are those of `python data_gen.py`.
"""

from __future__ import annotations

import json
import random
from typing import Any

from worlds.toolscale.domains import BUILT_IN, build, rules
from worlds.toolscale.environment import ToolScaleWorld, split
from worlds.toolscale.pipeline import BATCH, make_batch
from worlds.toolscale.world import World

DOMAINS, TASKS = 3, 100  # how many, and tasks of each
MOST_CALLS, MOST_CHARS = 2, 1000  # golden calls of a task; characters of its policy and tools


def small_world(seed: int, name: str = "domains") -> ToolScaleWorld:
    """Some hundred proved tasks of three built-in domains that the seed chooses; a pure function of `seed`."""
    tasks, worlds = [], {}
    for domain in random.Random(f"small/{seed}").sample(BUILT_IN, DOMAINS):
        world, words = build(domain, seed)
        worlds[domain] = world
        made = [
            task
            for number in range(TASKS // BATCH)
            for task in make_batch(domain, seed, (1,), number)["tasks"]
        ]
        small = [shrunk(world, task, words.business, words.today) for task in made]
        tasks += [
            task
            for task in small
            if len(task["evaluation_criteria"]["actions"]) <= MOST_CALLS
            and len(task["policy"]) + len(json.dumps(world.functions(task["tools"]))) <= MOST_CHARS
        ]
    return ToolScaleWorld(split(tasks), worlds, seed, 0, name)


def shrunk(world: World, task: dict[str, Any], business: str, today: str) -> dict[str, Any]:
    """The task with fewer tools, a policy of its own, and a user who says with the first wish who they are."""
    rng = random.Random(f"small/{task['id']}")
    golden = {action["name"] for action in task["evaluation_criteria"]["actions"]}
    others = rng.sample([name for name in task["tools"] if name not in golden], 1)
    tools = [name for name in task["tools"] if name in golden or name in others]
    instructions = task["user_scenario"]["instructions"]
    opening = "; ".join(
        part[:1].lower() + part[1:]
        for part in [
            *instructions["known_info"].rstrip(".").split(". "),
            instructions["reason_for_call"],
        ]
    )
    told = {"reason_for_call": opening[:1].upper() + opening[1:]}
    policy = f"You are the agent of {business}. Today is {today}. Tell the user only what the tools return.\n"
    policy += "".join(
        f"- {name}: {' '.join(said)}\n" for name in tools if (said := rules(world.by_name[name]))
    )
    return task | {
        "tools": tools,
        "policy": policy,
        "user_scenario": task["user_scenario"] | {"instructions": instructions | told},
    }
