"""Demonstrations as ids: what a teacher does in an environment, turn by turn, in either way to build context."""

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
    """One demonstrated turn: the thought, and a call or a message; `result` is what the tool or the user answered, None to the last message."""

    thought: str
    content: str = ""
    call: ToolCall | None = None
    result: ToolResult | None = None

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """What the policy should sample."""
        return chat.encode_assistant(
            tokenizer, self.thought, self.content, [self.call] if self.call else []
        )


def as_session(
    lessons: Iterable[Lesson], env: Environment, tokenizer: Tokenizer
) -> tuple[list[int], list[int], list[bool]]:
    """One growing session: (prompt ids, further ids, which of them the policy should have sampled). `lessons` may act in `env` as they are taken."""
    prompt, ids, sampled = chat.encode(tokenizer, env.messages, env.tools), [], []
    for lesson in lessons:
        said, given = lesson.ids(tokenizer), []
        if lesson.result:
            text = lesson.result.content
            given = (
                chat.encode_observations(tokenizer, [text])
                if lesson.call
                else chat.encode_user(tokenizer, text)
            )
        ids += said + given
        sampled += [True] * len(said) + [False] * len(given)
    return prompt, ids, sampled


def as_turns(
    lessons: Iterable[Lesson], env: Environment, tokenizer: Tokenizer, prompt_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """A context that is composed afresh each turn (rebuild.py): (prompt, ids the policy should have sampled) of each."""
    notes, turns = Notes(tokenizer, env, prompt_tokens), []
    for lesson in lessons:
        turns.append((notes.prompt(), lesson.ids(tokenizer)))
        if lesson.call:
            notes.see([lesson.call], [lesson.result])
        elif lesson.result:
            notes.hear(lesson.content, lesson.result.content)
    return turns
