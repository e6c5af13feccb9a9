"""Scores as rows of texts: one table for the terminal and the pages."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from nanorchestra.schemas import Json
from nanorchestra.units import Write, decimal, dollars, mean_and_ends, percent, seconds

Rows = list[list[str]]  # the first row has the titles of the columns, a row begins with a name


class Measure(NamedTuple):
    """A score of a task: the title of its column, and how its values are written."""

    title: str
    write: Write


MEASURES = {
    "reward": Measure("reward", decimal),
    "accuracy": Measure("right", percent),
    "cost_usd": Measure("cost", dollars),
    "latency_s": Measure("time", seconds),
    "cost_per_correct_usd": Measure("cost/right", dollars),
    "preference": Measure("preference", decimal),
    "avoided_rate": Measure("bans broken", percent),
    "turns": Measure("turns", partial(decimal, decimals=1)),
    "tokens": Measure("tokens", partial(decimal, decimals=0)),
    "published": Measure("appendix L", decimal),
    "tasks": Measure("tasks", partial(decimal, decimals=0)),
    "failed": Measure("failed", partial(decimal, decimals=0)),
    "reward_of_calls": Measure("reward of calls", decimal),
}
MAIN = ("reward", "accuracy", "cost_usd", "latency_s")  # with a name they fit 80 columns
FIRST_COLUMN = 38  # characters, so that a table fits a terminal of 80


def table(policies: dict[str, Json], heading: str = "on held-out tasks") -> str:
    """Returns the main scores by name as lines for a terminal of 80 columns.

    The other measures are in summary.json and report.html.
    """
    rows = scores_table(policies, MAIN, intervals=("reward",))
    rows[0][0] = heading
    return "\n".join([*aligned(rows), *failures(policies)])


def scores_table(
    policies: dict[str, Json],
    measures: Iterable[str] | None = None,
    intervals: Iterable[str] = MEASURES,
) -> Rows:
    """Returns the scores by policy.

    measures: by default those that any policy has. intervals: measures beside which half of the
    95% interval stands, if it is known.
    """
    measures = measures or _measured(policies)
    rows = [["", *(MEASURES[name].title for name in measures)]]
    for policy, scores in policies.items():
        rows.append([policy, *(cell(scores, name, name in intervals) for name in measures)])
    return rows


def changes_table(before: dict[str, Json], after: dict[str, Json]) -> Rows:
    """Returns the scores of parts of the tasks by name, each before and after."""
    measures = _measured(before | after)
    rows = [["", *(MEASURES[name].title for name in measures)]]
    for part in sorted(before | after):
        sides = before.get(part, {}), after.get(part, {})
        cells = [" → ".join(cell(side, name) for side in sides) for name in measures]
        rows.append([part, *cells])
    return rows


def _measured(policies: dict[str, Json]) -> list[str]:
    """The measures that any policy has."""
    found = []
    for name in MEASURES:
        if any(scores.get(name) is not None for scores in policies.values()):
            found.append(name)
    return found


def cell(scores: Json, name: str, interval: bool = False) -> str:
    """Returns a score, with half of its interval if asked for; "-" if it has none."""
    write = MEASURES[name].write
    if scores.get(name) is None:
        return "-"
    text = write(scores[name])
    low, high = scores.get("intervals", {}).get(name, (None, None))
    if interval and low is not None:
        text += f" ±{write((high - low) / 2)}"
    return text


def failures(policies: dict[str, Json]) -> list[str]:
    """Returns a line for each policy of which the infrastructure failed attempts."""
    lines = []
    for name, scores in policies.items():
        if scores.get("failed"):
            failed = f"{scores['failed']} of {scores['attempts']} attempts"
            reason = " ".join(scores["failure"].split())
            lines.append(f"{name}: {failed} failed, and are in no mean: {reason}")
    return lines


def difference(behind: dict[str, Sequence[float | None]], name: str) -> str:
    """Returns a mean difference with its 95% interval and p; "-" if there is none."""
    if name not in behind:
        return "-"
    *ends, p = behind[name]
    return f"{mean_and_ends(MEASURES[name].write, *ends, sign='+')} p={p:.2g}"


def held_out_scores(summary: Json) -> dict[str, Json]:
    """Returns the held-out scores of a training run: before and after it, and of the routers."""
    held_out = summary["held_out"]
    sides = {f"{side} GRPO": held_out[side] for side in ("before", "after")}
    return sides | held_out["routers"]


def aligned(rows: Rows) -> list[str]:
    """Returns rows of texts as lines of columns; the first column is cut to FIRST_COLUMN."""
    heads = [shortened(head, FIRST_COLUMN) for head, *_ in rows]
    columns = zip(*(texts for _, *texts in rows), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for head, (_, *texts) in zip(heads, rows, strict=True):
        cells = map(str.rjust, texts, widths)
        lines.append("  ".join([head.ljust(max(map(len, heads))), *cells]))
    return lines


def shortened(text: str, chars: int) -> str:
    """Returns the end of a text that is longer than `chars`, after "..."."""
    return text if len(text) <= chars else "..." + text[3 - chars :]
