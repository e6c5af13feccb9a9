"""Sampled text -> reasoning, content and tool calls, of a whole turn or as it streams.

Nothing the policy writes makes this raise. A call ends where its JSON object ends, so strings in it
may hold braces and closing tags. Tags are read as text, so ids that spell a tag count as the tag.
chat.py is the opposite direction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import ParsedTurn, ToolCall

IM_END = "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


def parse(
    tokenizer: Tokenizer | None, turn: Sequence[int] | str, enable_thinking: bool | None = None
) -> ParsedTurn:
    """Return the parts of one sampled turn, ids or text; a bad call carries its `error`.

    The turn starts after the generation prompt; a final <|im_end|> is dropped. A turn that opens
    with <think> is reasoning up to </think>; with enable_thinking=False nothing is reasoning.
    """
    if isinstance(turn, str):
        text = turn.removesuffix(IM_END)
    else:
        ended = len(turn) and turn[-1] in tokenizer.eos_ids
        text = tokenizer.decode(turn[:-1] if ended else turn)
    parser = StreamParser(enable_thinking)
    parser.feed(text)
    return parser.finish()


class StreamParser:
    """Parses text that arrives in pieces; `finish` gives what `parse` gives for the whole.

    The deltas of a kind, "reasoning" or "content", joined with those that `finish` leaves in
    `last_deltas`, are that part of the turn. The k-th "tool_call" delta is the text of `calls[k]`.
    """

    def __init__(self, enable_thinking: bool | None = None) -> None:
        self.calls: list[ToolCall] = []
        self.last_deltas: list[tuple[str, str]] = []
        self._state = self._content if enable_thinking is False else self._start
        self._buffer = ""  # text that no state has taken
        self._deltas: list[tuple[str, str]] = []
        self._text: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._fresh = True  # only line breaks since the last tag
        self._held = ""  # line breaks that a following tag would drop
        self._searched = 0  # start of the search for the closing tag of a call
        self._truncated = False

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Take the next piece of text; return the (kind, text) deltas that are certain by now."""
        return self._run(text, final=False)

    def finish(self) -> ParsedTurn:
        """Return the whole turn; deltas that waited for its end are left in `last_deltas`."""
        self.last_deltas = self._run("", final=True)
        reasoning, content = ("".join(self._text[kind]) for kind in ("reasoning", "content"))
        return ParsedTurn(reasoning, content, tuple(self.calls), self._truncated)

    def _run(self, text: str, final: bool) -> list[tuple[str, str]]:
        """Run the states; each takes what it can and returns True if the next may go on."""
        self._buffer += text
        self._deltas = []
        while self._state(final):
            pass
        return self._deltas

    def _start(self, final: bool) -> bool:
        """Decide, at the first visible characters, if the turn opens with <think>."""
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer, self._state = text[len(THINK) :], self._reasoning
        elif final or not THINK.startswith(text):
            self._state = self._content
        else:
            return False
        return True

    def _reasoning(self, final: bool) -> bool:
        """Take text up to </think>, without the line breaks at both ends."""
        closed = self._emit_before(THINK_END, "reasoning", final)
        if closed:
            self._fresh, self._held, self._state = True, "", self._content
        self._truncated |= final and not closed
        return closed

    def _content(self, final: bool) -> bool:
        """Take text up to <tool_call>, without the line break that the template puts before it."""
        called = self._emit_before(CALL, "content", final)
        rest = self._held[1:] if called else self._held
        if rest and (called or final):
            self._add("content", rest)
        if called:
            self._fresh, self._held, self._searched, self._state = True, "", 0, self._call
        return called

    def _call(self, final: bool) -> bool:
        """Take a call up to its closing tag; what is no JSON ends at the first closing tag."""
        end = self._buffer.find(CALL_END, self._searched)
        closed = end >= 0
        if not closed and not final:
            return False
        text = self._buffer[:end] if closed else self._buffer
        call, length = _read_call(text)
        if length is None and closed and "Unterminated string" in call.error:
            self._searched = end + len(CALL_END)  # the tag may be part of that string
            return True
        rest = end + len(CALL_END) if closed else len(text)
        if length is not None:
            tail = text[length:].strip()
            if not closed and CALL_END.startswith(tail):
                self._truncated = True
            elif tail:
                error = f"{CALL_END} must follow the JSON object, not {tail[:20]!r}"
                call = replace(call, error=call.error or error)
                rest = length if CALL in tail or not closed else rest
        elif CALL_END in self._buffer:
            first = self._buffer.find(CALL_END)
            call, rest = _read_call(self._buffer[:first])[0], first + len(CALL_END)
        else:
            self._truncated = True
            call = replace(call, error="cut off before the end of its JSON object")
        self.calls.append(call)
        self._deltas.append(("tool_call", call.raw))
        self._buffer, self._state = self._buffer[rest:], self._content
        return True

    def _emit_before(self, tag: str, kind: str, final: bool) -> bool:
        """Emit the text before `tag`, or all that cannot be its beginning; True if it was found."""
        text, found, self._buffer = self._buffer.partition(tag)
        if not found and not final:
            certain = _certain(text, tag)
            text, self._buffer = text[:certain], text[certain:]
        if self._fresh:
            text = text.lstrip("\n")
            if text and self._text["content"]:
                text = "\n" + text  # content after a call is on a line of its own
        text = self._held + text
        visible = text.rstrip("\n")
        self._held = text[len(visible) :]
        if visible:
            self._fresh = False
            self._add(kind, visible)
        return bool(found)

    def _add(self, kind: str, text: str) -> None:
        self._text[kind].append(text)
        self._deltas.append((kind, text))


def _certain(text: str, tag: str) -> int:
    """Return how many characters of `text` cannot be the beginning of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return len(text) - size
    return len(text)


def _read_call(text: str) -> tuple[ToolCall, int | None]:
    """Return a call and where its JSON value ends in `text`, None if it is not valid JSON."""
    stripped = text.lstrip()
    name, raw, length = "", text.strip(), None
    try:
        value, end = _DECODER.raw_decode(stripped)
        raw, length = stripped[:end], len(text) - len(stripped) + end
        name = value["name"]
        arguments = value.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _DECODER.decode(arguments)
        if isinstance(name, str) and isinstance(arguments, dict):
            return ToolCall(name, arguments, raw), length
        name, error = str(name), "name must be a string and arguments a JSON object"
    except (TypeError, KeyError):
        error = "call must be a JSON object with name and arguments"
    except json.JSONDecodeError as problem:
        reason = problem.msg.removesuffix(" at")
        error = f"call is not valid JSON: {reason} at column {problem.pos + 1}"
    except (ValueError, RecursionError) as problem:
        error = f"call is not valid JSON: {problem}"
    return ToolCall(name, {}, raw, error), length


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
