"""Questions with known answers: FRAMES, HLE, GeneralThought, any JSONL of question and answer.

A training task offers a random subset of a catalogue's tools. Experts have aliases and prices that
change from task to task and stand in a description, as in the paper (arXiv 2511.21689). Held-out
tasks offer the catalogue as it is. The user's preference comes with the row, from the config, or is
drawn. A task is a function of split, index and seed alone.

Experts are the endpoints of the catalogue, or simulations: these know the row's answer and give it
with a probability that grows with the price of the model behind them.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanorchestra.agent.environment import Tool, ToolEnvironment
from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json_lines
from nanorchestra.records import Preference, Price, Task, ToolCall, ToolResult
from nanorchestra.tools.sandbox import Sandbox
from tools import load_tools
from worlds import catalogue
from worlds.judge import Judge
from worlds.toolscale import preferences

PREFIX = "questions:"
FIELDS = {  # of a row, under the names that public data sets use
    "question": ("question", "problem", "prompt"),
    "answer": ("answer", "reference_answer"),
    "id": ("id", "question_id", "index"),
    "kind": ("category", "task"),
    "vector": ("vector", "pref_vec"),
}
HELD_OUT = "held_out"  # the split of every fifth question, by its hash
EVERY = 5
MISTAKES = 8  # wrong answers that simulated experts choose from
READ = 1500  # tokens that an expert reads in a usual call, for the bounds of a reward


@dataclass(frozen=True)
class Row:
    """One question; `preference` None: the world's."""

    id: str
    question: str
    answer: str
    kind: str
    preference: Preference | None = None


class QuestionEnvironment(ToolEnvironment):
    """One attempt at a question. An expert that is called without a task gets the question."""

    def __init__(self, task: Task, tools: Sequence[Tool], judge: Judge):
        super().__init__(task, tools, grade=lambda answer: 0.0)
        self.judge = judge

    def most_usd(self, call: ToolCall) -> float:
        """Returns the most that a call can cost, as ToolEnvironment does."""
        return super().most_usd(self._whole(call))

    async def execute(self, call: ToolCall) -> ToolResult:
        """Runs one call, as ToolEnvironment does."""
        return await super().execute(self._whole(call))

    def _whole(self, call: ToolCall) -> ToolCall:
        if self.kinds.get(call.name) == "expert" and call.arguments == {}:
            return replace(call, arguments={"task": self.task.question})
        return call

    def score(self, answer: str) -> float:
        """Returns 1.0 if the judge accepts the answer, else 0.0."""
        outcome, self.verdict = self.judge.grade(
            self.task.question, self.task.data["answer"], answer
        )
        return outcome


@dataclass(frozen=True)
class QuestionWorld:
    """Rows by split ("train", "held_out"), and the catalogue's tools to answer them with.

    `wish` is the preference of every row without one, None: drawn. `name` stands in every task's
    data.
    """

    name: str
    splits: dict[str, list[Row]]
    tools: tuple[Tool, ...]
    judge: Judge
    seed: int
    simulated: bool
    wish: Preference | None = None

    def task(self, split: str, index: int) -> Task:
        """Returns task `index` of a split, whose rows are taken round and round."""
        rows = self.splits[split]
        row = rows[index % len(rows)]
        rng = random.Random(f"{self.seed}/{split}/{index}/{row.id}")
        offers = catalogue.draw_offers(self.tools, rng, varied=split != HELD_OUT)
        wish = row.preference or self.wish
        if wish is None:
            named = [name for o in offers for name in o["models"] or [o["name"]]]
            wish = preferences.draw(rng, named, split)
        else:
            wish = _renamed(wish, offers)
        wrong = {other.answer for other in rng.sample(rows, min(len(rows), MISTAKES))}
        data = {
            "kind": row.kind,
            "world": self.name,
            "answer": row.answer,
            "wrong": sorted(wrong - {row.answer}) or ["unknown"],
            "tools": offers,
            "wish": preferences.kind_of(wish),
            "bounds": _bounds(offers),
        }
        return Task(f"{row.id}/{split}-{index}", row.question, wish, data)

    def environment(self, task: Task, seed: int) -> QuestionEnvironment:
        """Returns one attempt at a task; `seed` is that of the simulated experts."""
        by_name = {tool.name: tool for tool in self.tools}
        tools = []
        for offer in task.data["tools"]:
            tool = by_name[offer["what"]]
            stand_in = catalogue.Simulation(task, seed) if self.simulated else None
            tools.append(catalogue.offered(tool, offer, stand_in))
        return QuestionEnvironment(task, tools, self.judge)


