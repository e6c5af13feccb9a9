"""Turns ids, as they are sampled, into reasoning, content and tool calls. No torch."""

import codecs

from nanorchestra.model.parser import StreamParser
from nanorchestra.model.tokenizer import Tokenizer


class TurnStream:
    """Gives the deltas of one turn: (kind, text) of kind "reasoning", "content" or "tool_call".

    A call is given whole; the k-th is `parser.calls[k]`. Joined, the deltas are what `chat.parse`
    gives for the whole turn, with the same `calls` and `thinks`. What is no turn of a `chat` is
    content throughout.
    """

    def __init__(
        self, tokenizer: Tokenizer, calls: bool = True, chat: bool = True, thinks: bool = False
    ):
        self._tokenizer, self._chat = tokenizer, chat
        self.parser = StreamParser(calls and tokenizer.chat.reads_calls, thinks)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, *tokens: int, final: bool = False) -> list[tuple[str, str]]:
        """Returns the deltas that are certain once these are sampled."""
        return self.read(self._decoder.decode(self._tokenizer.text_bytes(tokens), final))

    def read(self, text: str) -> list[tuple[str, str]]:
        """Returns the deltas that are certain once this text has come, whose ids are not known."""
        return self.parser.feed(text) if self._chat else [("content", text)]

    def finish(self) -> list[tuple[str, str]]:
        """Returns the deltas that waited for the end."""
        deltas = self.feed(final=True)
        self.parser.finish()
        return deltas + self.parser.last_deltas
