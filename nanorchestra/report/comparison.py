"""report.html and PNG plots of an evaluation, from its summary.json and its attempts."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from nanorchestra.files import read_json_lines, write_whole
from nanorchestra.report import plots
from nanorchestra.report.page import images, page
from nanorchestra.report.run import Run
from nanorchestra.report.trace import tree
from nanorchestra.schemas import Json

SHOWN = 5  # tasks that the first policy wins, and as many that it loses
SIZE = {"width": 7.5, "height": 4.2}  # inches of a plot


def recorded_attempts(path: Path) -> Iterator[Json]:
    """Yields the rows of an evaluation's attempts. UserError if they cannot be read."""
    for file in sorted(path.glob("[0-9]*.jsonl")):
        for _, row in read_json_lines(file):
            yield row


def write_comparison(path: Path) -> None:
    """Writes the page and the plots of an evaluation. UserError if it cannot be read."""
    run = Run.open(path)
    summary = run.summary()
    frontiers, sweeps = [], []  # a panel for each world
    for world, policies in summary["worlds"].items():
        frontiers.append(plots.frontier(policies, f"{world}:"))
        swept = {name: scores for name, scores in policies.items() if ":turns=" in name}
        if swept:
            sweeps.append(plots.frontier(swept, f"{world}:", turns=True))
    parts = ['<div id="summary"></div>']
    for name, panels in (("frontier", frontiers), ("turns", sweeps)):
        if panels:
            write_whole(path / f"{name}.png", plots.figure(panels, "png", **SIZE))
            parts.append(images(panels, **SIZE))
    parts.append('<div id="worlds"></div><div id="pairs"></div>')
    data = {"summary": summary, "pairs": _instructive(path, summary)}
    write_whole(path / "report.html", page(run, "\n".join(parts), data))


def _instructive(path: Path, summary: Json) -> list[list[Json]]:
    """Returns the tasks where the first two policies' rewards differ most, with both attempts.

    First the SHOWN that the first policy wins by most, then those that it loses by most.
    """
    worlds = list(summary["worlds"].values())
    first_two = list(worlds[0])[:2] if worlds else []
    attempts_at = defaultdict(list)
    for row in recorded_attempts(path):
        if row["policy"] not in first_two:
            break  # the rows of a policy lie together, those of the first two at the start
        if row["trial"] == 0 and row["status"] != "infrastructure":
            preference = row["task"]["preference"]["text"]
            shown = {"policy": row["policy"], "reward": row["reward"], "preference": preference}
            attempts_at[row["task"]["id"]].append(shown | {"tree": tree(row)})
    pairs = [pair for pair in attempts_at.values() if len(pair) == 2]
    pairs.sort(key=_lost)
    return pairs[:SHOWN] + pairs[SHOWN:][-SHOWN:][::-1]


def _lost(pair: list[Json]) -> float:
    """Returns by how much the first policy earns less than the second."""
    ours, theirs = pair
    return theirs["reward"] - ours["reward"]
