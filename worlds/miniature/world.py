"""The miniature's world: its tasks, and the environment in which a task is attempted.

A task offers a random subset of tools under names, prices and latencies that change from task to
task and stand in the prompt. The user states a preference (right, cheap, fast, balanced, perhaps a
tool to avoid), which the reward holds as weights. Experts are simulated: their skill by subject and
difficulty is hidden from the policy. A task is a function of `split`, `index` and the world's seed
alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.records import Preference, Price, Task
from nanorchestra.tools.sandbox import Sandbox
from tools import LookupTool, PythonTool, RecordsTool, SimulatedExpert
from worlds.miniature.draw import DRAW_QUESTION, Question, draw_amount, draw_wrong
from worlds.miniature.offers import (
    Offer,
    bounds,
    corpus,
    describe,
    plain_choice,
    skill,
    title,
)
from worlds.miniature.tables import (
    AVOID_SHARE,
    EXPERT_NAMES,
    EXPERT_TOKENS,
    FITTING_TOOL,
    KINDS,
    LATENCIES,
    LESSON_KINDS,
    PHRASES,
    PREFERENCES,
    PRICES,
    SUBJECTS,
    TOOL_NAMES,
    TRAIN,
    TRAINING_AVOID_FAVOURITE,
    TRAINING_AVOID_SHARE,
)


@dataclass(frozen=True)
class World:
    """The miniature's tasks.

    lessons: training tasks as demonstrations need them, with other shares of kinds and of bans.
    most_tools: tools on offer at most, 0 for no limit.
    """

    seed: int = 0
    lessons: bool = False
    most_tools: int = 0

    def tasks(self, split: str, count: int, start: int = 0) -> list[Task]:
        """Returns the tasks start .. start + count of a split, "train" or "held_out"."""
        return [self.task(split, i) for i in range(start, start + count)]

    def task(self, split: str, index: int) -> Task:
        """Returns one task."""
        rng = random.Random(f"{self.seed}/{split}/{index}")
        kinds = LESSON_KINDS if self.lessons else KINDS
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        difficulty = rng.choice(("easy", "hard"))
        question = DRAW_QUESTION[kind](rng, split, difficulty)
        tools = self._offer(rng, split, kind, question.subject)
        wish = rng.choices(list(PREFERENCES), [share for share, _ in PREFERENCES.values()])[0]
        preference = Preference(rng.choice(PHRASES[split][wish]), *PREFERENCES[wish][1])
        task = make_task(f"{split}-{self.seed}-{index}", question, tools, wish, preference)
        task = self._with_ban(rng, split, task)
        task.data["wrong"] = draw_wrong(rng, question.answer)
        return task

    def _offer(self, rng, split, kind, subject) -> list[Offer]:
        """Draws the tools on offer.

        Always the large and the small model, often a third expert; the tool that fits the question
        four times out of five (records always), and one time in ten a tool that does not.
        """
        experts, fitting = ["large", "small"], FITTING_TOOL.get(kind)
        if rng.random() < 0.7:
            experts.append(_third_expert(rng, kind, subject))
        tools = [t for t in ("code", "search") if rng.random() < (0.8 if t == fitting else 0.1)]
        if fitting == "records":
            tools.append("records")
        names = rng.sample(EXPERT_NAMES, len(experts))
        names += [rng.choice(TOOL_NAMES[tool]) for tool in tools]
        offered = []
        for what, name in zip(experts + tools, names, strict=True):
            family = "specialist" if what in SUBJECTS else what
            price = draw_amount(rng, PRICES[family], 100, split)
            latency = draw_amount(rng, LATENCIES[family], 60, None)
            offered.append({"name": name, "what": what, "price": price, "latency": latency})
        if self.most_tools:  # the fitting tool first, then experts
            offered.sort(key=lambda offer: offer["what"] != fitting)
            offered = offered[: self.most_tools]
        rng.shuffle(offered)
        return offered

    def _with_ban(self, rng, split, task) -> Task:
        """Forbids a tool, in words and with a negative weight, in a share of the tasks."""
        training = split == TRAIN and not self.lessons
        share = TRAINING_AVOID_SHARE if training else AVOID_SHARE
        options = [offer for offer in task.data["tools"] if offer["what"] != "records"]
        if not options or rng.random() >= share:
            return task
        avoided = rng.choice(options)
        if training and rng.random() < TRAINING_AVOID_FAVOURITE:
            avoided = plain_choice(task, options, rng)
        wish, ban_first = task.preference, rng.randrange(2) == 0
        ban = rng.choice(PHRASES[split]["avoid"]).format(title(avoided))
        text = f"{ban} {wish.text}" if ban_first else f"{wish.text} {ban}"
        tools = {avoided["name"]: -(wish.outcome + wish.cost + wish.latency)}
        return replace(task, preference=replace(wish, text=text, tools=tools))


def _third_expert(rng, kind, subject):
    """The medium model or a specialist: of the question's subject mostly, if it has one."""
    knowledge = kind == "knowledge"
    if not (knowledge and rng.random() < 0.6 or rng.random() < 0.2):
        return "medium"
    return subject if knowledge and rng.random() < 0.8 else rng.choice(SUBJECTS)


def make_task(
    name: str, question: Question, tools: list[Offer], wish: str, preference: Preference
) -> Task:
    """Returns a task, still without the wrong answers that experts give (`draw_wrong`)."""
    data = {
        "kind": question.kind,
        "subject": question.subject,
        "difficulty": question.difficulty,
        "answer": question.answer,
        "tools": tools,
        "tables": question.tables,
        "solution": question.solution,
        "wish": wish,
        "bounds": bounds(tools, question.difficulty),
    }
    return Task(name, question.words, preference, data)


def environment(task: Task, seed: int, sandbox: Sandbox) -> ToolEnvironment:
    """Returns one attempt at a task; `seed` decides what the simulated experts say."""
    data = task.data
    gold = normalise(data["answer"])
    tools = [_tool(offer, task, seed, sandbox) for offer in data["tools"]]
    return ToolEnvironment(task, tools, grade=lambda answer: float(normalise(answer) == gold))


def _tool(offer: Offer, task: Task, seed: int, sandbox: Sandbox) -> Any:
    data, name, text = task.data, offer["name"], describe(offer)
    usd_per_call, seconds = offer["price"] / 1e5, float(offer["latency"])
    if offer["what"] == "code":
        return PythonTool(name, text, sandbox, usd_per_call, seconds)
    if offer["what"] == "search":
        return LookupTool(name, text, corpus()[1], usd_per_call, seconds)
    if offer["what"] == "records":
        return RecordsTool(name, text, data["tables"], usd_per_call, seconds)
    return SimulatedExpert(
        name,
        text,
        skill(offer["what"], data["subject"], data["difficulty"]),
        data["answer"],
        tuple(data["wrong"]),
        Price(offer["price"] / 100, offer["price"] / 100),
        *EXPERT_TOKENS[data["difficulty"]],
        latency_s=seconds,
        seed=f"{task.id}/{seed}",
    )


def normalise(answer: str) -> str:
    """Returns an answer without case, thousands separators, outer space and final full stop."""
    return answer.strip().rstrip(".").replace(",", "").casefold()
