"""What an expert is good at, learnt from a number of single calls: a table in place of training.

The handbook of SkillOrchestra (arXiv 2602.19672) in numbers: explore, write down which expert is
right how often at what, then route by it. It is given what a policy must learn to read: the kind of
question, its difficulty, the preference, the prices.
"""

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from nanorchestra.records import Task
from tools import Skill
from worlds.judge import grade
from worlds.miniature.offers import Offer, is_expert, read_result
from worlds.miniature.world import Miniature

PRIOR = 2.0  # calls that an expert's own mean counts for in a cell of the table
SEED = 4711  # of the tasks that the first table explores, which no run has
UNKNOWN = Skill(0.5, 0.5, 0.5)  # of an expert that was never asked


@dataclass
class _Count:
    """Calls of an expert: how many, right, and unsure among right and wrong ones."""

    calls: float = 0.0
    right: float = 0.0
    unsure_right: float = 0.0
    unsure_wrong: float = 0.0

    def add(self, is_right: bool, is_sure: bool) -> None:
        self.calls += 1
        self.right += is_right
        self.unsure_right += is_right and not is_sure
        self.unsure_wrong += not is_right and not is_sure


@cache
def skill_table(calls: int, number: int = 0) -> dict[tuple[str, str, str], Skill]:
    """Returns the estimated skill by expert, subject and difficulty, after so many single calls.

    Each call asks an expert on offer, drawn evenly, about a training task. An estimate is the mean
    of its cell, drawn towards that of the expert by PRIOR calls; how often it is unsure is taken
    for the expert as a whole. Tables of other numbers come from other tasks.
    """
    world, rng = Miniature(SEED + number, None), random.Random(SEED + number)
    cells, experts = defaultdict(_Count), defaultdict(_Count)
    for index in range(calls):
        task = world.task("train", index)
        offer = rng.choice([offer for offer in task.data["tools"] if is_expert(offer)])
        is_right, is_sure = _tried(world, task, offer)
        for counts, key in ((cells, cell_of(task, offer)), (experts, offer["what"])):
            counts[key].add(is_right, is_sure)
    return {cell: _estimate(count, experts[cell[0]]) for cell, count in cells.items()} | {
        (what, "", ""): _estimate(_Count(), count) for what, count in experts.items()
    }


def estimated_skill(table: dict[tuple[str, str, str], Skill], task: Task, offer: Offer) -> Skill:
    """Returns the skill that a table has for an expert, subject and difficulty, or the nearest."""
    return table.get(cell_of(task, offer)) or table.get((offer["what"], "", ""), UNKNOWN)


def cell_of(task: Task, offer: Offer) -> tuple[str, str, str]:
    """Returns the cell of the table that an offer and the question of a task belong to."""
    return offer["what"], task.data["subject"], task.data["difficulty"]


def _tried(world, task, offer) -> tuple[bool, bool]:
    """Returns whether an expert's answer was right, and whether it was sure."""
    env = world.environment(task, 0)
    result = env.by_name[offer["name"]].call({})
    reading = read_result(task, offer, result)
    outcome, _ = grade(task.question, task.data["answer"], reading.answer or "")
    return bool(outcome), reading.sure


def _estimate(count: _Count, expert: _Count) -> Skill:
    mean = (expert.right + 1) / (expert.calls + 2)
    wrong = expert.calls - expert.right
    return Skill(
        (count.right + PRIOR * mean) / (count.calls + PRIOR),
        (expert.unsure_right + 1) / (expert.right + 2),
        (expert.unsure_wrong + 1) / (wrong + 2),
    )
