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
    if act.story in act.used_texts:
        manner = manner | {"styles": data["stories"][act.story]["moods"]}
    instructions = []
    for kind, texts in manner.items():
        if rng.random() < SHARES[kind]:
            instructions.append(rng.choice(texts))
    number = rng.choice(identify["unknown"])  # of the caller
    fields = [number] if act.named else []
    fields += dict.fromkeys(act.unknown)
    unknown_info = None
    if fields:
        unknown_info = rng.choice(PHRASES["unknown"]).format(" or ".join(fields[:2]))
    actions = [
        {"action_id": f"{name}_{number}", "name": tool, "arguments": arguments}
        for number, (tool, arguments) in enumerate(act.calls)
    ]
    basis = ["DB", "ACTION"]
    if act.communicate:
        basis.append("COMMUNICATE")
    wishes = []
    for wish, (before, after) in zip(act.wishes, itertools.pairwise(act.marks), strict=True):
        (first_call, first_info), (end_call, end_info) = before, after
        wishes.append(
            wish
            | {
                "actions": [*range(first_call, end_call)],
                "told": act.communicate[first_info:end_info],
            }
        )
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
                "unknown_info": unknown_info,
                "task_instructions": " ".join(instructions),
            },
        },
        "evaluation_criteria": {
            "actions": actions,
            "communicate_info": list(dict.fromkeys(act.communicate)),
            "reward_basis": basis,
        },
        "tools": list(domain.by_name),
        "wishes": wishes,
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
    stated = {task.get("split") for task in tasks} == set(splits)
    counts = Counter()
    for task in tasks:
        counts[task["domain"]] += 1
        name = "train" if counts[task["domain"]] % HELD_OUT else "held_out"
        splits[task["split"] if stated else name].append(task)
    return splits


def offer(task: Json, split: str, seed: int) -> None:
    """Gives a task the experts on offer with their prices, and a preference over them.

    `preference_text` is the preference in words, `preference` its weights for the reward, and
    `pref_vec` the paper's vector: from 0 to 1, with 0 for an expert to avoid and 0.5 for one that
    is not named.
    """
    rng = random.Random(f"{seed}/{task['id']}/offer")
    experts = draw_experts(rng, split)
    aliases = [expert["alias"] for expert in experts]
    preference = preferences.draw(rng, aliases, split)
    weights = {
        "accuracy": preference.outcome,
        "cost": preference.cost,
        "latency": preference.latency,
    }
    vector = dict(weights)
    for alias in aliases:
        vector[alias] = (preference.tools.get(alias, 0.0) + 1) / 2
    task |= {
        "split": split,
        "experts": experts,
        "preference_text": preference.text,
        "preference": weights | preference.tools,
        "pref_vec": vector,
    }
