"""What the orchestrator practises on: the world of the miniature, and demonstrations for its warm start.

The real problem in small. A task offers a random subset of tools under names, prices and latencies that change from task to task and
stand in the prompt; the user says in words what matters (right, cheap, fast, a balance; a tool to avoid), and the same preference
stands as weights in the reward. Some questions need a lookup, some a calculation, some a chain of records, and some only an expert
can answer. Experts are simulated: their skill by subject and difficulty (SKILLS below) is hidden from the policy, which must learn it.

Nothing is drawn from anywhere but `split`, `index` and `seed`. Train and held-out tasks share no fact, number, price or phrasing.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterator, Sequence

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.model import chat
from nanorchestra.records import Preference, Price, Task, ToolCall, ToolResult
from nanorchestra.tools.index import Index
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.lessons import Lesson
from tools import LookupTool, PythonTool, RecordsTool, SimulatedExpert, Skill

CORPUS = Path(__file__).resolve().parents[2] / "assets" / "nano" / "corpus.jsonl"
SUBJECTS = ("law", "medicine", "history")
KINDS = {"knowledge": 0.54, "arithmetic": 0.16, "lookup": 0.16, "chain": 0.14}
LESSONS = {
    "knowledge": 0.28,
    "arithmetic": 0.22,
    "lookup": 0.30,
    "chain": 0.20,
}  # of the demonstrations: copying arguments is what takes longest
EXPERT_NAMES = (
    "orion",
    "vega",
    "lyra",
    "atlas",
    "rigel",
    "castor",
    "draco",
    "hydra",
    "mira",
    "nova",
    "altair",
    "deneb",
    "juno",
    "ceres",
    "pallas",
    "titan",
    "io",
    "luna",
    "sol",
    "terra",
)
TOOL_NAMES = {
    "code": ("calc", "compute", "run", "python"),
    "search": ("search", "lookup", "find", "wiki"),
    "records": ("records", "db", "fetch", "table"),
}

# P(right) on an easy and on a hard question, by who is asked and about what. Names promise more than they keep, as they do in life: the
# large model is weak at medicine and the medium one strong, the small one knows its history, the history specialist does not.
SKILLS: dict[str, dict[str, tuple[float, float]]] = {
    "large": {
        "law": (0.97, 0.94),
        "medicine": (0.70, 0.25),
        "history": (0.95, 0.85),
        "arithmetic": (0.97, 0.70),
        "lookup": (0.97, 0.75),
        "chain": (0.05, 0.05),
    },
    "medium": {
        "law": (0.65, 0.40),
        "medicine": (0.97, 0.94),
        "history": (0.65, 0.35),
        "arithmetic": (0.95, 0.30),
        "lookup": (0.92, 0.40),
        "chain": (0.05, 0.05),
    },
    "small": {
        "law": (0.80, 0.55),
        "medicine": (0.55, 0.35),
        "history": (0.95, 0.85),
        "arithmetic": (0.90, 0.20),
        "lookup": (0.88, 0.15),
        "chain": (0.05, 0.05),
    },
    "law": {
        "law": (0.97, 0.95),
        "medicine": (0.30, 0.10),
        "history": (0.40, 0.20),
        "arithmetic": (0.60, 0.05),
        "lookup": (0.45, 0.10),
        "chain": (0.05, 0.05),
    },
    "medicine": {
        "law": (0.30, 0.10),
        "medicine": (0.90, 0.25),
        "history": (0.30, 0.10),
        "arithmetic": (0.70, 0.10),
        "lookup": (0.70, 0.20),
        "chain": (0.05, 0.05),
    },
    "history": {
        "law": (0.92, 0.85),
        "medicine": (0.30, 0.10),
        "history": (0.30, 0.10),
        "arithmetic": (0.50, 0.05),
        "lookup": (0.60, 0.30),
        "chain": (0.05, 0.05),
    },
}
# P(says "unsure") when right and when wrong. The small model does not know what it does not know, and specialists are proud.
CANDOUR = {
    "large": (0.05, 0.35),
    "medium": (0.08, 0.85),
    "small": (0.05, 0.15),
    "law": (0.03, 0.35),
    "medicine": (0.03, 0.40),
    "history": (0.03, 0.25),
}
# Prices per million tokens (experts) or per thousand calls (tools), in US cents, or, with the probability that stands last, in whole
# dollars; how long an answer takes, in seconds or in whole minutes. Drawn log-uniformly. Whoever reads the unit knows what is dear or slow.
PRICES = {
    "large": ((20, 99), (2, 9), 0.5),
    "medium": ((20, 99), (2, 9), 0.4),
    "small": ((10, 60), (2, 9), 0.3),
    "specialist": ((20, 99), (2, 9), 0.4),
    "code": ((10, 99), (2, 9), 0.25),
    "search": ((10, 99), (2, 9), 0.25),
    "records": ((10, 60), (2, 9), 0.0),
}
LATENCIES = {
    "large": ((2, 9), (1, 3), 0.5),
    "medium": ((2, 9), (1, 3), 0.4),
    "small": ((1, 6), (1, 3), 0.3),
    "specialist": ((2, 9), (1, 3), 0.4),
    "code": ((1, 5), (1, 3), 0.25),
    "search": ((1, 5), (1, 3), 0.25),
    "records": ((1, 4), (1, 3), 0.0),
}
DEAR, SLOW = 100, 60  # cents and seconds from which a thought says so
EXPERT_TOKENS = {"easy": (200, 500), "hard": (250, 1300)}  # input, mean output

# Name -> (share of the tasks, weights of outcome, cost and latency). Chosen so that always asking the strongest and always asking the
# cheapest expert earn about the same: where one blind choice is clearly best, a policy settles on it and never learns to read the wish.
PREFERENCES = {
    "right": (0.24, (1.0, 0.0, 0.0)),
    "cheap": (0.38, (0.5, 1.0, 0.0)),
    "fast": (0.16, (0.5, 0.0, 1.0)),
    "balanced": (0.22, (0.7, 0.7, 0.7)),
}
AVOID_SHARE = 0.45  # of the tasks in which the user forbids a tool
PHRASES = {
    "train": {
        "right": (
            "Be right at any price.",
            "Only the right answer counts.",
            "Cost and time do not matter, be right.",
            "Accuracy first, whatever the price.",
            "I need the right answer, whatever the cost.",
            "Be right.",
            "Take your time and be right.",
            "Spend what you need, but be right.",
            "Whatever it costs, I want accuracy.",
            "The right answer matters, not the time.",
            "Accuracy is all I want.",
        ),
        "cheap": (
            "Be cheap.",
            "Keep the cost low.",
            "Spend little.",
            "Save money, please.",
            "I want it cheap: keep the cost down.",
            "Take your time, but be cheap.",
            "Cheap matters, not the time.",
            "It must be cheap.",
            "Spend as little as you can.",
            "Low cost is all I want.",
            "Save my money: be cheap.",
        ),
        "fast": (
            "Be fast.",
            "Be quick.",
            "I am in a hurry.",
            "Answer soon, please.",
            "I want it fast: be quick.",
            "Fast matters, not the cost.",
            "Whatever it costs, be fast.",
            "It must be quick.",
            "Answer as fast as you can.",
            "Time is all I mind: be quick.",
            "I am in a hurry: be fast, please.",
        ),
        "balanced": (
            "Mind cost and time.",
            "Balance accuracy, cost and time.",
            "Mind the cost and the time.",
            "A fair balance, please.",
            "Find a balance.",
            "I want a balance of cost and time.",
            "Mind both, time and cost.",
            "Please balance it all.",
            "A balance is all I want.",
        ),
        "avoid": (
            "Do not use {}.",
            "Avoid {}.",
            "Never call {}.",
            "I do not want {} to be used.",
            "Do not ask {}.",
            "Leave {} out.",
            "No {}, please.",
            "Please do not use {}.",
            "Please never ask {}.",
            "I want to avoid {}.",
            "You must not call {}.",
            "Never ask {}, please.",
            "Do not ever call {}.",
            "Please leave {} alone.",
            "Use no {}.",
            "I never use {}.",
            "You may not use {}.",
            "Stay away from {}.",
            "Please avoid {}.",
            "Avoid asking {}, please.",
        ),
    },
    "held_out": {
        "right": (
            "Whatever the cost, be right.",
            "Be right, only accuracy counts.",
            "I want the right answer.",
        ),
        "cheap": (
            "Keep it cheap, please.",
            "Save money: spend little.",
            "Be cheap, keep the cost low.",
        ),
        "fast": ("Be quick, I am in a hurry.", "Be fast, please.", "Answer fast: I am in a hurry."),
        "balanced": ("A balance, please: mind cost and time.", "Balance cost, time and accuracy."),
        "avoid": ("Do not call {}.", "Never use {}.", "You must not ask {}, please."),
    },
}
QUESTIONS = {
    "train": {
        "knowledge": (
            "{subject} case {n} is {difficulty}: what is its code?",
            "what is the code of the {difficulty} {subject} case {n}?",
            "give the code of {subject} case {n}, a {difficulty} one.",
            "{difficulty} {subject} case {n}: what is the code?",
            "what is given as the code of {subject} case {n}? it is {difficulty}.",
            "for the {difficulty} {subject} case {n}, what is the code?",
            "the code of {subject} case {n}, please: it is a {difficulty} one.",
            "I want the code of {difficulty} {subject} case {n}.",
            "{subject} case {n}, {difficulty}: give its code.",
            "this is a {difficulty} case of {subject}, {n}: give its code.",
        ),
        "arithmetic": (
            "what is the value of {expression}?",
            "give the value of {expression}.",
            "the value of {expression}, please.",
            "compute the value of {expression}.",
            "I want the value of {expression}.",
        ),
        "lookup": (
            "what is the {relation} of {subject}?",
            "give the {relation} of {subject}.",
            "what is given as the {relation} of {subject}?",
            "the {relation} of {subject}, please.",
            "I want the {relation} of {subject}.",
        ),
        "chain": (
            "what is the {field} of the {path} {table} {n}?",
            "give the {field} of the {path} {table} {n}.",
            "the {field} of the {path} {table} {n}, please.",
            "{path} {table} {n}: what is the {field}?",
            "the {path} {table} {n}: what {field}?",
        ),
    },
    "held_out": {
        "knowledge": (
            "{difficulty} {subject} case {n}: give its code.",
            "what code is given for {subject} case {n}? it is a {difficulty} one.",
        ),
        "arithmetic": (
            "the value of {expression}, what is it?",
            "give me this: the value of {expression}.",
        ),
        "lookup": (
            "the {relation} of {subject}, what is it?",
            "give me this: the {relation} of {subject}.",
        ),
        "chain": ("{path} {table} {n}: give the {field}.",),
    },
}
CHAINS = (("order", "customer", "agent"), ("book", "author", "editor"), ("flight", "pilot", "base"))
FITS = {
    "arithmetic": "code",
    "lookup": "search",
    "chain": "records",
}  # which tool solves which kind of question
FIELDS = ("age", "code", "rank")
ASKED = ("element", "country")  # subjects of the corpus, by number, that questions are about
WELL_KNOWN = ("period",)  # relations that experts are good at: easy look-ups
_TRAIN, _HELD = "train", "held_out"


def _belongs(number: int, split: str) -> bool:
    """Splits the integers: about a fifth of them, scattered (2, 7, 14, 19, 21, ...), are held out."""
    return (number * 2654435761 % 2**32 // 2**16 % 5 == 0) == (split == _HELD)


def _draw(rng: random.Random, low: int, high: int, split: str) -> int:
    while not _belongs(n := rng.randint(low, high), split):
        pass
    return n


def _log_draw(
    rng: random.Random,
    ranges: tuple[tuple[int, int], tuple[int, int], float],
    unit: int,
    split: str | None,
) -> int:
    """A whole number of the first range or, with the probability given, of the second times `unit`: of this split's numbers (None: any)."""
    usual, high, share = ranges
    (low, high), unit = (high, unit) if rng.random() < share else (usual, 1)
    while not (n := round(low * (high / low) ** rng.random())) or split and not _belongs(n, split):
        pass
    return n * unit


