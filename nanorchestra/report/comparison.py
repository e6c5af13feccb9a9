"""report.html of an evaluation, from its summary.json and its attempts."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from nanorchestra.files import read_json_lines
from nanorchestra.report.page import frontiers, write_page
from nanorchestra.report.run import Run
from nanorchestra.report.tables import (
    Rows,
    cell,
    difference,
    failures,
    label,
    number,
    scores_table,
)
from nanorchestra.report.trace import Attempt, Pair, instructive
from nanorchestra.schemas import Json

# Of the paired differences: the title of a column, the factor to its unit, and the format.
DIFFERENCES = {
    "reward": ("reward", 1, "+.3f"),
    "accuracy": ("right, points", 100, "+.1f"),
    "cost_usd": ("cost m$", 1000, "+.2f"),
    "latency_s": ("time s", 1, "+.1f"),
}


def recorded_attempts(path: Path) -> Iterator[Json]:
    """Yields the rows of an evaluation's attempts. UserError if they cannot be read."""
    for file in sorted(path.glob("[0-9]*.jsonl")):
        for _, row in read_json_lines(file):
            yield row


def write_comparison(path: Path) -> None:
    """Writes the page of an evaluation. UserError if it cannot be read."""
    run = Run.open(path)
    summary = run.summary()
    worlds = summary["worlds"]
    first_two = list(next(iter(worlds.values()), {}))[:2]
    names = [label(name) for name in first_two]
    write_page(
        run,
        "evaluation.html",
        live=False,
        partial=summary["partial"],
        first=names[0] if names else "",
        first_two=names,
        summary=_summary_table(worlds),
        worlds=[_world(name, policies) for name, policies in worlds.items()],
        instructive=instructive(_pairs(path, first_two)),
    )


def _summary_table(worlds: dict[str, dict[str, Json]]) -> Rows:
    """Right answers by world; cost in cents and time in minutes, as in the paper's Table 1."""
    names = dict.fromkeys(name for policies in worlds.values() for name in policies)
    rows = [["", *(f"{world} %" for world in worlds), "cost cents", "time min"]]
    for name in names:
        scores = [policies[name] for policies in worlds.values() if name in policies]
        rights = [cell(policies.get(name, {}), "accuracy", True) for policies in worlds.values()]
        costs = [each["cost_usd"] for each in scores]
        cost = "-" if None in costs else number(100 * sum(costs) / len(costs))
        minutes = sum(each["latency_s"] for each in scores) / len(scores) / 60
        rows.append([label(name), *rights, cost, number(minutes)])
    return rows


def _world(name: str, policies: dict[str, Json]) -> Json:
    """The tables and figures of a world."""
    trials = max(len(scores["pass_hat"]) for scores in policies.values())
    passes = [f"pass^{k} %" for k in range(1, trials + 1)] if trials > 1 else []
    more = [["", "tasks", "failed", "appendix L", *passes]]
    for policy, scores in policies.items():
        counts = [str(scores["tasks"]), str(scores["failed"])]
        published = scores["published"]
        counts.append("-" if published is None else number(published, 3))
        rates = [number(100 * rate, 1) for rate in scores["pass_hat"]]
        rates += ["-"] * (trials - len(rates))
        more.append([label(policy), *counts, *rates[: len(passes)]])

    differences = [["", *(title for title, _, _ in DIFFERENCES.values())]]
    for policy, scores in list(policies.items())[1:]:
        texts = []
        for key, (_, factor, form) in DIFFERENCES.items():
            found = scores["behind"].get(key)
            texts.append(difference(found, factor, form) if found else "-")
        differences.append([label(policy), *texts])

    by_preference = {}
    for policy, scores in policies.items():
        split = scores["by_preference"].items()
        by_preference[policy] = {preference: means["reward"] for preference, means in split}
    return {
        "name": name,
        "tasks": max(scores["tasks"] for scores in policies.values()),
        "frontiers": frontiers(policies, name),
        "scores": scores_table(policies),
        "failures": failures(policies),
        "more": more,
        "calls": _spread({policy: scores["calls"] for policy, scores in policies.items()}),
        "seconds": _spread({policy: scores["seconds_by"] for policy, scores in policies.items()}),
        "preferences": _spread(by_preference),
        "differences": differences if len(differences) > 1 else [],
    }


def _spread(values: dict[str, dict[str, float]]) -> Rows:
    """A table of numbers by policy and by the name of a column; 0 where a policy has none."""
    columns = sorted({column for numbers in values.values() for column in numbers})
    rows = [["", *columns]]
    for policy, numbers in values.items():
        rows.append([label(policy), *(f"{numbers.get(column, 0):.2f}" for column in columns)])
    return rows


def _pairs(path: Path, first_two: list[str]) -> Iterator[Pair]:
    """Yields the attempts of the first two policies at the same task, in the first trial."""
    attempts_at = defaultdict(dict)
    for row in recorded_attempts(path):
        if row["policy"] not in first_two:
            break  # the rows of a policy lie together, those of the first two at the start
        if row["trial"] == 0 and row["status"] != "infrastructure":
            attempts_at[row["task"]["id"]][row["policy"]] = Attempt.of(row)
    for attempts in attempts_at.values():
        if len(attempts) == 2:
            yield tuple(attempts[name] for name in first_two)
