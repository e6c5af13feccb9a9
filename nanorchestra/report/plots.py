"""The figures of the pages, drawn by matplotlib as SVG from plain rows.

A figure has no background, its text has the colour of the page around it, and all other colours
read on light and dark pages.
"""

import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nanorchestra.report.tables import measures_of, shortened
from nanorchestra.schemas import Json
from nanorchestra.units import Write, dollars, percent, seconds

COLOURS = (
    *("#3b82d6", "#d9902f", "#35a876", "#c05fa8", "#5fb0dd", "#d9623b"),
    *("#a07850", "#8377e0", "#a3aa1e", "#1f9ea0", "#e0668a"),
)
DASHES = ("-", ":", "-.")  # of lines, when the colours are all used
MARKERS = "os^vD"  # of policies in turn
GREY = "#8a939e"
STYLE = {
    "axes.edgecolor": GREY,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.color": GREY,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # texts stay texts: black ones take the colour of the page
    "svg.hashsalt": "nanorchestra",  # the same figure gives the same bytes
    "text.parse_math": False,  # a name with dollars is no formula
    "xtick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.color": GREY,
    "ytick.labelcolor": "black",
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
WIDTH, HEIGHT = 3.7, 2.4  # inches of a panel of curves
FRONTIER_WIDTH, FRONTIER_HEIGHT = 4.4, 3.0
LEGEND_ROW = 0.16  # inches
RECENT = 25  # steps of which a strong line is the mean, at most
POINTS = 400  # of a line, at most: a panel has fewer pixels
LEGEND_CHARS = 28  # of a policy's name


class Panel(NamedTuple):
    """A chart of metrics by step: its keys in a row, and how its axis writes their values.

    keys: each, after a space, has a number, or numbers by name, which are a line each.
    """

    title: str
    keys: str
    write: Write | None = None  # plain numbers


LEARNING = (
    Panel("Reward that is trained on", "reward"),
    Panel("Cost per task", "cost_usd", dollars),
    Panel("Time per task", "latency_s", seconds),
    Panel("Preference score", "preference"),
    Panel("Avoided tools called", "avoided_rate", percent),
    Panel("Parts of the reward by the price list", "reward_parts"),
)
RIGHT = Panel("Right answers", "accuracy", percent)
GRADED = Panel("Outcome, and the share that is exact", "accuracy exact", percent)
TOOLS = (
    Panel("Calls per trajectory, by kind of tool", "calls"),
    Panel("Cost per task, by payee", "costs_usd", dollars),
    Panel("Time per task, by who takes it", "seconds_by", seconds),
    Panel("Bill of the run at endpoints", "bill_usd", dollars),
)
HEALTH = (
    Panel("GRPO loss", "loss"),
    Panel("KL to the reference, nats per token", "kl"),
    Panel("Entropy, nats per token", "entropy"),
    Panel("KL(sampler || trainer), nats per token", "mismatch_kl"),
    Panel("Probability, trainer / sampler", "mismatch_ratio mismatch_ratio_max"),
    Panel("Gradient norm", "grad_norm"),
    Panel("Ratios clipped", "clip_fraction", percent),
    Panel("Std of rewards within a group", "group_std"),
    Panel("Left out of training", "filtered", percent),
    Panel("Well-formed trajectories", "well_formed", percent),
    Panel("Turns per trajectory", "turns"),
    Panel("Time per step", "phase_seconds", seconds),
    Panel("Tokens per second", "tokens_per_s"),
    Panel("Model FLOPs utilisation", "mfu", percent),
    Panel("Peak memory of the process so far, MB", "memory_mb"),
)
WARM_START = (
    Panel("Loss, nats per token", "loss"),
    Panel("Entropy, nats per token", "entropy"),
    Panel("Gradient norm", "grad_norm"),
    Panel("Time per step", "phase_seconds", seconds),
    Panel("Tokens per second", "tokens_per_s"),
)


def curves(rows: Sequence[Json], panels: Sequence[Panel]) -> list[str]:
    """Returns the SVG of each panel of which the rows of metrics have a number.

    Faint: each step. Strong: the mean of the last tenth of all steps, at most 25.
    """
    images = []
    for panel in panels:
        lines = {}
        for key in panel.keys.split():
            lines |= _lines(rows, key)
        if lines:
            with rc_context(STYLE):
                images.append(_curve(panel, lines))
    return images


def frontier(policies: dict[str, Json]) -> str:
    """Returns the SVG of right answers, or outcomes, against cost.

    Scores by policy, with 95% intervals; the first two are drawn larger, in blue and orange. A
    policy without a price has no place on the axis of cost. "" if none has a place.
    """
    shown = {name: scores for name, scores in policies.items() if scores["cost_usd"] is not None}
    if not shown:
        return ""
    with rc_context(STYLE):
        rows = math.ceil(len(shown) / 2)  # of the legend
        figure = Figure(figsize=(FRONTIER_WIDTH, FRONTIER_HEIGHT + LEGEND_ROW * rows))
        axes = figure.subplots()
        measure = measures_of(shown.values())["accuracy"]
        axes.set_title(f"{measure.title.capitalize()} on held-out tasks")
        _write_axis(axes.yaxis, measure.write)
        axes.set_xlabel("cost per task")
        axes.xaxis.set_major_locator(MaxNLocator(5))  # amounts are long
        _write_axis(axes.xaxis, dollars)
        points = []
        for place, (name, scores) in enumerate(shown.items()):
            x, wide = _point(scores, "cost_usd")
            y, up = _point(scores, "accuracy")
            points.append((x, y))
            axes.errorbar(
                x,
                y,
                up,
                wide,
                color=COLOURS[place % len(COLOURS)],
                elinewidth=0.7,
                fmt=MARKERS[place % len(MARKERS)],
                label=shortened(name, LEGEND_CHARS),
                markersize=8 if place < 2 else 5,
            )
        best = []  # from left to right: nothing to its left is right as often
        for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
            if not best or y > best[-1][1]:
                best.append((x, y))
        axes.plot(*zip(*best, strict=True), "--", color=GREY, linewidth=0.8, zorder=0)
        axes.set_xlim(left=0)
        return _svg(figure, columns=2)


def _lines(rows, key) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values by the name of a line: the key, or the names of the numbers that it has."""
    lines = {}
    for row in rows:
        value = row.get(key)
        numbers = value if isinstance(value, dict) else {key: value}
        for name, number in numbers.items():
            if number is not None:
                steps, values = lines.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(number)
    return dict(sorted(lines.items()))


def _curve(panel, lines) -> str:
    figure = Figure(figsize=(WIDTH, HEIGHT + LEGEND_ROW * (math.ceil(len(lines) / 4) - 1)))
    axes = figure.subplots()
    axes.set_title(panel.title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if panel.write:
        _write_axis(axes.yaxis, panel.write)
    for place, (name, (steps, values)) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        dash = DASHES[place // len(COLOURS) % len(DASHES)]
        chosen = _spread(len(steps))
        steps = np.array(steps)[chosen]
        values = np.array(values, float)
        strong = {"color": colour, "linestyle": dash, "linewidth": 1.6}
        if len(steps) < 10:
            strong["marker"] = "."
        axes.plot(steps, values[chosen], color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(steps, _recent_means(values)[chosen], label=name.replace("_", " "), **strong)
    return _svg(figure, columns=4 if len(lines) > 1 else 0)


def _write_axis(axis, write) -> None:
    """Labels the ticks of an axis by a function of units.py."""
    axis.set_major_formatter(lambda value, _: write(value))


def _recent_means(values) -> np.ndarray:
    """The mean of each value and those before it: of the last tenth of all, at most RECENT."""
    window = min(RECENT, max(1, len(values) // 10))
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _spread(count) -> np.ndarray:
    """At most POINTS places in a list of `count`, evenly spaced from the first to the last."""
    return np.linspace(0, count - 1, min(count, POINTS)).astype(int)


def _point(scores, key):
    """A score, and how far its interval reaches below and above it.

    Rounding may put the score of equal attempts outside of its interval; a reach is at least 0.
    """
    value = scores[key]
    low, high = scores.get("intervals", {}).get(key, (value, value))
    below, above = max(0.0, value - low), max(0.0, high - value)
    return value, [[below], [above]]


def _svg(figure, columns) -> str:
    """The image with a legend of so many columns below it, 0 for none."""
    if columns:
        figure.legend(loc="outside lower left", ncols=columns, columnspacing=1, handlelength=1.2)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without what only a file of its own begins with