@lru_cache(maxsize=1)
def corpus() -> tuple[tuple[dict[str, str], ...], Index]:
    """The bundled facts and the index over their texts."""
    facts = tuple(json.loads(line) for line in CORPUS.read_text().splitlines())
    return facts, Index.build([fact["text"] for fact in facts])


@lru_cache(maxsize=2)
def _facts(split: str) -> tuple[dict[str, str], ...]:
    """What is asked in a split; the rest of the corpus is there to be confused with."""
    asked = [fact for fact in corpus()[0] if fact["subject"].split()[0] in ASKED]
    return tuple(fact for i, fact in enumerate(asked) if _belongs(i, split))


@dataclass(frozen=True)
class World:
    """The miniature's tasks. `task(split, index)` is a pure function of its arguments and `seed`."""

    seed: int = 0
    avoid_share: float = AVOID_SHARE  # of the train tasks
    avoid_favourite: float = (
        0.0  # of these bans, that they hit the very tool that common sense would choose
    )
    lessons: bool = False  # true: the mixture of kinds for demonstrations
    most_tools: int = 0  # on offer; 0: no limit

    def tasks(self, split: str, count: int, start: int = 0) -> list[Task]:
        return [self.task(split, i) for i in range(start, start + count)]

    def task(self, split: str, index: int) -> Task:
        rng = random.Random(f"{self.seed}/{split}/{index}")
        kinds = LESSONS if self.lessons else KINDS
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        difficulty = rng.choice(("easy", "hard"))
        words, subject, answer, tables, solution = getattr(self, f"_{kind}")(rng, split, difficulty)
        tools = self._offer(rng, split, kind, subject)
        preference = self._preference(rng, split, tools, kind, subject)
        wrong = [str(n) for n in rng.sample(range(1, 1000), 9) if str(n) != answer][:8]
        data = {
            "kind": kind,
            "subject": subject,
            "difficulty": difficulty,
            "answer": answer,
            "wrong": wrong,
            "tools": tools,
            "tables": tables,
            "solution": solution,
        }
        return Task(f"{split}-{self.seed}-{index}", words, preference, data)

    # Each kind: the question in words, its subject, the answer, the tables, and what to give the tool that solves it.

    def _knowledge(self, rng, split, difficulty):
        subject, n = rng.choice(SUBJECTS), _draw(rng, 100, 999, split)
        words = rng.choice(QUESTIONS[split]["knowledge"]).format(
            subject=subject, difficulty=difficulty, n=n
        )
        return words, subject, str(_draw(rng, 10, 99, split)), {}, None

    def _arithmetic(self, rng, split, difficulty):
        if difficulty == "easy":
            expression = (
                f"{_draw(rng, 10, 99, split)} {rng.choice('+-')} {_draw(rng, 10, 99, split)}"
            )
        else:
            expression = f"{_draw(rng, 100, 999, split)} * {_draw(rng, 3, 9, split)}"
        return (
            rng.choice(QUESTIONS[split]["arithmetic"]).format(expression=expression),
            "arithmetic",
            str(eval(expression)),
            {},
            expression,
        )  # our own digits

    def _lookup(self, rng, split, difficulty):
        fact = rng.choice(
            [f for f in _facts(split) if (f["relation"] in WELL_KNOWN) == (difficulty == "easy")]
        )
        words = rng.choice(QUESTIONS[split]["lookup"]).format(
            relation=fact["relation"], subject=fact["subject"]
        )
        return words, "lookup", fact["value"], {}, f"{fact['relation']} of {fact['subject']}"

    def _chain(self, rng, split, difficulty):
        names = rng.choice(CHAINS)[: 2 if difficulty == "easy" else 3]
        field = rng.choice(FIELDS)
        ids = [_draw(rng, 100, 999, split) for _ in names]
        answer = str(_draw(rng, 10, 99, split))
        tables: dict[str, dict[str, Any]] = {name: {} for name in names}
        for i, name in enumerate(names):
            for key in {ids[i], *(_draw(rng, 100, 999, split) for _ in range(2))}:
                last, on_path = i == len(names) - 1, key == ids[i]
                value = (
                    (int(answer) if on_path else rng.randint(10, 99))
                    if last
                    else (ids[i + 1] if on_path else rng.randint(100, 999))
                )
                tables[name][str(key)] = {field: value} if last else {names[i + 1]: value}
        path = " of the ".join(reversed(names[1:])) + " of"
        words = rng.choice(QUESTIONS[split]["chain"]).format(
            field=field, path=path, table=names[0], n=ids[0]
        )
        return words, "chain", answer, tables, [names[0], ids[0]]

    def _offer(self, rng, split, kind, subject) -> list[dict[str, Any]]:
        """The large and the small model, often a third expert; the tool that fits the question four times out of five (records
        always), and now and then one that does not."""
        experts = ["large", "small"]
        if rng.random() < 0.7:
            specialist = kind == "knowledge" and rng.random() < 0.6 or rng.random() < 0.2
            experts.append(
                "medium"
                if not specialist
                else subject
                if kind == "knowledge" and rng.random() < 0.8
                else rng.choice(SUBJECTS)
            )
        fitting = FITS.get(kind)
        others = [
            t for t in ("code", "search") if rng.random() < (0.8 if t == fitting else 0.1)
        ] + (["records"] if fitting == "records" else [])
        names = rng.sample(EXPERT_NAMES, len(experts))
        offered = []
        for what, name in [*zip(experts, names), *((t, rng.choice(TOOL_NAMES[t])) for t in others)]:
            family = "specialist" if what in SUBJECTS else what
            offered.append(
                {
                    "name": name,
                    "what": what,
                    "price": _log_draw(rng, PRICES[family], 100, split),
                    "latency": _log_draw(rng, LATENCIES[family], 60, None),
                }
            )
        if self.most_tools:
            offered = sorted(offered, key=lambda t: t["what"] != fitting)[
                : self.most_tools
            ]  # experts stand before tools
        rng.shuffle(offered)
        return offered

    def _preference(self, rng, split, tools, kind, subject) -> Preference:
        name = rng.choices(list(PREFERENCES), [share for share, _ in PREFERENCES.values()])[0]
        outcome, cost, latency = PREFERENCES[name][1]
        sentences, weights = [rng.choice(PHRASES[split][name])], {}
        dispensable = [t for t in tools if t["what"] != "records"]
        if dispensable and rng.random() < (self.avoid_share if split == _TRAIN else AVOID_SHARE):
            avoided = rng.choice(dispensable)
            if split == _TRAIN and self.avoid_favourite and rng.random() < self.avoid_favourite:
                avoided = common_sense(
                    Task(
                        "",
                        "",
                        Preference("", outcome, cost, latency),
                        {"kind": kind, "subject": subject},
                    ),
                    dispensable,
                    rng,
                )
            sentences.insert(
                rng.randrange(2), rng.choice(PHRASES[split]["avoid"]).format(title(avoided))
            )
            weights[avoided["name"]] = -(outcome + cost + latency)
        return Preference(" ".join(sentences), outcome, cost, latency, weights)


