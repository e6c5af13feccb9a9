"""report.html and curves.png of a run: what was trained, how well it does, and what it does.

The page is self-contained and works at any moment of a run. Everything that a model or a tool
wrote is escaped; the page's policy lets it load nothing and run only its own scripts.
`python -m nanorchestra.report.page runs/NAME` writes it.
"""

from __future__ import annotations

import base64
import hashlib
import re
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
from nanorchestra.report.browser import SCRIPT, browser
from nanorchestra.report.run import COLUMNS, Run, cells, entries, number

CSS = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
RELOAD = "setTimeout(() => location.reload(), 30000);"  # of a page whose run goes on
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
COLOURS = (
    '<span class="sampled">Blue: sampled by the model.</span> '
    '<span class="given">Grey: given to it.</span>'
)


def write_report(run_path: str | Path) -> Path:
    """Write report.html and curves.png of a run from what it holds so far; return the page's path.

    UserError if `run_path` holds no run, or a record in it cannot be read.
    """
    run = Run.open(run_path)
    rows, summary = list(run.rows("metrics")), run.summary()
    warm, grpo, evaluations = (
        [row for row in rows if row["phase"] == phase]
        for phase in ("warm_start", "grpo", "evaluation")
    )
    trajectories = list(run.rows("trajectories", TAIL_BYTES))
    learning, calls = plots.curves(grpo, *plots.LEARNING), plots.curves(grpo, plots.TOOLS)
    frontier = [plots.frontier(summary)]
    parts = [
        _header(run, summary, warm, grpo),
        _section("On held-out tasks", TABLE, _table(entries(summary))),
        _figure(frontier, width=8, height=4),
        _section("Learning curves", f"Means over the training tasks of each step. {SMOOTH}"),
        _figure(learning),
    ]
    if evaluations:
        note = "The best of these is in model-best/."
        parts += [_section("During training, on held-out tasks", note)]
        parts += [_figure(plots.curves(evaluations, *plots.HELD_OUT))]
    if splits := _splits(summary):
        parts += [_section("By preference and kind of task", "Held-out tasks.", _table(splits))]
    health = plots.curves(warm, plots.WARM_START) + plots.curves(grpo, *plots.HEALTH)
    parts += [
        _section("Which tools it calls", SMOOTH),
        _figure(calls, width=8, height=3),
        _section("Training health", SMOOTH),
        _figure(health),
        _samples(trajectories),
        browser(trajectories, _pieces(run)),
    ]
    if not summary:  # the run goes on
        parts += [f"<script>{RELOAD}</script>"]
    run.write_text("report.html", _page(run, parts))
    image = plots.figure([*learning[:4], *calls, *frontier], "png", height=2.9)
    write_whole(run.path / "curves.png", image)
    return run.path / "report.html"


