"""One table of scores: aligned for a terminal, the same texts for the pages."""

import math
import re

from nanorchestra.report.tables import MEASURES, OUTCOME, cell, difference, held_out_text, table
from nanorchestra.training.printing import step_line


def test_the_tables_are_aligned_have_units_and_fit_eighty_columns():
    scores = {"reward": 0.5, "accuracy": 0.783, "cost_usd": 0.0021, "latency_s": 2.1}
    scores["intervals"] = {"reward": [0.4, 0.6], "accuracy": [0.7, 0.8]}
    scores["most_frequent_answer"] = {"answer": "a\x1b[2J\nlong answer, " * 9, "share": 0.25}
    scores["calls_by_preference"] = {"cheap": {"ant": 0.5, "bee": 1.25}, "fast": {"bee": 0.75}}
    nothing_right = {"reward": 0.0, "accuracy": 0.0, "cost_usd": 0.25}
    nothing_right["most_frequent_answer"] = {"answer": "", "share": 1.0}
    path = "a/long/" * 9 + "path"
    held_out = {"tasks": 9, "after": scores, "before": nothing_right, "routers": {path: scores}}
    text = held_out_text({"held_out": held_out})
    first, answers, calls = (part.splitlines() for part in text.split("\n\n"))
    for lines in (first, answers, calls):
        assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 80
    titles = ["on", "9", "held-out", "tasks", "reward", "right", "cost", "time"]
    assert first[0].split() == titles and len(first) == 4
    assert re.match(r"after GRPO +0\.500 ±0\.100 +78\.3% +\$0\.0021 +2\.1 s$", first[2])
    assert re.match(r"before GRPO +0\.000 +0\.0% +\$0\.25 +-$", first[1])
    assert first[3].startswith("...") and "/path  " in first[3]
    assert re.match(r"before GRPO +none +100\.0%$", answers[1])
    assert re.match(r"after GRPO +a\[2J long answer, a\[2J l +25\.0%$", answers[2])
    assert [line.split()[-2:] for line in calls] == [
        ["bee", "ant"],
        ["1.25", "0.50"],
        ["0.75", "0.00"],
    ]


def test_partial_credit_is_no_right_answer():
    """The mean outcome has no percent, and the share that is exact stands beside it."""
    graded = {"reward": 0.5, "accuracy": 0.72, "exact": 0.03}
    lines = table({"ours": graded, "none": {"accuracy": 0.0, "exact": 0.0}}).splitlines()
    assert lines[0].split()[-5:] == ["reward", "outcome", "exact", "cost", "time"]
    assert lines[1].split() == ["ours", "0.500", "0.720", "3.0%", "-", "-"]
    step = graded | {"phase": "grpo", "step": 3, "tokens_per_s": 9.0, "cost_usd": 0.1, "loss": 0.0}
    step |= {"latency_s": 1.0, "preference": 0.5}
    assert "  outcome 0.720  exact 3.0%  cost $0.1  " in step_line(step, 9)
    assert "  right 72.0%  cost $0.1  " in step_line(step | {"exact": 0.72}, 9)


def test_attempts_that_failed_stand_below_the_table():
    scores = {"reward": 0.5, "failed": 3, "attempts": 8, "failure": "no\nroute"}
    assert "m: 3 of 8 attempts failed, and are in no mean: no route\n" in table({"m": scores})


def test_what_is_not_known_is_a_dash():
    cost, right = MEASURES["cost_usd"], MEASURES["accuracy"]
    assert cell({"cost_usd": None}, "cost_usd", cost) == cell({}, "cost_usd", cost) == "-"
    assert difference({}, "reward", cost) == "-"
    behind = {"accuracy": [0.1, None, math.inf, 0.2]}
    assert difference(behind, "accuracy", right) == "+10.0% [-, -] p=0.2"
    assert difference(behind, "accuracy", OUTCOME) == "+0.100 [-, -] p=0.2"
    assert len({measure.title for measure in MEASURES.values()}) == len(MEASURES)
