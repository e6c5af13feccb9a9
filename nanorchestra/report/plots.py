"""The figures of a run, drawn by matplotlib from plain rows.

A panel is a function that draws on one Axes; `figure` lays panels out and returns the image. Money
is in m$, thousandths of a dollar.
"""

from __future__ import annotations

import fnmatch
import io
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorchestra.report.run import entries, scalars

COLOURS = ("#1f63c4", "#e39b2d", "#2f9e6e", "#b5499b", "#6fb7e0", "#c8502b", "#8a919c", "#7a5538")
BEFORE, AFTER = "#8a919c", "#1f63c4"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e8ebef",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "nanorchestra",  # the same figure gives the same bytes
}
# A table: title with unit, patterns for the keys of a row (as run.scalars names them), factor
LEARNING = (
    ("Reward and its parts", "reward reward_parts/*", 1),
    ("Right answers, %", "accuracy", 100),
    ("Cost per task, m$", "cost_usd", 1000),
    ("Latency per task, s", "latency_s", 1),
    ("Preference score", "preference", 1),
    ("Used a tool to avoid, %", "avoided_rate", 100),
)
TOOLS = ("Calls per trajectory, by kind of tool", "calls/*", 1)
WARM_START = ("Warm start: loss, nats per token", "loss", 1)
HEALTH = (
    ("GRPO loss", "loss", 1),
    ("KL to the reference, nats per token", "kl", 1),
    ("Entropy, nats per token", "entropy", 1),
    ("Log-prob gap to the engine, nats", "logprob_gap logprob_gap_max", 1),
    ("Gradient norm", "grad_norm", 1),
    ("Ratios clipped, %", "clip_fraction", 100),
    ("Std of rewards within a group", "group_std", 1),
    ("Left out of training, %", "filtered/*", 100),
    ("Well-formed trajectories, %", "well_formed", 100),
    ("Turns per trajectory", "turns", 1),
    ("Seconds per step", "phase_seconds/*", 1),
    ("Tokens per second", "tokens_per_s", 1),
    ("Model FLOPs utilisation, %", "mfu", 100),
    ("Peak memory so far, MB", "memory_mb", 1),
)
Table = tuple[str, str, float]
Rows = list[dict[str, Any]]
Panel = Callable[[Axes], None]


def figure(panels: Sequence[Panel], kind: str, width: float = 3.7, height: float = 2.6) -> bytes:
    """Return an image of `kind` "svg" or "png" (150 dots an inch), three panels a row.

    Width and height of a panel are in inches. The same panels give the same bytes.
    """
    with matplotlib.rc_context(STYLE):
        rows, columns = math.ceil(len(panels) / 3), min(len(panels), 3)
        drawn = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = drawn.subplots(rows, columns, squeeze=False).flat
        for axis, panel in zip(axes, panels, strict=True):
            panel(axis)
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        drawn.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def curves(rows: Rows, *tables: Table) -> list[Panel]:
    """Return one panel for each table: its values by step, and strong their trailing mean."""
    return [_curve(rows, *table) for table in tables]


def _curve(rows: Rows, title: str, patterns: str, factor: float) -> Panel:
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
        for key, colour in zip(keys, COLOURS * 9, strict=False):
            points = [(step, factor * found[key]) for step, found in values if key in found]
            steps, heights = zip(*points, strict=True)
            axis.plot(steps, heights, color=colour, alpha=0.28, linewidth=0.9)
            label = key.rpartition("/")[2].replace("_", " ")
            marker = "o" if len(points) == 1 else None
            mean = _trailing_mean(heights, window)
            axis.plot(steps, mean, color=colour, label=label, linewidth=1.8, marker=marker)
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
    """Return the panel of right answers against cost on held-out tasks, with one standard error."""
    found = entries(summary)

    def draw(axis: Axes) -> None:
        axis.set_title("Right answers, %, against cost")
        axis.set_xlabel("cost per held-out task, m$")
        if not found:
            return _empty(axis)
        tasks = summary["held_out"].get("tasks") or math.inf
        for (key, label, scores), colour in zip(found, COLOURS[1:] * 9, strict=False):
            accuracy = scores["accuracy"]
            policy = {"before": BEFORE, "after": AFTER}.get(key)
            axis.errorbar(
                1000 * scores["cost_usd"],
                100 * accuracy,
                yerr=100 * math.sqrt(accuracy * (1 - accuracy) / tasks),
                color=policy or colour,
                marker="o" if policy else "s",
                markersize=9 if policy else 6,
                linestyle="none",
                label=label,
            )
        axis.set_xlim(left=0)
        axis.set_ylim(0, 100)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    return draw


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and the up to window - 1 before it."""
    recent = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return list(map(fmean, recent))


def _empty(axis: Axes) -> None:
    axis.text(0.5, 0.5, "no data yet", transform=axis.transAxes, ha="center", color=BEFORE)
