"""Qwen3's chat format: messages -> text or ids. parser.py is the opposite direction.

`Tokenizer.chat` says which format a model has: Qwen3's if its tokenizer has the markers, else one
of its own (formats/template.py), or none.

A prompt is a sequence of pieces. A `Marker` is one of the template's own tokens and becomes one id;
every other piece is text. Only the template makes Markers, so no user, tool or model text can forge
one. The text between two markers is encoded at once, which gives the ids that Hugging Face gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from nanorchestra.errors import UserError, require
from nanorchestra.model.parser import CALL, CALL_END, THINK, THINK_END, Marker
from nanorchestra.model.parser import parse as parse  # chat.parse
from nanorchestra.records import ToolCall
from nanorchestra.schemas import Json

if TYPE_CHECKING:
    from nanorchestra.model.tokenizer import Tokenizer

IM_START, IM_END = Marker("<|im_start|>"), Marker("<|im_end|>")
RESPONSE, RESPONSE_END = Marker("<tool_response>"), Marker("</tool_response>")


def render(
    messages: list[Json], tools: list[Json] | None = None, add_generation_prompt: bool = True
) -> str:
    """Returns the prompt as Qwen3's template writes it; messages and tools in the OpenAI shape.

    The template omits the reasoning of assistant turns before the last user query.
    """
    return "".join(_prompt(messages, tools, add_generation_prompt, None))


def encode(
    tokenizer: Tokenizer,
    messages: list[Json],
    tools: list[Json] | None = None,
    enable_thinking: bool | None = None,
) -> list[int]:
    """Returns the ids of `render`, with added-token ids only where the template puts them.

    enable_thinking=False adds an empty think block to the generation prompt. A model with a format
    of its own has the ids of its own template. UserError if that fails.
    """
    return tokenizer.chat.encode(messages, tools, enable_thinking)


class Qwen3Format:
    """The chat format of a tokenizer with Qwen3's markers."""

    bos_ids: list[int] = []
    reads_calls = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = tokenizer.token_id(IM_END), tokenizer.token_id("<|endoftext|>")

    def encode(
        self, messages: list[Json], tools: list[Json] | None, enable_thinking: bool | None
    ) -> list[int]:
        """Returns the ids of a prompt, up to where the model's turn begins."""
        return _ids(self._tokenizer, _prompt(messages, tools, True, enable_thinking))


class NoFormat:
    """The format of a model that only completes text. `source`: the file of its tokenizer."""

    bos_ids: list[int] = []
    eos_ids = ()
    reads_calls = False

    def __init__(self, source: str) -> None:
        self._source = source

    def encode(
        self, messages: list[Json], tools: list[Json] | None, enable_thinking: bool | None
    ) -> list[int]:
        """Raises UserError."""
        raise UserError(f"{self._source}: the model has no chat template")


def require_tools(tokenizer: Tokenizer) -> None:
    """Raises UserError if the model's format takes no tools, or has calls of another form."""
    require(
        tokenizer.chat.reads_calls,
        f"tools: the chat template of this model takes no tools whose calls stand in {CALL}; "
        "leave them out",
    )