def preference_name(preference: Preference) -> str:
    """Which of PREFERENCES this is."""
    return next(
        name
        for name, (_, weights) in PREFERENCES.items()
        if weights == (preference.outcome, preference.cost, preference.latency)
    )


def skill(what: str, subject: str, difficulty: str) -> Skill:
    """The hidden skill of the expert `what` ("large", ..., or a specialist's subject) at a question."""
    return Skill(SKILLS[what][subject][difficulty == "hard"], *CANDOUR[what])


def is_expert(offered: dict[str, Any]) -> bool:
    return offered["what"] not in TOOL_NAMES


def expected_cost(offered: dict[str, Any], difficulty: str) -> float:
    """US dollars that one call is expected to cost."""
    return (
        offered["price"]
        / 100
        * (sum(EXPERT_TOKENS[difficulty]) / 1e6 if is_expert(offered) else 1e-3)
    )


def title(offered: dict[str, Any]) -> str:
    """What users and thoughts call it: "medium vega"."""
    return f"{offered['what']} {offered['name']}"


def describe(offered: dict[str, Any]) -> str:
    """What stands in the prompt: "8s expert medium vega 85c/M", a price per million tokens; tools charge per thousand calls, "2min tool code run
    $3/k". The kind is written as in a thought, and its unit of time and of money stand at fixed distances, for a small model to find."""
    price, latency = offered["price"], offered["latency"]
    money = f"{price}c" if price < DEAR else f"${price // 100}"
    duration = f"{latency}s" if latency < SLOW else f"{latency // 60}min"
    return (
        f"{duration} expert {title(offered)} {money}/M"
        if is_expert(offered)
        else f"{duration} tool {title(offered)} {money}/k"
    )


