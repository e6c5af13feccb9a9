"""The desk: questions whose next step stands in the result of the last one.

"What is the code of order 512? Keep it cheap." The records have a note on order 512. It says the
code, or names another row, a matter that only an expert knows, or two numbers to multiply. Which
words are tables, and which expert knows which matter, is said nowhere: a policy learns it from
rewards. A policy that decides on the prompt alone is right in about a third of the tasks, since the
others need a result as an argument of the next call.

`Desk` is the world: its tasks, and the environment of an attempt. `teach` demonstrates the form of
an attempt for a warm start. Its choices are random, so that nothing of what pays is shown.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.tool import Tool
from nanorchestra.agent.world import Lesson, Split
from nanorchestra.records import Bounds, Preference, Price, Task, ToolCall, ToolResult
from nanorchestra.schemas import Json
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.simulated import SimulatedExpert, Skill
from tools import PythonTool, RecordsTool

TABLES = ["order", "customer", "agent", "book", "author", "flight", "room", "parcel"]
MATTERS = {
    "law": ["trial", "judge", "verdict", "lawyer", "appeal", "statute", "fine", "jury"],
    "medicine": ["patient", "clinic", "fever", "nurse", "doctor", "vaccine", "dose", "ward"],
    "history": ["battle", "king", "treaty", "empire", "castle", "siege", "crown", "armada"],
}
SUBJECT = {word: subject for subject, words in MATTERS.items() for word in words}
FIELDS = ("code", "rank", "age")
SKILLS = {  # the probability that an expert is right, by subject; hidden from the policy
    "ant": {"law": 0.92, "medicine": 0.2, "history": 0.55},
    "bee": {"law": 0.55, "medicine": 0.92, "history": 0.2},
    "cat": {"law": 0.2, "medicine": 0.55, "history": 0.92},
}
EXPERTS = tuple(SKILLS)
UNSURE_IF_RIGHT, UNSURE_IF_WRONG = 0.1, 0.4  # the probability that an expert says it is unsure
PRICES = SECONDS = (3, 40)  # of an expert, in US cents and seconds, log-uniform
STEP = 1  # the US cents and the seconds of the records and of Python
EXPERT_TOKENS = 1000  # of an expert's answer; its price is per call

# Kind of question: share, notes to read, what then follows.
KINDS = {
    "matter": (0.17, (0,), "matter"),
    "product": (0.05, (0,), "product"),
    "value": (0.09, (1,), "value"),
    "chain": (0.15, (2, 3), "value"),
    "chain product": (0.16, (1, 2), "product"),
    "chain matter": (0.38, (1, 2), "matter"),
}
# A user's wish: the weights of outcome, cost and latency, and its words. All are equally frequent.
WISHES = {
    "right": (
        (1.0, 0.0, 0.0),
        ("It must be right.", "Be sure of it.", "No mistakes, please.", "Take your time."),
    ),
    "cheap": (
        (0.4, 0.6, 0.0),
        ("Keep it cheap.", "Money is short.", "Spend little.", "Mind the price."),
    ),
    "fast": (
        (0.4, 0.0, 0.6),
        ("Be quick.", "I am in a hurry.", "I cannot wait.", "As fast as you can."),
    ),
}
# A note that names a row, a matter or a value: the same sentences, so the word alone tells which.
NOTES = (
    "See {}.",
    "It is filed under {}.",
    "Moved to {} last year.",
    "Closed, now {}.",
    "Ask about {}.",
    "We only know {}.",
    "Came with {}.",
    "Kept by {}.",
    "Part of {}, it seems.",
    "Look for {}.",
    "The same as {}.",
    "Handed over to {}.",
)
PRODUCTS = (
    "Price {}, count {}.",
    "{} each, count {}.",
    "Sold at {}, count {}.",
    "Unit price {}, {} pieces.",
)
EVERY_NTH = 7  # a number divisible by it names rows and matters of held-out tasks alone
TERMS = ("cheap", "fast")  # the wishes that mind an expert's price, and its seconds
# The teacher: the weights of looking up and of answering, that of asking an expert being 1.
LOOK_UP, ANSWER = 3.0, 2.0
SIGNS = {"times": "*", "plus": "+"}
MOST_CALLS = 6
LESSONS = 4


@dataclass(frozen=True)
class Desk:
    """The world. Its tasks have no end; it demonstrates them, too."""

    seed: int
    sandbox: Sandbox
    name: ClassVar[str] = "desk"

    def size(self, split: Split) -> None:
        """Returns None: there are tasks without end."""

    def task(self, split: Split, index: int) -> Task:
        """Returns one task; "all" is "held_out"."""
        split = "train" if split == "train" else "held_out"
        rng = random.Random(f"desk/{self.seed}/{split}/{index}")
        kind = rng.choices(list(KINDS), [share for share, *_ in KINDS.values()])[0]
        _, lengths, end = KINDS[kind]
        rows = [(word, draw_id(rng, split)) for word in rng.sample(TABLES, rng.choice(lengths))]

        # What follows the last row, and the answer.
        answer, answers, factors = rng.randint(10, 99), {}, None
        if end == "matter":
            rows.append((rng.choice(list(SUBJECT)), draw_id(rng, split)))
            answers["{} {}".format(*rows[-1])] = answer
        elif end == "value":
            rows.append((rng.choice(FIELDS), answer))
        else:
            factors = rng.randint(11, 99), rng.randint(3, 9)
            answer = math.prod(factors)

        # The note on a row names the next row, and that on the last one the two numbers.
        notes: dict[str, Json] = {}
        for (table, row), (word, number) in zip(rows, rows[1:], strict=False):
            notes[table] = {str(row): {"note": rng.choice(NOTES).format(f"{word} {number}")}}
        if rows and factors:
            table, row = rows[-1]
            notes[table] = {str(row): {"note": rng.choice(PRODUCTS).format(*factors)}}

        asked = (
            "the {} of {} {}".format(rng.choice(FIELDS), *rows[0])
            if rows
            else "{} * {}".format(*factors)
        )
        wish = rng.choice(list(WISHES))
        weights, words = WISHES[wish]
        offers = {name: [log_uniform(rng, PRICES), log_uniform(rng, SECONDS)] for name in EXPERTS}
        most_cents, most_seconds = (
            max(terms) + 4 * STEP for terms in zip(*offers.values(), strict=True)
        )
        return Task(
            f"desk-{split}-{self.seed}-{index}",
            f"What is {asked}?",
            Preference(rng.choice(words), *weights),
            Bounds((0.0, most_cents / 100), (0.0, float(most_seconds))),
            self.name,
            kind,
            {name: name for name in ("records", "python", *EXPERTS)},
            {"answer": str(answer), "notes": notes, "answers": answers, "offers": offers},
        )

    def environment(self, task: Task, seed: int) -> ToolEnvironment:
        """Returns one attempt at a task; `seed` decides what the simulated experts say."""
        data = task.data
        tables = {word: data["notes"].get(word, {}) for word in (*TABLES, *SUBJECT, *FIELDS)}
        terms = f"{STEP:02d}c {STEP:02d}s"
        tools = [
            RecordsTool("records", f"notes, {terms}", tables, STEP / 100, STEP),
            PythonTool("python", f"runs code, {terms}", self.sandbox, STEP / 100, STEP),
            AskTool(data["offers"], data["answers"], f"{task.id}/{seed}"),
        ]
        return ToolEnvironment(
            task, tools, grade=lambda answer: float(answer.strip() == data["answer"])
        )

    def lesson(self, index: int, most_tools: int = 0) -> tuple[ToolEnvironment, list[Lesson]]:
        """Returns an environment, and the turns of the teacher that has acted in it.

        A task is demonstrated LESSONS times in a row, each time with other choices.
        """
        env = self.environment(self.task("train", index // LESSONS), index % LESSONS)
        return env, teach(env, random.Random(f"{self.seed}/teacher/{index}"))


class AskTool(Tool):
    """Asks a simulated expert about a matter such as "trial 388"; it says how sure it is.

    `offers` are the US cents and seconds of each expert, `answers` those of the task's matters. A
    question about anything else gets a wrong answer.
    """

    name, kind, blocking = "ask", "expert", False
    parameters: ClassVar[Json] = {
        "type": "object",
        "properties": {"expert": {"enum": list(EXPERTS)}, "question": {"type": "string"}},
        "required": ["expert", "question"],
    }

    def __init__(self, offers: dict[str, Sequence[int]], answers: dict[str, int], seed: str):
        self.offers, self.answers, self.seed = offers, answers, seed
        terms = [f"{name} {usd:02d}c {seconds:02d}s" for name, (usd, seconds) in offers.items()]
        self.description = f"a simulated expert, {', '.join(terms)}"

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars of the longest answer."""
        return self._expert(**arguments).most_usd({})

    def call(self, arguments: Json) -> ToolResult:
        """Returns "sure: NUMBER" or "unsure: NUMBER"."""
        return replace(self._expert(**arguments).call({}), alias=arguments["expert"])

    def _expert(self, expert: str, question: str) -> SimulatedExpert:
        cents, seconds = self.offers[expert]
        matter = " ".join(question.split())
        known = self.answers.get(matter)
        right = SKILLS[expert][SUBJECT[matter.split()[0]]] if known else 0.0
        return SimulatedExpert(
            expert,
            self.description,
            Skill(right, UNSURE_IF_RIGHT, UNSURE_IF_WRONG),
            str(known),
            tuple(str(number) for number in range(10, 100) if number != known),
            Price(0.0, cents / 100 * 1e6 / EXPERT_TOKENS),
            0,
            EXPERT_TOKENS,
            float(seconds),
            f"{self.seed}/{matter}",
        )