def opens_thinking(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Returns whether a prompt ends with <think>, as the templates of DeepSeek-R1's kind let it."""
    return tokenizer.decode(prompt[-2:]).endswith((THINK, THINK + "\n"))


def encode_reply(tokenizer: Tokenizer, role: str, contents: Sequence[str]) -> list[int]:
    """Returns the ids between a sampled <|im_end|> and the next turn.

    They are the results of its calls (role "tool"), or a message of the "user".
    """
    return encode_after(tokenizer, [{"role": role, "content": content} for content in contents])


def encode_after(tokenizer: Tokenizer, messages: list[Json]) -> list[int]:
    """Returns the ids between a sampled <|im_end|> and the next turn, for any messages there."""
    return _ids(tokenizer, ("\n", *_prompt(messages, None, True, None)))


def encode_assistant(
    tokenizer: Tokenizer, reasoning: str, content: str, calls: Sequence[ToolCall]
) -> list[int]:
    """Returns the ids an ideal policy samples after the generation prompt, <|im_end|> included.

    Arguments that are text stay as given.
    """
    content = content.lstrip("\n")
    written = call_pieces([(call.name, call.arguments) for call in calls], bool(content))
    return _ids(tokenizer, (*_think(reasoning), content, *written, IM_END))


def _prompt(messages, tools, add_generation_prompt, enable_thinking) -> Iterator[str]:
    """Yields the pieces of a prompt."""
    roles = [message["role"] for message in messages]
    contents = [message.get("content") or "" for message in messages]
    require(messages, "messages: there are none; expected at least one")
    for content in contents:
        require(isinstance(content, str), f"messages: content is {content!r}; expected a text")
    start = 1 if roles[0] == "system" else 0
    if tools:
        yield from _tools(contents[0] + "\n\n" if start else "", tools)
    elif start:
        yield from _message("system", contents[0])
    queries = (
        i for i, role in enumerate(roles) if role == "user" and not _is_response(contents[i])
    )
    last_query = max(queries, default=len(messages) - 1)
    for i, (role, content) in enumerate(zip(roles, contents, strict=True)):
        if role == "tool":  # consecutive results share one user turn
            if roles[i - 1 : i] != ["tool"]:
                yield from (IM_START, "user")
            yield from _response(content)
            if roles[i + 1 : i + 2] != ["tool"]:
                yield from (IM_END, "\n")
        elif role == "assistant":
            is_last = i == len(messages) - 1
            yield from _assistant(messages[i], content, i > last_query, is_last)
        elif i >= start:
            yield from _message(role, content)
    if add_generation_prompt:
        yield from (IM_START, "assistant\n")
        if enable_thinking is False:
            yield from _think("")


def _tools(system, tools) -> Iterator[str]:
    """Yields the system turn that describes the tools."""
    yield from (IM_START, "system\n", system)
    yield "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    yield "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    for tool in tools:
        yield "\n" + json.dumps(tool, ensure_ascii=False)
    yield "\n</tools>\n\nFor each function call, return a json object with function name and "
    yield from ("arguments within ", CALL, CALL_END, " XML tags:\n", CALL)
    yield '\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    yield from (CALL_END, IM_END, "\n")


def _assistant(message, content, active, is_last) -> Iterator[str]:
    """Yields one assistant turn; `active` ones, after the last user query, show their reasoning."""
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        before, closed, after = content.rpartition(THINK_END)
        reasoning = before.split(THINK_END)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
        content = after.lstrip("\n") if closed else content
    yield from (IM_START, "assistant\n")
    if active and (is_last or reasoning):
        yield from (*_think(reasoning), content.lstrip("\n"))
    else:
        yield content
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [(function["name"], function.get("arguments")) for function in functions]
    yield from call_pieces(calls, bool(content))
    yield from (IM_END, "\n")


def _message(role, content) -> tuple[str, ...]:
    return IM_START, role + "\n", content, IM_END, "\n"


def _think(reasoning) -> tuple[str, ...]:
    return THINK, "\n" + reasoning.strip("\n") + "\n", THINK_END, "\n\n"


def call_pieces(calls: Sequence[tuple[str, Json | str]], after_content: bool) -> Iterator[str]:
    """Yields (name, arguments) of each call; arguments that are text stay, absent ones are {}."""
    for k, (name, arguments) in enumerate(calls):
        if k or after_content:
            yield "\n"
        text = arguments or {}
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
        yield from (CALL, f'\n{{"name": "{name}", "arguments": {text}}}\n', CALL_END)


def _response(content) -> tuple[str, ...]:
    return "\n", RESPONSE, "\n" + content + "\n", RESPONSE_END


def _is_response(content) -> bool:
    return content.startswith(RESPONSE) and content.endswith(RESPONSE_END)


def _ids(tokenizer, pieces) -> list[int]:
    ids = []
    for is_marker, group in groupby(pieces, lambda piece: type(piece) is Marker):
        if is_marker:
            ids += map(tokenizer.token_id, group)
        else:
            ids += tokenizer.encode("".join(group))
    return ids
