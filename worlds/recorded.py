"""Answers that were really given, as a world: `recorded:FILE`, in which nothing is asked or paid.

A file is JSON Lines, also .gz: a case a line, with what each expert answered, whether that was
right, what it cost in US dollars and how long it took in seconds (0 if it is not stated).

    {"id": "a7", "question": "...", "kind": "law", "answers": {"gpt-4o": ["42", 1, 0.002, 1.4]}}
    {"id": "b3", "language": "python", "words": 31, "answers": {"gpt-4o": ["A", 1, 0.002, 1.4]}}

The policy asks experts, who replay their answer and bill, and ends with one of the answers that it
has read. It is right if the expert that gave that answer first in the attempt was.

What the policy is told is what the user knows. A case with a question is told by it, and answers
are texts. Without one, the case is a line of its other fields ("python, 30 words."), in which
numbers have one significant digit: a small byte-level vocabulary reads a digit an id, and each line
comes up often enough to be learned from. Such answers are classes, numbered anew in each attempt in
the order in which they are read: a class as it stands in a file may say which of the experts that
were never asked agree. `id`, `kind` and `category` are for reports. A field that is null in some
cases is told there as in another case, since that it is missing may give the category away.
"""

import asyncio
import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple, Required

from pydantic import Field
from typing_extensions import TypedDict

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.threads import in_daemons
from nanorchestra.agent.tool import Allowance, Tool
from nanorchestra.agent.world import Lesson, Split
from nanorchestra.config import TaskSection
from nanorchestra.errors import require
from nanorchestra.files import read_json_lines, write_whole
from nanorchestra.records import Bounds, Preference, Task, ToolCall, ToolResult
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.models import ExpertTool
from nanorchestra.tools.roles import final_answer
from nanorchestra.validation import Number, validated
from worlds import catalogue, preferences
from worlds.judge import normalise
from worlds.questions import QuestionWorld

PREFIX = "recorded:"
UNTOLD = ("id", "question", "kind", "category", "answers")  # fields that are no facts of a case
WISHES = (  # weights of outcome, cost and latency
    (1.0, 0.0, 0.0),
    (0.5, 1.0, 0.0),
    (0.5, 0.0, 1.0),
    (1.0, 0.5, 0.5),
)
MOST_ASKED = 4  # experts, by the teacher
THRIFT = 6.0  # how strongly it minds what its user minds
Outcome = Annotated[Number, Field(ge=0, le=1)]
Amount = Annotated[Number, Field(ge=0)]


class Answer(NamedTuple):
    """What an expert answered; `right` is the outcome, 0 to 1."""

    text: str
    right: Outcome
    usd: Amount
    seconds: Amount = 0.0


class CaseForm(TypedDict, total=False):
    """A line of a file; other fields are facts of the case."""

    id: Required[str | int]
    question: str
    kind: str
    category: str
    answers: Required[dict[str, tuple[str, Outcome, Amount] | tuple[str, Outcome, Amount, Amount]]]


@dataclass(frozen=True)
class Case:
    """A case as the policy reads it, and the answers to it by expert.

    classes: whether answers are classes in place of texts.
    """

    id: str
    told: str
    kind: str
    classes: bool
    answers: dict[str, Answer]


@dataclass(frozen=True)
class Offer:
    """An expert on offer: its tool, and the name under which the file has its answers.

    `usd` and `seconds` are the means of its answers in the training half.
    """

    name: str
    description: str
    parameters: Json
    expert: str
    usd: float
    seconds: float


