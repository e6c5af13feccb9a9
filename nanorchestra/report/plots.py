"""The figures of a run, drawn by matplotlib from plain rows.

A panel is a function that draws on one Axes; `figure` lays panels out and returns the image. Money
is in m$, thousandths of a dollar.
"""

import fnmatch
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorchestra.report.run import TITLES, label, scalars
from nanorchestra.schemas import Json

STYLE = Path(__file__).with_name("report.mplstyle")
BEFORE, AFTER = "C6", "C0"  # of the style's colours
OTHERS = (1, 2, 3, 4, 5, 7, 8, 9, 10, 11)  # colours of all policies but the first two
MARKERS = "s^vD"  # of these policies in turn
COLOURS = 12  # of the style
DASHES = ("-", ":", "-.")  # of lines, when the colours are all used
Rows = list[Json]
Panel = Callable[[Axes], None]


def figure(panels: Sequence[Panel], kind: str, width: float = 3.7, height: float = 2.6) -> bytes:
    """Return an image of `kind` "svg" or "png" (150 dots an inch), three panels a row.

    Width and height of a panel are in inches. The same panels give the same bytes.
    """
    with style.context(STYLE):
        rows, columns = math.ceil(len(panels) / 3), min(len(panels), 3)
        drawn = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
        for axis, panel in zip(axes, panels, strict=False):
            panel(axis)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        drawn.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def curves(rows: Rows, name: str) -> list[Panel]:
    """Return the panels of that name in report.json: values by step, and strong their mean.

    A panel of all the keys of one name is left out where rows have none, such as a bill.
    """
    values = [(row["step"], scalars(row)) for row in rows]
    names = sorted({name for _, numbers in values for name in numbers})
    panels = []
    for title, patterns, factor in TITLES["panels"][name]["panels"]:
        keys = [key for pattern in patterns.split() for key in fnmatch.filter(names, pattern)]
        if keys or not rows or not patterns.endswith("/*"):
            panels.append(_curve(values, title, keys, factor))
    return panels


def _curve(values, title, keys, factor):
    """Return a panel of `values`, pairs of a step and its scalars, at some keys."""
    window = min(25, max(1, len(values) // 10))  # of the strong lines

    def draw(axis):
        axis.set_title(title)
        axis.set_xlabel("step")
        if not keys:
            return _empty(axis)
        for place, key in enumerate(keys):
            points = [(step, factor * numbers[key]) for step, numbers in values if key in numbers]
            steps, heights = zip(*points, strict=True)
            axis.plot(steps, heights, color=f"C{place % COLOURS}", alpha=0.28, linewidth=0.9)
            named = key.rpartition("/")[2].replace("_", " ")
            mean = [fmean(heights[max(0, n - window) : n]) for n in range(1, len(heights) + 1)]
            line = {"label": named, "linewidth": 1.8, "marker": ".", "markersize": 2}
            line["linestyle"] = DASHES[place // COLOURS % len(DASHES)]
            axis.plot(steps, mean, color=f"C{place % COLOURS}", **line)
        if len(keys) > 1:
            axis.margins(y=0.04 * (2 + len(keys)))  # room for the legend
            axis.legend(loc="upper left", ncols=3, columnspacing=1, handlelength=1)
        axis.xaxis.get_major_locator().set_params(integer=True)

    return draw


def frontier(policies: dict[str, Json], world: str = "", turns: bool = False) -> Panel:
    """Return the panel of right answers against cost, or allowed turns, with 95% intervals.

    Scores by policy; the first two are drawn larger, in blue and grey.
    """
    ours = [*policies][:2]

    def draw(axis):
        axis.set_title(f"{world} right answers on held-out tasks, %".strip())
        axis.set_xlabel("turns allowed" if turns else "cost per task, m$ (thousandths of a dollar)")
        known = [item for item in policies.items() if turns or item[1]["cost_usd"] is not None]
        if not known:
            return _empty(axis)
        best = []
        ranked = sorted(known, key=lambda item: -item[1]["accuracy"])  # as in the picture
        for name, scores in ranked:
            y, up = _point(scores, "accuracy", 100)
            if turns:
                x, wide = float(name.rpartition(":turns=")[2].partition(":")[0]), None
            else:
                x, wide = _point(scores, "cost_usd", 1000)
            best.append((x, y))
            place = [*policies].index(name)  # as in the page
            style = {"color": f"C{OTHERS[(place - 2) % len(OTHERS)]}", "elinewidth": 0.6}
            if name in ours:
                style = {"color": (AFTER, BEFORE)[place], "markersize": 9}
            marker = "o" if name in ours else MARKERS[place % len(MARKERS)]
            axis.errorbar(x, y, up, wide, marker, label=label(name), **style)
        steps = [p for p in sorted(best) if all(q[1] < p[1] for q in best if q < p)]
        dominant = {"label": "nothing to its left is right as often", "zorder": 0}
        axis.plot(*zip(*steps, strict=True), color=BEFORE, linewidth=0.8, **dominant)
        axis.set_xlim(left=0)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    return draw


def _point(scores, key, factor):
    """A score, and how far its interval reaches below and above it.

    Rounding may put the score of equal attempts outside of its interval; a reach is at least 0.
    """
    value = scores[key]
    low, high = scores.get("intervals", {}).get(key, (value, value))
    below, above = max(0.0, value - low), max(0.0, high - value)
    return factor * value, [[factor * below], [factor * above]]


def _empty(axis):
    axis.text(0.5, 0.5, "no data yet", transform=axis.transAxes, ha="center", color=BEFORE)
