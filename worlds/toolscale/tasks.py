"""Writes an act as a task in the tau2 format, with the experts that it offers."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence

from worlds import preferences
from worlds.toolscale.act import PHRASES, Act
from worlds.toolscale.offers import draw_experts
from worlds.toolscale.program import Json

SHARES = {"styles": 0.8, "confirm": 0.15, "order": 0.15}  # of the tasks with such an instruction
HELD_OUT = 5  # of tasks that are not of held-out domains, every fifth of a domain is held out


def to_task(act: Act, name: str, level: int) -> Json:
    """Returns the tau2 task of an act.

    Beside tau2's fields it has `domain`, `split`, `level`, `tools` (all of the domain's: what is
    missing would tell what is not needed), `wishes` (the parts of the reason for the call, with
    their actions and what is told) and `rules` (those that no tool enforces, with their checks; see
    score.py).
    """
    domain, data, rng = act.domain, act.data, random.Random(f"{name}/task")
    split = "held_out" if data.get("held_out") else "train"
    identify = data["identify"]
    known = rng.choice(identify["known"] if act.named else identify["id"])
    manner = PHRASES["manner"][split]
    if act.story in act.said:
        manner = manner | {"styles": data["stories"][act.story]["moods"]}
    said = [rng.choice(texts) for kind, texts in manner.items() if rng.random() < SHARES[kind]]
    unknown = [rng.choice(identify["unknown"])] * act.named + [*dict.fromkeys(act.unknown)]
    unknown = unknown and rng.choice(PHRASES["unknown"]).format(" or ".join(unknown[:2]))
    actions = [
        {"action_id": f"{name}_{number}", "name": tool, "arguments": arguments}
        for number, (tool, arguments) in enumerate(act.calls)
    ]
    between = (zip(*ends, strict=True) for ends in itertools.pairwise(act.marks))
    return {
        "id": name,
        "domain": domain.name,
        "split": split,
        "level": level,
        "description": {"purpose": ", ".join(kind for kind, _ in act.twists) or "plain"},
        "user_scenario": {
            "persona": None,
            "instructions": {
                "domain": domain.name,
                "reason_for_call": " ".join(act.reasons),
                "known_info": act.render(known, {"me": act.me}),
                "unknown_info": unknown or None,
                "task_instructions": " ".join(said),
            },
        },
        "evaluation_criteria": {
            "actions": actions,
            "communicate_info": list(dict.fromkeys(act.communicate)),
            "reward_basis": ["DB", "ACTION"] + ["COMMUNICATE"] * bool(act.communicate),
        },
        "tools": list(domain.by_name),
        "wishes": [
            wish | {"actions": [*range(*calls)], "told": act.communicate[slice(*told)]}
            for wish, (calls, told) in zip(act.wishes, between, strict=True)
        ],
        "rules": [*_standing(act), *act.rules],
    }


def _standing(act) -> list[Json]:
    """The domain's rules that every attempt must keep, with the tools that they are about."""
    writes = [name for name, tool in act.domain.by_name.items() if tool["kind"] == "write"]
    first = [act.data["identify"]["call"].split("(")[0]]
    usual = {"confirmed": {"tools": writes}, "before": {"first": first, "then": writes}}
    return [
        {"args": usual.get(rule["check"])} | rule
        for rule in act.data["rules"].values()
        if "check" in rule and (act.named or rule["check"] != "before")
    ]


def split(tasks: Sequence[Json]) -> dict[str, list[Json]]:
    """Returns {"train", "held_out"}: as the tasks say, or every fifth of each domain."""
    splits: dict[str, list[Json]] = {"train": [], "held_out": []}
    said = {task.get("split") for task in tasks} == set(splits)
    counts = Counter()
    for task in tasks:
        counts[task["domain"]] += 1
        name = "train" if counts[task["domain"]] % HELD_OUT else "held_out"
        splits[task["split"] if said else name].append(task)
    return splits


def offer(task: Json, split: str, seed: int) -> None:
    """Gives a task the experts on offer with their prices, and a preference over them.

    `wish` is the preference in words, `preference` its weights for the reward, and `pref_vec` the
    paper's vector: from 0 to 1, with 0 for an expert to avoid and 0.5 for one that is not named.
    """
    rng = random.Random(f"{seed}/{task['id']}/offer")
    experts = draw_experts(rng, split)
    names = [expert["alias"] for expert in experts]
    wish = preferences.draw(rng, names, split)
    weights = {"accuracy": wish.outcome, "cost": wish.cost, "latency": wish.latency}
    task |= {
        "split": split,
        "experts": experts,
        "wish": wish.text,
        "preference": weights | wish.tools,
        "pref_vec": weights | {name: (wish.tools.get(name, 0.0) + 1) / 2 for name in names},
    }
