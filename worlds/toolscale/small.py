"""Makes domain tasks that fit a small context, in memory, from a seed.

A domain's whole policy and a dozen tools are some 5,000 ids of the miniature's tokenizer. A prompt
here is a tenth of that: one wish, the golden tools and one other, the rules of these tools alone,
no expert, and a user who says at once who they are. Worlds, checks and scores are those of
data_gen.py.
"""

from __future__ import annotations

import json
import random

from worlds.toolscale.dataset import ToolScaleWorld, split
from worlds.toolscale.domains import BUILT_IN, build, rules
from worlds.toolscale.pipeline import make_batch
from worlds.toolscale.program import Json
from worlds.toolscale.words import Words
from worlds.toolscale.world import World

DOMAINS, BATCHES = 3, 2  # domains of a world, batches of tasks of each
MOST_CALLS, MOST_CHARS = 2, 1000  # golden calls of a task; characters of its policy and tools


def small_world(seed: int, name: str = "domains") -> ToolScaleWorld:
    """Returns some hundred proved tasks of three built-in domains that the seed chooses."""
    fit, worlds = [], {}
    for domain in random.Random(f"small/{seed}").sample(BUILT_IN, DOMAINS):
        world, words = build(domain, seed)
        worlds[domain] = world
        for number in range(BATCHES):
            for task in make_batch(seed, (1,), domain, number)["tasks"]:
                task = _shrunk(world, words, task)
                chars = len(task["policy"]) + len(json.dumps(world.functions(task["tools"])))
                calls = len(task["evaluation_criteria"]["actions"])
                if calls <= MOST_CALLS and chars <= MOST_CHARS:
                    fit.append(task)
    return ToolScaleWorld(split(fit), worlds, seed, 0, name)


def _shrunk(world: World, words: Words, task: Json) -> Json:
    """The task with fewer tools, a policy of its own, and a user who says at once who they are."""
    rng = random.Random(f"small/{task['id']}")
    golden = {action["name"] for action in task["evaluation_criteria"]["actions"]}
    golden.update(rng.sample([name for name in task["tools"] if name not in golden], 1))
    tools = [name for name in task["tools"] if name in golden]
    instructions = task["user_scenario"]["instructions"]
    parts = instructions["known_info"].rstrip(".").split(". ")
    parts = [part[0].lower() + part[1:] for part in [*parts, instructions["reason_for_call"]]]
    opening = "; ".join(parts)
    told = {"reason_for_call": opening[0].upper() + opening[1:]}
    policy = f"You are the agent of {words.business}. Today is {words.today}. "
    policy += "Tell the user only what the tools return.\n"
    for name in tools:
        if said := rules(world.by_name[name]):
            policy += f"- {name}: {' '.join(said)}\n"
    scenario = task["user_scenario"] | {"instructions": instructions | told}
    return task | {"tools": tools, "policy": policy, "user_scenario": scenario}
