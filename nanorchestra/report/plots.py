"""The figures of a run, drawn by matplotlib from plain rows: learning curves, tool shares, cost against accuracy, health.

`panels` makes a Figure of functions that draw one panel each, `image` makes its bytes; no global state, no files, no screen.
Amounts of money are in m$ (thousandths of a dollar) or $, whichever reads best, and every axis that measures an amount starts at zero.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from nanorchestra.report.run import ROUTER_NAMES, money_unit, number

BEFORE, AFTER, ROUTER, INK = "#8a919c", "#1f63c4", "#c8641b", "#24292f"
PALETTE = (
    "#1f63c4",
    "#e39b2d",
    "#2f9e6e",
    "#b5499b",
    "#6fb7e0",
    "#c8502b",
    "#8a919c",
    "#b8b032",
    "#5b4fa8",
    "#7a5538",
)
STYLE = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.labelsize": 9, "axes.edgecolor": "#9aa1ab",
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#e8ebef", "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8, "svg.hashsalt": "nanorchestra",
}  # fmt: skip

Rows = list[dict[str, Any]]
Draw = Callable[[Any], None]


def panels(draws: list[Draw], columns: int, width: float = 3.65, height: float = 2.5) -> Figure:
    """One figure with `draws` as its panels, row by row; sizes of a panel in inches. Each draw gets its own Axes.

    The margins are fixed: matplotlib's automatic layout would take longer than everything else in a report.
    """
    left, right, bottom, top = 0.6, 0.15, 0.5, 0.35  # inches around each Axes
    with matplotlib.rc_context(STYLE):
        count = math.ceil(len(draws) / columns)
        across, down = width * columns, height * count
        figure = Figure(figsize=(across, down))
        figure.subplots_adjust(left / across, bottom / down, 1 - right / across, 1 - top / down)
        figure.subplots_adjust(
            wspace=(left + right) / (width - left - right),
            hspace=(bottom + top) / (height - bottom - top),
        )
        for axis, draw in zip(
            figure.subplots(count, columns, squeeze=False).flat,
            draws + [lambda axis: axis.set_axis_off()] * columns,
        ):
            draw(axis)
    return figure


def image(figure: Figure, kind: str) -> bytes:
    """The figure as "svg" or "png" (150 dots an inch). The same figure gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None
        )
    return buffer.getvalue()


def curve(
    rows: Rows,
    title: str,
    keys: dict[str, str],
    scale: float = 1.0,
    top: float | None = None,
    zero: bool = True,
) -> Draw:
    """Values by step, one line for each key ("a.b" looks inside a dict): faint as measured, strong as the mean of the last few steps.

    The axis reaches down to zero unless `zero` is false, and up to `top` if that is given.
    """

    def draw(axis) -> None:
        axis.set_title(title)
        axis.set_xlabel("step")
        window, lowest, drawn = smoothing(rows), 0.0, False
        for (key, label), color in zip(keys.items(), PALETTE):
            points = [
                (row["step"], scale * value)
                for row in rows
                if (value := lookup(row, key)) is not None
            ]
            if not points:
                continue
            steps, values = zip(*points)
            drawn, lowest = True, min(lowest, *values, 0.0)
            if window > 1:
                axis.plot(steps, values, color=color, alpha=0.28, linewidth=0.9)
            marker = "o" if len(points) == 1 else None
            axis.plot(
                steps,
                trailing_mean(values, window),
                color=color,
                linewidth=1.8,
                label=label,
                marker=marker,
            )
        if not drawn:
            return _empty(axis, "no data yet")
        if zero and lowest >= 0:
            axis.set_ylim(0, top)
        if len(keys) > 1:
            axis.legend()
        axis.set_xlim(0, 1.02 * max(row["step"] for row in rows))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.8g}")

    return draw


def learning(rows: Rows) -> list[Draw]:
    """Reward and its parts, accuracy, cost, latency, preference and the use of tools that were to be avoided, of the training trajectories by step."""
    scale, unit = money_unit(lookup(row, "cost_usd") for row in rows)
    return [
        curve(
            rows,
            "Reward and its parts, training tasks",
            {
                "reward": "reward",
                "reward_parts.outcome": "right",
                "reward_parts.cost": "cheap",
                "reward_parts.latency": "fast",
                "reward_parts.tools": "tools",
            },
        ),
        curve(rows, "Right answers, training tasks, %", {"accuracy": "right"}, 100, 100),
        curve(rows, f"Cost per training task, {unit}", {"cost_usd": "cost"}, scale),
        curve(rows, "Latency per training task, s", {"latency_s": "latency"}),
        curve(rows, "Preference score, training tasks", {"preference": "preference"}),
        curve(rows, "Used a tool it was to avoid, %", {"avoided_rate": "avoided"}, 100, 100),
    ]


