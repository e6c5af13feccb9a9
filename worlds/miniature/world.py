"""The miniature's world: its tasks, and the environment in which a task is attempted.

A task offers a random subset of tools under aliases, prices and latencies that change from task to
task and stand in the prompt. The user states a preference (right, cheap, fast, balanced, perhaps a
tool to avoid), which the reward holds as weights. Experts are simulated: their skill by subject and
difficulty is hidden from the policy. A task is a function of `split`, `index` and the world's seed
alone.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.records import Preference, Price, Task
from nanorchestra.tools.sandbox import Sandbox
from tools import LookupTool, PythonTool, RecordsTool, SimulatedExpert
from worlds.judge import grade
from worlds.miniature.draw import (
    DRAW_QUESTION,
    Question,
    draw_names,
    draw_terms,
    draw_wrong,
)
from worlds.miniature.offers import (
    Offer,
    bounds,
    corpus,
    describe,
    skill,
    title,
)
from worlds.miniature.tables import (
    AVOID_SHARE,
    EXPERT_TOKENS,
    FITTING_TOOL,
    KINDS,
    LATENCIES,
    LESSON_KINDS,
    PHRASES,
    PREFERENCES,
    PRICES,
    SPECIALISTS,
)
from worlds.preferences import sentence


@dataclass(frozen=True)
class World:
    """The miniature's tasks.

    lessons: training tasks as demonstrations need them, with other shares of kinds.
    most_tools: tools on offer at most, 0 for no limit.
    words, names: the split whose phrasings or aliases all tasks have, "" for that of the task; the
    tasks are otherwise the same.
    """

    seed: int = 0
    lessons: bool = False
    most_tools: int = 0
    words: str = ""
    names: str = ""

    def tasks(self, split: str, count: int) -> list[Task]:
        """Returns the first `count` tasks of a split, "train" or "held_out"."""
        return [self.task(split, i) for i in range(count)]

    def task(self, split: str, index: int) -> Task:
        """Returns one task."""
        rng = random.Random(f"{self.seed}/{split}/{index}")
        kinds = LESSON_KINDS if self.lessons else KINDS
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        difficulty = rng.choice(("easy", "hard"))
        question = DRAW_QUESTION[kind](rng, split, difficulty)
        tools = self._offer(rng, kind)
        aliases = random.Random(f"{self.seed}/{split}/{index}/names")
        names = draw_names(aliases, len(tools), self.names or split)
        tools = [{"name": name} | offer for name, offer in zip(names, tools, strict=True)]
        said, words = random.Random(f"{self.seed}/{split}/{index}/words"), self.words or split
        wish = rng.choices(list(PREFERENCES), [share for share, _ in PREFERENCES.values()])[0]
        preference = Preference(sentence(said, PHRASES[words][wish]), *PREFERENCES[wish][1])
        options = [offer for offer in tools if offer["what"] != "records"]
        if options[1:] and rng.random() < AVOID_SHARE:
            preference = forbid(preference, rng.choice(options), said, words)
        name, text = f"{split}-{self.seed}-{index}", question.phrased(said, words)
        wrong = draw_wrong(rng, question, split)
        return make_task(name, text, question, wrong, tools, wish, preference)

    def _offer(self, rng, kind) -> list[Offer]:
        """Draws the tools on offer, still without their aliases.

        Two to four experts; the tool that fits the question four times out of five (records
        always), and one time in ten a tool that does not.
        """
        experts, fitting = ["large", "medium", "small"], FITTING_TOOL.get(kind)
        if rng.random() < 0.3:
            experts.remove(rng.choice(experts))
        if rng.random() < 0.6:
            experts.append(rng.choice(list(SPECIALISTS.values())))
        tools = [t for t in ("code", "search") if rng.random() < (0.8 if t == fitting else 0.1)]
        if fitting == "records":
            tools.append("records")
        offered = []
        for what in experts + tools:
            family = "expert" if what in experts else "tool"
            offered.append({"what": what} | draw_terms(rng, PRICES[family], LATENCIES[family]))
        if self.most_tools:  # the fitting tool first, then experts
            offered.sort(key=lambda offer: offer["what"] != fitting)
            offered = offered[: self.most_tools]
        rng.shuffle(offered)
        return offered


def forbid(wish: Preference, avoided: Offer, rng: random.Random, split: str) -> Preference:
    """Returns a preference that also forbids a tool, in words of the split and by its weight.

    The weight cancels the others, so that a right answer with its help earns nothing.
    """
    ban = sentence(rng, PHRASES[split]["avoid"], title(avoided))
    ban_first = rng.random() < 0.5
    text = (f"{ban} {wish.text}" if ban_first else f"{wish.text} {ban}").strip()
    weight = -(wish.outcome + wish.cost + wish.latency)
    return replace(wish, text=text, tools=wish.tools | {avoided["name"]: weight})


def make_task(
    name: str,
    text: str,
    question: Question,
    wrong: list[str],
    tools: list[Offer],
    wish: str,
    preference: Preference,
) -> Task:
    """Returns the task of a question in the words `text`; experts err with the `wrong` answers."""
    data = {
        "kind": question.kind,
        "subject": question.subject,
        "difficulty": question.difficulty,
        "answer": question.answer,
        "wrong": wrong,
        "tools": tools,
        "tables": question.tables,
        "solution": question.solution,
        "wish": wish,
        "bounds": bounds(tools, question.difficulty),
    }
    return Task(name, text, preference, data)


def environment(task: Task, seed: int, sandbox: Sandbox) -> ToolEnvironment:
    """Returns one attempt at a task; `seed` decides what the simulated experts say."""
    data = task.data
    tools = [_tool(offer, task, seed, sandbox) for offer in data["tools"]]

    def outcome(answer: str) -> float:
        return grade(task.question, data["answer"], answer)[0]

    return ToolEnvironment(task, tools, grade=outcome)


def _tool(offer: Offer, task: Task, seed: int, sandbox: Sandbox) -> Any:
    data, name, text = task.data, offer["name"], describe(offer)
    usd_per_call, seconds = offer["price"] / 1e4, float(offer["latency"])
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
        Price(offer["price"] / 10, offer["price"] / 10),
        *EXPERT_TOKENS[data["difficulty"]],
        latency_s=seconds,
        seed=f"{task.id}/{seed}",
    )