@dataclass(frozen=True)
class RecordedExpert(Tool):
    """An expert that replays its answer to the task, whatever it is asked.

    The most that a call can cost is what it did cost.
    """

    name: str
    description: str
    parameters: Json
    answer: Answer
    attempt: "RecordedEnvironment"
    kind, blocking = "expert", False

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars of its answer."""
        return self.answer.usd

    def call(self, arguments: Json) -> ToolResult:
        """Returns its answer, with the recorded bill and seconds."""
        content = self.attempt.hear(self.answer)
        findings = {"attempts": [[self.name, content]]}
        return ToolResult(content, self.answer.usd, self.answer.seconds, findings=findings)


class RecordedEnvironment(ToolEnvironment):
    """One attempt at a case. `heard` are the outcomes of the answers that the policy has read."""

    def __init__(self, task: Task, case: Case, offers: Sequence[Offer]):
        self.case, self.heard = case, {}
        self._numbers: dict[str, str] = {}  # of classes, in the order in which they were read
        tools = []
        for offer in offers:
            words = offer.name, offer.description, offer.parameters
            tools.append(RecordedExpert(*words, case.answers[offer.expert], self))
        super().__init__(task, tools)

    def hear(self, answer: Answer) -> str:
        """Returns an answer as the policy reads it."""
        text = answer.text
        if self.case.classes:
            text = self._numbers.setdefault(text, str(len(self._numbers) + 1))
        self.heard.setdefault(same(text), answer.right)
        return text

    def score(self, answer: str) -> float:
        """Returns the outcome of an answer that was read, 0.0 for another."""
        return self.heard.get(same(answer), 0.0)


def same(answer: str) -> str:
    """Returns a key that equal answers share."""
    return normalise(final_answer(answer))


class RecordedWorld:
    """The cases of a file, by split; each is a task for each of the `users`.

    `offers` and `bounds` are those of every task.
    """

    def __init__(
        self,
        name: str,
        splits: dict[str, list[Case]],
        offers: Sequence[Offer],
        users: Sequence[Preference],
        bounds: Bounds,
        seed: int,
    ):
        self.name, self.splits, self.offers = name, splits, offers
        self.users, self.bounds, self.seed = users, bounds, seed
        self._cases = {case.id: case for cases in splits.values() for case in cases}
        self._pairs = {}  # cases and users by split, in the order of tasks
        for split, cases in splits.items():
            pairs = [(case, user) for case in cases for user in users]
            random.Random(f"{seed}/{split}").shuffle(pairs)
            self._pairs[split] = pairs
        self._pairs["all"] = [*self._pairs["train"], *self._pairs["held_out"]]

    def size(self, split: Split) -> int:
        """Returns how many tasks a split has."""
        return len(self._pairs[split])

    def task(self, split: Split, index: int) -> Task:
        """Returns task `index` of a split; they are taken round and round."""
        case, user = self._pairs[split][index % len(self._pairs[split])]
        offers = {offer.name: f"{offer.expert} (recorded)" for offer in self.offers}
        name = f"{case.id}/{split}-{index}"
        data = {"case": case.id}
        return Task(name, case.told, user, self.bounds, self.name, case.kind, offers, data)

    def environment(self, task: Task, seed: int) -> RecordedEnvironment:
        """Returns one attempt at a task; nothing in it is drawn."""
        return self._environment(task, self.offers)

    def _environment(self, task, offers) -> RecordedEnvironment:
        return RecordedEnvironment(task, self.case(task), offers)

    def case(self, task: Task) -> Case:
        """Returns the case of a task."""
        return self._cases[task.data["case"]]

    def lesson(self, index: int, most_tools: int = 0) -> tuple[RecordedEnvironment, list[Lesson]]:
        """Returns an environment, and a teacher's turns: some experts, then the answer of most.

        Of answers that are as frequent it gives the latest. Who is right it does not show, nor when
        to ask another expert, which it does as often as not. It thinks what the user wants, in a
        word, and asks experts by `thrift`: so a small model reads the wish where it chooses whom to
        ask, before rewards depend on it.
        """
        rng = random.Random(f"{self.seed}/lesson/{index}")
        offered = list(self.offers)
        if most_tools:
            offered = rng.sample(offered, min(most_tools, len(offered)))
        env = self._environment(self.task("train", index), offered)
        wish, lessons = env.task.preference.name, []
        while offered and len(lessons) < MOST_ASKED:
            weights = [thrift(offer, env.task) for offer in offered]
            (number,) = rng.choices(range(len(offered)), weights)
            logprob = math.log(weights[number] / sum(weights))
            if lessons:
                logprob -= math.log(2)
            offer = offered.pop(number)
            result = env.by_name[offer.name].call({})
            lessons.append(Lesson(wish, "", ToolCall(offer.name, {}), result, logprob))
            if rng.random() < 0.5:
                break
        said = [lesson.result.content for lesson in lessons]
        answer = max(reversed(said), key=said.count)
        may_ask = offered and len(lessons) < MOST_ASKED
        return env, [*lessons, Lesson(wish, answer, logprob=-math.log(2) if may_ask else 0.0)]


def thrift(offer: Offer, task: Task) -> float:
    """Returns the weight with which the teacher asks an expert: 1 if its user minds no costs.

    It falls with the mean bill and seconds, as shares of those of the dearest and the slowest
    expert, which are the task's bounds.
    """
    user, most_usd, most_s = task.preference, task.bounds.cost_usd[1], task.bounds.latency_s[1]
    usd = user.cost * offer.usd / most_usd if most_usd else 0.0
    seconds = user.latency * offer.seconds / most_s if most_s else 0.0
    return math.exp(-THRIFT * (usd + seconds) / (user.outcome + user.cost + user.latency or 1.0))


def load_world(name: str, seed: int, settings: TaskSection, tools: Sequence[Tool]) -> RecordedWorld:
    """Opens "recorded:FILE", with the experts of a catalogue, or all of the file without one.

    UserError.
    """
    file = Path(name.removeprefix(PREFIX))
    splits = {"train": [], "held_out": []}
    for case in load_cases(file):
        digest = hashlib.sha256(case.id.encode()).digest()
        splits["held_out" if digest[0] % 2 else "train"].append(case)
    trained, held_out = splits.values()
    count = len(trained) + len(held_out)
    require(trained and held_out, f"{file}: {count} cases are too few; half of them is held out")
    offers = _offers(trained)
    if tools:
        offers = []
        for tool in catalogue.as_listed(tools):
            if isinstance(tool, ExpertTool):
                words = tool.name, tool.description, tool.parameters
                offers.append(Offer(*words, tool.name, *_means(tool.name, trained)))
        require(offers, f"{name}: the catalogue task.tools has no expert")
    for case in [*trained, *held_out]:
        missing = [offer.expert for offer in offers if offer.expert not in case.answers]
        problem = f"{file}: case {case.id} has no answer of {', '.join(missing)}"
        require(not missing, f"{problem}; there are {', '.join(case.answers)}")
    most_usd, most_s = max(each.usd for each in offers), max(each.seconds for each in offers)
    bounds = Bounds((0.0, most_usd), (0.0, most_s))
    user = preferences.of_setting(settings.preference)
    users = [user] if user else list(_users(bounds))
    for each in users:
        each.check_names("task.preference", [offer.name for offer in offers])
    return RecordedWorld(name, splits, offers, users, bounds, seed)


def _users(bounds: Bounds) -> Iterator[Preference]:
    """Yields a user of each of the WISHES; of those that weigh time only if it was recorded."""
    for weights in WISHES:
        preference = preferences.worded(Preference("", *weights))
        if bounds.latency_s[1] or not preference.latency:
            yield preference


def _offers(cases: Sequence[Case]) -> list[Offer]:
    """Returns the experts of a log on offer, each with its mean bill and seconds.

    A name is as many parts as tell it from the others: gpt-4o-mini of gpt-4o-mini-2024-07-18.
    """
    offers = []
    experts = list(cases[0].answers)
    for expert in experts:
        parts, others = expert.split("-"), [other for other in experts if other != expert]
        for count in range(1, len(parts) + 1):
            name = "-".join(parts[:count])
            if not any(f"{other}-".startswith(f"{name}-") for other in others):
                break
        usd, seconds = _means(expert, cases)
        words = f"${1000 * usd:.2g} a thousand" + (f", {seconds:.1f} s" if seconds else "")
        offers.append(Offer(name, words, arguments_schema(), expert, usd, seconds))
    return offers


def _means(expert: str, cases: Sequence[Case]) -> tuple[float, float]:
    """Returns the mean US dollars and seconds of an expert's answers."""
    answers = [case.answers[expert] for case in cases if expert in case.answers]
    if not answers:
        return 0.0, 0.0
    return fmean(answer.usd for answer in answers), fmean(answer.seconds for answer in answers)


