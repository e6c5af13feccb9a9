"""The user on the other side of a task: scripted, or a language model. Both know the task's scenario and end by the same signals.

The scripted one opens with its first wish, tells who it is when asked, confirms what it is asked to confirm, says that it does not know
what the scenario says it does not know, goes on to its next wish, and ends when it has none left. It says nothing that is not in the scenario.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from nanorchestra.tools.experts import chat_completion

STOP, TRANSFER, OUT_OF_SCOPE = SIGNALS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
GREETING = "Hello, how can I help you today?"
_HANDED = re.compile(r"hand(ed|ing)? (you )?over|transferr|human agent|connect(ed|ing)? you")
_CONFIRM = re.compile(
    r"confirm|proceed|go ahead|shall i|should i|would you like me to|do you want me to|\byes\b|is (this|that|it) (correct|right|ok)|correct\?|all right\?"
)
_MORE = re.compile(r"anything else|something else|further|what else")
_IDENTITY = re.compile(
    r"\bname|identi|verif|number|\bid\b|zip|birth|security|who (am|are)|details|account"
)
_ME = (
    r"\b(to|for|with|from|of|give|gives|tell|tells|ask|asks|call|calls|help|helps|reach|let|about)"
)


class User(Protocol):
    """`open` is the first message, `reply` the answer to a message of the agent; a signal in it ends the conversation."""

    def open(self) -> str: ...

    def reply(self, message: str) -> str: ...


def ended(message: str) -> bool:
    return any(signal in message for signal in SIGNALS)


def first_person(text: str) -> str:
    """ "You want your money." -> "I want my money." """
    text = re.sub(_ME + r" you\b", r"\1 me", text)
    for pattern, mine in (
        (r"\b([Yy])ou are\b", "I am"),
        (r"\b([Yy])ou were\b", "I was"),
        (r"\b([Yy])ours\b", "mine"),
        (r"\b([Yy])ourself\b", "myself"),
        (r"\byour\b", "my"),
        (r"\bYour\b", "My"),
        (r"\b[Yy]ou\b", "I"),
    ):
        text = re.sub(pattern, mine, text)
    return text


class ScriptedUser:
    """Plays the scenario of a tau2 task without a language model. A function of the messages it gets."""

    def __init__(self, scenario: dict[str, Any], patience: int = 40):
        instructions = scenario["instructions"]
        parts = {"reason_for_call": instructions} if isinstance(instructions, str) else instructions
        self.wishes: list[str] = []
        for sentence in re.split(
            r"(?<=[.!?]) +(?=[A-Z\"])", first_person(parts["reason_for_call"])
        ):
            if self.wishes and re.match(r"(If|Should|Unless|Otherwise)\b", sentence):
                self.wishes[-1] += " " + sentence  # a condition is said together with its wish
            else:
                self.wishes.append(sentence)
        self.known, self.unknown = (
            first_person(parts.get("known_info") or ""),
            first_person(parts.get("unknown_info") or ""),
        )
        self.said, self.patience, self.handed = 0, patience, False

    def open(self) -> str:
        return self._next("")

    def reply(self, message: str) -> str:
        self.patience -= 1
        text = message.casefold()
        self.handed |= bool(_HANDED.search(text)) and "?" not in text
        if self.patience < 0:
            return STOP
        if self.handed:
            return f"Thank you. {TRANSFER}"
        question = "?" in text or "please" in text
        if _MORE.search(text):
            return self._next("No, thank you.")
        if question and _CONFIRM.search(text):
            return "Yes, please."
        if question and self.unknown and self._asks_unknown(text):
            return f"{self.unknown} {self.known}".strip()
        if question and self.known and _IDENTITY.search(text):
            return self.known
        if question:
            return self.wishes[self.said - 1]
        return self._next("Thank you, that is all.")

    def _next(self, last: str) -> str:
        if self.said >= len(self.wishes):
            return f"{last} {STOP}"
        self.said += 1
        return self.wishes[self.said - 1]

    def _asks_unknown(self, text: str) -> bool:
        """True if what is asked for is a number that the scenario says is not known, such as "order number"."""
        return any(
            thing in text
            for thing in re.findall(r"(?:any|my) ([\w -]+? number)", self.unknown.casefold())
        )


@dataclass
class LanguageModelUser:
    """A language model plays the scenario, behind an OpenAI-compatible endpoint. Raises tools.EndpointError if it does not answer."""

    scenario: dict[str, Any]
    base_url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        instructions = self.scenario["instructions"]
        facts = (
            instructions
            if isinstance(instructions, str)
            else "\n".join(f"{field}: {words}" for field, words in instructions.items() if words)
        )
        rules = (
            f"You play a customer who writes to a service agent. Stay in this role and use nothing but this scenario:\n\npersona: {self.scenario.get('persona') or 'none'}\n{facts}\n\n"
            f"Write one short message at a time. Reveal what the scenario says step by step, and only when it is needed. Never invent a fact; if you are asked for something that is not in the "
            f"scenario, say that you do not know. When everything you wanted is done, write {STOP}. When you are handed over to a person, write {TRANSFER}. "
            f"When the scenario does not let you go on, write {OUT_OF_SCOPE}."
        )
        self.messages: list[dict[str, str]] = [{"role": "system", "content": rules}]

    def open(self) -> str:
        return self.reply(GREETING)

    def reply(self, message: str) -> str:
        self.messages.append({"role": "user", "content": message})
        answer, _ = chat_completion(
            self.base_url,
            {"model": self.model, "messages": self.messages},
            key_variable=self.key_variable,
            timeout_s=self.timeout_s,
        )
        self.messages.append({"role": "assistant", "content": answer.get("content") or STOP})
        return self.messages[-1]["content"]