def environment(task: Task, seed: int, sandbox: Sandbox) -> ToolEnvironment:
    """One attempt at a task of the miniature; `seed` decides what the simulated experts say."""
    data, tools = task.data, []
    for offered in data["tools"]:
        name, text, usd, seconds = (
            offered["name"],
            describe(offered),
            offered["price"] / 1e5,
            float(offered["latency"]),
        )
        if offered["what"] == "code":
            tools.append(PythonTool(name, text, sandbox, usd, seconds))
        elif offered["what"] == "search":
            tools.append(LookupTool(name, text, corpus()[1], usd, seconds))
        elif offered["what"] == "records":
            tools.append(RecordsTool(name, text, data["tables"], usd, seconds))
        else:
            tokens = EXPERT_TOKENS[data["difficulty"]]
            tools.append(
                SimulatedExpert(
                    name,
                    text,
                    skill(offered["what"], data["subject"], data["difficulty"]),
                    data["answer"],
                    tuple(data["wrong"]),
                    Price(offered["price"] / 100, offered["price"] / 100),
                    *tokens,
                    seconds,
                    seed=f"{task.id}/{seed}",
                )
            )
    return ToolEnvironment(
        task, tools, grade=lambda answer: float(normalise(answer) == normalise(data["answer"]))
    )


