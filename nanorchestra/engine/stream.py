"""Turns ids, as they are sampled, into reasoning, content and tool calls. No torch."""

import codecs

from nanorchestra.model.parser import StreamParser
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import ParsedTurn


class TextStream:
    """Gives the text of ids, which is content, without half a character and special tokens."""

    def __init__(self, tokenizer: Tokenizer, calls: bool = False):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _text(self, tokens, final=False) -> str:
        return self._decoder.decode(self._tokenizer.text_bytes(tokens), final)

    def feed(self, *tokens: int) -> list[tuple[str, str]]:
        """Returns the deltas that are certain once these are sampled."""
        return [("content", self._text(tokens))]

    def finish(self) -> tuple[list[tuple[str, str]], ParsedTurn | None]:
        """Returns the deltas that waited for the end, and the whole turn if it has parts."""
        return [("content", self._text((), True))], None


class TurnStream(TextStream):
    """Gives the deltas of one turn: (kind, text) of kind "reasoning", "content" or "tool_call".

    A call is given whole; the k-th is `calls[k]`. Joined, the deltas are what `chat.parse` gives
    for the whole turn. Without `calls`, a tag of a call is content.
    """

    def __init__(self, tokenizer: Tokenizer, calls: bool = True):
        super().__init__(tokenizer)
        self._parser = StreamParser(calls)

    @property
    def calls(self) -> list:
        """The tool calls that are complete."""
        return self._parser.calls

    @property
    def call(self) -> str | None:
        """What stands after the tag of a call that has begun; None outside of calls."""
        return self._parser.call

    def feed(self, *tokens: int) -> list[tuple[str, str]]:
        """Returns the deltas that are certain once these are sampled."""
        text = self._text(tokens)
        return self._parser.feed(text) if text else []

    def finish(self) -> tuple[list[tuple[str, str]], ParsedTurn]:
        """Returns the deltas that waited for the end, and the whole turn."""
        deltas = self._parser.feed(self._text((), True))
        turn = self._parser.finish()
        return deltas + self._parser.last_deltas, turn
