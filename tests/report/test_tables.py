"""One table of scores: aligned for a terminal, the same texts for the pages."""

import math
import re

from nanorchestra.report.tables import MEASURES, cell, difference, held_out_scores, table


def test_the_table_is_aligned_has_units_and_fits_eighty_columns():
    scores = {"reward": 0.5, "accuracy": 0.783, "cost_usd": 0.0021, "latency_s": 2.1}
    scores["intervals"] = {"reward": [0.4, 0.6], "accuracy": [0.7, 0.8]}
    nothing_right = {"reward": 0.0, "accuracy": 0.0, "cost_usd": 0.25}
    held_out = {
        "after": scores,
        "before": nothing_right,
        "routers": {"a/long/" * 9 + "path": scores},
    }
    lines = table(held_out_scores({"held_out": held_out})).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1 and len(lines[0]) <= 80
    assert lines[0].split()[-4:] == ["reward", "right", "cost", "time"]
    assert re.match(r"before GRPO +0\.000 +0\.0% +\$0\.25 +-$", lines[1])
    assert re.match(r"after GRPO +0\.500 ±0\.100 +78\.3% +\$0\.0021 +2\.1 s$", lines[2])
    assert lines[3].startswith("...") and "/path  " in lines[3]


def test_attempts_that_failed_stand_below_the_table():
    scores = {"reward": 0.5, "failed": 3, "attempts": 8, "failure": "no\nroute"}
    assert table({"m": scores}).endswith("m: 3 of 8 attempts failed, and are in no mean: no route")


def test_what_is_not_known_is_a_dash():
    assert (
        cell({"cost_usd": None}, "cost_usd") == cell({}, "turns") == difference({}, "reward") == "-"
    )
    assert difference({"accuracy": [0.1, None, math.inf, 0.2]}, "accuracy") == "+10.0% [-, -] p=0.2"
    assert len({measure.title for measure in MEASURES.values()}) == len(MEASURES)
