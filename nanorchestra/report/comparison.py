"""report.html and PNG plots of an evaluation, from its summary.json and its attempts."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from nanorchestra.files import read_json_lines, write_whole
from nanorchestra.records import Preference
from nanorchestra.report import plots
from nanorchestra.report.page import page
from nanorchestra.report.run import Run
from nanorchestra.report.trace import tree
from nanorchestra.schemas import Json

SIZE = {"width": 7.5, "height": 4.2}  # inches of a plot
SCRIPTS = ("tables.js", "frontier.js", "evaluation.js")
BODY = "\n".join(f'<div id="{name}"></div>' for name in ("summary", "frontier", "worlds", "pairs"))


def recorded_attempts(path: Path) -> Iterator[Json]:
    """Yields the rows of an evaluation's attempts. UserError if they cannot be read."""
    for file in sorted(path.glob("[0-9]*.jsonl")):
        for _, row in read_json_lines(file):
            yield row


def write_comparison(path: Path) -> None:
    """Writes the page and the plots of an evaluation. UserError if it cannot be read."""
    run = Run.open(path)
    summary = run.summary()
    frontiers, sweeps = [], []  # a panel for each world
    for world, policies in summary["worlds"].items():
        frontiers.append(plots.frontier(policies, f"{world}:"))
        swept = {name: scores for name, scores in policies.items() if ":turns=" in name}
        if swept:
            sweeps.append(plots.frontier(swept, f"{world}:", turns=True))
    for name, panels in (("frontier", frontiers), ("turns", sweeps)):
        if panels:
            write_whole(path / f"{name}.png", plots.figure(panels, "png", **SIZE))
    data = {"summary": summary, "pairs": _instructive(path, summary)}
    write_whole(path / "report.html", page(run, BODY, data, SCRIPTS))


def _instructive(path: Path, summary: Json) -> list[Json]:
    """Returns for each wish the tasks that the first policy wins and loses by most, if any.

    It is compared with the second policy. Each task has both attempts.
    """
    worlds = list(summary["worlds"].values())
    first_two = list(worlds[0])[:2] if worlds else []
    attempts_at = defaultdict(dict)
    for row in recorded_attempts(path):
        if row["policy"] not in first_two:
            break  # the rows of a policy lie together, those of the first two at the start
        if row["trial"] == 0 and row["status"] != "infrastructure":
            attempts_at[row["task"]["id"]][row["policy"]] = row

    pairs_of = defaultdict(list)  # by wish
    for attempts in attempts_at.values():
        if len(attempts) == 2:
            pair = [attempts[name] for name in first_two]
            pairs_of[Preference(**pair[0]["task"]["preference"]).name].append(pair)

    chosen = []
    for wish, pairs in sorted(pairs_of.items()):
        pairs.sort(key=_lead)
        for won, pair in ((True, pairs[-1]), (False, pairs[0])):
            if _lead(pair) * (1 if won else -1) > 0:
                sides = [
                    {"policy": row["policy"], "reward": row["reward"], "tree": tree(row)}
                    for row in pair
                ]
                text = pair[0]["task"]["preference"]["text"]
                chosen.append({"wish": wish, "preference": text, "won": won, "sides": sides})
    return chosen


def _lead(pair: list[Json]) -> float:
    """Returns by how much the first policy earns more than the second."""
    ours, theirs = pair
    return ours["reward"] - theirs["reward"]
