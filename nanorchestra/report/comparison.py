"""report.html of an evaluation, from its summary.json and its attempts."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from nanorchestra.files import read_json_lines
from nanorchestra.report.page import write_page
from nanorchestra.report.plots import frontier
from nanorchestra.report.tables import (
    MAIN,
    MEASURES,
    Rows,
    answers_table,
    cell,
    difference,
    failures,
    measures_of,
    scores_table,
)
from nanorchestra.report.trace import Attempt, Pair, instructive
from nanorchestra.schemas import Json
from nanorchestra.training.run import RunFolder
from nanorchestra.units import Write, decimal, percent, seconds


def recorded_attempts(path: Path) -> Iterator[Json]:
    """Yields the rows of an evaluation's attempts. UserError if they cannot be read."""
    for file in sorted(path.glob("[0-9]*.jsonl")):
        for _, row in read_json_lines(file):
            yield row


def write_comparison(path: Path) -> None:
    """Writes the page of an evaluation. UserError if it cannot be read."""
    run = RunFolder.open(path)
    summary = run.summary()
    worlds = summary["worlds"]
    first_two = list(next(iter(worlds.values()), {}))[:2]
    write_page(
        run,
        "evaluation.html",
        live=False,
        partial=summary["partial"],
        first_two=first_two,
        summary=_summary_table(worlds),
        worlds=[_world(name, policies) for name, policies in worlds.items()],
        instructive=instructive(_pairs(path, first_two)),
    )


def _summary_table(worlds: dict[str, dict[str, Json]]) -> Rows:
    """Right answers by world, and the means of cost and time over the worlds, by policy."""
    means = ("cost_usd", "latency_s")
    outcomes = {name: measures_of(worlds[name].values())["accuracy"] for name in worlds}
    heads = [f"{name}, {measure.title}" for name, measure in outcomes.items()]
    rows = [["", *heads, *(MEASURES[key].title for key in means)]]
    for policy in dict.fromkeys(name for policies in worlds.values() for name in policies):
        rights = []
        for name, measure in outcomes.items():
            rights.append(cell(worlds[name].get(policy, {}), "accuracy", measure, True))
        played = [policies[policy] for policies in worlds.values() if policy in policies]
        mean = {}
        for key in means:
            values = [scores[key] for scores in played]
            mean[key] = None if None in values else fmean(values)
        rows.append([policy, *rights, *(cell(mean, key, MEASURES[key]) for key in means)])
    return rows


def _world(name: str, policies: dict[str, Json]) -> Json:
    """The tables and figures of a world."""
    rates, rewards, calls_by_preference = {}, {}, {}
    known = measures_of(policies.values())
    compared = [key for key in MAIN if key in known]
    differences = [["", *(known[key].title for key in compared)]]
    for policy, scores in policies.items():
        rates[policy] = {f"pass^{k}": rate for k, rate in enumerate(scores["pass_hat"], 1)}
        parts = scores["by_preference"].items()
        rewards[policy] = {preference: means["reward"] for preference, means in parts}
        for preference, calls in scores["calls_by_preference"].items():
            calls_by_preference[f"{policy}, {preference}"] = calls
        if policy != next(iter(policies)):
            behind = scores["behind"]
            differences.append([policy, *(difference(behind, key, known[key]) for key in compared)])
    return {
        "name": name,
        "frontier": frontier(policies),
        "scores": scores_table(policies),
        "failures": failures(policies),
        "answers": answers_table(policies),
        "pass_hat": _numbers(rates, percent),
        "calls": _numbers({policy: scores["calls"] for policy, scores in policies.items()}),
        "calls_by_preference": _numbers(calls_by_preference),
        "seconds": _numbers(
            {policy: scores["seconds_by"] for policy, scores in policies.items()}, seconds
        ),
        "rewards": _numbers(rewards),
        "differences": differences,
    }


def _numbers(values: dict[str, dict[str, float]], write: Write = decimal) -> Rows:
    """A table of numbers by policy and by the name of a column; 0 where a policy has none."""
    columns = sorted({column for numbers in values.values() for column in numbers})
    rows = [["", *columns]]
    for policy, numbers in values.items():
        rows.append([policy, *(write(numbers.get(column, 0)) for column in columns)])
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