def evaluation(rows: Rows) -> list[Draw]:
    """The same of the evaluations on held-out tasks."""
    scale, unit = money_unit(lookup(row, "cost_usd") for row in rows)
    return [
        curve(
            rows,
            "Reward and preference score, held-out tasks",
            {"reward": "reward", "preference": "preference"},
        ),
        curve(rows, "Right answers, held-out tasks, %", {"accuracy": "right"}, 100, 100),
        curve(rows, f"Cost per held-out task, {unit}", {"cost_usd": "cost"}, scale),
    ]


def health(warm: Rows, grpo: Rows) -> list[Draw]:
    """What tells a training that learns from one that drifts or breaks, and where its time goes."""

    def names(rows: Rows, table: str) -> dict[str, str]:
        return {
            f"{table}.{name}": name.replace("_", " ")
            for name in sorted({name for row in rows for name in row.get(table) or {}})
        }

    return [
        curve(warm, "Warm start: loss, nats per token", {"loss": "loss"}),
        curve(grpo, "GRPO loss", {"loss": "loss"}),
        curve(grpo, "KL to the reference, nats per token", {"kl": "kl"}),
        curve(grpo, "Entropy, nats per token", {"entropy": "entropy"}),
        curve(
            grpo,
            "Log-prob gap engine - trainer, nats",
            {"logprob_gap": "mean", "logprob_gap_max": "largest"},
        ),
        curve(grpo, "Gradient norm", {"grad_norm": "norm"}),
        curve(grpo, "Probability ratio, mean", {"ratio": "ratio"}, zero=False),
        curve(grpo, "Ratios clipped, %", {"clip_fraction": "clipped"}, 100),
        curve(grpo, "Std of rewards within a group", {"group_std": "std"}),
        curve(grpo, "Left out of training, %", names(grpo, "filtered") or {"filtered": ""}, 100),
        curve(grpo, "Well-formed trajectories, %", {"well_formed": "well formed"}, 100, 100),
        curve(grpo, "Turns per trajectory", {"turns": "turns"}),
        curve(
            warm, "Warm start: seconds per step", names(warm, "phase_seconds") or {"seconds": "all"}
        ),
        curve(grpo, "Seconds per step", names(grpo, "phase_seconds") or {"seconds": "all"}),
        curve(grpo, "Tokens per second, the whole step", {"tokens_per_s": "tokens"}),
        curve(grpo, "Model FLOPs utilisation in training, %", {"mfu": "MFU"}, 100),
        curve(grpo, "Peak memory so far, MB", {"memory_mb": "memory"}),
    ]


def tools(rows: Rows) -> list[Draw]:
    """Which kinds of tool are called: mean calls per trajectory, stacked, and the share of each kind in all calls."""
    names = sorted({name for row in rows for name in row.get("calls") or {}})
    steps = [row["step"] for row in rows if row.get("calls")]
    counts = {
        name: trailing_mean(
            [row["calls"].get(name) or 0.0 for row in rows if row.get("calls")], smoothing(rows)
        )
        for name in names
    }
    names.sort(key=lambda name: -sum(counts[name]))
    totals = [sum(column) or 1.0 for column in zip(*counts.values())]

    def stack(title: str, values: list[list[float]], top: float, legend: bool) -> Draw:
        def draw(axis) -> None:
            axis.set_title(title)
            axis.set_xlabel("step")
            if not steps:
                return _empty(axis, "no data yet")
            colors = [PALETTE[index % len(PALETTE)] for index in range(len(names))]
            # one step has no width, so it is drawn from half a step before to half a step after
            edges, values_at = (
                (steps, values)
                if len(steps) > 1
                else ([steps[0] - 0.5, steps[0] + 0.5], [value * 2 for value in values])
            )
            axis.stackplot(
                edges, *values_at, labels=names, colors=colors, linewidth=0.4, edgecolor="white"
            )
            axis.set_ylim(0, top)
            axis.set_xlim(edges[0], edges[-1])
            if legend:
                axis.legend(loc="upper left", ncols=3)
            axis.xaxis.get_major_locator().set_params(integer=True)

        return draw

    shares = [[100 * value / total for value, total in zip(counts[name], totals)] for name in names]
    room = 1.1 + 0.1 * math.ceil(len(names) / 3)  # above the areas, for the legend
    return [
        stack(
            "Calls per trajectory, by kind of tool",
            [counts[name] for name in names],
            room * max(totals, default=1.0),
            True,
        ),
        stack("Share of all calls, % (same colours)", shares, 100, False),
    ]


