"""The figures of a run, drawn by matplotlib from plain rows.

A panel is a function that draws on one Axes; `figure` lays panels out and returns the image. Money
is in m$, thousandths of a dollar.
"""

from __future__ import annotations

import fnmatch
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorchestra.report.run import TITLES, entries, scalars

STYLE = Path(__file__).with_name("report.mplstyle")
BEFORE, AFTER = "C6", "C0"  # of the style's colours
MARKERS = "s^vD"  # of routers, when the colours are all used
Rows = list[dict[str, Any]]
Panel = Callable[[Axes], None]


def figure(panels: Sequence[Panel], kind: str, width: float = 3.7, height: float = 2.6) -> bytes:
    """Return an image of `kind` "svg" or "png" (150 dots an inch), three panels a row.

    Width and height of a panel are in inches. The same panels give the same bytes.
    """
    with style.context(STYLE):
        rows, columns = math.ceil(len(panels) / 3), min(len(panels), 3)
        drawn = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = drawn.subplots(rows, columns, squeeze=False).flat
        for axis, panel in zip(axes, panels, strict=True):
            panel(axis)
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        drawn.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def curves(rows: Rows, name: str) -> list[Panel]:
    """Return the panels of that name in report.json: values by step, and strong their mean."""
    return [_curve(rows, *panel) for panel in TITLES["panels"][name]]


def _curve(rows: Rows, title: str, patterns: str, factor: float) -> Panel:
    """Return a panel: patterns for the keys of a row (as run.scalars names them), a factor."""
    values = [(row["step"], scalars(row)) for row in rows]
    names = sorted({name for _, found in values for name in found})
    keys = [key for pattern in patterns.split() for key in fnmatch.filter(names, pattern)]
    window = min(25, max(1, len(rows) // 10))  # of the strong lines

    def draw(axis: Axes) -> None:
        axis.set_title(title)
        axis.set_xlabel("step")
        if not keys:
            return _empty(axis)
        drawn = [0.0]
        for place, key in enumerate(keys):
            points = [(step, factor * found[key]) for step, found in values if key in found]
            steps, heights = zip(*points, strict=True)
            axis.plot(steps, heights, color=f"C{place}", alpha=0.28, linewidth=0.9)
            label = key.rpartition("/")[2].replace("_", " ")
            mean = [fmean(heights[max(0, n - window) : n]) for n in range(1, len(heights) + 1)]
            marker = "o" if len(points) == 1 else None
            line = {"label": label, "linewidth": 1.8, "marker": marker}
            axis.plot(steps, mean, color=f"C{place}", **line)
            drawn += heights
        room = 0.05
        if len(keys) > 1:
            room += 0.11 * math.ceil(len(keys) / 3)  # above the lines, for the legend
            axis.legend(loc="upper left", ncols=3, columnspacing=1, handlelength=1)
        if max(drawn) > min(drawn):
            axis.set_ylim(min(drawn), max(drawn) + room * (max(drawn) - min(drawn)))
        axis.xaxis.get_major_locator().set_params(integer=True)

    return draw


def frontier(summary: dict[str, Any]) -> Panel:
    """Return the panel of right answers against cost on held-out tasks, with 95% intervals.

    A line joins those that nothing cheaper equals.
    """
    found = entries(summary)

    def draw(axis: Axes) -> None:
        axis.set_title("Right answers, %, against cost")
        axis.set_xlabel("cost per held-out task, m$")
        if not found:
            return _empty(axis)
        best = []
        for place, (key, label, scores) in enumerate(found, 1):
            usd, right = 1000 * scores["cost_usd"], 100 * scores["accuracy"]
            ends = scores.get("intervals", {}).get("accuracy", [scores["accuracy"]] * 2)
            policy = {"before": BEFORE, "after": AFTER}.get(key)
            axis.errorbar(
                usd,
                right,
                yerr=[[abs(right - 100 * end)] for end in ends],
                color=policy or f"C{place}",
                marker="o" if policy else MARKERS[place // 8 % len(MARKERS)],
                markersize=9 if policy else 6,
                linestyle="none",
                label=label,
            )
            best.append((usd, right))
        steps = [p for p in sorted(best) if all(q[1] < p[1] for q in best if q < p)]
        axis.plot(*zip(*steps, strict=True), color=BEFORE, linewidth=0.8, zorder=0)
        axis.set_xlim(left=0)
        axis.set_ylim(0, 100)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    return draw


def compared(world: str, found: dict[str, dict[str, Any]]) -> dict[str, Panel]:
    """Return the panels of an evaluation in one world, by name; scores by policy."""
    swept = {name: scores for name, scores in found.items() if ":turns=" in name}
    calls = {name: scores["calls"] for name, scores in found.items()}
    wishes = {
        name: {wish: row["reward"] for wish, row in scores["by_preference"].items()}
        for name, scores in found.items()
    }
    sets = {"frontier": found} | ({"turns": swept} if swept else {})
    panels = {name: frontier({"held_out": {"routers": some}}) for name, some in sets.items()}
    panels["calls"] = partial(_heat, f"{world}: calls per task, by what is behind the alias", calls)
    return panels | {"preferences": partial(_heat, f"{world}: reward by preference", wishes)}


def _heat(title, rows, axis):
    """Numbers as colours, a row of names each."""
    names = sorted({name for row in rows.values() for name in row}) or ["none"]
    axis.set_title(title)
    axis.grid(visible=False)
    values = [[row.get(name, 0.0) for name in names] for row in rows.values()]
    axis.imshow(values, cmap="Blues", vmin=0, vmax=1.5, aspect="auto")
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.set_yticks(range(len(rows)), [*rows])
    for y, x in product(range(len(rows)), range(len(names))):
        axis.text(x, y, f"{values[y][x]:.2f}", fontsize=7, ha="center", va="center")


def _empty(axis: Axes) -> None:
    axis.text(0.5, 0.5, "no data yet", transform=axis.transAxes, ha="center", color=BEFORE)
