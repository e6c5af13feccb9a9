"""Baselines in worlds of recorded answers, which know what a policy knows.

A baseline is a plan for each task: an order of experts, and how many equal answers end it. Plans
are chosen on the training half before an answer of the held-out half is read. A plan is played as a
program (programs.py).

| name | asks |
|---|---|
| an expert's | it, in every case |
| best | the expert with the highest mean reward for the user's preference |
| table | the same among the cases of training of which the same is told; `best` if these are few |
| vote | all experts; the answer of most of them |
| cascade | two experts, and a third if they disagree: the three with the highest mean reward |
| table-any | the best expert or cascade among the cases of training of which the same is told |
| oracle | whose answer is right and pays most: it reads the truth, and is a bound |
| chance | whom the first policy asked in another case |
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np

from nanorchestra.agent.environment import Environment
from nanorchestra.errors import require
from nanorchestra.records import Preference, Task, ToolCall, Trajectory
from reward import normalise, project, weights
from worlds.programs import Play, Program
from worlds.recorded import Case, RecordedWorld, same

CHANCE = "chance"
FEW = 20  # cases of which the same is told, below which a table says nothing


@dataclass(frozen=True)
class Plan:
    """Experts by number, asked in order until `enough` answers are equal.

    The answer is that of most; of answers that are as frequent the latest.
    """

    order: tuple[int, ...]
    enough: int = 1

    def program(self, names: Sequence[str]) -> Program:
        """Returns the program that follows the plan; `names` are those of the experts on offer."""
        keys, texts = [], {}
        for number in self.order:
            result = yield ToolCall(names[number], {})
            if result.error:
                continue
            key = same(result.content)
            keys.append(key)
            texts[key] = result.content
            if keys.count(key) == self.enough:
                break
        return texts[max(reversed(keys), key=keys.count)] if keys else ""


@dataclass(frozen=True)
class Figures:
    """Outcomes, US dollars and seconds of recorded answers, each [cases, experts].

    `classes` [cases, experts] are equal where answers are.
    """

    right: np.ndarray
    usd: np.ndarray
    seconds: np.ndarray
    classes: np.ndarray

    @classmethod
    def of(cls, cases: Sequence[Case], experts: Sequence[str]) -> "Figures":
        """Returns the figures of the answers of some experts."""
        numbers, classes = [], []
        for case in cases:
            answers = [case.answers[expert] for expert in experts]
            numbers.append([(each.right, each.usd, each.seconds) for each in answers])
            keys = [same(answer.text) for answer in answers]
            classes.append([keys.index(key) for key in keys])
        return cls(*np.moveaxis(np.array(numbers, dtype=float), 2, 0), np.array(classes))

    def alone(self, expert: int) -> np.ndarray:
        """Returns [3, cases]: outcome, US dollars and seconds of an expert that is asked alone."""
        return np.array([each[:, expert] for each in (self.right, self.usd, self.seconds)])

    def cascaded(self, first: int, second: int, third: int) -> np.ndarray:
        """Returns [3, cases] of two experts, and a third if they disagree, whose answer counts.

        An answer has the outcome of the expert that gave it first.
        """
        agree = self.classes[:, first] == self.classes[:, second]
        alone, both = self.alone(third), self.alone(first) + self.alone(second)
        right = alone[0]
        for earlier in (second, first):
            repeated = self.classes[:, earlier] == self.classes[:, third]
            right = np.where(repeated, self.right[:, earlier], right)
        right = np.where(agree, self.right[:, first], right)
        spent = both[1:] + np.where(agree, 0.0, alone[1:])
        return np.array([right, *spent])


class Baselines:
    """The plans of a world by name of a baseline, chosen on its training half."""

    def __init__(self, world: RecordedWorld):
        self.world = world
        self.names = [offer.name for offer in world.offers]
        self.experts = [offer.expert for offer in world.offers]
        cases = world.splits["train"]
        self.figures = Figures.of(cases, self.experts)
        self.alike = defaultdict(list)  # rows of the training half by what is told
        for row, case in enumerate(cases):
            self.alike[case.told].append(row)
        count = range(len(self.names))
        self.single = {Plan((k,)): self.figures.alone(k) for k in count}
        self.cascade = {Plan(k, 2): self.figures.cascaded(*k) for k in permutations(count, 3)}
        self._best: dict[tuple[str, str, str], Plan] = {}

    def programs(self) -> "dict[str, Play]":
        """Returns the baselines by name."""
        names = [*self.names, "best", "table", "vote"]
        names += ["cascade", "table-any"] if self.cascade else []
        programs = {name: partial(self._program, name) for name in [*names, "oracle"]}
        return programs | {CHANCE: Chance()}

    def _program(self, name, env) -> Program:
        return self.plan(name, env.task).program(self.names)

    def plan(self, name: str, task: Task) -> Plan:
        """Returns the plan of a baseline for a task."""
        if name in self.names:
            return Plan((self.names.index(name),))
        if name == "vote":
            order = np.argsort(self.figures.right.mean(axis=0), kind="stable")
            return Plan(tuple(order.tolist()), len(order))
        if name == "oracle":
            case = Figures.of([self.world.case(task)], self.experts)
            plans = {Plan((k,)): case.alone(k) for k in range(len(self.names))}
            return self._highest(plans, task.preference)
        rows = self.alike[task.question] if name.startswith("table") else []
        told = task.question if len(rows) >= FEW else ""
        key = name, told, task.preference.text
        if key not in self._best:
            plans = {
                "best": self.single,
                "table": self.single,
                "cascade": self.cascade,
                "table-any": self.single | self.cascade,
            }[name]
            if told:
                plans = {plan: played[:, rows] for plan, played in plans.items()}
            self._best[key] = self._highest(plans, task.preference)
        return self._best[key]

    def _highest(self, plans: dict[Plan, np.ndarray], preference: Preference) -> Plan:
        """Returns the plan with the highest mean reward, of equal ones the one that costs least."""

        def worth(plan: Plan) -> tuple[float, float]:
            played = plans[plan]
            return self.rewards(played, preference).mean(), -played[1].mean()

        return max(plans, key=worth)

    def rewards(self, played: np.ndarray, preference: Preference) -> np.ndarray:
        """Returns the rewards [n] of outcomes, US dollars and seconds [3, n], as `task_rewards`."""
        most = np.array([self.world.bounds.cost_usd[1], self.world.bounds.latency_s[1]])
        saved = np.clip(normalise(-played[1:].T, -most, np.zeros(2)), 0.0, 1.0)
        saved = np.where(most > 0, saved, 1.0)
        normalised = np.column_stack((np.ones(len(saved)), saved))
        weight = weights(preference)[:3]
        return project(normalised, weight / weight.sum(), played[0])


class Chance:
    """Plays what a policy did in another case of the same preference, whatever is answered.

    So it has the policy's shares of calls, and its answer is that of the expert at the same place.
    """

    def __init__(self) -> None:
        self._by_preference = defaultdict(list)

    def follow(self, played: Sequence[tuple[Task, Trajectory]] | None) -> None:
        """Plays from now on what a policy did in these attempts. UserError if there are none."""
        require(played, "--policy chance: it plays as the first policy does; name that before it")
        for task, attempt in played:
            self._by_preference[task.preference.text].append(attempt)

    def __call__(self, env: Environment) -> Program:
        """Returns the program of an attempt."""
        task = env.task
        others = self._by_preference[task.preference.text]
        other = random.Random(f"chance/{task.id}").choice(others)
        answer = ""
        for turn in other.turns:
            for call, result in zip(turn.calls, turn.results, strict=False):  # fewer if one failed
                if result.error:
                    continue
                ours = yield call
                if same(result.content) == same(other.answer):
                    answer = answer or ours.content
        return answer
