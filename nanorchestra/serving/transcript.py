"""The transcript of a conversation, which the next attempt continues. No torch."""

import json
from dataclasses import dataclass, field
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.files import read_json, write_whole
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Trajectory


@dataclass
class Transcript:
    """Questions and answers as messages, and all that followed the first question as ids.

    An attempt continues the ids, so that the engine's prefix cache serves them. Tools may change in
    between: their descriptions stand before the ids.
    """

    tokenizer: Tokenizer
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def lead(self, env: Any) -> None:
        """Puts the transcript before the message of `env`."""
        (question,) = env.messages
        if self.ids:  # else the template writes all anew
            next_ids = chat.encode_reply(self.tokenizer, "user", [question["content"]])
            env.prompt = [*self._head(env), *self.ids, *next_ids]
        env.messages = [*self.messages, question]

    def keep(self, env: Any, attempt: Trajectory) -> None:
        """Adds the attempt at `env` that `lead` began, whether it has ended or was stopped."""
        self.messages = [*env.messages, {"role": "assistant", "content": attempt.answer}]
        if not self.tokenizer.markers:
            return
        self.ids = attempt.ids[len(self._head(env)) :]
        if self.ids[-1:] != [self.tokenizer.end_of_turn]:
            self.ids.append(self.tokenizer.end_of_turn)

    def note(self, question: str, answer: str) -> None:
        """Adds a question that stands alone, and its answer; no attempt continues it."""
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def _head(self, env) -> list[int]:
        """Returns the ids of the tools and the first question."""
        return chat.encode(self.tokenizer, self.messages[:1], env.tools)

    def save(self, path: str) -> None:
        """Writes the conversation as JSON. UserError if the place cannot be written."""
        write_whole(path, json.dumps([self.messages, self.ids]) + "\n")

    def load(self, path: str) -> None:
        """Reads what `save` wrote with the same tokenizer. UserError for another kind of file."""
        saved = read_json(path)
        try:
            messages, ids = saved
            _ = messages[-1]["content"]
        except (TypeError, ValueError, LookupError):
            raise UserError(f"{path}: not a conversation, as /save writes") from None
        self.messages, self.ids = messages, ids
