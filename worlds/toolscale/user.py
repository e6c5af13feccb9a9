"""The scripted user of a task.

It opens with its first wish and follows what the agent's messages are about (user.toml): it reveals
the facts that are asked for, confirms what it wants, refuses another operation, record, number or
choice, waits while the agent works, and goes on when a wish is fulfilled, refused or answered. It
says nothing that is not in the scenario.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from nanorchestra.files import read_toml
from worlds.toolscale.domain import Domain, communicated, leaves
from worlds.toolscale.program import Json

STOP, TRANSFER = SIGNALS = ("###STOP###", "###TRANSFER###")  # tau2's, which end a conversation
PATIENCE = 40  # messages that the scripted user answers
TEXTS = read_toml(Path(__file__).with_suffix(".toml"))
WORDS = TEXTS["words"]
SAYS, ABOUT = (
    {
        name: re.sub(r"\{([a-z]+)\}", lambda word: TEXTS["lexicon"][word[1]], pattern)
        for name, pattern in TEXTS[part].items()
    }
    for part in ("says", "about")
)


def ended(message: str) -> bool:
    """Returns whether a message of the user ends the conversation."""
    return any(signal in message for signal in SIGNALS)


def first_person(text: str) -> str:
    """Returns the text as the user says it: "You want your money." is "I want my money."."""
    for pattern, mine in TEXTS["first_person"]:
        text = re.sub(pattern, mine, text)
    return text


class SpokenWish(NamedTuple):
    """A wish as the user says it.

    `actions` are the places of its golden actions, `communicate_info` is what the user wants to be
    told. `first` is what it asks for before it changes its mind, if it does so in the talk.
    """

    say: str
    actions: tuple[int, ...]
    communicate_info: tuple[str, ...]
    first: str = ""

    @property
    def opening(self) -> str:
        """What is said first."""
        return self.first or self.say


def wishes(task: Json) -> list[SpokenWish]:
    """Returns the wishes of a task: [{"say", "actions", "told", "first"?}, ...] in `wishes`.

    Without the field, each sentence of the reason for the call may want any of the golden actions.
    """
    if "wishes" in task:
        given = task["wishes"]
    else:
        criteria, wanted = task["evaluation_criteria"], task["user_scenario"]["instructions"]
        # A condition is said together with its wish.
        parting = rf"(?<=[.!?]) +(?=[A-Z\"])(?!{SAYS['condition'][1:]})"
        every = {"actions": range(len(criteria["actions"])), "told": criteria["communicate_info"]}
        given = [{"say": say} | every for say in re.split(parting, wanted["reason_for_call"])]
    return [
        SpokenWish(
            first_person(w["say"]),
            (*w["actions"],),
            (*w["told"],),
            first_person(w.get("first", "")),
        )
        for w in given
    ]


def spoken(say: str, heard: str) -> bool:
    """Returns whether the user has said this: nearly all of its words."""
    words = set(re.findall(r"\w+", say))
    return len(words & {*re.findall(r"\w+", heard)}) > 0.9 * len(words)


class ScriptedUser:
    """Plays the scenario of a task; its answers depend on the messages and on what is done.

    `at` is the place of the wish that it talks about, `firm` says whether it has made up its mind
    about it.
    """

    def __init__(self, task: Json, domain: Domain):
        parts = task["user_scenario"]["instructions"]
        self.domain, self.actions = domain, task["evaluation_criteria"]["actions"]
        self.wishes = wishes(task)
        self.known = first_person(parts.get("known_info") or "")
        self.unknown = first_person(parts.get("unknown_info") or "")
        clauses = re.split(SAYS["clauses"], self.known.rstrip("."))
        self.facts = [(_pattern(clause), clause) for clause in clauses if clause]
        fields = re.findall(SAYS["unknown"], self.unknown.casefold())
        self.facts += [(_pattern(field), self.unknown) for field in fields]
        self.at, self.heard, self.last, self.firm = 0, [], "", not self.wishes[0].first

    def reply(self, message: str, pending: Collection[int], handed: bool) -> str:
        """Returns the answer to a message of the agent.

        `pending` are the places of the golden writes that have not been made, `handed` says whether
        the agent has handed over.
        """
        self.heard.append(message)
        if handed or len(self.heard) > PATIENCE:
            return f"{WORDS['thanks']} {TRANSFER}"
        self.last = answer = self._answer(message.casefold().replace("\u2019", "'"), pending)
        return answer

    def _answer(self, text, pending) -> str:
        sentences = _sentences(text)
        about = {
            topic
            for topic, pattern in ABOUT.items()
            for sentence in sentences
            if re.search(pattern, sentence)
            if topic in ("more", "wait") or not re.search(r"^if |\?$", sentence)
        }
        wish = self.wishes[self.at]
        left = [place for place in wish.actions if place in pending]
        if "over" in about:
            return f"{WORDS['thanks']} {TRANSFER}"
        asks = [each for each in sentences if _fits("question", each)]
        if facts := self._facts([*asks, *(each for each in sentences if each[-1:] == ":")]):
            return facts
        if not self.firm and (asks or "wait" not in about):
            self.firm = True
            return wish.say
        asks = [each for each in asks if not re.search(ABOUT["more"], each)]
        opened = [each for each in asks if _fits("open", each)]
        proposed = [each for each in asks if each not in opened and _decides(each)]
        if proposed and self._wants(" ".join(sentences), proposed, {*pending}):
            return WORDS["yes"]
        if not opened and ("refuse" in about or "sorry" in about and not asks):
            return self._refused(wish, left)
        if proposed:
            return f"{WORDS['no']} {wish.say}"
        if not asks and ("done" in about or wish.actions and not left):
            return self._next(WORDS["thanks"])
        if "more" in about or "bye" in about:
            repeat = left and self.last != wish.say
            return wish.say if repeat else self._next(WORDS["last"])
        if "wait" in about and not opened:
            return wish.say if self.last == WORDS["wait"] else WORDS["wait"]
        if asks or left:
            return wish.say
        return self._next(WORDS["thanks"])

    def _next(self, last) -> str:
        """Goes on to the next wish, unless only a part of what was asked for has just been told."""
        wish = self.wishes[self.at]
        left = [info for info in wish.communicate_info if not communicated(info, self.heard)]
        if left and any(communicated(info, self.heard[-1:]) for info in wish.communicate_info):
            return wish.say
        if self.at + 1 >= len(self.wishes):
            return f"{last} {STOP}"
        self.at += 1
        self.firm = not self.wishes[self.at].first
        return self.wishes[self.at].opening

    def _refused(self, wish, left) -> str:
        """Says once what the wish names for this case, if that is not done; then goes on."""
        sentences = re.split(r"(?<=[.!?]) +", wish.say)
        otherwise = " ".join(s for s in sentences if _fits("condition", s))
        if left and otherwise and self.last != otherwise:
            return otherwise
        return self._next(WORDS["accept"])

    def _facts(self, asks) -> str:
        """The facts that the sentences ask for; "" if none."""
        answers = []
        for sentence in asks:
            if not _fits("proposes", sentence) or _fits("open", sentence):
                facts = [fact for pattern, fact in self.facts if re.search(pattern, sentence)]
                if not facts and _fits("identity", sentence):
                    return self.known
                answers += facts
        sentences = []
        for fact in dict.fromkeys(answers):
            sentences.append(fact[:1].upper() + fact[1:].rstrip(".") + ".")
        return " ".join(sentences)

    def _wants(self, text, proposed, pending) -> bool:
        """Returns whether the agent proposes what the user has asked for and is not done."""
        asked = [w for w in self.wishes[: self.at] if pending & {*w.actions}]
        asked.append(self.wishes[self.at])
        say = " ".join(wish.say for wish in asked).casefold()
        if _fits("handover", " ".join(proposed)):
            return _fits("person", say)
        actions = [self.actions[place] for wish in asked for place in wish.actions]
        left = [each["name"] for each in actions if self.actions.index(each) in pending]
        tools = " ".join(left).replace("_", " ")
        text, *proposed = (re.sub(SAYS["charges"], "", each) for each in (text, *proposed))
        source = f"{say} {tools}" if not tools or _fits("unless", say) else tools
        named, wanted = (
            {name for name, pattern in TEXTS["operations"].items() if re.search(pattern, each)}
            for each in (text, source)
        )
        if named and wanted and not named & wanted:
            return False
        own = self._names([value for each in actions for value in each["arguments"].values()])
        for texts in self.domain.columns.values():
            others = [other for other in texts - own if other not in say] if own & texts else ()
            for part in (text, *proposed):
                if _holds(part, others) and not _holds(part, own & texts):
                    return False
        if not _fits("record", text) and _miscounts(say, text):
            return False
        words = set(re.findall(r"[a-z]{4,}", re.sub(SAYS["generic"], "", text)))
        known = " ".join([say, self.known.casefold(), tools, *own])
        return len(words) < 2 or any(re.search(rf"\b{word[:5]}", known) for word in words)

    def _names(self, values) -> set[str]:
        """The texts among the values, and the names in the records that they lead to."""
        own = reached = {value for value in values if isinstance(value, str)}
        tables = [rows for rows in self.domain.tables.values() if isinstance(rows, dict)]
        for _ in range(2):  # a booking, and its train
            for rows in tables:
                rows = [rows[key] for key in reached & rows.keys()]
                texts = (text for row in rows for _, text in leaves(row) if isinstance(text, str))
                reached = reached.union(texts)
        return {text.casefold() for text in own | {text for text in reached if " " in text}}


def _fits(name, text) -> bool:
    """True if the pattern of user.toml is found in the text."""
    return bool(re.search(SAYS[name], text))


def _sentences(text) -> list[str]:
    """The sentences of a message; the items of a list belong to the one that leads to them."""
    text = re.sub(r"\n+\s*([-\u2022*]|\d+[.)]) +", "; ", re.sub(r"\*\*", "", text))
    return [each.strip("; ") for each in re.split(r"(?<=[.!?])[\s;]+|\n+", text)]


def _decides(sentence) -> bool:
    """True if the sentence wants a yes or a no."""
    asks = "?" in sentence and not _fits("request", sentence)
    return asks or _fits("proposes", sentence) or _fits("consents", sentence)


def _miscounts(say, text) -> bool:
    """True if what is counted has another number in the text, and the right one is not there."""
    return any(
        re.search(rf"\b\d+ {unit}s?\b|\b{unit}s?: .*\d", text)
        and number not in re.findall(r"\d+", text)
        for number, unit in re.findall(SAYS["counts"], re.sub(SAYS["limits"], "", say))
    )


def _pattern(field) -> str:
    """The pattern of a question about a fact."""
    *facts, number = TEXTS["facts"].values()
    if _fits("name", field):
        return facts[0]
    field = field.casefold()
    if named := [pattern for pattern in facts if re.search(pattern, field)]:
        return named[0]
    words = "|".join(re.findall(SAYS["words of facts"], field)) or "(?!)"
    if re.search(rf"{number}|[a-z]\d", field):
        near = r"\W+(\w+\W+){0,2}?"
        return rf"\b({words})\w*{near}({number})|({number}){near}({words})"
    return words


def _holds(text, words) -> bool:
    return any(communicated(word, [text]) for word in words if word in text)
