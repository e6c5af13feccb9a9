"""What the policy sampled -> reasoning, content and tool calls, whole or as it streams. Nothing it may write makes this raise.

A call ends where its JSON object ends, so strings in it may hold braces and closing tags. Tags are read as text: ids that spell a tag out
letter by letter count as the tag, in `parse` and in `StreamParser` alike. (chat.py is the other direction, and re-exports both.)
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, Sequence

from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import ParsedTurn, ToolCall

IM_END, THINK, THINK_END, CALL, CALL_END = (
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
TAG, TAG_END = re.compile("</?tool_call>"), re.compile(CALL_END)
# What matters to the end of a JSON object: inside a string (which holds no raw line break), outside of one, and before its "{".
IN_STRING, OUTSIDE, OPENING = (
    re.compile(r'"|\\.?|\n', re.DOTALL),
    re.compile(r'["{}<\\]'),
    re.compile(r"\S"),
)


def parse(
    tokenizer: Tokenizer | None, turn: Sequence[int] | str, enable_thinking: bool | None = None
) -> ParsedTurn:
    """Takes one sampled turn (ids, or text) apart. Never raises for what the policy wrote: a bad call carries its `error`.

    The turn starts right after the generation prompt; a final <|im_end|> is dropped. enable_thinking=False: there is no reasoning, all
    that is not a call is content. Else a turn that opens with <think> is reasoning up to </think>; without it, reasoning and truncated.
    """
    if not isinstance(turn, str):
        ids = turn[:-1] if len(turn) and turn[-1] in tokenizer.eos_ids else turn
        turn = tokenizer.decode(ids)
    parser = StreamParser(enable_thinking)
    parser.feed(turn)
    return parser.finish()


class StreamParser:
    """`parse` for text that arrives in pieces. However it is cut, `finish` gives what `parse` gives for the whole.

    The reasoning (content) deltas, joined with those `finish` leaves in `last_deltas`, are the turn's reasoning (content). Each
    "tool_call" delta is the whole text of one call, given when the call is complete; the k-th is that of `calls[k]`.
    """

    def __init__(self, enable_thinking: bool | None = None):
        self.calls: list[ToolCall] = []
        self.last_deltas: list[tuple[str, str]] = []
        self._state = self._content if enable_thinking is False else self._start
        self._buffer = ""  # text not yet understood
        self._tail = ""  # the end of what came, while it may turn out to be the closing <|im_end|>
        self._text: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._fresh = True  # nothing but line breaks since the last tag
        self._held = ""  # line breaks that are dropped if a tag follows them
        self._scan = _ObjectScan()
        self._truncated = False

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Takes the next piece of text; returns the (kind, text) deltas that are certain by now."""
        text = self._tail + text
        certain = _before_prefix(text, IM_END)
        self._tail = text[certain:]
        return self._advance(text[:certain], final=False)

    def finish(self) -> ParsedTurn:
        """The whole turn, once no more text will come. Deltas that had waited for the end are left in `last_deltas`."""
        self.last_deltas = self._advance("" if self._tail == IM_END else self._tail, final=True)
        reasoning, content = ("".join(self._text[kind]) for kind in ("reasoning", "content"))
        return ParsedTurn(reasoning, content, tuple(self.calls), self._truncated)

    def _advance(self, text: str, final: bool) -> list[tuple[str, str]]:
        """Runs the states over the buffer. Each takes what it can, may set the next state, and says whether it is worth going on."""
        self._buffer += text
        deltas: list[tuple[str, str]] = []
        while self._state(deltas, final):
            pass
        return deltas

    def _start(self, deltas: list, final: bool) -> bool:
        """Before the first visible character: does the turn open with <think>?"""
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer, self._state = text[len(THINK) :], self._reasoning
        elif final or not THINK.startswith(text):
            self._state = self._content
        else:
            return False
        return True

    def _reasoning(self, deltas: list, final: bool) -> bool:
        """Up to </think>, without the line breaks at both ends."""
        before, closed = self._take_before(THINK_END, final)
        if self._fresh:
            before = before.lstrip("\n")
        if text := before.rstrip("\n"):
            self._emit(deltas, "reasoning", self._held + text)
            self._held = ""
        if not self._fresh:
            self._held += before[len(text) :]
        if closed:
            self._fresh, self._held, self._state = True, "", self._content
        elif final:
            self._truncated = True
        return closed

    def _content(self, deltas: list, final: bool) -> bool:
        """Up to <tool_call>, without line breaks in front and the one that the template puts before a call.

        What follows a call is content too, on a line of its own.
        """
        text, call = self._take_before(CALL, final)
        if self._fresh:
            text = text.lstrip("\n")
            if text and self._text["content"]:
                text = "\n" + text
        text = self._held + text
        self._held = "\n" if text.endswith("\n") and (call or not final) else ""
        if text := text.removesuffix(self._held):
            self._emit(deltas, "content", text)
        if call:
            self._fresh, self._held, self._scan, self._state = True, "", _ObjectScan(), self._call
        return call

    def _call(self, deltas: list, final: bool) -> bool:
        """After <tool_call>: up to the end of the JSON object, where the closing tag is due. What is no JSON goes up to the tag."""
        text, scan = self._buffer, self._scan
        scan.advance(text)
        tag = (
            TAG.search(text, scan.end)
            if scan.end
            else TAG_END.search(text)
            if scan.broken or final
            else None
        )
        if tag is None and not final:
            return False
        end = scan.end or (tag.start() if tag else len(text))
        junk = text[end : tag.start() if tag else len(text)].strip()
        call = _read_call(text[:end].strip())
        if tag is None and (
            not scan.end or CALL_END.startswith(junk)
        ):  # nothing but the turn's end was in the way
            self._truncated, junk, rest = True, "", len(text)
            call = (
                call
                if scan.end
                else replace(call, error="cut off before the end of its JSON object")
            )
        elif tag is None or tag[0] == CALL:
            call, rest = (
                replace(
                    call, error=call.error or f"closing {CALL_END} is missing after the JSON object"
                ),
                end,
            )
        else:
            rest = tag.end()
            if junk:
                call = replace(
                    call,
                    error=call.error
                    or f"unexpected {junk[:20]!r} between the JSON object and {CALL_END}",
                )
        self.calls.append(call)
        deltas.append(("tool_call", call.raw))
        self._buffer, self._state = text[rest:], self._content
        return True

    def _take_before(self, tag: str, final: bool) -> tuple[str, bool]:
        """Takes the text before `tag` (and the tag) off the buffer, or, if it is not there, all that cannot be its beginning."""
        before, found, after = self._buffer.partition(tag)
        if not found and not final:
            cut = _before_prefix(before, tag)
            before, after = before[:cut], before[cut:]
        self._buffer = after
        return before, bool(found)

    def _emit(self, deltas: list, kind: str, text: str) -> None:
        self._fresh = False
        self._text[kind].append(text)
        deltas.append((kind, text))