def frontier(held_out: dict[str, Any]) -> Draw:
    """Cost per task against accuracy on held-out tasks: before, after and the routers, with one standard error of the accuracy."""
    routers = held_out.get("routers") or {}
    entries = [
        (ROUTER_NAMES.get(name, name), scores, ROUTER, "s") for name, scores in routers.items()
    ]
    entries += [
        (key, held_out[key], color, "o")
        for key, color in (("before", BEFORE), ("after", AFTER))
        if held_out.get(key)
    ]
    scale, unit = money_unit(scores.get("cost_usd") for _, scores, _, _ in entries)

    def draw(axis) -> None:
        axis.set_title("Right answers against cost, held-out tasks")
        if not entries:
            return _empty(axis, "no held-out results yet")
        points = [
            (scale * scores["cost_usd"], 100 * scores["accuracy"]) for _, scores, _, _ in entries
        ]
        right = 1.15 * max(cost for cost, _ in points) or 1.0
        if edge := efficient(points[: len(routers)]):
            costs, answers = zip(*edge, (right, edge[-1][1]))
            axis.step(
                costs,
                answers,
                where="post",
                color=ROUTER,
                alpha=0.5,
                linestyle="--",
                linewidth=1,
                label="best of the fixed routers",
            )
            axis.legend(loc="lower right")
        tasks = held_out.get("tasks") or math.inf
        error = [
            100 * math.sqrt(scores["accuracy"] * (1 - scores["accuracy"]) / tasks)
            for _, scores, _, _ in entries
        ]
        places = _label_places(
            [(cost / right, accuracy / 100) for cost, accuracy in points],
            [label for label, *_ in entries],
        )
        for (label, _, color, marker), (cost, accuracy), half, (x, y, side) in zip(
            entries, points, error, places
        ):
            axis.errorbar(
                cost,
                accuracy,
                yerr=half,
                color=color,
                marker=marker,
                markersize=9 if marker == "o" else 6,
                elinewidth=1,
            )
            axis.text(x, y, label, transform=axis.transAxes, ha=side, va="center", color=color, fontsize=8,
                      fontweight="bold" if marker == "o" else "normal", bbox={"color": "white", "alpha": 0.75, "pad": 0.5})  # fmt: skip
        axis.set_xlim(0, right)
        axis.set_ylim(0, 100)
        axis.set_xlabel(f"cost per task, {unit}")
        axis.set_ylabel("right answers, %")

    return draw


def frontier_by_preference(held_out: dict[str, Any]) -> Draw:
    """The same axes for each preference: hollow before, full after, an arrow between."""
    before, after = (
        (held_out.get(key) or {}).get("by_preference") or {} for key in ("before", "after")
    )
    scale, unit = money_unit(
        scores.get("cost_usd") for split in (before, after) for scores in split.values()
    )

    def draw(axis) -> None:
        axis.set_title("The same by preference: before (hollow), after (full)")
        if not after:
            return _empty(axis, "no held-out results yet")
        for (name, scores), color in zip(after.items(), PALETTE * 9):
            end = (scale * scores["cost_usd"], 100 * scores["accuracy"])
            if name in before:
                start = (scale * before[name]["cost_usd"], 100 * before[name]["accuracy"])
                axis.plot(*start, marker="o", markersize=6, markerfacecolor="white", color=color)
                axis.annotate(
                    "",
                    end,
                    start,
                    arrowprops={
                        "arrowstyle": "->",
                        "color": color,
                        "alpha": 0.6,
                        "shrinkA": 4,
                        "shrinkB": 4,
                    },
                )
            axis.plot(
                *end, marker="o", markersize=8, color=color, linestyle="none", label=f'"{name}"'
            )
        axis.set_xlim(left=0)
        axis.set_ylim(0, 100)
        axis.set_xlabel(f"cost per task, {unit}")
        axis.legend(loc="lower right")

    return draw


