"""Scores as rows of texts: one table for the terminal and the pages."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from nanorchestra.schemas import Json
from nanorchestra.units import Write, decimal, dollars, is_graded, mean_and_ends, percent, seconds

Rows = list[list[str]]  # the first row has the titles of the columns, a row begins with a name


class Measure(NamedTuple):
    """A score of a task: the title of its column, and how its values are written."""

    title: str
    write: Write


MEASURES = {
    "reward": Measure("reward", decimal),
    "accuracy": Measure("right", percent),
    "exact": Measure("exact", percent),
    "cost_usd": Measure("cost", dollars),
    "latency_s": Measure("time", seconds),
    "cost_per_correct_usd": Measure("cost/right", dollars),
    "preference": Measure("preference", decimal),
    "avoided_rate": Measure("avoided called", percent),
    "turns": Measure("turns", partial(decimal, decimals=1)),
    "tokens": Measure("tokens", partial(decimal, decimals=0)),
    "tasks": Measure("tasks", partial(decimal, decimals=0)),
    "failed": Measure("failed", partial(decimal, decimals=0)),
}
OUTCOME = Measure("outcome", decimal)  # of a world that gives partial credit, its accuracy
MAIN = ("reward", "accuracy", "exact", "cost_usd", "latency_s")
LINE = 80  # characters of a terminal
CALLED = 6  # tools whose calls are shown by preference
ANSWER_CHARS = 24
LEAST_HEAD = 12  # characters of the first column
AFTER_CALLS = "calls after GRPO, by preference"


def measures_of(scores: Collection[Json]) -> dict[str, Measure]:
    """Returns the measures that scores may have: outcomes and exact ones, if any is graded."""
    if any(map(is_graded, scores)):
        return MEASURES | {"accuracy": OUTCOME}
    return {name: measure for name, measure in MEASURES.items() if name != "exact"}


def table(policies: dict[str, Json], heading: str = "on held-out tasks") -> str:
    """Returns the main scores by name, and the most frequent answers, as lines for a terminal.

    The other measures are in summary.json and report.html.
    """
    rows = scores_table(policies, MAIN, intervals=("reward",))
    rows[0][0] = heading
    lines = [*aligned(rows), *failures(policies)]
    return "\n".join([*lines, "", *aligned(answers_table(policies))])


def scores_table(
    policies: dict[str, Json],
    measures: Iterable[str] | None = None,
    intervals: Iterable[str] = MEASURES,
) -> Rows:
    """Returns the scores by policy.

    measures: by default those that any policy has. intervals: measures beside which half of the
    95% interval stands, if it is known.
    """
    known = measures_of(policies.values())
    names = [name for name in known if name in (measures or _measured(policies.values()))]
    rows = [["", *(known[name].title for name in names)]]
    for policy, scores in policies.items():
        cells = [cell(scores, name, known[name], name in intervals) for name in names]
        rows.append([policy, *cells])
    return rows


def changes_table(before: dict[str, Json], after: dict[str, Json]) -> Rows:
    """Returns the scores of parts of the tasks by name, each before and after."""
    both = [*before.values(), *after.values()]
    known = measures_of(both)
    names = [name for name in known if name in _measured(both)]
    rows = [["", *(known[name].title for name in names)]]
    for part in sorted(before | after):
        sides = before.get(part, {}), after.get(part, {})
        cells = [" → ".join(cell(side, name, known[name]) for side in sides) for name in names]
        rows.append([part, *cells])
    return rows


def answers_table(policies: dict[str, Json]) -> Rows:
    """Returns the answer that each policy gives most often, and how often."""
    rows = [["", "most frequent answer", "of the attempts"]]
    for policy, scores in policies.items():
        if found := scores.get("most_frequent_answer"):
            text = "".join(filter(str.isprintable, " ".join(found["answer"].split())))
            rows.append([policy, text[:ANSWER_CHARS] or "none", percent(found["share"])])
    return rows


def calls_table(by_preference: dict[str, dict[str, float]], heading: str) -> Rows:
    """Returns the calls per task by the user's preference, of the tools that are called most."""
    total = Counter()
    for calls in by_preference.values():
        total.update(calls)
    names = [name for name, _ in total.most_common(CALLED)]
    rows = [[heading, *names]]
    for preference, calls in by_preference.items():
        rows.append([preference, *(decimal(calls.get(name, 0.0), decimals=2) for name in names)])
    return rows


def _measured(policies: Collection[Json]) -> list[str]:
    """The measures that any policy has."""
    found = []
    for name in MEASURES:
        if any(scores.get(name) is not None for scores in policies):
            found.append(name)
    return found


def cell(scores: Json, name: str, measure: Measure, interval: bool = False) -> str:
    """Returns a score, with half of its interval if asked for; "-" if it has none."""
    write = measure.write
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


def difference(behind: dict[str, Sequence[float | None]], name: str, measure: Measure) -> str:
    """Returns a mean difference with its 95% interval and p; "-" if there is none."""
    if name not in behind:
        return "-"
    *ends, p = behind[name]
    return f"{mean_and_ends(measure.write, *ends, sign='+')} p={p:.2g}"


def held_out_scores(summary: Json) -> dict[str, Json]:
    """Returns the held-out scores of a training run: before and after it, and of the routers."""
    held_out = summary["held_out"]
    sides = {f"{side} GRPO": held_out[side] for side in ("before", "after")}
    return sides | held_out["routers"]


def held_out_text(summary: Json) -> str:
    """Returns the held-out scores of a training run, and what it calls in the end, as lines."""
    scores = table(held_out_scores(summary), f"on {summary['held_out']['tasks']} held-out tasks")
    by_preference = summary["held_out"]["after"]["calls_by_preference"]
    if not any(by_preference.values()):  # nothing was called
        return scores
    return "\n".join([scores, "", *aligned(calls_table(by_preference, AFTER_CALLS))])


def aligned(rows: Rows) -> list[str]:
    """Returns rows of texts as lines of columns; the first column is cut so that they fit LINE."""
    columns = zip(*(texts for _, *texts in rows), strict=True)
    widths = [max(map(len, column)) for column in columns]
    room = max(LEAST_HEAD, LINE - sum(width + 2 for width in widths))
    heads = [shortened(head, room) for head, *_ in rows]
    lines = []
    for head, (_, *texts) in zip(heads, rows, strict=True):
        cells = map(str.rjust, texts, widths)
        lines.append("  ".join([head.ljust(max(map(len, heads))), *cells]))
    return lines


def shortened(text: str, chars: int) -> str:
    """Returns the end of a text that is longer than `chars`, after "..."."""
    return text if len(text) <= chars else "..." + text[3 - chars :]
