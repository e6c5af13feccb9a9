"""The user of a task: scripted, or a language model.

The scripted user opens with its first wish, says who it is when asked, confirms what it is asked to
confirm, says that it does not know what the scenario says it does not know, goes on to its next
wish, and ends when none is left. It says nothing that is not in the scenario.
"""

from __future__ import annotations

import re
from pathlib import Path

from nanorchestra.agent.environment import Tool
from nanorchestra.files import read_toml
from nanorchestra.tools.http import EndpointError
from worlds.toolscale.program import Json

STOP, TRANSFER = SIGNALS = ("###STOP###", "###TRANSFER###")  # tau2's, which end a conversation
PATIENCE = 40  # messages that the scripted user answers
TEXTS = read_toml(Path(__file__).with_suffix(".toml"))


def ended(message: str) -> bool:
    """Returns whether a message of the user ends the conversation."""
    return any(signal in message for signal in SIGNALS)


def first_person(text: str) -> str:
    """Returns the text as the user says it: "You want your money." is "I want my money."."""
    for pattern, mine in TEXTS["first_person"]:
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
        handed = re.search(TEXTS["handed"], text) and "?" not in text
        if handed or self.heard > PATIENCE:
            return f"Thank you. {TRANSFER}"
        if re.search(TEXTS["more"], text):
            return self._next("No, thank you.")
        if not question:
            return self._next("Thank you, that is all.")
        if re.search(TEXTS["confirm"], text):
            return "Yes, please."
        numbers = re.findall(r"(?:any|my) ([\w -]+? number)", self.unknown.casefold())
        if any(number in text for number in numbers):
            return f"{self.unknown} {self.known}".strip()
        if self.known and re.search(TEXTS["identity"], text):
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
        text = TEXTS["role"].format(facts=self.facts, talk=talk, stop=STOP, transfer=TRANSFER)
        answer = ask(self.expert, text)
        self.talk.append(f"You: {answer}")
        return answer


def ask(expert: Tool, text: str) -> str:
    """Returns what a language model answers. Raises EndpointError."""
    result = expert.call({"task": text})
    if result.error:
        raise EndpointError(result.content)
    return result.content