def _bounds(offers: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Bounds of US dollars and seconds: from nothing to a call of each expert on offer."""
    experts = [spec for offer in offers for spec in offer["models"].values()]
    usd = sum(Price(*spec["usd"]).cost(READ, catalogue.WRITTEN) for spec in experts)
    return [[0.0, usd or 0.01], [0.0, sum(s["latency_s"] for s in experts) or catalogue.LATENCY_S]]


def _renamed(wish: Preference, offers: Sequence[dict[str, Any]]) -> Preference:
    """Returns a preference over the tools on offer, under their aliases, in the words too.

    A model behind several roles has an alias in each; what is not on offer is left out.
    """
    aliases: dict[str, list[str]] = {}
    for offer in offers:
        behind = offer["models"] or {offer["name"]: offer}
        for alias, spec in behind.items():
            aliases.setdefault(spec["what"], []).append(alias)
        if offer["name"] not in behind:  # a role, which keeps its name
            aliases[offer["what"]] = [offer["name"]]
    names = "|".join(map(re.escape, sorted(aliases, key=len, reverse=True)))
    text = re.sub(rf"(?<![\w-])({names})(?![\w-])", lambda m: " or ".join(aliases[m[1]]), wish.text)
    tools = {
        alias: weight for name, weight in wish.tools.items() for alias in aliases.get(name, ())
    }
    never = [alias for name in wish.never for alias in aliases.get(name, ())]
    return replace(wish, text=text, tools=tools, never=never)


def load_world(name: str, seed: int, sandbox: Sandbox, settings: TaskSection) -> QuestionWorld:
    """Opens "questions:FILE" with the catalogue of `settings`.

    Rows that are no question are left out, which one line on stderr says. UserError if none is
    left, or a setting does not fit the catalogue.
    """
    file = Path(name.removeprefix(PREFIX))
    require(settings.tools, f"task.world is {name!r}, which needs a catalogue of tools: task.tools")
    tools = {tool.name: tool for tool in load_tools(settings.tools, sandbox)}
    judge, _ = tools.pop(settings.judge, None), tools.pop(settings.user, None)
    require(
        not settings.judge or getattr(judge, "kind", "") == "expert",
        f"task.judge is {settings.judge!r}; it must be an expert of {settings.tools}",
    )
    require(tools, f"{settings.tools}: no tool is left to offer beside the judge")
    wish = None
    if settings.preference:
        names = [name for tool in tools.values() for name in (tool.name, *catalogue.models(tool))]
        wish = Preference.parse(settings.preference, "task.preference", names)
    splits = {"train": [], HELD_OUT: []}
    for row in load_rows(file):
        digest = hashlib.sha256(row.question.encode()).digest()
        splits["train" if int.from_bytes(digest[:4]) % EVERY else HELD_OUT].append(row)
    require(
        all(splits.values()),
        f"{file}: {sum(map(len, splits.values()))} questions are too few; every fifth by its hash "
        "is held out",
    )
    for split, rows in splits.items():
        random.Random(f"{seed}/{split}").shuffle(rows)
    simulated = settings.experts == "simulated"
    return QuestionWorld(name, splits, tuple(tools.values()), Judge(judge), seed, simulated, wish)


def load_rows(file: Path) -> list[Row]:
    """Returns the questions of a file; says on stderr how many rows are none, and why the first."""
    rows, problems, count = [], [], 0
    for count, (number, value) in enumerate(read_json_lines(file), 1):  # noqa: B007
        try:
            rows.append(_row(value, file, number))
        except UserError as problem:
            problems.append(str(problem))
    require(rows, problems[0] if problems else f"{file}: the file has no rows")
    if problems:
        left_out = f"{len(problems)} of {count} rows are left out; the first: {problems[0]}"
        print(left_out, file=sys.stderr)
    return rows


def _row(value: Any, file: Path, number: int) -> Row:
    """Returns a row. UserError names line and field."""
    where = f"{file}, line {number}"
    require(isinstance(value, dict), f"{where}: it must be an object of question and answer")
    known = {key.lower(): field for key, field in value.items() if field not in (None, "", {})}
    require("image" not in known, f"{where}: the question has an image, which no tool can see")
    found = {
        field: next((known[name] for name in names if name in known), None)
        for field, names in FIELDS.items()
    }
    for field in ("question", "answer"):
        require(
            isinstance(found[field], str | int | float) and str(found[field]).strip(),
            f"{where}: no {field}; it must be a text, under the name {' or '.join(FIELDS[field])}",
        )
    vector, text = found["vector"] or {}, known.get("preference", "")
    require(
        isinstance(vector, dict) and isinstance(text, str),
        f"{where}: preference must be a text, and vector an object of numbers",
    )
    return Row(
        id=str(found["id"] or number),
        question=str(found["question"]).strip(),
        answer=str(found["answer"]).strip(),
        kind=str(found["kind"] or file.stem),
        preference=Preference.of(text, vector, where) if vector or text else None,
    )
