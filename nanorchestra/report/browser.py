"""Chooses the recorded groups that the report's browser shows id by id; browser.js draws them.

Colours show who wrote an id, the ratio of trainer to sampler, or the advantage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

SHOWN_IDS = 60_000  # two megabytes in the page
FIELDS = (
    *("phase", "step", "task_id", "question", "preference_text", "reward", "outcome", "cost_usd"),
    *("latency_s", "advantage", "status", "answer", "calls", "ids", "sampled", "logprobs"),
    *("trainer_logprobs", "weight_versions"),
)
Row = dict[str, Any]


def browser(rows: list[Row], piece: Callable[[int], str]) -> dict[str, Any]:
    """Return what the page needs of rows of trajectories.jsonl; piece(id) is the text of an id.

    Groups are in their order, evenly spaced to SHOWN_IDS ids, and the last one always.
    """
    groups = defaultdict(list)
    for row in rows:
        shown = {name: row[name] for name in FIELDS}
        groups[row["phase"], row["step"], row["task_id"]].append(shown)
    if not groups:
        return {}
    every = -(-sum(len(row["ids"]) for row in rows) // SHOWN_IDS)
    shown = list(groups.values())[::-1][:: max(1, every)][::-1]
    used = {token for group in shown for row in group for token in row["ids"]}
    pieces = {token: piece(token) for token in sorted(used)}
    return {"count": len(groups), "groups": shown, "pieces": pieces}