def normalise(answer: str) -> str:
    """An answer without case, thousands separators, surrounding space and a final full stop."""
    return answer.strip().rstrip(".").replace(",", "").casefold()


# Demonstrations: a teacher that weighs what the prompt says and chooses carelessly.


def objections(task: Task, offered: dict[str, Any], asked: Sequence[str] = ()) -> list[str]:
    """What speaks against a tool: dear or slow, if it is an expert and the wish minds (the tool made for a question is worth its price);
    banned; asked already (its name is in `asked`)."""
    wish, expert = task.preference, is_expert(offered)
    reasons = {
        "dear": expert and wish.cost > 0 and offered["price"] >= DEAR,
        "slow": expert and wish.latency > 0 and offered["latency"] >= SLOW,
        "banned": offered["name"] in wish.avoided,
        "asked": offered["name"] in asked,
    }
    return [reason for reason, holds in reasons.items() if holds]


def consider(task: Task, asked: Sequence[str] = ()) -> str:
    """What decides a choice, said right before it: the kind of question, the wish, what to avoid; the tools by kind, each with what speaks
    against it; and which are left: those that nothing speaks against, or else those that are dear or slow at worst."""
    data, wish = task.data, task.preference
    topic = (
        f"{data['difficulty']} {data['subject']}" if data["kind"] == "knowledge" else data["kind"]
    )
    avoided = "".join(f", avoid {t['what']}" for t in data["tools"] if t["name"] in wish.avoided)
    against = {t["what"]: objections(task, t, asked) for t in data["tools"]}
    listed = ", ".join(" ".join([what, *reasons]) for what, reasons in against.items())
    left = [what for what, reasons in against.items() if not reasons] or [
        what for what, reasons in against.items() if set(reasons) <= {"dear", "slow"}
    ]
    return f"{topic}. {preference_name(wish)}{avoided}. {listed}. left {' '.join(left) or 'none'}"


