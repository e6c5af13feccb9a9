"""Makes domain tasks that fit a small context, in memory, from a seed.

A domain's whole policy and a dozen tools are some 5,000 ids of the miniature's tokenizer. A prompt
here is a tenth of that: one wish, the golden tools and one other, the rules of these tools alone,
no expert, and a user who says at once who they are. Worlds, checks and scores are those of
data_gen.py.
"""

import json
import random

from worlds.toolscale.dataset import ToolScaleWorld, split
from worlds.toolscale.domains import BUILT_IN, build
from worlds.toolscale.plan import Planner
from worlds.toolscale.program import Json, rules
from worlds.toolscale.tasks import to_task
from worlds.toolscale.verify import mentions, signature, task_text, verify

DOMAINS, TASKS, DRAWS = 3, 40, 160  # domains of a world, tasks of each, and draws for them
# Golden calls of a task; characters of its policy and tools, and of what its calls return.
MOST_CALLS, MOST_CHARS, MOST_READ = 2, 1000, 400


def small_world(seed: int, name: str = "domains") -> ToolScaleWorld:
    """Returns some hundred proved tasks of three built-in domains that the seed chooses."""
    fit, worlds = [], {}
    for domain in random.Random(f"small/{seed}").sample(BUILT_IN, DOMAINS):
        world, words = build(domain, seed)
        worlds[domain], found = world, {}
        for number in range(DRAWS):
            rng = random.Random(f"small/{domain}/{seed}/{number}")
            act = Planner(world, words, rng).generate(1, number, known=True)
            task = _shrunk(world, words, to_task(act, f"{domain}-{seed}-{number}", 1))
            chars = len(task["policy"]) + len(json.dumps(world.functions(task["tools"])))
            few = 0 < len(task["evaluation_criteria"]["actions"]) <= MOST_CALLS
            short = few and chars <= MOST_CHARS and _reads(world, task) <= MOST_READ
            if short and not verify(world, task) and len(found) < TASKS:
                found.setdefault(signature(task), task)
        fit += found.values()
    return ToolScaleWorld(split(fit), worlds, seed, name)


def _shrunk(world, words, task) -> Json:
    """The task with fewer tools, a policy of its own, and a user who says at once who they are."""
    rng, criteria = random.Random(f"small/{task['id']}"), task["evaluation_criteria"]
    criteria = criteria | {"actions": _needed(world, task)}
    golden = {action["name"] for action in criteria["actions"]}
    golden.update(rng.sample([name for name in task["tools"] if name not in golden], 1))
    tools = [name for name in task["tools"] if name in golden]
    instructions = task["user_scenario"]["instructions"]
    told = {"reason_for_call": f"{instructions['known_info']} {instructions['reason_for_call']}"}
    policy = f"You are the agent of {words.business}. Today is {words.today}. "
    policy += "Tell the user only what the tools return.\n"
    for name in tools:
        if said := rules(world.by_name[name]):
            policy += f"- {name}: {' '.join(said)}\n"
    every = [*range(len(criteria["actions"]))]
    return task | {
        "tools": tools,
        "policy": policy,
        "experts": [],
        "user_scenario": task["user_scenario"] | {"instructions": instructions | told},
        "evaluation_criteria": criteria,
        "wishes": [task["wishes"][0] | {"say": told["reason_for_call"], "actions": every}],
        "rules": [rule for rule in task["rules"] if rule["check"] == "never"],
    }


def _needed(world, task) -> list[Json]:
    """The golden actions, without reads whose results no answer and no argument needs."""
    criteria, text, kept = task["evaluation_criteria"], task_text(task), []
    if criteria["communicate_info"]:
        return criteria["actions"]
    for action in reversed(criteria["actions"]):
        values = [value for other in kept for value in other["arguments"].values()]
        if world.by_name[action["name"]]["kind"] != "read" or not all(
            mentions(text, value) for value in values
        ):
            kept.insert(0, action)
    return kept


def _reads(world, task) -> int:
    """The characters that the golden calls return."""
    tables, actions = dict(world.tables), task["evaluation_criteria"]["actions"]
    results = (world.invoke(tables, action["name"], action["arguments"]) for action in actions)
    return sum(len(json.dumps(result)) for result in results)