def draw_id(rng: random.Random, split: str) -> int:
    """Returns the number of a row or a matter; train and held-out tasks share none."""
    while True:
        number = rng.randint(100, 999)
        if (number % EVERY_NTH == 0) == (split == "held_out"):
            return number


def log_uniform(rng: random.Random, bounds: tuple[int, int]) -> int:
    """Returns a whole number whose logarithm is uniform between those of the bounds."""
    low, high = map(math.log, bounds)
    return round(math.exp(rng.uniform(low, high)))


def asked(question: str) -> tuple[str, str]:
    """Returns what a question is about: a word and a number, or two numbers to multiply."""
    return re.search(r"(\w+) (?:\* )?(\d+)\?", question).groups()


def named(text: str) -> tuple[str, ...]:
    """Returns what a result names: a word and a number, two numbers to multiply, or a number."""
    numbers, word = re.findall(r"\d+", text), re.search(r"[a-z]+ (?=\d)", text)
    if word and len(numbers) == 1:
        return word[0].strip(), numbers[0]
    return tuple(numbers)


# The teacher.


@dataclass
class Step:
    """What a turn is about, and what was done about it so far.

    `about` has a word and a number ("trial", "388"), two numbers to multiply, or one number.
    `said` is what experts said, by their names. `failed`: the records have no such row. `tried` are
    the choices that were made.
    """

    about: tuple[str, ...]
    said: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    tried: list[str] = field(default_factory=list)

    def choices(self) -> dict[str, float]:
        """Returns the weights of the calls of the right form that were not tried, by name."""
        if len(self.about) < 2:
            weights = {}
        elif self.about[0].isdigit():
            weights = dict.fromkeys(SIGNS, 1.0)
        else:
            weights = {"records": LOOK_UP} | dict.fromkeys(EXPERTS, 1.0)
        return {name: weight for name, weight in weights.items() if name not in self.tried}

    def call(self, choice: str) -> ToolCall:
        """Returns the call of a choice."""
        first, second = self.about
        if choice in SIGNS:
            return ToolCall("python", {"code": f"{first} {SIGNS[choice]} {second}"})
        if choice == "records":
            return ToolCall("records", {"table": first, "id": int(second)})
        return ToolCall("ask", {"expert": choice, "question": f"{first} {second}"})

    def answers(self) -> list[str]:
        """Returns the numbers that may be the answer."""
        said = [text.split()[1] for text in self.said.values()]
        return sorted(set(said or filter(str.isdigit, self.about)))


