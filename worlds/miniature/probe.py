"""Probes what a policy reads: held-out tasks changed in one thing, and made-up price ratios.

Shares and rewards come with 95% intervals over tasks; differences are paired by task.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Rollout
from nanorchestra.records import Preference, Task, Trajectory
from worlds.evaluation import evaluate, interval
from worlds.miniature.offers import bounds, is_expert, title
from worlds.miniature.tables import HELD_OUT, PHRASES, PREFERENCES, TRAIN
from worlds.miniature.world import World, forbid
from worlds.routers import informed_order

STEPS = (1.1, 1.25, 1.5, 2, 3, 5, 9, 16)
RATIOS = (*(1 / step for step in reversed(STEPS)), *STEPS)  # of two prices
MIDDLE_CENTS = 20  # geometric mean of the two prices of a ratio
DEAREST_CENTS = 99  # price of the other experts on offer
Make = Callable[[Task, int], Environment]


def probe(rollout: Rollout, seed: int, count: int, make: Make) -> dict[str, Any]:
    """Returns the probes of a policy on `count` held-out tasks each, by name.

    Those of `reward` hold the reward on the changed tasks and its difference from the reward on the
    unchanged ones, as (mean, low, high). The others are shares of attempts.
    """
    tasks = World(seed).tasks(HELD_OUT, count)

    def play(changed: Sequence[Task]) -> list[Trajectory]:
        return evaluate(rollout, changed, seed, make)

    plain = play(tasks)
    changes = {
        "aliases of training": World(seed, names=TRAIN).tasks(HELD_OUT, count),
        "phrases of training": World(seed, words=TRAIN).tasks(HELD_OUT, count),
        "aliases permuted": list(map(permuted, tasks)),
        "tools in reverse order": [_with(task, task.data["tools"][::-1]) for task in tasks],
    }
    rewards: dict[str, Any] = {"unchanged": {"reward": interval([t.reward for t in plain])}}
    for name, changed in changes.items():
        pairs = list(zip(play(changed), plain, strict=True))
        rewards[name] = {
            "reward": interval([ours.reward for ours, _ in pairs]),
            "difference": interval([ours.reward - base.reward for ours, base in pairs]),
        }
    asked = [(task, t) for task, t in zip(tasks, plain, strict=True) if _is_case(task)]
    banned = [with_ban(task) for task, _ in asked]
    kept = [
        bool(t.calls) and not any(t.calls.get(name) for name in task.preference.avoided)
        for task, t in zip(banned, play(banned), strict=True)
    ]
    return {
        "reward": rewards,
        "bans of the preferred tool kept": interval(kept),
        "difficulty read right": interval([_is_read(rollout, *pair) for pair in asked]),
        "first choice by price ratio": _price_ratios(tasks, play),
    }


def first_call(attempt: Trajectory) -> str:
    """Returns the name that the first call of an attempt asks for, "" if it calls nothing."""
    calls = [call.name for turn in attempt.turns for call in turn.calls]
    return calls[0] if calls else ""


def permuted(task: Task) -> Task:
    """Returns the task with each alias moved to the next tool, in the wish's words too."""
    tools = task.data["tools"]
    names = [offer["name"] for offer in tools]
    moved = [{**o, "name": name} for o, name in zip(tools, names[1:] + names[:1], strict=True)]
    text, weights = task.preference.text, {}
    for old, new in zip(tools, moved, strict=True):
        if old["name"] in task.preference.tools:
            weights[new["name"]] = task.preference.tools[old["name"]]
            text = text.replace(title(old), title(new))
    return _with(
        replace(task, preference=replace(task.preference, text=text, tools=weights)), moved
    )


def with_ban(task: Task) -> Task:
    """Returns the task with a ban, of the tool that is best by the hidden skills, and no other."""
    wish = task.data["wish"]
    rng = random.Random(f"ban/{task.id}")
    plain = Preference(rng.choice(PHRASES[HELD_OUT][wish]), *PREFERENCES[wish][1])
    best = informed_order(replace(task, preference=plain))[0]
    return replace(task, preference=forbid(plain, best, rng, HELD_OUT))


def with_ratio(task: Task, ratio: float) -> Task:
    """Returns the task for a user who minds cost alone, with its experts alone on offer.

    The prices of two of them, drawn at random, have the given ratio; the others are dear.
    """
    rng = random.Random(f"ratio/{task.id}")
    preference = Preference(rng.choice(PHRASES[HELD_OUT]["cheap"]), *PREFERENCES["cheap"][1])
    tools = [offer | {"price": DEAREST_CENTS} for offer in _experts(task)]
    first, second = rng.sample(range(len(tools)), 2)
    tools[first]["price"] = round(MIDDLE_CENTS * ratio**0.5)
    tools[second]["price"] = round(MIDDLE_CENTS / ratio**0.5)
    task = replace(task, preference=preference, data=task.data | {"wish": "cheap"})
    return _with(task, tools)


def _price_ratios(tasks: Sequence[Task], play: Callable[..., list[Trajectory]]) -> dict[str, Any]:
    """The share of first choices that are the informed rule's, over all ratios and for each.

    Beside it stands the share of a rule that always takes the cheapest.
    """
    cases = [task for task in tasks if _is_case(task) and len(_experts(task)) > 2]
    shares, every, cheapest = {}, [], []
    for n, ratio in enumerate(RATIOS):
        asked = [with_ratio(task, ratio) for task in cases[n :: len(RATIOS)]]
        best = [informed_order(task)[0]["name"] for task in asked]
        hits = [first_call(t) == name for t, name in zip(play(asked), best, strict=True)]
        lowest = (min(task.data["tools"], key=lambda offer: offer["price"]) for task in asked)
        shares[f"{ratio:.3g}"] = interval(hits)
        every += hits
        cheapest += [o["name"] == name for o, name in zip(lowest, best, strict=True)]
    return {"all": interval(every), "the cheapest": interval(cheapest), **shares}


def _experts(task: Task) -> list[dict[str, Any]]:
    return list(filter(is_expert, task.data["tools"]))


def _is_case(task: Task) -> bool:
    return task.data["kind"] == "knowledge"


def _is_read(rollout: Rollout, task: Task, attempt: Trajectory) -> bool:
    """True if the first thought names the difficulty and the subject."""
    turn = attempt.turns[0]
    thought = rollout.tokenizer.decode(attempt.ids[turn.start : turn.end])
    return f"use for {task.data['difficulty']} {task.data['subject']} " in thought


def _with(task: Task, tools: list[dict[str, Any]]) -> Task:
    """The task with other tools, and the bounds that follow from them."""
    limits = bounds(tools, task.data["difficulty"])
    return replace(task, data=task.data | {"tools": tools, "bounds": limits})
