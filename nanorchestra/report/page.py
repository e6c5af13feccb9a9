"""report.html and curves.png of a run: what was trained, how well it does, and what it does.

The page is self-contained and works at any moment of a run. Everything that a model or a tool
wrote is escaped, and the page's policy lets it load nothing.
`python -m nanorchestra.report.page runs/NAME` writes it.
"""

from __future__ import annotations

import base64
import sys
import tomllib
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nanorchestra.errors import UserError
from nanorchestra.files import write_whole
from nanorchestra.report import plots
from nanorchestra.report.browser import browser
from nanorchestra.report.run import Run, cells, columns, entries

CSS = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
RELOAD = "setTimeout(() => location.reload(), 30000);"  # of a page whose run goes on
POLICY = (  # everything is in the page
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
TAIL_BYTES = 16 << 20  # of trajectories.jsonl, so that a long run's report is not slower
ABOUT = (
    "An orchestrator: a language model that decides, turn by turn, which tool or which other model "
    "to call, trained by reinforcement learning to be right, cheap, fast and obedient to the "
    "user's preference. In the miniature world the experts are simulated, and their prices are "
    "charged to a virtual account."
)
SMOOTH = "Faint: each step; strong: the mean of the last tenth of all steps, at most 25."
TABLE = (
    "More is better for reward, right answers and preference; less is better for cost, latency "
    "and tools to avoid. m$: thousandths of a dollar."
)


def write_report(run_path: str | Path) -> Path:
    """Write report.html and curves.png of a run from what it holds so far; return the page's path.

    UserError if `run_path` holds no run, or a record in it cannot be read.
    """
    run = Run.open(run_path)
    rows, summary = list(run.rows("metrics")), run.summary()
    warm, grpo = (
        [row for row in rows if row["phase"] == phase] for phase in ("warm_start", "grpo")
    )
    learning, calls = plots.curves(grpo, "learning"), plots.curves(grpo, "tools")
    frontier = [plots.frontier(summary)]
    parts = [
        _header(run, summary, warm, grpo),
        _section("On held-out tasks", TABLE, _table(entries(summary))),
        images(frontier, width=8, height=4),
        _section("Learning curves", f"Means over the training tasks of each step. {SMOOTH}"),
        images(learning),
    ]
    if splits := _splits(summary):
        parts += [_section("By preference and kind of task", "Held-out tasks.", _table(splits))]
    health = plots.curves(warm, "warm_start") + plots.curves(grpo, "health")
    parts += [
        _section("Which tools it calls", SMOOTH),
        images(calls, width=8, height=3),
        _section("Training health", SMOOTH),
        images(health),
        browser(list(run.rows("trajectories", TAIL_BYTES)), _pieces(run)),
    ]
    if not summary:  # the run goes on
        parts += [f"<script>{RELOAD}</script>"]
    write_whole(run.path / "report.html", page(run, parts))
    image = plots.figure([*learning[:4], *calls, *frontier], "png", height=2.9)
    write_whole(run.path / "curves.png", image)
    return run.path / "report.html"


def page(run: Run, parts: list[str]) -> str:
    """Return the page of these parts, with the run's config.toml at its end."""
    config = escape((run.path / "config.toml").read_text(encoding="utf-8"))
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.path.name)} - nanorchestra</title><style>{CSS}</style></head>
<body>{body}
<details><summary>config.toml</summary><pre>{config}</pre></details></body></html>
"""


def _header(run: Run, summary: dict[str, Any], warm: list, grpo: list) -> str:
    seconds = summary.get("seconds") or sum(row.get("seconds") or 0.0 for row in warm + grpo)
    facts = {
        "parameters": f"{summary.get('parameters', 0) / 1e6:,.2f} million",
        "warm-start steps": len(warm),
        "GRPO steps": len(grpo),
        "held-out tasks": (summary.get("held_out") or {}).get("tasks", 0),
        "time": f"{seconds:,.0f} s ({seconds / 60:.1f} min)",
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{facts[name]}</dd></div>" for name in facts)
    return f"<h1>{escape(run.path.name)}</h1><p>{ABOUT}</p><dl>{items}</dl>"


def _section(title: str, note: str, content: str = "") -> str:
    return f'<h2>{title}</h2><p class="note">{note}</p>{content}'


def _table(rows: list[tuple[str, str, dict[str, Any]]]) -> str:
    """Return (class, label, scores) as a table that scrolls in its own box."""
    titles = ["", *columns()]
    lines = ["<tr>" + "".join(f"<th>{title}</th>" for title in titles)]
    for style, label, scores in rows:
        line = "".join(f"<td>{escape(cell)}</td>" for cell in [label, *cells(scores)])
        lines.append(f'<tr class="{escape(style)}">{line}')
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _splits(summary: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the results by preference and by kind of task, each before and after."""
    found = []
    for side in ("before", "after"):
        scores = (summary.get("held_out") or {}).get(side) or {}
        for split in ("by_preference", "by_kind"):
            parts = scores.get(split) or {}
            found += [(side, f"{name}, {side}", part) for name, part in parts.items()]
    return found


def images(panels: list[plots.Panel], **size: float) -> str:
    """Return the panels as images, in which nothing can run; they wrap on a narrow screen."""
    images = (base64.b64encode(plots.figure([panel], "svg", **size)).decode() for panel in panels)
    head = '<img alt="a panel of curves" src="data:image/svg+xml;base64,'
    return "".join(f'{head}{image}">' for image in images)


def _pieces(run: Run) -> Callable[[int], str]:
    """Return the text of an id by the tokenizer of the run, or of the checkpoint it began from."""
    config = tomllib.loads((run.path / "config.toml").read_text(encoding="utf-8"))
    folder = Path(config.get("model", {}).get("path") or run.path / "tokenizer")
    if not (folder / "tokenizer.json").exists():
        return lambda token: f"{token} "
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


if __name__ == "__main__":
    try:
        write_report(sys.argv[1])
    except UserError as error:
        sys.exit(f"report: {error}")