def _page(run: Run, parts: list[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in (SCRIPT, RELOAD)
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src " + hashes
    config = _text((run.path / "config.toml").read_text(encoding="utf-8"))
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(run.path.name)} - nanorchestra</title><style>{CSS}</style></head>
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
    return f"<h1>{_text(run.path.name)}</h1><p>{ABOUT}</p><dl>{items}</dl>"


def _section(title: str, note: str, content: str = "") -> str:
    return f'<h2>{title}</h2><p class="note">{note}</p>{content}'


def _table(rows: list[tuple[str, str, dict[str, Any]]]) -> str:
    """Return (class, label, scores) as a table that scrolls in its own box."""
    titles = ["", *(title for title, *_ in COLUMNS.values())]
    lines = ["<tr>" + "".join(f"<th>{title}</th>" for title in titles)]
    for style, label, scores in rows:
        line = "".join(f"<td>{_text(cell)}</td>" for cell in [label, *cells(scores)])
        lines.append(f'<tr class="{_text(style)}">{line}')
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _splits(summary: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the results by preference and by kind of task, each before and after."""
    held_out = summary.get("held_out") or {}
    found = []
    for split in ("by_preference", "by_kind"):
        for name in (held_out.get("after") or {}).get(split) or ():
            sides = ("before", "after")
            found += [(s, f"{name}, {s}", held_out[s][split].get(name, {})) for s in sides]
    return found


def _figure(panels: list[plots.Panel], width: float = 3.7, height: float = 2.6) -> str:
    """Return the panels as images, in which nothing can run; they wrap on a narrow screen."""
    images = [plots.figure([panel], "svg", width, height) for panel in panels]
    sources = [f"data:image/svg+xml;base64,{base64.b64encode(i).decode()}" for i in images]
    return "".join(f'<img alt="a panel of curves" src="{source}">' for source in sources)


def _pieces(run: Run) -> Callable[[int], str]:
    """Return the text of an id by the tokenizer of the run, or of the checkpoint it began from."""
    config = tomllib.loads((run.path / "config.toml").read_text(encoding="utf-8"))
    folder = Path(config.get("model", {}).get("path") or run.path / "tokenizer")
    if not (folder / "tokenizer.json").exists():
        return lambda token: f"{token} "
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def _samples(rows: list[dict[str, Any]]) -> str:
    """Return the best and the worst trajectories of the latest phase and step."""
    latest = [row for row in rows if all(row[key] == rows[-1][key] for key in ("phase", "step"))]
    if not latest:
        return ""
    ranked = sorted(latest, key=lambda row: -row["reward"])
    ends = ranked if len(ranked) < 8 else ranked[:4] + ranked[-4:]
    where = f"The highest and lowest rewards of step {rows[-1]['step']}, {rows[-1]['phase']}. "
    shown = "".join(map(_trajectory, ends))
    return _section("Sample trajectories", where + COLOURS, shown)


def _trajectory(row: dict[str, Any]) -> str:
    facts = [f"outcome {row['outcome']:.2f}", _spent(row), row["status"], row["task_id"]]
    tools = "".join(
        f"<li><b>{_text(tool['name'])}</b> ({_text(tool['kind'])}): {_text(tool['description'])}"
        for tool in row["tools"]
    )
    parts, turns = [], iter(row["turns"])
    for piece in row["text"]:
        if piece["role"] != "assistant":
            parts.append(f'<pre class="given">{_text(piece["text"])}</pre>')
            continue
        turn = next(turns)
        parts.append(f'<pre class="sampled">{_marked(piece["text"])}</pre>')
        for call, result in zip(turn["calls"], turn["results"], strict=False):
            failed = ", failed" if result["error"] else ""
            paid = f"called {call['name']}: {_spent(result)}{failed}"
            parts.append(f'<p class="note">{_text(paid)}</p>')
    preference = _text(row["preference_text"] or "no preference")
    return (
        f"<article><h3>Reward {row['reward']:.3f}</h3>"
        f'<p class="note">{_text("; ".join(facts))}</p>'
        f'<pre class="given">{_text(row["question"])}\n({preference})</pre>'
        f"<details><summary>{len(row['tools'])} tools offered</summary><ul>{tools}</ul></details>"
        f"{''.join(parts)}<p><b>Answer:</b> {_text(row['answer'] or 'none')}</p></article>"
    )


def _spent(record: dict[str, Any]) -> str:
    return f"{number(1000 * record['cost_usd'])} m$, {record['latency_s']:.2f} s"


def _marked(text: str) -> str:
    """Return a sampled turn as HTML with its reasoning and calls set off, also if cut short."""
    pattern = r"(<think>.*?(?:</think>|\Z)|<tool_call>.*?(?:</tool_call>|\Z))"
    marked = ""
    for i, piece in enumerate(re.split(pattern, text, flags=re.DOTALL)):
        style = "reasoning" if piece.startswith("<think>") else "call"
        marked += f'<span class="{style}">{_text(piece)}</span>' if i % 2 else _text(piece)
    return marked


def _text(value: Any) -> str:
    """Return the value as escaped text; half a surrogate pair, which UTF-8 lacks, is replaced."""
    return escape(str(value).encode("utf-8", "replace").decode())


if __name__ == "__main__":
    try:
        write_report(sys.argv[1])
    except UserError as error:
        sys.exit(f"report: {error}")
