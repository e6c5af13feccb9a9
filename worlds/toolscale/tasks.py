"""Writes an act as a task in the tau2 format."""

from __future__ import annotations

import random

from worlds.toolscale.act import PHRASES, Act
from worlds.toolscale.program import Json

SPARE = 3  # tools on offer that are not needed, times the level


def to_task(draft: Json, act: Act, name: str) -> Json:
    """Returns the tau2 task of a draft and its act.

    Beside tau2's fields it has `domain`, `level` and `tools` (the names of those offered).
    """
    world, w, wishes = act.world, act.w, draft["wishes"]
    rng = random.Random(f"{draft['seed']}/task")
    me = world.tables[w.person.table][act.me]
    known = f"You are {me['first_name']} {me['last_name']}"
    if draft["person"]["by"] == "id":
        known += f". Your {w.person} number is {act.me}."
    else:
        known += f" and your {w.proof} is {me[w.proof.field]}."
    manner = [
        rng.choice(PHRASES["styles"]),
        "If the agent asks you to confirm a step that you want, confirm it.",
    ]
    if len(wishes) > 1:
        manner.append("Bring up your wishes one after the other, in the order given.")
    unknown = " or ".join(dict.fromkeys(act.unknown))
    used = {tool for tool, _ in act.calls}
    used |= {w.tool[role] for role in ("find_person", "calculate", "handover")}
    spare = [tool for tool in world.by_name if tool not in used]
    offered = used | set(rng.sample(spare, min(len(spare), SPARE * draft["level"])))
    actions = [
        {"action_id": f"{name}_{number}", "name": tool, "arguments": arguments}
        for number, (tool, arguments) in enumerate(act.calls)
    ]
    return {
        "id": name,
        "domain": world.domain,
        "level": draft["level"],
        "description": {"purpose": "; ".join(dict.fromkeys(wish["kind"] for wish in wishes))},
        "user_scenario": {
            "persona": rng.choice(PHRASES["personas"]),
            "instructions": {
                "domain": world.domain,
                "reason_for_call": " ".join(act.sentences),
                "known_info": known,
                "unknown_info": f"You do not know {unknown}." if unknown else None,
                "task_instructions": " ".join(manner),
            },
        },
        "evaluation_criteria": {
            "actions": actions,
            "communicate_info": list(dict.fromkeys(act.communicate)),
            "reward_basis": ["DB", "ACTION"] + ["COMMUNICATE"] * bool(act.communicate),
        },
        "tools": [tool for tool in world.by_name if tool in offered],
    }
