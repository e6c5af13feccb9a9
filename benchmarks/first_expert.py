"""How often attempts at the desk ask first the expert that knows most, by the records of a run.

    python benchmarks/first_expert.py runs/nano/trajectories.jsonl runs/evaluation/00-*.jsonl

Counts the attempts that ask an expert about the matter at the end of their trail. By chance one in
three asks the best expert first.
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from worlds.desk import EXPERTS, SKILLS, SUBJECT  # noqa: E402
from worlds.metrics import interval  # noqa: E402


def main(files: list[str]) -> None:
    """Prints a line for each file and phase."""
    for file in files:
        firsts = defaultdict(Counter)  # by phase: (subject, expert) -> attempts
        for line in Path(file).read_text().splitlines():
            attempt = json.loads(line)
            expert = first_expert(attempt)
            if expert:
                (matter,) = attempt["task"]["data"]["answers"]
                firsts[attempt.get("phase", "")][SUBJECT[matter.split()[0]], expert] += 1
        for phase, counts in firsts.items():
            best = []
            for (subject, expert), count in counts.items():
                knows_most = max(EXPERTS, key=lambda name: SKILLS[name][subject])
                best += [float(expert == knows_most)] * count
            mean, low, high = interval(best)
            print(f"{file} {phase}: {mean:.1%} [{low:.1%}, {high:.1%}] of {len(best)} attempts")


def first_expert(attempt: dict) -> str:
    """Returns the expert that an attempt at a matter asks first, "" without one."""
    if not attempt["task"]["data"].get("answers"):
        return ""
    asked = [r["alias"] for turn in attempt["turns"] for r in turn["results"] if r["alias"]]
    return next(iter(asked), "")


if __name__ == "__main__":
    main(sys.argv[1:])