def find(task: Task, offered: dict[str, Any]) -> str:
    """The choice by kind, then the kinds in the order of the prompt as far as that one, with its name: "Small: large, medium, small io"."""
    tools = task.data["tools"]
    return f"{offered['what'].capitalize()}: " + ", ".join(
        [t["what"] for t in tools[: tools.index(offered)]] + [title(offered)]
    )


def calls_for(task: Task, offered: dict[str, Any], key: tuple[str, int] | None = None) -> ToolCall:
    """A call of `offered` with arguments that fit the question; `key` is the (table, id) to read next in a chain."""
    data, what = task.data, offered["what"]
    if what == "code":
        return ToolCall(
            offered["name"], {"code": data["solution"] if data["kind"] == "arithmetic" else "0"}
        )
    if what == "search":
        return ToolCall(
            offered["name"],
            {"query": data["solution"] if data["kind"] == "lookup" else data["subject"]},
        )
    if what == "records":
        table, row = key or data["solution"]
        return ToolCall(offered["name"], {"table": table, "id": row})
    return ToolCall(offered["name"], {})


def read_result(
    task: Task, offered: dict[str, Any], result: ToolResult
) -> tuple[str, str | None, bool, tuple[str, int] | None]:
    """What an observation says: (thought, answer or None, sure, next (table, id) of a chain or None)."""
    text = result.content
    if result.error:
        return "failed", None, False, None
    if offered["what"] == "records":
        ((name, value),) = json.loads(text).items()
        return (
            f"{name} {value}",
            (None if name in task.data["tables"] else str(value)),
            True,
            ((name, value) if name in task.data["tables"] else None),
        )
    if offered["what"] == "search":
        fact = next((f for f in corpus()[0] if f["text"] == text), None)
        right = (
            fact is not None and task.data["solution"] == f"{fact['relation']} of {fact['subject']}"
        )
        return (
            (f"found {fact['value']}", fact["value"], True, None)
            if right
            else ("failed", None, False, None)
        )
    if offered["what"] == "code":
        return f"value {text}", text, task.data["kind"] == "arithmetic", None
    confidence, value = text.split(": ")
    return f"{confidence} {value}", value, confidence == "sure", None


