"""report.html and curves.png of a run: what was trained, how well it does, and what it does.

The page is self-contained and works at any moment of a run; tables.js and browser.js draw its
tables. Everything that a model or a tool wrote is set as text, and the page's policy lets it load
nothing. `python -m nanorchestra.report.page runs/NAME` writes it.
"""

import base64
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from html import escape
from pathlib import Path

from tokenizers import Tokenizer

from nanorchestra.errors import UserError
from nanorchestra.files import read_toml, write_whole
from nanorchestra.report import plots
from nanorchestra.report.run import TITLES, Run, held_out_scores
from nanorchestra.schemas import Json

HERE = Path(__file__).parent
NAMES = ("page.css", "run.html", "tables.js", "browser.js")
CSS, BODY, *SCRIPTS = ((HERE / name).read_text(encoding="utf-8") for name in NAMES)
POLICY = (  # everything is in the page
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
TAIL_BYTES = 16 << 20  # of trajectories.jsonl, so that a long run's report is not slower
SHOWN_IDS = 60_000  # two megabytes in the page


def write_report(run_path: str | Path) -> None:
    """Write report.html and curves.png of a run from what it holds so far.

    UserError if `run_path` holds no run, or a record in it cannot be read.
    """
    run = Run.open(run_path)
    rows, summary = list(run.rows("metrics")), run.summary()
    warm, grpo = (
        [row for row in rows if row["phase"] == phase] for phase in ("warm_start", "grpo")
    )
    learning, calls = plots.curves(grpo, "learning"), plots.curves(grpo, "tools")
    health = plots.curves(warm, "warm_start") + plots.curves(grpo, "health")
    held_out = held_out_scores(summary)
    frontier = [plots.frontier(dict(sorted(held_out.items())))]  # after, before, ...
    drawn = {
        "frontier": images(frontier, width=8, height=4),
        "learning": images(learning),
        "calls": images(calls, width=8, height=3),
        "health": images(health),
    }
    seconds = summary.get("seconds") or sum(row.get("seconds") or 0.0 for row in rows)
    facts = {
        "parameters": f"{summary.get('parameters', 0) / 1e6:,.2f} million",
        "warm-start steps": len(warm),
        "GRPO steps": len(grpo),
        "held-out tasks": summary.get("held_out", {}).get("tasks", 0),
        "time": f"{seconds:,.0f} s ({seconds / 60:.1f} min)",
    }
    data = {
        "run": {"facts": facts, "held_out": held_out, "live": not summary},
        "browser": browser(list(run.rows("trajectories", TAIL_BYTES)), _pieces(run)),
    }
    write_whole(run.path / "report.html", page(run, BODY.format(**drawn), data))
    image = plots.figure([*learning[:4], *calls[:1], *frontier], "png", height=2.9)
    write_whole(run.path / "curves.png", image)


def page(run: Run, body: str, data: Json) -> str:
    """Return the page of a body, filled with `data` by the scripts, and config.toml."""
    config = escape((run.path / "config.toml").read_text(encoding="utf-8"))
    name = escape(run.path.name)
    text = json.dumps({"titles": TITLES, **data}, separators=(",", ":")).replace("<", "\\u003c")
    scripts = "".join(f"<script>{script}</script>" for script in SCRIPTS)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - nanorchestra</title><style>{CSS}</style></head>
<body><h1>{name}</h1><noscript>The tables need JavaScript.</noscript>
{body}
<details><summary>config.toml</summary><pre>{config}</pre></details>
<script type="application/json" id="data">{text}</script>{scripts}</body></html>
"""


def images(panels: list[plots.Panel], **size: float) -> str:
    """Return the panels as images, in which nothing can run.

    On a narrow screen they wrap; those of a given size scroll in their box, to stay legible.
    """
    images = (base64.b64encode(plots.figure([panel], "svg", **size)).decode() for panel in panels)
    head = '<img alt="a figure of the run" src="data:image/svg+xml;base64,'
    inner = "".join(f'{head}{image}">' for image in images)
    return f'<div class="wide">{inner}</div>' if size else inner


def browser(rows: list[Json], piece: Callable[[int], str]) -> Json:
    """Return what the page shows id by id of rows of trajectories.jsonl; piece(id) is an id's text.

    Groups are in their order, evenly spaced to SHOWN_IDS ids, and the last one always.
    """
    groups = defaultdict(list)
    for row in rows:
        task = row["task"]
        shown = {"question": task["question"], "preference": task["preference"]["text"]}
        shown |= {name: row[name] for name in TITLES["attempt"]}
        groups[row["phase"], row["step"], row["task_id"]].append(shown)
    every = -(-sum(len(row["ids"]) for row in rows) // SHOWN_IDS)
    shown = list(groups.values())[::-1][:: max(1, every)][::-1]
    used = {token for group in shown for row in group for token in row["ids"]}
    return {"count": len(groups), "groups": shown, "pieces": {id: piece(id) for id in sorted(used)}}


def _pieces(run):
    """Return the text of an id by the tokenizer of the run, or of the checkpoint it began from."""
    config = read_toml(run.path / "config.toml")
    folder = run.path / "tokenizer"
    if not folder.exists():
        folder = Path(config.get("model", {}).get("path") or ".")
    if not (folder / "tokenizer.json").exists():
        return lambda token: f"{token} "
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


if __name__ == "__main__":
    try:
        write_report(sys.argv[1])
    except UserError as error:
        sys.exit(f"report: {error}")
