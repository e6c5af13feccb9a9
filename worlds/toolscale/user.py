"""The users of a task: a script that needs no model, and a language model.

The script says at once who it is and all that it wants. To a question that names all values of a
golden write that is not made yet it says yes; to any other it says again what it wants. A message
without a question ends the conversation, unless the agent says that it is at work; so does
"anything else?" when all is done.
"""

import re
from collections.abc import Collection

from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.tool import Tool
from nanorchestra.schemas import Json
from worlds.toolscale.words import mentions

STOP, TRANSFER = SIGNALS = ("###STOP###", "###TRANSFER###")  # tau2's, which end a conversation
PATIENCE = 40  # messages that the scripted user answers
YES, WAITS, THANKS = "Yes, please.", "All right, I will wait.", "Thank you."
_AT_WORK = re.compile(r"\b(one moment|a moment|let me|i will|i'll|i am going to|checking)\b")
_MORE = re.compile(r"\b(any|some)thing (else|more)\b")
_FIRST_PERSON = [  # what a scenario says of "you", as the user says it
    (r"\b[Yy]ou(?: are|'re)\b", "I am"),
    (r"\b[Yy]ou were\b", "I was"),
    (r"\b[Yy]ours\b", "mine"),
    (r"\b[Yy]ourself\b", "myself"),
    (r"\byour\b", "my"),
    (r"\bYour\b", "My"),
    (r"\b(to|for|with|from|of|at|about|give|tell|ask|help|let|cost|suit)s? you\b", r"\1 me"),
    (r"\byou(?=[.,;:?!)]|$)", "me"),
    (r"\b[Yy]ou\b", "I"),
]
PROMPT = """You play a customer who writes to a service agent. Stay in this role, and use nothing \
but this scenario:

{facts}

The conversation so far:

{talk}

Write your next message and nothing else: a short one, in the first person. Say what the scenario \
says when it is needed, a wish at a time. Never invent a fact: what is not in the scenario you do \
not know. When all that you want is done, or cannot be done, write {stop}. When you are handed \
over to a person, write {transfer}."""


def ended(message: str) -> bool:
    """Returns whether a message of the user ends the conversation."""
    return any(signal in message for signal in SIGNALS)


def first_person(text: str) -> str:
    """Returns the text as the user says it: "You want your money." is "I want my money."."""
    for pattern, mine in _FIRST_PERSON:
        text = re.sub(pattern, mine, text)
    return text


def opening(task: Json) -> str:
    """Returns the user's first message: who it is, and all that it wants."""
    parts = task["user_scenario"]["instructions"]
    told = (parts.get("known_info"), parts["reason_for_call"])
    return first_person(" ".join(filter(None, told)))


class ScriptedUser:
    """A user that says what it wants and confirms it. `heard` counts the agent's messages."""

    def __init__(self, task: Json):
        self.opening, self.actions = opening(task), task["evaluation_criteria"]["actions"]
        self.heard = 0

    def reply(self, message: str, pending: Collection[int], handed: bool) -> str:
        """Returns the answer to a message of the agent.

        `pending` are the places of the golden writes that have not been made, `handed` says whether
        the agent has handed over.
        """
        self.heard += 1
        if handed or self.heard > PATIENCE:
            return f"{THANKS} {TRANSFER}"
        if "?" in message and (pending or not _MORE.search(message.casefold())):
            due = [self.actions[place]["arguments"].values() for place in pending]
            return YES if any(_names(message, values) for values in due) else self.opening
        return WAITS if _AT_WORK.search(message.casefold()) else f"{THANKS} {STOP}"


def _names(message, values) -> bool:
    return all(mentions(message, value) for value in values)


class ModelUser:
    """A language model that plays the scenario; it opens as the scripted user does."""

    def __init__(self, task: Json, expert: Tool):
        scenario = task["user_scenario"]
        facts = {"persona": scenario.get("persona")} | scenario["instructions"]
        self.facts = "\n".join(f"{field}: {text}" for field, text in facts.items() if text)
        self.expert, self.talk = expert, [f"You: {opening(task)}"]

    def reply(self, message: str, pending: Collection[int], handed: bool) -> str:
        """Returns the answer to a message of the agent. Raises EndpointError."""
        self.talk.append(f"Agent: {message}")
        talk = "\n".join(self.talk)
        text = PROMPT.format(facts=self.facts, talk=talk, stop=STOP, transfer=TRANSFER)
        answer = ask(self.expert, text)
        self.talk.append(f"You: {answer}")
        return answer


def ask(expert: Tool, text: str) -> str:
    """Returns what a language model answers. Raises EndpointError."""
    result = expert.call({"task": text})
    if result.error:
        raise EndpointError(result.content)
    return result.content
