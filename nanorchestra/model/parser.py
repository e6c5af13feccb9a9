"""Sampled text -> reasoning, content and tool calls, of a whole turn or as it streams.

Nothing the policy writes makes this raise. A call ends where its JSON object ends, so strings in it
may hold braces and closing tags. Tags are read as text, so ids that spell a tag count as the tag.
chat.py is the opposite direction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanorchestra.records import ParsedTurn, ToolCall
from nanorchestra.schemas import MOST_DEPTH, levels

if TYPE_CHECKING:
    from nanorchestra.model.tokenizer import Tokenizer


class Marker(str):
    """A token of the chat template: its spelling as text, one id as ids."""


THINK, THINK_END = Marker("<think>"), Marker("</think>")
CALL, CALL_END = Marker("<tool_call>"), Marker("</tool_call>")


def parse(
    tokenizer: Tokenizer, ids: Sequence[int], thinks: bool = False, calls: bool = True
) -> ParsedTurn:
    """Returns the parts of one sampled turn; a bad call carries its `error`.

    The turn starts after the generation prompt. Special tokens, such as the <|im_end|> that ends
    it, are no text and left out. A turn that opens with <think>, or whose prompt ended so
    (`thinks`), is reasoning up to </think>. A turn has calls if its prompt had tools (`calls`) and
    the model's chat format reads calls; otherwise they are content.
    """
    parser = StreamParser(calls and tokenizer.chat.reads_calls, thinks)
    parser.feed(tokenizer.decode(ids, skip_special=True))
    return parser.finish()


class StreamParser:
    r"""Parses text that arrives in pieces; `finish` gives what `parse` gives for the whole.

    The deltas of a kind, "reasoning" or "content", joined with those that `finish` leaves in
    `last_deltas`, are that part of the turn. The k-th "tool_call" delta is the text of `calls[k]`.
    With `has_calls` False all that follows the reasoning is content. With `thinks` the text begins
    within the reasoning.

    For example, the pieces `<think>ab</th`, `ink>\n\nc<tool` and `_call>{"name": "f"}</tool_call>`
    give ("reasoning", "ab"), then ("content", "c"), then ("tool_call", '{"name": "f"}'): what may
    begin a tag waits for the next piece.
    """

    def __init__(self, has_calls: bool = True, thinks: bool = False) -> None:
        self._call_tag = CALL if has_calls else ""
        self.calls: list[ToolCall] = []
        self.last_deltas: list[tuple[str, str]] = []
        self._parts = {"reasoning": "", "content": ""}
        self._kind = "reasoning" if thinks else ""  # of the section; "": undecided
        self._text = ""  # of the section, and what follows it
        self._shown = 0  # characters of the section
        self._truncated = False

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Takes the next piece of text; returns the (kind, text) deltas that are certain by now."""
        self._text += text
        return self._advance(final=False)

    def finish(self) -> ParsedTurn:
        """Returns the whole turn; deltas that waited for its end are left in `last_deltas`."""
        self.last_deltas = self._advance(final=True)
        return ParsedTurn(**self._parts, calls=tuple(self.calls), truncated=self._truncated)

    @property
    def call(self) -> str | None:
        """What stands after the tag of a call that has begun; None outside of calls."""
        _, tag, rest = self._text.partition(CALL)
        return rest if tag and self._kind == "content" else None

    def _advance(self, final) -> list[tuple[str, str]]:
        """Emits what is certain of a section, which ends at its tag, then goes on with the next."""
        deltas = []
        text = self._text.lstrip()
        if not self._kind and text.startswith(THINK):
            self._kind, self._text = "reasoning", text[len(THINK) :]
        elif not self._kind and (final or not THINK.startswith(text)):
            self._kind = "content"
        while self._kind:
            tag = THINK_END if self._kind == "reasoning" else self._call_tag
            body, closed, rest = self._text.partition(tag) if tag else (self._text, "", "")
            if not closed and not final:
                body = body[: _certain(body, tag)].rstrip("\n")  # line breaks may end the section
            visible = body.lstrip("\n")
            if self._kind == "reasoning":
                visible = visible.rstrip("\n")
            elif closed:
                visible = visible.removesuffix("\n")
            if delta := visible[self._shown :]:
                if not self._shown and self._parts["content"]:
                    delta = "\n" + delta  # content after a call is on a line of its own
                deltas.append((self._kind, delta))
                self._parts[self._kind] += delta
                self._shown = len(visible)
            if not closed:
                if final and self._kind == "reasoning":
                    self._truncated = True
                break
            if self._kind == "content":
                rest = self._take_call(rest, final)
                if rest is None:
                    break
                deltas.append(("tool_call", self.calls[-1].raw))
            self._kind, self._text, self._shown = "content", rest, 0
        return deltas

    def _take_call(self, text, final) -> str | None:
        """Adds the call at the beginning of `text`; returns what follows, None if not certain yet.

        What is no JSON ends at the first closing tag after the error.
        """
        if CALL_END not in text and not final:
            return None
        read = _read_call(text)
        call = read.call
        tail, closed, rest = text[read.end :].partition(CALL_END)
        in_string = not read.is_json and "Unterminated string" in call.error  # the tag may be, too
        if not final and (in_string or not closed):
            return None
        if not closed:
            self._truncated = True
        if read.is_json:
            if tail.strip() and (closed or not CALL_END.startswith(tail.strip())):
                error = f"{CALL_END} must follow the JSON object, not {tail.strip()[:20]!r}"
                call = replace(call, error=call.error or error)
        elif closed:
            call = _read_call(text[: read.end] + tail).call
        else:
            call = replace(call, error="cut off before the end of its JSON object")
        self.calls.append(call)
        return rest


def _certain(text, tag) -> int:
    """Returns how many characters of `text` cannot be the beginning of `tag`."""
    for size in range(len(tag) - 1, 0, -1):
        if text.endswith(tag[:size]):
            return len(text) - size
    return len(text)


@dataclass(frozen=True)
class _ReadCall:
    """A call, where in the text its JSON value ends or is wrong, and whether it is JSON."""

    call: ToolCall
    end: int
    is_json: bool


def _read_call(text) -> _ReadCall:
    """Reads the call at the beginning of `text`."""
    stripped = text.lstrip()
    start = len(text) - len(stripped)
    name, raw, end, is_json = "", text.strip(), start, False
    try:
        value, length = _DECODER.raw_decode(stripped)
        raw, end, is_json = stripped[:length], start + length, True
        name = value["name"]
        arguments = value.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _DECODER.decode(arguments)
        if any(depth > MOST_DEPTH for depth, _ in enumerate(levels(arguments), 1)):
            raise ValueError(f"arguments are nested deeper than {MOST_DEPTH} levels")
        if isinstance(name, str) and isinstance(arguments, dict):
            return _ReadCall(ToolCall(name, arguments, raw), end, True)
        name, error = str(name), "name must be a string and arguments a JSON object"
    except (TypeError, KeyError):
        error = "call must be a JSON object with name and arguments"
    except json.JSONDecodeError as problem:
        if not is_json:  # otherwise the arguments, a string, are not
            end = start + problem.pos
        reason = problem.msg.removesuffix(" at")
        error = f"call is not valid JSON: {reason} at column {problem.pos + 1}"
    except (ValueError, RecursionError) as problem:
        error = f"call is not valid JSON: {problem}"
    return _ReadCall(ToolCall(name, {}, raw, error), end, is_json)


def _finite(number) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a JSON number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
