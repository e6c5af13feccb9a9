"""The miniature's world: its tasks, and the environment in which a task is attempted.

A task offers a random subset of tools under aliases, prices and latencies that change from task to
task and stand in the prompt. The user states a preference (right, cheap, fast, balanced, perhaps a
tool to avoid), which the reward holds as weights. Experts are simulated: their skill by subject and
difficulty is hidden from the policy. A task is a function of `split`, `index` and the world's seed
alone.
"""

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.world import Lesson, Split
from nanorchestra.records import Preference, Price, Task
from nanorchestra.tools.sandbox import Sandbox
from tools import LookupTool, PythonTool, RecordsTool, SimulatedExpert
from worlds.judge import grade
from worlds.miniature.draw import (
    DRAW_QUESTION,
    Question,
    draw_terms,
    draw_wrong,
)
from worlds.miniature.language import HELD_OUT, TRAIN, draw_sentence
from worlds.miniature.names import draw_names
from worlds.miniature.offers import (
    Offer,
    bounds,
    corpus,
    describe,
    skill,
)
from worlds.miniature.tables import (
    AVOID_SHARE,
    EXPERT_TOKENS,
    FITTING_TOOL,
    KINDS,
    LATENCIES,
    LESSON_KINDS,
    PREFERENCES,
    PRICES,
    READING_LESSONS,
    SPECIALISTS,
)
from worlds.miniature.teacher import read, teach


@dataclass(frozen=True)
class Miniature:
    """The world of the miniature. Its tasks have no end; it demonstrates them, too."""

    seed: int
    sandbox: Sandbox
    name: ClassVar[str] = "miniature"

    def size(self, split: Split) -> None:
        """Returns None: there are tasks without end."""

    def task(self, split: Split, index: int) -> Task:
        """Returns one task; "all" is "held_out"."""
        return self._draw(TRAIN if split == TRAIN else HELD_OUT, index, KINDS)

    def environment(self, task: Task, seed: int) -> ToolEnvironment:
        """Returns one attempt at a task; `seed` decides what the simulated experts say."""
        tools = [_tool(offer, task, seed, self.sandbox) for offer in task.data["tools"]]
        gold = task.data["answer"]
        return ToolEnvironment(
            task, tools, grade=lambda answer: grade(task.question, gold, answer)[0]
        )

    def lesson(self, index: int, most_tools: int = 0) -> tuple[ToolEnvironment, list[Lesson]]:
        """Returns an environment, and the turns of a teacher that has acted in it.

        Lessons have other shares of kinds than tasks: copying is learnt slowly. One in
        READING_LESSONS + 1 has tools. In the others none is on offer, and the teacher only says
        what it has read: they are a seventh as long, and a wish has very many forms.
        """
        task = self._draw(TRAIN, index, LESSON_KINDS, most_tools)
        if index % (READING_LESSONS + 1):
            return ToolEnvironment(task, []), [read(task)]
        env = self.environment(task, 0)
        return env, teach(env, 0)

    def _draw(self, split, index, kinds, most_tools=0) -> Task:
        """Returns task `index`, with `most_tools` tools on offer at most (0: no limit)."""
        rng = random.Random(f"{self.seed}/{split}/{index}")
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        difficulty = rng.choice(("easy", "hard"))
        question = DRAW_QUESTION[kind](rng, split, difficulty)
        tools = _draw_offers(rng, kind, most_tools)
        aliases = random.Random(f"{self.seed}/{split}/{index}/names")
        names = draw_names(aliases, len(tools), split == HELD_OUT)
        tools = [{"name": name} | offer for name, offer in zip(names, tools, strict=True)]
        phrasing = random.Random(f"{self.seed}/{split}/{index}/words")
        weighed = rng.choices(list(PREFERENCES), [share for share, _ in PREFERENCES.values()])[0]
        text = draw_sentence(phrasing, f"wish_{weighed}", split)
        preference = Preference(text, *PREFERENCES[weighed][1])
        options = [offer for offer in tools if offer["what"] != "records"]
        if options[1:] and rng.random() < AVOID_SHARE:
            preference = forbid(preference, rng.choice(options), phrasing, split)
        text = question.phrased(phrasing, split)
        wrong = draw_wrong(rng, question, split)
        return make_task(f"{split}-{self.seed}-{index}", text, question, wrong, tools, preference)


def _draw_offers(rng, kind, most_tools) -> list[Offer]:
    """Draws the tools on offer, still without their aliases.

    Two to four experts; the tool that fits the question four times out of five (records always),
    and one time in ten a tool that does not.
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
    if most_tools:  # the fitting tool first, then experts
        offered.sort(key=lambda offer: offer["what"] != fitting)
        offered = offered[:most_tools]
    rng.shuffle(offered)
    return offered


def forbid(preference: Preference, avoided: Offer, rng: random.Random, split: str) -> Preference:
    """Returns a preference that also forbids a tool, in a sentence of the split and by its weight.

    The weight cancels the others, so that a right answer with its help earns nothing.
    """
    ban = draw_sentence(rng, "ban", split, alias=avoided["name"], what=avoided["what"])
    ban_first = rng.random() < 0.5
    parts = [ban, preference.text] if ban_first else [preference.text, ban]
    weight = -(preference.outcome + preference.cost + preference.latency)
    tools = preference.tools | {avoided["name"]: weight}
    return replace(preference, text=" ".join(parts).strip(), tools=tools)


def make_task(
    name: str,
    text: str,
    question: Question,
    wrong: list[str],
    tools: list[Offer],
    preference: Preference,
) -> Task:
    """Returns the task of a question in the words `text`; experts err with the `wrong` answers."""
    return Task(
        name,
        text,
        preference,
        bounds(tools, question.difficulty),
        Miniature.name,
        question.kind,
        {offer["name"]: offer["what"] for offer in tools},
        {
            "subject": question.subject,
            "difficulty": question.difficulty,
            "answer": question.answer,
            "wrong": wrong,
            "tools": tools,
            "tables": question.tables,
            "solution": question.solution,
        },
    )


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
