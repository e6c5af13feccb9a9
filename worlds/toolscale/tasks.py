"""Writes an act as a task in the tau2 format."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

from worlds.toolscale.act import PHRASES, Act
from worlds.toolscale.program import Tables
from worlds.toolscale.shapes import Json


def to_task(draft: Json, act: Act, name: str) -> Json:
    """Returns the tau2 task of a draft and its act.

    Beside tau2's fields it has `domain`, `level`, `tools` (the names of those offered) and
    `template` (a hash of its wording).
    """
    world, w = act.world, act.w
    rng = random.Random(f"{draft['seed']}/task")
    me = world.tables[w.person.table][act.me]
    known = f"You are {me['first_name']} {me['last_name']}"
    if draft["by"] == "id":
        known += f". Your {w.person} number is {act.me}."
    else:
        known += f" and your {w.proof} is {me[w.proof.field]}."
    manner = [
        rng.choice(PHRASES["styles"]),
        "If the agent asks you to confirm a step that you want, confirm it.",
        "Bring up your wishes one after the other, in the order given.",
    ]
    unknown = " or ".join(dict.fromkeys(act.unknown))
    used = {tool for tool, _ in act.calls}
    used |= {w.tool[role] for role in ("find_person", "calculate", "handover")}
    spare = [tool for tool in world.by_name if tool not in used]
    offered = used | set(rng.sample(spare, min(len(spare), draft["distractors"])))
    purpose = "; ".join(dict.fromkeys(wish["kind"] for wish in draft["wishes"]))
    calls = [{"name": tool, "arguments": arguments} for tool, arguments in act.calls]
    return {
        "id": name,
        "domain": world.domain,
        "level": draft["level"],
        "description": {"purpose": purpose, "relevant_policies": None, "notes": None},
        "user_scenario": {
            "persona": rng.choice(PHRASES["personas"]),
            "instructions": {
                "domain": world.domain,
                "reason_for_call": " ".join(act.sentences),
                "known_info": known,
                "unknown_info": f"You do not know {unknown}." if unknown else None,
                "task_instructions": " ".join(manner[: 3 if len(draft["wishes"]) > 1 else 2]),
            },
        },
        "ticket": None,
        "initial_state": None,
        "evaluation_criteria": {
            "actions": actions(name, calls),
            **assertions(world.tables, act.tables, act.communicate, act.claims),
        },
        "tools": [tool for tool in world.by_name if tool in offered],
        "template": hashlib.sha1("|".join(act.template).encode()).hexdigest()[:10],
    }


def actions(task: str, calls: list[Json]) -> list[Json]:
    """Returns golden calls with all of tau2's fields."""
    blank = dict.fromkeys(("action_id", "requestor", "name", "arguments", "info", "compare_args"))
    return [
        blank | {"action_id": f"{task}_{number}", "requestor": "assistant"} | call
        for number, call in enumerate(calls)
    ]


def assertions(before: Tables, after: Tables, communicate: list[str], claims: list[str]) -> Json:
    """Returns what a task is scored by beside its actions.

    One env_assertion for each field that changed in a record that stays; for a record that comes or
    goes, that it is there or not. `claims` are for a judge.
    """
    found = []
    for table, key, old, new in changes(before, after):
        more: list[Json] = [{}]
        if old and new:
            more = [{"field": f, "value": new[f]} for f in new if old[f] != new[f]]
        found += [
            {
                "env_type": "assistant",
                "func_name": "assert_record",
                "arguments": {"table": table, "key": key} | wanted,
                "assert_value": bool(new),
                "message": None,
            }
            for wanted in more
        ]
    basis = ["DB", "ACTION"] + ["COMMUNICATE"] * bool(communicate) + ["ENV_ASSERTION"] * bool(found)
    return {
        "env_assertions": found,
        "communicate_info": list(dict.fromkeys(communicate)),
        "nl_assertions": list(dict.fromkeys(claims)) or None,
        "reward_basis": basis,
    }


def changes(before: Tables, after: Tables) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (table, key, record before or None, record after or None) of what differs."""
    for table, rows in after.items():
        if rows is not before[table]:
            for key in sorted(before[table].keys() | rows.keys()):
                old, new = before[table].get(key), rows.get(key)
                if old is not new and old != new:
                    yield table, key, old, new