def common_sense(
    task: Task, options: list[dict[str, Any]], rng: random.Random, heeds: bool = True
) -> dict[str, Any]:
    """What anybody would choose who can read, among the tools that nothing speaks against (a ban only if it `heeds` bans): the tool made for
    such questions; else who is to be right at any price takes the specialist or the biggest name, and who is not takes any of them."""
    options = [
        t for t in options if not set(objections(task, t)) - (set() if heeds else {"banned"})
    ] or options
    fitting = [t for t in options if t["what"] == FITS.get(task.data["kind"])]
    if fitting:
        return fitting[0]
    if preference_name(task.preference) == "right":
        return max(
            options,
            key=lambda t: (
                t["what"] == task.data["subject"],
                t["what"] == "large",
                t["what"] == "medium",
            ),
        )
    return rng.choice(options)


def teach(
    env: ToolEnvironment,
    seed: int,
    *,
    sensible: float = 0.8,
    heedful: float = 0.7,
    quits: float = 0.15,
    turns: int = 6,
) -> list[Lesson]:
    """The teacher's attempt at a task, acted out in its environment so that what it reads is what the policy will read.

    A sloppy teacher, as a language model is before it is trained for this: each choice is `common_sense` with probability `sensible`,
    and else any usable tool. What is forbidden it leaves alone with probability `heedful`, and else notes but does not mind. With
    probability `quits` it gives up without asking anybody. It takes an unsure answer half of the time, and checks a sure one three times in ten.
    """
    task, lessons = env.task, []
    rng = random.Random(f"teacher/{task.id}/{seed}")
    usable = [
        t
        for t in task.data["tools"]
        if is_expert(t) or t["what"] == FITS.get(task.data["kind"]) or rng.random() < 0.2
    ]
    heeds = rng.random() < heedful
    if heeds:
        usable = [t for t in usable if t["name"] not in task.preference.avoided] or usable
    if rng.random() < quits:
        return [Lesson(f"{consider(task)}. Quit", "unknown")]
    said, key, value, offered, left = [], None, "0", None, list(usable)
    for _ in range(turns - 1):
        if key is None:
            said.append(consider(task, [t["name"] for t in usable if t not in left]))
            offered = (
                common_sense(task, left, rng, heeds)
                if rng.random() < sensible
                else rng.choice(left)
            )
            left.remove(offered)
        call = calls_for(task, offered, key)
        result = env.by_name[offered["name"]].call(call.arguments)
        lessons.append(Lesson(". ".join([*said, find(task, offered)]), call=call, result=result))
        thought, answer, sure, key = read_result(task, offered, result)
        said, value = [thought], answer or value
        if key is None and (
            not left or answer is not None and rng.random() < (0.7 if sure else 0.5)
        ):
            break
    return lessons + [Lesson(said[0], value)]


def texts(world: World, count: int, sandbox: Sandbox, **habits: float) -> Iterator[str]:
    """Demonstrations on `count` train tasks as text, and the corpus: what the tokenizer is trained on."""
    yield from (fact["text"] for fact in corpus()[0])
    for task in world.tasks(_TRAIN, count):
        env = environment(task, 0, sandbox)
        messages = list(env.messages)
        for lesson in teach(env, 0, **habits):
            calls = (
                [
                    {
                        "type": "function",
                        "function": {"name": lesson.call.name, "arguments": lesson.call.arguments},
                    }
                ]
                if lesson.call
                else None
            )
            messages.append(
                {
                    "role": "assistant",
                    "content": lesson.content,
                    "reasoning_content": lesson.thought,
                    "tool_calls": calls,
                }
            )
            if lesson.result:
                messages.append({"role": "tool", "content": lesson.result.content})
        yield chat.render(messages, env.tools, add_generation_prompt=False)
