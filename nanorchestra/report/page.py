"""report.html of a run: how well it does, its curves, and what it does.

The page is one file that can be written at any moment of a run. It is a template of HTML with
figures in SVG: what a model or a tool wrote is text in it, and it has no script and loads nothing.
`python -m nanorchestra.report.page runs/NAME` writes it.
"""

import sys
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from nanorchestra.errors import UserError
from nanorchestra.files import read_text, read_toml, write_whole
from nanorchestra.report import plots
from nanorchestra.report.tables import (
    answers_table,
    calls_table,
    changes_table,
    held_out_scores,
    scores_table,
)
from nanorchestra.report.trace import Attempt, Pair, instructive
from nanorchestra.schemas import Json
from nanorchestra.training.run import RunFolder, training_command
from nanorchestra.units import is_graded

TEMPLATES = Environment(
    autoescape=True,
    loader=FileSystemLoader(Path(__file__).parent),
    lstrip_blocks=True,
    trim_blocks=True,
    undefined=StrictUndefined,
)
TAIL_BYTES = 16 << 20  # of trajectories.jsonl, so that a long run's report is not slower
SHOWN_GROUPS = 20
SPLITS = {"by_preference": "the user's preference", "by_kind": "kind of question"}


def write_report(path: str | Path, live: bool = False, phase: str = "") -> None:
    """Writes report.html of a run from what the directory holds so far.

    live: the run goes on, so the page loads itself again. phase: in which it has stopped, if that
    is known. UserError if `path` holds no run.
    """
    run = RunFolder.open(path)
    rows, summary = list(run.rows("metrics")), run.summary()
    warm_start = [row for row in rows if row["phase"] == "warm_start"]
    grpo = [row for row in rows if row["phase"] == "grpo"]
    policies, splits, calls = {}, {}, []
    if summary:
        policies = held_out_scores(summary)
        before, after = (summary["held_out"][side] for side in ("before", "after"))
        for split, title in SPLITS.items():
            splits[title] = changes_table(before[split], after[split])
        calls = calls_table(after.get("calls_by_preference", {}), "")

    outcome = plots.GRADED if any(map(is_graded, grpo)) else plots.RIGHT
    parts = {
        "What it learns": plots.curves(grpo, [outcome, *plots.LEARNING]),
        "Which tools it calls, and who takes dollars and seconds": plots.curves(grpo, plots.TOOLS),
        "Health of the training": plots.curves(grpo, plots.HEALTH),
        "Warm start": plots.curves(warm_start, plots.WARM_START),
    }
    groups, pairs = _attempts(run)
    world = read_toml(run.path / "config.toml").get("task", {}).get("world", "desk")
    worlds = [part.partition("=")[0].strip() for part in world.split(",")]  # a mixture has several
    write_page(
        run,
        "run.html",
        live=live,
        phase=phase,
        resume=training_command("--resume", str(path)),
        at_desk="desk" in worlds,
        summary=summary,
        seconds=summary.get("seconds") or sum(row["seconds"] for row in rows),
        warm_start_steps=len(warm_start),
        grpo_steps=len(grpo),
        held_out=scores_table(policies),
        splits=splits,
        answers=answers_table(policies),
        calls=calls,
        frontier_image=plots.frontier(policies),
        curves={title: images for title, images in parts.items() if images},
        groups=groups,
        instructive=instructive(pairs),
    )


def write_page(run: RunFolder, template: str, **values: object) -> None:
    """Writes report.html in the directory of a run, with its config.toml."""
    config = read_text(run.path / "config.toml")
    page = TEMPLATES.get_template(template).render(name=run.path.name, config=config, **values)
    write_whole(run.path / "report.html", page)


def _attempts(run: RunFolder) -> tuple[list[Json], list[Pair]]:
    """Returns the last groups of GRPO, newest first, and held-out tasks after and before it."""
    groups: dict[tuple[int, str], list[Attempt]] = {}
    after = {}
    for row in run.rows("trajectories", TAIL_BYTES):
        if row["phase"] in ("grpo", "skipped"):
            groups.setdefault((row["step"], row["task_id"]), []).append(Attempt.of(row))
        elif row["phase"] == "after" and row["status"] != "infrastructure":
            after[row["task_id"]] = Attempt.of(row)
    shown = []
    for (step, _), attempts in [*groups.items()][: -SHOWN_GROUPS - 1 : -1]:
        rewards = _range([attempt.reward for attempt in attempts])
        shown.append({"step": step, "rewards": rewards, "attempts": attempts})

    pairs = []
    if after:  # the log begins with the tasks before GRPO
        before = takewhile(lambda row: row["phase"] == "before", run.rows("trajectories"))
        for row in before:
            if row["task_id"] in after and row["status"] != "infrastructure":
                pairs.append((after[row["task_id"]], Attempt.of(row)))
    return shown, pairs


def _range(values: Iterable[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    try:
        write_report(sys.argv[1])
    except UserError as error:
        sys.exit(f"report: {error}")
