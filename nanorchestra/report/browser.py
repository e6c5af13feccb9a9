"""The report's browser of trajectories: recorded groups id by id, drawn by browser.js.

Colours show who wrote an id, the ratio of trainer to sampler, or the advantage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHOWN_IDS = 100_000  # a megabyte in the page
SCRIPT = (Path(__file__).parent / "browser.js").read_text(encoding="utf-8")
FIELDS = ("reward", "outcome", "cost_usd", "latency_s", "advantage", "status", "answer", "ids")
Row = dict[str, Any]


def browser(rows: list[Row], piece: Callable[[int], str]) -> str:
    """Return the HTML for rows of trajectories.jsonl; piece(id) is the text of an id.

    Groups are shown in their order, evenly spaced to SHOWN_IDS ids, and the last one always.
    """
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["phase"], row["step"], row["task_id"]), []).append(row)
    if not groups:
        return ""
    every = -(-sum(len(row["ids"]) for row in rows) // SHOWN_IDS)
    shown = list(groups.values())[::-1][:: max(1, every)][::-1]
    used = {token for group in shown for row in group for token in row["ids"]}
    data = {
        "pieces": {token: piece(token) for token in sorted(used)},
        "groups": [
            {
                "phase": group[0]["phase"],
                "step": group[0]["step"],
                "task": group[0]["task_id"],
                "question": group[0]["question"],
                "preference": group[0]["preference_text"],
                "attempts": [_attempt(row) for row in group],
            }
            for group in shown
        ],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<h2>Trajectories, id by id</h2><p class="note">{len(shown)} of the last {len(groups)} '
        "groups. Point at an id for its numbers; click on an attempt to see it.</p>"
        '<div id="browser"><noscript>This needs JavaScript.</noscript></div>'
        f'<script type="application/json" id="attempts">{text}</script><script>{SCRIPT}</script>'
    )


def _attempt(row: Row) -> Row:
    """Return what the page has of one attempt; lists have one entry for each sampled id."""
    places = [i for i, sampled in enumerate(row["sampled"]) if sampled]
    logprobs = [row["logprobs"][i] for i in places]
    trained = zip(row["trainer_logprobs"] or [], logprobs, strict=False)
    return {name: row.get(name) for name in FIELDS} | {
        "mask": "".join("1" if sampled else "0" for sampled in row["sampled"]),
        "logprobs": logprobs,
        "versions": [row["weight_versions"][i] for i in places],
        "gaps": [None if None in pair else round(pair[0] - pair[1], 7) for pair in trained],
        "calls": sum(row["calls"].values()),
    }
