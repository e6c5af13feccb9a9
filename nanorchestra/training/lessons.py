"""Writes demonstrations as ids: the turns of a teacher in an environment, in either context."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.rebuild import Notes
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import ToolCall, ToolResult


@dataclass(frozen=True)
class Lesson:
    """One demonstrated turn: a thought, then a call or a message.

    `result` is the answer of the tool or of the user; None after the last message.
    """

    thought: str
    content: str = ""
    call: ToolCall | None = None
    result: ToolResult | None = None

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the ids that the policy should sample in this turn."""
        calls = [self.call] if self.call else []
        return chat.encode_assistant(tokenizer, self.thought, self.content, calls)


def as_session(
    lessons: Iterable[Lesson], env: Environment, tokenizer: Tokenizer
) -> tuple[list[int], list[int], list[bool]]:
    """Returns a demonstration as one growing session.

    Its prompt, the ids that follow, and which of these the policy should sample. `lessons` may act
    in `env` as they are iterated over.
    """
    prompt = chat.encode(tokenizer, env.messages, env.tools)
    ids: list[int] = []
    sampled: list[bool] = []
    for lesson in lessons:
        said, given = lesson.ids(tokenizer), []
        if lesson.result:
            text = lesson.result.content
            if lesson.call:
                given = chat.encode_observations(tokenizer, [text])
            else:
                given = chat.encode_user(tokenizer, text)
        ids += said + given
        sampled += [True] * len(said) + [False] * len(given)
    return prompt, ids, sampled


def as_turns(
    lessons: Iterable[Lesson], env: Environment, tokenizer: Tokenizer, prompt_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Returns a demonstration with a prompt per turn (agent/rebuild.py).

    The prompt, of at most `prompt_tokens` ids, and the ids that the policy should sample.
    """
    notes, turns = Notes(tokenizer, env, prompt_tokens), []
    for lesson in lessons:
        prompt = chat.encode(tokenizer, notes.messages, notes.tools)
        turns.append((prompt, lesson.ids(tokenizer)))
        if lesson.result:
            notes.observe(lesson.content, [lesson.call] if lesson.call else [], [lesson.result])
    return turns
