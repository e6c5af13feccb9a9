"""A turn as it is sampled: ids in, certain pieces of reasoning, content and tool calls out. No torch."""

from __future__ import annotations

from typing import Sequence

from nanorchestra.model.parser import StreamParser
from nanorchestra.model.tokenizer import IncrementalDecoder, Tokenizer
from nanorchestra.records import ParsedTurn


class TurnStream:
    """Deltas of one turn, (kind, text) with the kinds "reasoning", "content" and "tool_call" (a whole call, the k-th is `calls[k]`).

    They never hold half a character, nor a piece of a stop string or what stands behind it. Joined, they are what `chat.parse` gives for
    the whole turn up to its stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), enable_thinking: bool | None = None
    ):
        self._tokenizer, self._stops = tokenizer, tuple(stop)
        self._decoder, self._parser = IncrementalDecoder(tokenizer), StreamParser(enable_thinking)
        self._held = ""  # text that may be the beginning of a stop string
        self._stopped = False

    @property
    def calls(self) -> list:
        """The tool calls that are complete."""
        return self._parser.calls

    def feed(self, token: int) -> list[tuple[str, str]]:
        """The deltas that are certain once this id has been sampled. Special tokens have no text."""
        if self._stopped or not self._tokenizer.decode([token], skip_special=True):
            return []
        return self._text(self._decoder.feed(token))

    def finish(self) -> tuple[list[tuple[str, str]], ParsedTurn]:
        """The deltas that had waited for the end, and the whole turn."""
        deltas = [] if self._stopped else self._text(self._decoder.flush())
        if not self._stopped:
            deltas += self._parser.feed(self._held)
        turn = self._parser.finish()
        return deltas + self._parser.last_deltas, turn

    def _text(self, text: str) -> list[tuple[str, str]]:
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._stopped = True
            return self._parser.feed(text[: min(found)])
        certain = min((_certain(text, stop) for stop in self._stops), default=len(text))
        self._held = text[certain:]
        return self._parser.feed(text[:certain])


def _certain(text: str, stop: str) -> int:
    """How much of `text` cannot be the beginning of `stop`."""
    return next(
        i
        for i in range(max(0, len(text) - len(stop) + 1), len(text) + 1)
        if stop.startswith(text[i:])
    )