def load_cases(file: Path) -> list[Case]:
    """Returns the cases of a file. UserError names line and field."""
    rows = {}
    for number, row in read_json_lines(file):
        where = f"{file}, line {number}"
        name = str(validated(CaseForm, row, where, extra="allow")["id"])
        require(name not in rows, f"{where}: id is {name!r}, as on a line before")
        rows[name] = row
    require(rows, f"{file}: the file has no cases")
    whole = [row for row in rows.values() if None not in row.values()] or [*rows.values()]
    cases = []
    for name, row in rows.items():
        answers = {expert: Answer(*answer) for expert, answer in row["answers"].items()}
        told, kind = row.get("question", ""), row.get("kind") or row.get("category") or file.stem
        if not told:
            told = _told(row, random.Random(name).choice(whole))
        cases.append(Case(name, told, kind, "question" not in row, answers))
    return cases


def _told(row: Json, other: Json) -> str:
    """Returns the facts of a row in a line; null is told as in the `other` row."""
    parts = []
    for name, value in row.items():
        value = other.get(name) if value is None else value
        if name in UNTOLD or value is None:
            continue
        if isinstance(value, int | float):
            parts.append(f"{float(f'{value:.1g}'):g} {name}")
        else:
            parts.append(str(value))
    return f"{', '.join(parts)}." if parts else ""


def record(world: QuestionWorld, file: Path, parallel: int) -> tuple[int, int]:
    """Asks each expert of a world each question once, and writes their answers to `file`.

    Returns how many cases it wrote, and how many lack an answer and are left out: an expert or the
    judge was not reached, or too few US dollars were left. Where the world's endpoints record their
    replies, the next call asks for what is missing alone. UserError, before anything is paid, if
    two questions have one id.
    """
    tasks = [world.task("all", index) for index in range(world.size("all"))]
    name, count = Counter(map(_case_id, tasks)).most_common(1)[0]
    require(count == 1, f"{world.name}: {count} questions have the id {name!r}; a case has its own")
    rows = list(in_daemons(partial(_answered, world), tasks, parallel))
    whole = [row for row in rows if row]
    write_whole(file, "".join(json.dumps(row) + "\n" for row in whole))
    return len(whole), len(rows) - len(whole)


def _answered(world: QuestionWorld, task: Task) -> Json | None:
    """Returns a task as a case with the answers of its experts; None if one is missing."""
    env, answers = world.environment(task, 0), {}
    for name in [name for name, kind in env.kinds.items() if kind == "expert"]:
        call = env.prepare(ToolCall(name, {}), Allowance())
        result = asyncio.run(call.run())
        if result.infrastructure:
            return None
        try:
            right = 0.0 if result.error else env.score(result.content)
        except EndpointError:  # of the judge
            return None
        answers[name] = [result.content, right, result.cost_usd, result.latency_s]
    return {"id": _case_id(task), "question": task.question, "kind": task.kind, "answers": answers}


def _case_id(task: Task) -> str:
    return task.id.rpartition("/")[0]  # without its place in a split
