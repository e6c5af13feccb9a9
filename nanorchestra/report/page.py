"""report.html and curves.png of a run: what was trained, how well it does, and what it does.

The page is one file and works at any moment of a run. Its scripts draw it: tables.js,
frontier.js, run.js by the library uPlot, and browser.js. Everything that a model or a tool wrote
is set as text, and the page's policy lets it load nothing.
`python -m nanorchestra.report.page runs/NAME` writes it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from html import escape
from itertools import groupby, takewhile
from pathlib import Path

from tokenizers import Tokenizer

from nanorchestra.errors import UserError
from nanorchestra.files import read_toml, write_whole
from nanorchestra.records import Preference
from nanorchestra.report import plots
from nanorchestra.report.run import TITLES, Run, held_out_scores
from nanorchestra.report.trace import tree
from nanorchestra.schemas import Json

HERE = Path(__file__).parent
BODY = (HERE / "run.html").read_text(encoding="utf-8")
UPLOT = HERE / "uplot"  # a library for curves, as its authors ship it
RUN_SCRIPTS = ("tables.js", "frontier.js", "uplot/uPlot.iife.min.js", "run.js", "browser.js")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
TAIL_BYTES = 64 << 20  # of trajectories.jsonl, so that a long run's report is not slower
SHOWN_BYTES = 8 << 20  # of GRPO groups in the page, and as many of held-out tasks
SHOWN_STEPS = 2000
COLUMNS = ("reward", "outcome", "cost_usd", "latency_s", "advantage", "status", "answer", "calls")


def write_report(run_path: str | Path) -> None:
    """Write report.html and curves.png of a run from what it holds so far.

    UserError if `run_path` holds no run.
    """
    run = Run.open(run_path)
    rows, summary = list(run.rows("metrics")), run.summary()
    warm, grpo = (
        [row for row in rows if row["phase"] == phase] for phase in ("warm_start", "grpo")
    )
    held_out = held_out_scores(summary)
    seconds = summary.get("seconds") or sum(row.get("seconds") or 0.0 for row in rows)
    parameters = summary.get("parameters")
    facts = {
        "parameters": f"{parameters / 1e6:,.2f} million" if parameters else "",
        "warm-start steps": str(len(warm) or ""),
        "GRPO steps": str(len(grpo)),
        "held-out tasks": str(summary.get("held_out", {}).get("tasks") or ""),
        "time": f"{seconds:,.0f} s ({seconds / 60:.1f} min)",
    }
    every = -(-len(rows) // SHOWN_STEPS) or 1
    data = {
        "run": {
            "facts": {name: fact for name, fact in facts.items() if fact},
            "held_out": held_out,
            "live": not summary,
        },
        "metrics": _rounded(rows[::-1][::every][::-1]),
        "browser": browser(_recorded(run), _pieces(run)),
    }
    write_whole(run.path / "report.html", page(run, BODY, data, RUN_SCRIPTS))
    panels = plots.curves(grpo, "learning")[:4] + plots.curves(grpo, "tools")[:1]
    frontier = [plots.frontier(dict(sorted(held_out.items())))]  # after, before, ...
    write_whole(run.path / "curves.png", plots.figure([*panels, *frontier], "png", height=2.9))


def page(run: Run, body: str, data: Json, names: Iterable[str]) -> str:
    """Return the page of a body that the scripts of these names fill with `data`; and config.toml.

    The library stands in the page whole, with its licence.
    """
    config = escape((run.path / "config.toml").read_text(encoding="utf-8"))
    name = escape(run.path.name)
    styles, licence = [(HERE / "page.css").read_text(encoding="utf-8")], ""
    if any(script.startswith(UPLOT.name) for script in names):
        styles.insert(0, (UPLOT / "uPlot.min.css").read_text(encoding="utf-8"))
        licence = f"<!-- uPlot:\n{(UPLOT / 'LICENSE').read_text(encoding='utf-8')}-->\n"
    text = json.dumps({"titles": TITLES, **data}, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [(HERE / script).read_text(encoding="utf-8") for script in names]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name} - nanorchestra</title><style>{"".join(styles)}</style></head>
<body><h1>{name}</h1><noscript>The tables and figures need JavaScript.</noscript>
{body}
<details><summary>config.toml</summary><pre>{config}</pre></details>
{licence}<script type="application/json" id="data">{text}</script>
{"".join(f"<script>{script}</script>" for script in scripts)}</body></html>
"""


