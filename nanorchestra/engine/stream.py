"""Turns ids, as they are sampled, into reasoning, content and tool calls. No torch."""

from __future__ import annotations

import codecs

from nanorchestra.model.parser import StreamParser
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import ParsedTurn


class TurnStream:
    """Gives the deltas of one turn: (kind, text) of kind "reasoning", "content" or "tool_call".

    A call is given whole; the k-th is `calls[k]`. No delta holds half a character. Joined, the
    deltas are what `chat.parse` gives for the whole turn. Without `calls`, a tag
    of a call is content.
    """

    def __init__(self, tokenizer: Tokenizer, calls: bool = True):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parser = StreamParser(calls)

    @property
    def calls(self) -> list:
        """The tool calls that are complete."""
        return self._parser.calls

    def feed(self, *tokens: int) -> list[tuple[str, str]]:
        """Returns the deltas that are certain once these are sampled. Special ids have no text."""
        text = self._decoder.decode(self._tokenizer.text_bytes(tokens))
        return self._parser.feed(text) if text else []

    def finish(self) -> tuple[list[tuple[str, str]], ParsedTurn]:
        """Returns the deltas that waited for the end, and the whole turn."""
        deltas = self._parser.feed(self._decoder.decode(b"", True))
        turn = self._parser.finish()
        return deltas + self._parser.last_deltas, turn
