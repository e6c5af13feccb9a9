"""report.html and curves.png of a run: one self-contained page that says what was trained, how well it does and what it does.

Works at any moment: before the first step, during a run (`write_report` again and again) and after it. Everything that a model or a tool
wrote is escaped, and the page may load nothing and run nothing but its own script: no network. `python -m nanorchestra.report.page runs/NAME` writes it.
"""

from __future__ import annotations

import base64
import html
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.files import write_whole
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.report import plots
from nanorchestra.report.browser import RELOAD, browser, policy
from nanorchestra.report.run import Run, comparison, money_unit, number

TAIL_BYTES = (
    16 << 20
)  # how much of trajectories.jsonl is read for the samples: a live report must not slow down as the run grows
SAMPLES = 8
MINIATURE = "this is a miniature. Its experts are simulated, and their prices are charged to a virtual account."
SMOOTH = "Faint: each step; strong: the mean over a tenth of all steps so far (at most 25), the latest last."
CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #fff; max-width: 1120px; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.7rem; margin: 0 } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; border-top: 1px solid #e1e4e8; padding-top: 1.2rem }
p { max-width: 52rem } .note { color: #57606a; font-size: .9rem; margin: .2rem 0 .8rem } img { width: 100%; height: auto }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2.2rem; margin: 1rem 0 } dt { color: #57606a; font-size: .8rem } dd { margin: 0; font-weight: 600 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #e1e4e8 }
th:first-child, td:first-child { text-align: left } th { font-size: .85rem; font-weight: 600 } tr.after td { background: #eaf2fd; font-weight: 600 }
article { border: 1px solid #d9dde3; border-radius: 6px; padding: .8rem 1rem; margin: 1rem 0 } article h3 { margin: 0; font-size: 1rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; margin: .3rem 0; padding: .4rem .7rem }
.sampled { background: #eaf2fd; border-left: 4px solid #1f63c4 } .given { background: #f4f5f7; border-left: 4px solid #8a919c }
.reasoning { color: #57606a; font-style: italic } .call { color: #8a3f0c; font-weight: 600 }
.paid { font-size: .85rem; color: #57606a; margin: 0 0 .3rem .8rem } summary { cursor: pointer; color: #57606a; font-size: .9rem }
#browser tr[tabindex] { cursor: pointer } #browser tr.chosen td { background: #eaf2fd } #browser select { margin-right: 1rem; font: inherit; max-width: 30rem }
#browser pre span { border: 0; border-radius: 2px } #browser .sampled { background: #cfe2fb } #browser table { font-size: .9rem } #browser td, #browser th { padding: .15rem .6rem }
"""


def write_report(run_path: str | Path) -> Path:
    """Writes report.html and curves.png into the run directory from what it holds so far; the path of report.html.

    It takes about 3 s of one core. UserError if `run_path` is no run directory, a record in it cannot be read or the files cannot be written.
    """
    run = Run.open(run_path)
    rows, summary = list(run.rows("metrics")), run.summary()
    warm, grpo = (
        [row for row in rows if row.get("phase") == phase] for phase in ("warm_start", "grpo")
    )
    evaluations = [row for row in rows if row.get("phase") == "evaluation"]
    trajectories = list(run.rows("trajectories", TAIL_BYTES))
    held_out = summary.get("held_out") or {}
    learning, calls = plots.learning(grpo), plots.tools(grpo)

    parts = [_header(run, summary, warm, grpo), "<h2>On held-out tasks</h2>", _table(summary)]
    if held_out:
        frontiers = [plots.frontier(held_out), plots.frontier_by_preference(held_out)]
        parts += [_figure(frontiers, 2, "right answers against cost", width=5.5, height=4)]
    parts += [
        "<h2>Learning curves</h2>",
        f'<p class="note">Means over the trajectories of each GRPO step, on training tasks. {SMOOTH}</p>',
    ]
    parts += [_figure(learning, 3, "reward, accuracy, cost, latency and preference by step")]
    if evaluations:
        best = summary.get("best") or {}
        note = (
            f" The best by {best['measure']}, step {best['step']}, is in model-best/."
            if best
            else ""
        )
        parts += [
            f'<p class="note">On held-out tasks, every so many steps.{_text(note)}</p>',
            _figure(plots.evaluation(evaluations), 3, "held-out tasks by step"),
        ]
    parts += [
        "<h2>Which tools it calls</h2>",
        _figure(calls, 2, "calls by kind of tool and step", width=5.5, height=3.2),
    ]
    for split, what in (("by_preference", "preference"), ("by_kind", "kind of task")):
        if bars := plots.spending(held_out, split, what):
            parts += [
                f'<h2>What it spends, by {what}</h2><p class="note">Held-out tasks, before and after GRPO.</p>',
                _figure(bars, 3, f"by {what}", height=2.9),
            ]
    parts += [
        "<h2>Training health</h2>",
        f'<p class="note">{SMOOTH}</p>',
        _figure(plots.health(warm, grpo), 3, "losses and other signs of health by step"),
    ]
    parts += [_samples(trajectories), browser(trajectories, _pieces(run))]
    parts += [
        f"<details><summary>config.toml</summary><pre>{_text((run.path / 'config.toml').read_text(errors='replace'))}</pre></details>"
    ]

    parts += [] if held_out.get("after") else [f"<script>{RELOAD}</script>"]
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy()}"><meta name="viewport" content="width=device-width">'
    page = f'<!doctype html>\n<html lang="en"><head>{head}<title>{_text(run.path.name)} - nanorchestra</title><style>{CSS}</style></head>\n<body>\n'
    run.write_text("report.html", page + "\n".join(parts) + "\n</body></html>\n")
    readme = plots.panels(
        [*learning[:4], plots.tools(grpo)[0], plots.frontier(held_out)], 3, width=4.2, height=3
    )
    write_whole(run.path / "curves.png", plots.image(readme, "png"))
    return run.path / "report.html"


def _header(run: Run, summary: dict[str, Any], warm: list, grpo: list) -> str:
    seconds = summary.get("seconds") or sum(row.get("seconds") or 0.0 for row in warm + grpo)
    facts = {
        "parameters": f"{summary['parameters'] / 1e6:,.2f} million"
        if summary.get("parameters")
        else None,
        "seed": summary.get("seed"),
        "warm-start steps": f"{warm[-1]['step']:,}" if warm else None,
        "GRPO steps": f"{summary.get('steps') or grpo[-1]['step']:,}" if grpo else "none yet",
        "held-out tasks": f"{summary['held_out']['tasks']:,}"
        if (summary.get("held_out") or {}).get("tasks")
        else None,
        "time": f"{seconds:,.0f} s ({seconds / 60:.1f} min)",
        "peak memory": f"{summary['peak_memory_mb']:,.0f} MB"
        if summary.get("peak_memory_mb")
        else None,
        "state": "finished" if summary.get("held_out", {}).get("after") else "not finished",
    }
    items = "".join(
        f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    return (
        f"<h1>{_text(run.path.name)}</h1><p>An orchestrator: a language model that answers questions by deciding, turn by turn, which tool or which other "
        "model to call, trained by reinforcement learning to be right, cheap, fast and obedient to the user's preference.</p><p><b>What is simulated:</b> "
        f"{MINIATURE}</p><dl>{items}</dl>"
    )


def _table(summary: dict[str, Any]) -> str:
    columns, rows = comparison(summary)
    if not rows:
        return '<p class="note">No held-out results yet.</p>'
    note = "Reward, right answers and preference: more is better. Cost, latency and the use of a tool that was to be avoided: less is better. "
    note += "m$: thousandths of a dollar. " if any("m$" in column for column in columns) else ""
    if tasks := summary["held_out"].get("tasks"):
        note += f"With {tasks:,} tasks, the standard error of a share of right answers is at most {50 / tasks**0.5:.1f} points."
    head = "".join(f"<th>{_text(column)}</th>" for column in ["", *columns])
    body = "".join(
        f'<tr class="{_text(key)}">'
        + "".join(f"<td>{_text(cell)}</td>" for cell in [label, *cells])
        + "</tr>"
        for key, label, cells in rows
    )
    return f'<p class="note">{note}</p><table><tr>{head}</tr>{body}</table>'


def _figure(draws: list, columns: int, description: str, **size: float) -> str:
    """The panels as an image inside the page: as an image, nothing in it can run or clash with the names in another."""
    data = base64.b64encode(plots.image(plots.panels(draws, columns, **size), "svg")).decode()
    return f'<img alt="{description}" src="data:image/svg+xml;base64,{data}">'


def _pieces(run: Run) -> Callable[[int], str]:
    """The text of an id by the run's tokenizer, its own or that of the checkpoint it began from; without one the id as a number."""
    start = tomllib.loads((run.path / "config.toml").read_text()).get("model", {}).get("path")
    try:
        tokenizer = Tokenizer.from_dir(start or run.path / "tokenizer")
    except UserError:
        return lambda token: f"{token} "
    return lambda token: tokenizer.decode([token]) if token < tokenizer.vocab_size else f"{token} "


def _samples(rows: list[dict[str, Any]]) -> str:
    latest = [
        row
        for row in rows
        if (row.get("phase"), row.get("step")) == (rows[-1].get("phase"), rows[-1].get("step"))
    ]
    if not latest:
        return '<h2>Sample trajectories</h2><p class="note">None recorded yet.</p>'
    phase, step = latest[0].get("phase"), latest[0].get("step")
    where = {"before": "held-out tasks, before GRPO", "after": "held-out tasks, after GRPO"}.get(
        phase, f"training tasks, GRPO step {step}"
    )
    return (
        f'<h2>Sample trajectories</h2><p class="note">From {len(latest)} on {_text(where)}: the best and the worst by reward, then one for each way of '
        'using the tools, the most frequent first. <span class="sampled">&nbsp;Blue: sampled by the model.</span> <span class="given">&nbsp;Grey: given to it.'
        "</span></p>" + "".join(_trajectory(title, row) for title, row in choose(latest, SAMPLES))
    )


def choose(rows: list[dict[str, Any]], count: int) -> list[tuple[str, dict[str, Any]]]:
    """At most `count` rows worth reading, each with the reason: best and worst reward, then one for each set of kinds of tool called."""
    ranked = sorted(rows, key=lambda row: -(row.get("reward") or 0.0))
    chosen = [("highest reward", ranked[0])] + (
        [("lowest reward", ranked[-1])] if len(ranked) > 1 else []
    )

    def ways(row: dict[str, Any]) -> str:
        kinds = {tool["name"]: tool["kind"] for tool in row.get("tools") or []}
        return (
            ", ".join(
                sorted(
                    {
                        kinds.get(name, name)
                        for name, calls in (row.get("calls") or {}).items()
                        if calls
                    }
                )
            )
            or "no tool"
        )

    frequency, shown = Counter(ways(row) for row in rows), set()
    for way, times in frequency.most_common():
        row = next(
            (
                row
                for row in rows
                if ways(row) == way and all(row is not other for _, other in chosen)
            ),
            None,
        )
        if row is not None and way not in shown:
            shown.add(way)
            chosen.append((f"{way} ({100 * times / len(rows):.0f}% of the trajectories)", row))
    return chosen[:count]


def _trajectory(title: str, row: dict[str, Any]) -> str:
    scale, unit = money_unit([row.get("cost_usd")])
    sampled = sum(row.get("sampled") or [])
    facts = [
        f"reward {row.get('reward') or 0:.3f}",
        "right"
        if row.get("outcome") == 1
        else "wrong"
        if not row.get("outcome")
        else f"outcome {row['outcome']:.2f}",
        f"{number(scale * (row.get('cost_usd') or 0))} {unit}",
        f"{row.get('latency_s') or 0:.2f} s",
        f"{sampled} tokens sampled, {len(row.get('ids') or []) - sampled} given",
        str(row.get("status", "")).replace("_", " "),
    ]
    tools = "".join(
        f"<li><b>{_text(tool['name'])}</b> ({_text(tool['kind'])}): {_text(tool['description'])}</li>"
        for tool in row.get("tools") or []
    )
    kinds = {tool["name"]: tool["kind"] for tool in row.get("tools") or []}
    parts, turns = [], iter(row.get("turns") or [])
    for piece in row.get("text") or []:
        if piece["role"] == "assistant":
            parts.append(
                f'<pre class="sampled">{_marked(piece["text"])}</pre>{_paid(next(turns, {}), kinds)}'
            )
        else:
            parts.append(f'<pre class="given">{_text(piece["text"])}</pre>')
    return (
        f'<article><h3>{_text(title[:1].upper() + title[1:])}</h3><p class="note">{_text("; ".join(facts))}; {_text(row.get("task_id"))}</p>'
        f'<pre class="given"><b>Question:</b> {_text(row.get("question"))}\n<b>Preference:</b> {_text(row.get("preference_text") or "none stated")}</pre>'
        f"<details><summary>{len(row.get('tools') or [])} tools offered</summary><ul>{tools}</ul></details>{''.join(parts)}"
        f'<p class="note"><b>Answer:</b> {_text(row.get("answer") or "none")}</p></article>'
    )


def _marked(text: str) -> str:
    """A sampled turn with its reasoning and its calls set off; one that was cut inside either is marked to its end."""
    marked = ""
    for piece in re.split(
        r"(<think>.*?(?:</think>|\Z)|<tool_call>.*?(?:</tool_call>|\Z))", text, flags=re.DOTALL
    ):
        style = (
            "reasoning"
            if piece.startswith("<think>")
            else "call"
            if piece.startswith("<tool_call>")
            else ""
        )
        marked += f'<span class="{style}">{_text(piece)}</span>' if style else _text(piece)
    return marked


def _paid(turn: dict[str, Any], kinds: dict[str, str]) -> str:
    """One line for each call of a turn: which kind of tool it went to, what it cost and how long it took."""
    lines = []
    for call, result in zip(turn.get("calls") or [], turn.get("results") or []):
        scale, unit = money_unit([result.get("cost_usd")])
        failed = ", failed" if result.get("error") else ""
        cost, latency = (
            number(scale * (result.get("cost_usd") or 0.0)),
            result.get("latency_s") or 0.0,
        )
        name = call.get("name")
        lines.append(
            f'<p class="paid">called <b>{_text(name)}</b> ({_text(kinds.get(name, "not offered"))}): {cost} {unit}, {latency:.2f} s{failed}</p>'
        )
    return "".join(lines)


def _text(value: Any) -> str:
    """As text for the page: escaped, and half a surrogate pair (which JSON may hold and UTF-8 may not) replaced."""
    return html.escape(str("" if value is None else value).encode("utf-8", "replace").decode())


if __name__ == "__main__":
    try:
        write_report(sys.argv[1] if len(sys.argv) == 2 else "")
    except UserError as error:
        sys.exit(f"report: {error}")
