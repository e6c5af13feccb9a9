"""Reads tasks that others wrote into the form of tasks.jsonl.

They are the rows of ToolScale as its hub offers them, which are tasks in tau2's format, or the rows
that the published orchestrator was trained on, which hold such a task with the experts on offer,
their prices and a preference.
"""

import json
import re
from datetime import UTC, datetime
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.schemas import Json
from worlds.toolscale.domain import Domain
from worlds.toolscale.offers import EXPERTS, OTHERS

DEFAULTS = {"actions": [], "communicate_info": [], "reward_basis": ["DB", "COMMUNICATE"]}
PER_TOKEN = 1e-3  # the released rows have dollars per token where they say per million
MIDNIGHT = re.compile(r"(\d{4}-\d\d-\d\d)[T ]00:00:00(\.0+)?(Z|\+00:00)?")


def read_row(row: Json, where: str) -> Json | None:
    """Returns the task of a row, of which `where` says where it stands; None for a question.

    UserError if it is neither a task of data_gen.py nor a row of ToolScale.
    """
    try:
        return _task_of(row)
    except (AttributeError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        text = f"neither a task of data_gen.py nor a row of ToolScale ({problem})"
        raise UserError(f"{where}: {text}") from error


def _task_of(row) -> Json | None:
    if "domain" in row:  # ours
        if criteria := row.get("evaluation_criteria"):
            row = row | {"evaluation_criteria": DEFAULTS | criteria}
        return row
    if row.get("category") == "qa":
        return None
    task, index = row.get("example", row), row.get("index", "")
    scenario, state = task["user_scenario"], task.get("initial_state") or {}
    parts, criteria = scenario["instructions"], task["evaluation_criteria"] or {}
    parts = {"reason_for_call": parts} if isinstance(parts, str) else parts
    domain = index.partition("____")[0] or parts.get("domain")
    wanted = (parts.get("reason_for_call"), parts.get("task_instructions"))
    reason = {"reason_for_call": " ".join(filter(None, wanted)), "task_instructions": None}
    return {
        "id": index or f"{domain}/{task['id']}",
        "domain": domain,
        "user_scenario": scenario | {"instructions": parts | reason},
        "initial_state": {k: v for k, v in restored(state, {}).items() if v},
        "evaluation_criteria": DEFAULTS | {k: v for k, v in criteria.items() if v is not None},
    } | (_offer(row) if "model_mapping" in row else {})


def _offer(row) -> Json:
    """The tools, the experts and the preference of a training row."""
    functions = {f["name"]: f for f in (tool.get("function", tool) for tool in row["tools"])}
    asking, vector = functions.pop("call_expert", None), row["pref_vec"]
    simulated = EXPERTS["train"] | EXPERTS["held_out"]
    experts = []
    for alias, model in row["model_mapping"].items():
        if asking and alias not in json.dumps(asking):
            continue
        prices = row["tool_pricing"][model]
        usd = [prices[f"{key}_tokens_per_million"] for key in ("input", "output")]
        usd = [n * 1e6 if n < PER_TOKEN else n for n in usd]
        expert = simulated.get(model, OTHERS)
        experts.append(
            {
                "alias": alias,
                "model": model,
                "description": f"{alias}: ${usd[0]:g} and ${usd[1]:g} per million.",
                "usd": usd,
                "latency_s": float(expert["seconds"]),
                "skill": expert["skill"],
            }
        )
    names = "accuracy", "cost", "latency", *(expert["alias"] for expert in experts)
    weights = {name: vector.get(name, 0.0) for name in names}
    asking = asking and {"type": "function", "function": asking}
    return {"tools": [*functions], "experts": experts, "preference": weights, "asking": asking}


def restored(value: Any, shape: Json) -> Any:
    """Undoes what the hub's one table for all tools did to an argument of this JSON schema.

    Fields of other tools are there as null, and days have become times, or milliseconds.
    """
    if isinstance(value, dict):
        inner = shape.get("properties", {})
        return {k: restored(v, inner.get(k, {})) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [restored(v, shape.get("items", {})) for v in value]
    if isinstance(value, int) and shape.get("type") == "string":
        value = datetime.fromtimestamp(value / 1000, UTC).isoformat()
    day = isinstance(value, str) and MIDNIGHT.fullmatch(value)
    return day[1] if day else value


def unfit(domain: Domain, task: Json, models: Any) -> str:
    """Returns why a task cannot be played by these Models and scored here; "" if it can."""
    criteria = task["evaluation_criteria"]
    actions, basis = criteria["actions"], criteria["reward_basis"]
    missing = {action["name"] for action in actions} - domain.kinds.keys()
    judged = "NL_ASSERTION" in basis and criteria.get("nl_assertions")
    reasons = {
        "initial_state": task.get("initial_state"),
        "the user has tools": any("user" in action.values() for action in actions),
        "ENV_ASSERTION": "ENV_ASSERTION" in basis,
        "task.judge is needed": judged and not models.judge,
        f"no tool {min(missing, default='')}": missing,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
