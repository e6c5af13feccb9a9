"""The user of a task: scripted, or a language model.

The scripted user opens with its first wish, says who it is when asked, confirms what it is asked to
confirm, says that it does not know what the scenario says it does not know, goes on to its next
wish, and ends when none is left. It says nothing that is not in the scenario.
"""

from __future__ import annotations

import re

from nanorchestra.agent.environment import Tool
from nanorchestra.tools.http import EndpointError
from worlds.toolscale.program import Json

STOP, TRANSFER = SIGNALS = ("###STOP###", "###TRANSFER###")  # tau2's, which end a conversation
PATIENCE = 40  # messages that the scripted user answers
ROLE = """You play a customer who writes to a service agent. Stay in this role, and use nothing \
but this scenario:

{facts}

The conversation so far:

{talk}

Write your next message and nothing else: a short one, in the first person. Say what the scenario \
says when it is needed, a wish at a time. Never invent a fact: what is not in the scenario you do \
not know. When all that you want is done, or cannot be done, write {stop}. When you are handed \
over to a person, write {transfer}."""
_HANDED = re.compile(r"hand(ed|ing)? (you )?over|transferr|human agent|connect(ed|ing)? you")
_CONFIRM = re.compile(
    r"confirm|proceed|go ahead|shall i|should i|would you like me to|do you want me to|\byes\b|"
    r"is (this|that|it) (correct|right|ok)|correct\?|all right\?"
)
_MORE = re.compile(r"anything else|something else|further|what else")
_IDENTITY = re.compile(
    r"\bname|identi|verif|number|\bid\b|zip|birth|security|who (am|are)|details|account"
)
_ME = r"to|for|with|from|of|give|gives|tell|tells|ask|asks|call|calls|help|helps|reach|let|about"
_FIRST_PERSON = (
    (rf"\b({_ME}) you\b", r"\1 me"),
    (r"\b[Yy]ou are\b", "I am"),
    (r"\b[Yy]ou were\b", "I was"),
    (r"\b[Yy]ours\b", "mine"),
    (r"\b[Yy]ourself\b", "myself"),
    (r"\byour\b", "my"),
    (r"\bYour\b", "My"),
    (r"\b[Yy]ou\b", "I"),
)


def ended(message: str) -> bool:
    """Returns whether a message of the user ends the conversation."""
    return any(signal in message for signal in SIGNALS)


def first_person(text: str) -> str:
    """Returns the text as the user says it: "You want your money." is "I want my money."."""
    for pattern, mine in _FIRST_PERSON:
        text = re.sub(pattern, mine, text)
    return text


class ScriptedUser:
    """Plays the scenario of a tau2 task; its answers depend on the messages alone.

    `opening` is its first message.
    """

    def __init__(self, scenario: Json):
        parts = scenario["instructions"]
        self.wishes = []
        wanted = first_person(parts["reason_for_call"])
        for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z\"])", wanted):
            if self.wishes and re.match(r"(If|Should|Unless|Otherwise)\b", sentence):
                self.wishes[-1] += " " + sentence  # a condition is said together with its wish
            else:
                self.wishes.append(sentence)
        self.known = first_person(parts.get("known_info") or "")
        self.unknown = first_person(parts.get("unknown_info") or "")
        self.opening, self.said = self.wishes[0], 1
        self.heard = 0

    def reply(self, message: str) -> str:
        """Returns the answer to a message of the agent."""
        self.heard += 1
        text = message.casefold()
        question = "?" in text or "please" in text
        handed = _HANDED.search(text) and "?" not in text
        if handed or self.heard > PATIENCE:
            return f"Thank you. {TRANSFER}"
        if _MORE.search(text):
            return self._next("No, thank you.")
        if not question:
            return self._next("Thank you, that is all.")
        if _CONFIRM.search(text):
            return "Yes, please."
        numbers = re.findall(r"(?:any|my) ([\w -]+? number)", self.unknown.casefold())
        if any(number in text for number in numbers):
            return f"{self.unknown} {self.known}".strip()
        if self.known and _IDENTITY.search(text):
            return self.known
        return self.wishes[self.said - 1]

    def _next(self, last: str) -> str:
        if self.said >= len(self.wishes):
            return f"{last} {STOP}"
        self.said += 1
        return self.wishes[self.said - 1]


class ModelUser:
    """A language model that plays the scenario.

    It opens as the scripted user does, so that no task waits for a model before it begins.
    """

    def __init__(self, scenario: Json, expert: Tool):
        facts = {"persona": scenario.get("persona")} | scenario["instructions"]
        self.facts = "\n".join(f"{field}: {text}" for field, text in facts.items() if text)
        self.expert, self.talk = expert, [f"You: {ScriptedUser(scenario).opening}"]

    def reply(self, message: str) -> str:
        """Returns the answer to a message of the agent. Raises EndpointError."""
        self.talk.append(f"Agent: {message}")
        talk = "\n".join(self.talk)
        text = ROLE.format(facts=self.facts, talk=talk, stop=STOP, transfer=TRANSFER)
        answer = ask(self.expert, text)
        self.talk.append(f"You: {answer}")
        return answer


def ask(expert: Tool, text: str) -> str:
    """Returns what a language model answers. Raises EndpointError."""
    result = expert.call({"task": text})
    if result.error:
        raise EndpointError(result.content)
    return result.content
