"""report.html and PNG plots of an evaluation, from its summary.json and its attempts."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from nanorchestra.files import read_json_lines, write_whole
from nanorchestra.report import plots
from nanorchestra.report.page import images, page
from nanorchestra.report.run import Run
from nanorchestra.report.trace import tree
from nanorchestra.schemas import Json

SHOWN = 5  # tasks that the first policy wins, and as many that it loses
SIZE = {"width": 7.5, "height": 4.2}  # inches of a plot


def attempts(path: Path) -> Iterator[Json]:
    """Yields the rows of an evaluation's attempts. UserError if they cannot be read."""
    for file in sorted(path.glob("[0-9]*.jsonl")):
        yield from (row for _, row in read_json_lines(file))


def write_evaluation(path: Path) -> None:
    """Write the page and the plots of an evaluation. UserError if it cannot be read."""
    run, panels = Run.open(path), defaultdict(list)
    summary = run.summary()
    for world, found in summary["worlds"].items():
        panels["frontier"].append(plots.frontier(found, f"{world}:"))
        if swept := {name: scores for name, scores in found.items() if ":turns=" in name}:
            panels["turns"].append(plots.frontier(swept, f"{world}:", turns=True))
    parts = ['<div id="summary"></div>']
    for name, drawn in panels.items():
        write_whole(path / f"{name}.png", plots.figure(drawn, "png", **SIZE))
        parts.append(images(drawn, **SIZE))
    parts.append('<div id="worlds"></div><div id="pairs"></div>')
    data = {"summary": summary, "pairs": _instructive(path, summary)}
    write_whole(path / "report.html", page(run, "\n".join(parts), data))


def _instructive(path, summary):
    """The tasks where the rewards of the first two policies differ most, with both attempts."""
    first = [*next(iter(summary["worlds"].values()), {})][:2]
    found = defaultdict(list)
    for row in takewhile(lambda row: row["policy"] in first, attempts(path)):
        if not row["trial"] and row["status"] != "infrastructure":
            task, shown = row["task"], {"policy": row["policy"], "reward": row["reward"]}
            shown |= {"tree": tree(row), "wish": task["preference"]["text"]}
            found[task["id"]].append(shown)
    pairs = [pair for pair in found.values() if len(pair) == 2]
    pairs.sort(key=lambda pair: pair[1]["reward"] - pair[0]["reward"])
    return pairs[:SHOWN] + pairs[SHOWN:][-SHOWN:][::-1]