class _ObjectScan:
    """Finds where a JSON object ends, a piece at a time, knowing strings and escapes.

    `end` is the index after its last brace, None until that is known; `broken` is true once the text cannot be JSON.
    """

    def __init__(self):
        self.end: int | None = None
        self.broken = False
        self._at, self._depth, self._in_string = 0, 0, False

    def advance(self, text: str) -> None:
        """Goes on in `text`, of which what was there before is a prefix."""
        while self.end is None and not self.broken:
            match = (IN_STRING if self._in_string else OUTSIDE if self._depth else OPENING).search(
                text, self._at
            )
            if (
                match is None or self._in_string and match[0] == "\\"
            ):  # nothing yet, or an escape whose character is still to come
                self._at = match.start() if match else len(text)
                return
            self._at, found = match.end(), match[0]
            if found == '"' and self._depth:
                self._in_string = not self._in_string
            elif found == "{":
                self._depth += 1
            elif found == "}" and self._depth:
                self._depth -= 1
                self.end = None if self._depth else self._at
            else:
                self.broken = len(found) == 1  # an escape has two


def _before_prefix(text: str, tag: str) -> int:
    """Where the longest end of `text` begins that is a beginning of `tag` (or the whole of it); len(text) if there is none."""
    at = text.find(tag[0], max(0, len(text) - len(tag)))
    while at >= 0 and not tag.startswith(text[at:]):
        at = text.find(tag[0], at + 1)
    return len(text) if at < 0 else at


def _read_call(raw: str) -> ToolCall:
    """The JSON text of a call -> ToolCall, `error` says what is wrong with it. Arguments may be missing, or JSON in a string."""
    name, what = "", "call"
    try:
        call = _load(raw)
        if not isinstance(call, dict):
            return ToolCall(
                "", {}, raw, f"call is {_kind(call)}, not a JSON object with name and arguments"
            )
        if not isinstance(call.get("name"), str) or not call["name"]:
            return ToolCall(
                "",
                {},
                raw,
                "call has no name" if "name" not in call else "name is not a non-empty string",
            )
        name, what, arguments = call["name"], "arguments", call.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            arguments = _load(arguments)
        arguments = {} if arguments in (None, "") else arguments
        if not isinstance(arguments, dict):
            return ToolCall(name, {}, raw, f"arguments is {_kind(arguments)}, not a JSON object")
        return ToolCall(name, arguments, raw)
    except json.JSONDecodeError as error:
        where = (
            f"line {error.lineno} column {error.colno}"
            if error.lineno > 1
            else f"column {error.colno}"
        )
        problem = error.msg.removesuffix(" at")
        return ToolCall(name, {}, raw, f"{what} is not valid JSON: {problem} at {where}")
    except (ValueError, RecursionError) as error:
        return ToolCall(name, {}, raw, f"{what} is not valid JSON: {error}")


def _load(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _kind(value: Any) -> str:
    return {
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
        dict: "an object",
    }.get(type(value), "a number")
