"""Learners for the desk that are no language models: a table, and a linear function of words.

They are told the grammar. A call is one word of a few, whose arguments are what the last result
names (`Step` of desk.py), and the answer is the last number that was read. What is left to learn is
which word pays, from the rewards of attempts at training tasks. `Table` takes the last sentence as
a whole, `Linear` takes a note and the last result as bags of n-grams, of up to NGRAM words.

Features, rate and exploration were tuned on training tasks (docs/results.md).
"""

import random
import re
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar

from nanorchestra.agent.environment import Environment
from nanorchestra.records import Task, ToolResult
from worlds.desk import EXPERTS, MOST_CALLS, Desk, Step, after_call, asked, ranked
from worlds.metrics import score
from worlds.programs import Program, play_program

RATE, LAST_RATE = 0.1, 0.01  # of the linear learner, which falls evenly over its attempts
NGRAM = 3  # words of a feature at most
UNTRIED = 0.5  # reward that a table expects of a choice that was never made


@dataclass
class Situation:
    """What a learner knows before a choice: the task, the latest note and result, and the step.

    The question is the first note.
    """

    task: Task
    note: str
    last: str
    step: Step
    calls: int = 0

    def choices(self) -> list[str]:
        """Returns the words that may be chosen."""
        calls = [*self.step.choices()] if self.calls < MOST_CALLS else []
        return [*calls, "answer"] if self.calls else calls

    def term(self, choice: str) -> tuple[str, int]:
        """Returns the wish, and of an expert the place of its price or its seconds, from 1 on."""
        wish = self.task.preference.name
        if wish == "right" or choice not in EXPERTS:
            return wish, 0
        return wish, 1 + ranked(self.task.data["offers"], int(wish == "fast")).index(choice)

    def after(self, choice: str, result: ToolResult) -> "Situation":
        """Returns the situation after a call."""
        read = result.content if choice == "records" and not result.error else self.note
        step = after_call(self.step, choice, result)
        return Situation(self.task, read, result.content, step, self.calls + 1)

    def answer(self) -> str:
        """Returns what an expert said last, or the number that the last result names."""
        said = [text.split()[1] for text in self.step.said.values()]
        return [self.step.about[-1], *said][-1]


def masked(text: str) -> str:
    """Returns a text with # for each number."""
    return re.sub(r"\d+", "#", text)


def ngrams(words: list[str], length: int) -> list[tuple[str, ...]]:
    """Returns all runs of so many words."""
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]


@dataclass
class Table:
    """Values a choice by the mean reward after it, for each last sentence and wish."""

    explored: ClassVar[float] = 0.05  # share of the choices in practice that are random
    sums: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    def features(self, seen: Situation, choice: str) -> list[Hashable]:
        """Returns the row of a choice."""
        return [(masked(seen.last), choice, seen.term(choice))]

    def value(self, features: list[Hashable]) -> float:
        """Returns the reward that is expected after a choice."""
        (row,) = features
        return self.sums[row] / self.counts[row] if self.counts[row] else UNTRIED

    def learn(self, features: list[Hashable], reward: float, share: float) -> None:
        """Learns from the reward of an attempt; `share` of the attempts came before."""
        (row,) = features
        self.sums[row] += reward
        self.counts[row] += 1


@dataclass
class Linear:
    """Values a choice by a sum of weights: of the wish, what was read, the experts asked."""

    explored: ClassVar[float] = 0.02
    weights: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))

    def features(self, seen: Situation, choice: str) -> list[Hashable]:
        """Returns the features of a choice."""
        said = list(seen.step.said.values())
        names = ["always", seen.task.preference.name, f"{len(said)} answered"]
        names += ["two agree"] * (len(set(said)) < len(said))
        names += [f"asked {name}" for name in seen.step.said]
        for kind, text in (("note", seen.note), ("last", seen.last)):
            words = re.findall("[A-Za-z]+|#", masked(text))
            for length in range(1, NGRAM + 1):
                names += [(kind, *each) for each in ngrams(words, length)]
        return [(name, choice) for name in names] + [seen.term(choice)]

    def value(self, features: list[Hashable]) -> float:
        """Returns the reward that is expected after a choice."""
        return sum(self.weights[feature] for feature in features)

    def learn(self, features: list[Hashable], reward: float, share: float) -> None:
        """Takes a step of least squares towards the reward of an attempt."""
        rate = RATE + (LAST_RATE - RATE) * share
        step = rate * (reward - self.value(features)) / len(features)
        for feature in features:
            self.weights[feature] += step


@dataclass
class Learner:
    """Plays the desk after some attempts at training tasks, one at each; they are made once."""

    world: Desk
    values: Table | Linear
    attempts: int

    def __call__(self, env: Environment) -> Program:
        """Returns the program of an attempt: in each situation the choice of the highest value."""
        return self._play(env, self._practised)

    @cached_property
    def _practised(self) -> Table | Linear:
        for index in range(self.attempts):
            task, path = self.world.task("train", index), []
            rng = random.Random(f"learner/{task.id}")
            play = partial(self._play, values=self.values, path=path, rng=rng)
            attempt = play_program(play, self.world.environment(task, index), index)
            reward = score(task, attempt).reward
            for features in path:
                self.values.learn(features, reward, index / self.attempts)
        return self.values

    def _play(
        self,
        env: Environment,
        values: Table | Linear,
        path: list[list[Hashable]] | None = None,
        rng: random.Random | None = None,
    ) -> Program:
        """Plays a task. In practice `rng` explores, and `path` gets the features of the choices."""
        task = env.task
        seen = Situation(task, task.question, task.question, Step(asked(task.question)))
        while True:
            options = {choice: values.features(seen, choice) for choice in seen.choices()}
            if rng and rng.random() < values.explored:
                choice = rng.choice([*options])
            else:
                worth = {choice: values.value(features) for choice, features in options.items()}
                choice = max(worth, key=worth.get)
            if path is not None:
                path.append(options[choice])
            if choice == "answer":
                return seen.answer()
            result = yield seen.step.call(choice)
            seen = seen.after(choice, result)
