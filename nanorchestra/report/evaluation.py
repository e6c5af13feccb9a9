"""report.html and PNG plots of an evaluation, from its summary.json and its attempts.

evaluation.js draws the tables of the page.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from nanorchestra.files import read_json_lines, write_whole
from nanorchestra.report import plots
from nanorchestra.report.page import images, page
from nanorchestra.report.run import TITLES, Run
from nanorchestra.report.trace import tree

SCRIPT = Path(__file__).with_name("evaluation.js").read_text(encoding="utf-8")
SHOWN = 5  # tasks that the first policy wins, and as many that it loses
SIZE = {"width": 6.5, "height": 3.8}  # inches of a plot


def attempts(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of an evaluation's attempts. UserError if they cannot be read."""
    for file in sorted(path.glob("[0-9]*.jsonl")):
        yield from (row for _, row in read_json_lines(file))


def write_evaluation(path: Path) -> None:
    """Write the page and the plots of an evaluation. UserError if it cannot be read."""
    run, panels = Run.open(path), defaultdict(list)
    summary = run.summary()
    for world, found in summary["worlds"].items():
        named = {TITLES["routers"].get(name, name): scores for name, scores in found.items()}
        for name, drawn in plots.compared(world, named).items():
            panels[name].append(drawn)
    parts = [f'<h1>{escape(path.name)}</h1><div id="tables"></div>']
    for name, drawn in panels.items():
        write_whole(path / f"{name}.png", plots.figure(drawn, "png", **SIZE))
        parts.append(images(drawn, **SIZE))
    data = {"summary": summary, "titles": TITLES, "attempts": _instructive(path, summary)}
    text = json.dumps(data).replace("<", "\\u003c")
    parts.append(
        f'<div id="attempts"></div><script type="application/json" id="data">{text}</script>'
        f"<script>{SCRIPT}</script>"
    )
    write_whole(path / "report.html", page(run, parts))


def _instructive(path, summary):
    """The tasks where the rewards of the first two policies differ most, with both attempts."""
    first = [*next(iter(summary["worlds"].values()), {})][:2]
    found = defaultdict(list)
    for row in attempts(path):
        if row["policy"] in first and not row["trial"]:
            said = {name: row[name] for name in ("policy", "reward")} | {"tree": tree(row)}
            found[row["task"]["id"]].append(said | {"wish": row["task"]["preference"]["text"]})
    pairs = [pair for pair in found.values() if len(pair) == 2]
    pairs.sort(key=lambda pair: pair[1]["reward"] - pair[0]["reward"])
    return pairs[:SHOWN] + pairs[SHOWN:][-SHOWN:][::-1]