def teach(env: ToolEnvironment, rng: random.Random) -> list[Lesson]:
    """Returns the turns of one attempt that has the right form and chooses at random."""
    task, lessons = env.task, []
    step = Step(asked(task.question))
    while True:
        weights = step.choices() if len(lessons) < MOST_CALLS else {}
        if lessons:
            weights |= {"answer": ANSWER}
        (choice,) = rng.choices(list(weights), list(weights.values()))
        logprob = math.log(weights[choice] / sum(weights.values()))
        text = thought(task, step, choice)
        if choice == "answer":
            answers = step.answers()
            logprob -= math.log(len(answers))
            return [*lessons, Lesson(text, rng.choice(answers), logprob=logprob)]
        call = step.call(choice)
        result = env.by_name[call.name].call(call.arguments)
        lessons.append(Lesson(text, call=call, result=result, logprob=logprob))
        step = follow(step, choice, result)


def thought(task: Task, step: Step, choice: str) -> str:
    """Returns what the policy writes before it acts: "cheap cat ant. unsure 42. 388 trial ant".

    It is the wish, the experts that were not asked, from the best terms for that wish on, what the
    others said, what the turn is about, and the choice: one word, after the one it depends on.
    """
    wish = task.preference.name
    left = [name for name in EXPERTS if name not in step.said]
    if wish in TERMS:
        left.sort(key=lambda name: task.data["offers"][name][TERMS.index(wish)])
    notes = ["failed"] if step.failed else []
    said = ", ".join(notes + list(step.said.values()))
    about = " ".join([*reversed(step.about), choice])
    return ". ".join(filter(None, [" ".join([wish, *left]), said, about]))


def follow(step: Step, choice: str, result: ToolResult) -> Step:
    """Returns the next step after a call: what the result names, or the same with what was said."""
    text, tried = result.content, [*step.tried, choice]
    if choice in EXPERTS:
        return replace(step, said=step.said | {choice: text.replace(":", "")}, tried=tried)
    if result.error:
        return replace(step, failed=True, tried=tried)
    return Step(named(text))