def browser(rows: Iterable[Json], piece: Callable[[int], str]) -> Json:
    """Return what the page shows id by id of rows of trajectories.jsonl; piece(id) is an id's text.

    A GRPO group is the attempts at a task in a step; the attempts at a held-out task, before and
    after the training, are a group too. Both kinds are evenly spaced to SHOWN_BYTES. `count` is
    how many groups there were.
    """
    grpo: dict[tuple[int, str], list[Json]] = {}
    held_out: dict[str, dict[str, Json]] = {}
    for row in rows:
        if row["phase"] in ("before", "after"):
            held_out.setdefault(row["task_id"], {})[row["phase"]] = row
        else:
            grpo.setdefault((row["step"], row["task_id"]), []).append(row)
    pairs = [
        [sides[name] for name in ("before", "after") if name in sides]
        for sides in held_out.values()
    ]
    groups = [_group(group) for kind in (list(grpo.values()), pairs) for group in _spaced(kind)]
    used = {
        token
        for group in groups
        for ids in [group["prompt"], *(a["ids"] for a in group["attempts"])]
        for token in ids
    }
    count = len(grpo) + len(pairs)
    return {"count": count, "groups": groups, "pieces": {id: piece(id) for id in sorted(used)}}


def _spaced(groups):
    """Return every n-th group and the last one, so that they have at most SHOWN_BYTES or so."""
    every = -(-sum(_size(row) for group in groups for row in group) // SHOWN_BYTES)
    return groups[::-1][:: max(1, every)][::-1]


def _size(row):
    """Return about how many bytes of the page an attempt takes."""
    return 7 * len(row["ids"]) + 18 * sum(row["sampled"]) + 300 * (1 + len(row["turns"]))


def _group(rows):
    """Return what the page shows of attempts at one task; ids that all begin with stand once."""
    first, task = rows[0], rows[0]["task"]
    shared = len(os.path.commonprefix([row["ids"][: row["prompt_length"]] for row in rows]))
    return {
        "phase": "held out" if first["phase"] in ("before", "after") else first["phase"],
        "step": first["step"],
        "task_id": first["task_id"],
        "question": task["question"],
        "preference": task["preference"]["text"],
        "wish": Preference(**task["preference"]).name,
        "prompt": first["ids"][:shared],
        "attempts": [_attempt(row, shared) for row in rows],
    }


def _attempt(row, start):
    """Return what the page shows of an attempt, from its id `start` on.

    `runs` are the lengths of its runs of given, sampled, given, ... ids. `logprobs`, `gaps` (the
    trainer's minus the sampler's) and `versions` have an entry for each sampled id; those of
    `versions` are [version, count] runs, and gaps are left out where all are unknown.
    """
    ids, sampled = row["ids"], row["sampled"]
    runs = [len([*same]) for _, same in groupby([False, *sampled[start:]])]
    runs[0] -= 1
    places = [i for i, drawn in enumerate(sampled) if drawn]
    logprobs = [row["logprobs"][i] for i in places]
    trained = row["trainer_logprobs"]  # of the sampled ids, or of none
    gaps = [
        None if None in pair else round(pair[0] - pair[1], 7)
        for pair in zip(trained, logprobs, strict=False)
    ]
    versions = groupby(row["weight_versions"][i] for i in places)
    return _rounded({name: row[name] for name in COLUMNS}) | {
        "side": row["phase"] if row["phase"] in ("before", "after") else "",
        "failures": _failures(row),
        "tree": tree(row),
        "ids": ids[start:],
        "runs": runs,
        "logprobs": [None if value is None else round(value, 4) for value in logprobs],
        "versions": [[version, len([*same])] for version, same in versions],
        "gaps": gaps if any(gap is not None for gap in gaps) else [],
    }


def _failures(row):
    """Return the names of what went wrong in an attempt."""
    results = [result for turn in row["turns"] for result in turn["results"]]
    found = {
        row["status"].replace("_", " "): row["status"] != "answered",
        "wrong answer": row["status"] == "answered" and row["outcome"] < 1,
        "malformed call": not row["well_formed"],
        "a call failed": any(result["error"] for result in results),
        "a call was refused": any(result["refused"] for result in results),
    }
    return [name for name, is_so in found.items() if is_so]


def _recorded(run) -> Iterator[Json]:
    """Yield rows of trajectories.jsonl: of held-out tasks before GRPO, and of the last bytes."""
    size = 0
    for row in takewhile(lambda row: row["phase"] == "before", run.rows("trajectories")):
        size += _size(row)
        if size > SHOWN_BYTES:
            break
        yield row
    for row in run.rows("trajectories", TAIL_BYTES):
        if row["phase"] != "before":
            yield row


def _rounded(value):
    """Return JSON with its numbers at five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


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
