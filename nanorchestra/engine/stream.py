"""Turns ids, as they are sampled, into reasoning, content and tool calls. No torch."""

from __future__ import annotations

import codecs

from nanorchestra.model.parser import StreamParser
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import ParsedTurn


class TurnStream:
    """Gives the deltas of one turn: (kind, text) of kind "reasoning", "content" or "tool_call".

    A call is given whole; the k-th is `calls[k]`. No delta holds half a character. Joined, the
    deltas are what `chat.parse` gives for the whole turn.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parser = StreamParser()

    @property
    def calls(self) -> list:
        """The tool calls that are complete."""
        return self._parser.calls

    def feed(self, token: int) -> list[tuple[str, str]]:
        """Returns the deltas that are certain once this id is sampled. Special ids have no text."""
        if not self._tokenizer.decode([token], skip_special=True):
            return []
        return self._parser.feed(self._decoder.decode(self._tokenizer.bytes_of(token)))

    def finish(self) -> tuple[list[tuple[str, str]], ParsedTurn]:
        """Returns the deltas that waited for the end, and the whole turn."""
        deltas = self._parser.feed(self._decoder.decode(b"", True))
        turn = self._parser.finish()
        return deltas + self._parser.last_deltas, turn
