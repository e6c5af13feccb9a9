"""What data_gen.py prints: the figures of a run, and tasks to read."""

from __future__ import annotations

from collections import Counter

from worlds.toolscale.score import Scorer
from worlds.toolscale.shapes import Json
from worlds.toolscale.tasks import changes
from worlds.toolscale.world import World


def report(
    tasks: list[Json], total: dict[str, Counter[str]], worlds: dict[str, World], seconds: float
) -> str:
    """Returns the figures of a run: what was thrown away and why, scores, and how varied tasks are.

    `total` is that of pipeline.make_all.
    """
    counts, rejected = total["counts"], +total["rejected"]
    golden, nothing, wrong = (
        f"{100 * counts[name] / counts['made']:.2f}%" for name in ("golden", "nothing", "altered")
    )
    sequences = [_names(task) for task in tasks]
    lengths = sorted(Counter(map(len, sequences)).items())
    lines = [
        f"{len(tasks)} tasks in {len(worlds)} domains, {seconds:.1f} s",
        f"thrown away: {rejected.total()}",
        *(f"  {count:6d}  {reason}" for reason, count in rejected.most_common()),
        f"score 1: {golden} by their golden calls, {nothing} by doing nothing, "
        f"{wrong} with one golden argument altered",
        f"distinct tool sequences: {len(set(sequences))}",
        "tasks by their golden calls: " + ", ".join(f"{n}: {count}" for n, count in lengths),
        "golden calls by tool:",
    ]
    for world in worlds.values():
        own = [task for task in tasks if task["domain"] == world.domain]
        used = Counter(dict.fromkeys(world.by_name, 0))
        used.update(name for task in own for name in _names(task))
        records = sum(map(len, world.tables.values()))
        listed = ", ".join(f"{name} {count}" for name, count in used.most_common())
        lines.append(f"  {world.domain} ({len(world.tools)} tools, {records} records): {listed}")
    return "\n".join(lines)


def _names(task: Json) -> tuple[str, ...]:
    return tuple(action["name"] for action in task["evaluation_criteria"]["actions"])


def show(world: World, task: Json) -> str:
    """Returns a task as text to read: scenario, tools, golden calls, and what they change."""
    scenario, scorer = task["user_scenario"], Scorer(world, task)
    words = scenario["instructions"] | {"persona": scenario["persona"]}
    words["told"] = ", ".join(scorer.criteria["communicate_info"])
    titles = {
        "Persona": "persona",
        "Wants": "reason_for_call",
        "Knows": "known_info",
        "Does not know": "unknown_info",
        "Manner": "task_instructions",
        "Must be told": "told",
    }
    lines = [f"=== {task['id']} (level {task['level']}) " + "=" * 40, ""]
    lines += [f"{title}: {words[field]}" for title, field in titles.items() if words.get(field)]
    lines += ["", f"Tools: {', '.join(task['tools'])}", "", "Golden calls:"]
    for number, (name, arguments) in enumerate(scorer.golden_calls(), 1):
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        lines.append(f"  {number}. {name}({given})")
    lines += ["", "Changes in the database:"]
    for table, key, old, new in changes(world.tables, scorer.gold):
        what = "deleted" if new is None else f"new: {new}"
        if old and new:
            fields = [field for field in new if old[field] != new[field]]
            what = ", ".join(f"{field}: {old[field]!r} -> {new[field]!r}" for field in fields)
        lines.append(f"  {table} {key}: {what}")
    return "\n".join([*lines, ""])