def spending(held_out: dict[str, Any], split: str, what: str) -> list[Draw]:
    """Cost, latency and accuracy as bars for each entry of `split` ("by_preference" or "by_kind"), before and after; [] without data."""
    scores = {key: (held_out.get(key) or {}).get(split) or {} for key in ("before", "after")}
    names = list(scores["after"] or scores["before"])
    if not names:
        return []
    scale, unit = money_unit(
        entry.get("cost_usd") for side in scores.values() for entry in side.values()
    )

    def bars(title: str, key: str, factor: float) -> Draw:
        def draw(axis) -> None:
            axis.set_title(f"{title}, by {what}")
            highest = 0.0
            for offset, side, color in ((-0.2, "before", BEFORE), (0.2, "after", AFTER)):
                if not scores[side]:
                    continue
                heights = [factor * (scores[side].get(name, {}).get(key) or 0.0) for name in names]
                highest = max(highest, *heights)
                bar = axis.bar(
                    [index + offset for index in range(len(names))],
                    heights,
                    0.38,
                    color=color,
                    label=side,
                )
                axis.bar_label(bar, [number(height) for height in heights], fontsize=7, padding=1)
            axis.set_xticks(range(len(names)), names)
            axis.set_ylim(0, 1.25 * highest or 1.0)  # room for the legend
            axis.grid(axis="x", visible=False)
            axis.legend(loc="upper right", ncols=2)

        return draw

    return [
        bars(f"Cost per task, {unit}", "cost_usd", scale),
        bars("Latency per task, s", "latency_s", 1),
        bars("Right answers, %", "accuracy", 100),
    ]


def efficient(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of the (cost, accuracy) points that no other beats: none as cheap is more accurate, none as accurate is cheaper. By cost."""
    edge: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not edge or point[1] > edge[-1][1]:
            edge.append(point)
    return edge


def lookup(row: dict[str, Any], key: str) -> float | None:
    """row[key], or row["a"]["b"] for the key "a.b"; None where it is missing or no number."""
    value: Any = row
    for part in key.split(".", 1):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, (int, float)) else None


def smoothing(rows: Rows) -> int:
    """Over how many steps the strong lines are averaged: a tenth of those recorded, at least one, at most twenty-five."""
    return min(25, max(1, len(rows) // 10))


def trailing_mean(values, window: int) -> list[float]:
    """The mean of each value and the up to window - 1 before it: nothing of a later step shows in an earlier one."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / (i + 1 - max(0, i + 1 - window))
        for i in range(len(values))
    ]


def _label_places(
    points: list[tuple[float, float]], labels: list[str]
) -> list[tuple[float, float, str]]:
    """For each point its label's (x, y, "left" or "right"-aligned), in fractions of the Axes: the first place about it that is free."""
    taken = [(x - 0.015, x + 0.015, y - 0.025, y + 0.025) for x, y in points]
    places = []
    for (x, y), label in zip(points, labels):
        length = 0.0165 * len(label)
        options = []
        for dy in (0.055, -0.055, 0.0, 0.11, -0.11):
            options += [(x + 0.02, y + dy, "left"), (x - 0.02, y + dy, "right")]
        starts = [px if side == "left" else px - length for px, _, side in options]
        boxes = [
            (start, start + length, py - 0.022, py + 0.022)
            for start, (_, py, _) in zip(starts, options)
        ]

        def hidden(box) -> float:
            outside = 9.0 * (
                max(0.0, -box[0]) + max(0.0, box[1] - 1) + max(0.0, -box[2]) + max(0.0, box[3] - 1)
            )
            return outside + sum(
                max(0.0, min(box[1], b) - max(box[0], a))
                * max(0.0, min(box[3], d) - max(box[2], c))
                for a, b, c, d in taken
            )

        best = min(range(len(options)), key=lambda index: hidden(boxes[index]))
        taken.append(boxes[best])
        places.append(options[best])
    return places


def _empty(axis, text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color=BEFORE)
    axis.set_xticks([])
    axis.set_yticks([])
