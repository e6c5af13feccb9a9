"""Qwen3's chat format: messages -> text or ids. The way back, sampled text -> reasoning, content and calls, is in parser.py.

One generator lists the pieces of a prompt; a `Marker` piece is one of the template's own tokens and becomes one id, every other piece is
text. Only the template makes Markers, so no user, tool or model text can forge one. The text between two markers is encoded in
one go, so the ids are those that Hugging Face gives for the rendered prompt. Never looks at model names, never runs a template engine.
"""

from __future__ import annotations

import json
from typing import Any, Iterable, Iterator, Sequence

from nanorchestra.errors import UserError
from nanorchestra.model import parser
from nanorchestra.model.parser import StreamParser, parse
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import ToolCall

__all__ = [
    "StreamParser",
    "encode",
    "encode_assistant",
    "encode_observations",
    "encode_user",
    "parse",
    "render",
]


class Marker(str):
    """A template token. As text it is its spelling, as ids it is one id."""


IM_START, IM_END = Marker("<|im_start|>"), Marker(parser.IM_END)
THINK, THINK_END, CALL, CALL_END = (
    Marker(tag) for tag in (parser.THINK, parser.THINK_END, parser.CALL, parser.CALL_END)
)
RESPONSE, RESPONSE_END = Marker("<tool_response>"), Marker("</tool_response>")
ROLES = ("system", "user", "assistant", "tool")


def render(
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
) -> str:
    """The prompt as Qwen3's own template writes it. Messages and tools in the OpenAI shape; raises UserError naming a bad field.

    Reasoning of assistant turns before the last real user query is left out. enable_thinking=False adds an empty think block, and only
    to the generation prompt; None and True are the same. Content is a string, a list of {"type": "text", "text": ...}, or None.
    """
    return "".join(_prompt(messages, tools, add_generation_prompt, enable_thinking))


def encode(
    tokenizer: Tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
) -> list[int]:
    """The ids of `render`, with added-token ids only where the template itself puts them."""
    return _ids(tokenizer, _prompt(messages, tools, add_generation_prompt, enable_thinking))


def encode_observations(
    tokenizer: Tokenizer, contents: Sequence[str], enable_thinking: bool | None = None
) -> list[int]:
    """What follows a sampled <|im_end|>: the answers to its calls, in order, and the next generation prompt."""
    responses = (piece for content in contents for piece in _response(content))
    return _ids(
        tokenizer,
        ["\n", IM_START, "user", *responses, IM_END, "\n", *_generation_prompt(enable_thinking)],
    )


def encode_user(tokenizer: Tokenizer, text: str, enable_thinking: bool | None = None) -> list[int]:
    """What follows a sampled <|im_end|> when the user speaks: the message and the next generation prompt."""
    return _ids(
        tokenizer,
        ["\n", IM_START, "user\n", text, IM_END, "\n", *_generation_prompt(enable_thinking)],
    )


def encode_assistant(
    tokenizer: Tokenizer,
    reasoning: str,
    content: str,
    calls: Sequence[ToolCall],
    thinking: bool = True,
) -> list[int]:
    """The ids an ideal policy samples after the generation prompt, <|im_end|> included.

    thinking=False: there is no think block (the prompt has an empty one) and `reasoning` is not used. Arguments that are text stay as they are.
    """
    content = content.lstrip("\n")
    think = _think(reasoning) if thinking else ()
    written = [
        (call.name, call.arguments if isinstance(call.arguments, str) else _json(call.arguments))
        for call in calls
    ]
    return _ids(tokenizer, [*think, content, *_calls(written, after_content=bool(content)), IM_END])


# --- messages -> pieces ---------------------------------------------------------------------------------------------------------------


def _prompt(
    messages: list[dict],
    tools: list[dict] | None,
    add_generation_prompt: bool,
    enable_thinking: bool | None,
) -> Iterator[str]:
    """The pieces of a prompt, in order."""
    if not messages:
        raise UserError("messages: empty; at least one message is needed")
    roles = [_role(message, i) for i, message in enumerate(messages)]
    contents = [_content(message, i) for i, message in enumerate(messages)]
    first_turn = 1 if roles[0] == "system" else 0
    if tools:
        yield from _tools(contents[0] + "\n\n" if first_turn else "", tools)
    elif first_turn:
        yield from (IM_START, "system\n", contents[0], IM_END, "\n")
    last_query = max(
        (i for i in range(len(messages)) if roles[i] == "user" and not _is_response(contents[i])),
        default=len(messages) - 1,
    )
    for i in range(first_turn, len(messages)):
        role, content = roles[i], contents[i]
        if role == "tool":
            if i == 0 or roles[i - 1] != "tool":
                yield from (IM_START, "user")
            yield from _response(content)
            if i == len(messages) - 1 or roles[i + 1] != "tool":
                yield from (IM_END, "\n")
        elif role == "assistant":
            yield from _assistant(
                messages[i], i, content, active=i > last_query, last=i == len(messages) - 1
            )
        else:
            yield from (IM_START, role + "\n", content, IM_END, "\n")
    if add_generation_prompt:
        yield from _generation_prompt(enable_thinking)


def _tools(system: str, tools: list[dict]) -> Iterator[str]:
    """The system turn that describes the tools."""
    yield from (IM_START, "system\n", system)
    yield "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    yield "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    for tool in tools:
        yield "\n" + _json(tool)
    yield "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    yield from (
        CALL,
        CALL_END,
        " XML tags:\n",
        CALL,
        '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
        CALL_END,
    )
    yield from (IM_END, "\n")


def _assistant(message: dict, i: int, content: str, active: bool, last: bool) -> Iterator[str]:
    """One assistant turn of the history. `active`: after the last user query, so its reasoning is still shown."""
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str):
        reasoning = ""
        if THINK_END in content:
            reasoning = content.split(THINK_END)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
            content = content.split(THINK_END)[-1].lstrip("\n")
    yield from (IM_START, "assistant\n")
    if active and (last or reasoning):
        yield from _think(reasoning)
        yield content.lstrip("\n")
    else:
        yield content
    calls = [
        _call(call, f"messages[{i}].tool_calls[{k}]")
        for k, call in enumerate(message.get("tool_calls") or ())
    ]
    yield from _calls(calls, after_content=bool(content))
    yield from (IM_END, "\n")


def _think(reasoning: str) -> tuple[str, ...]:
    return THINK, "\n" + reasoning.strip("\n") + "\n", THINK_END, "\n\n"


def _calls(calls: Sequence[tuple[str, str]], after_content: bool) -> Iterator[str]:
    """(name, arguments as JSON text) of each call -> pieces."""
    for k, (name, arguments) in enumerate(calls):
        if k or after_content:
            yield "\n"
        yield from (CALL, f'\n{{"name": "{name}", "arguments": {arguments}}}\n', CALL_END)


def _response(content: str) -> tuple[str, ...]:
    return "\n", RESPONSE, "\n" + content + "\n", RESPONSE_END


def _generation_prompt(enable_thinking: bool | None) -> tuple[str, ...]:
    return IM_START, "assistant\n", *(_think("") if enable_thinking is False else ())


def _is_response(content: str) -> bool:
    return content.startswith(RESPONSE) and content.endswith(RESPONSE_END)


def _role(message: Any, i: int) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise UserError(f"messages[{i}].role: {role!r}; one of {', '.join(ROLES)} is needed")
    return role


def _content(message: dict, i: int) -> str:
    """Content as one string. Parts are joined as they are; None is empty."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UserError(
            f"messages[{i}].content: {type(content).__name__}; a string or a list of text parts is needed"
        )
    for k, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise UserError(
                f'messages[{i}].content[{k}]: only parts {{"type": "text", "text": "..."}} are supported'
            )
    return "".join(part["text"] for part in content)


def _call(call: Any, where: str) -> tuple[str, str]:
    """(name, arguments as JSON text). Arguments that are text already stay as they are; missing ones are {}."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f'{where}: no name; {{"function": {{"name": ..., "arguments": ...}}}} is needed'
        )
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else arguments
    return function["name"], arguments if isinstance(arguments, str) else _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _ids(tokenizer: Tokenizer, pieces: Iterable[str]) -> list[int]:
    """Markers become their id; the text between two markers is encoded as one string without added tokens."""
    ids: list[int] = []
    text: list[str] = []
    for piece in pieces:
        if type(piece) is Marker:
            if text:
                ids += tokenizer.encode("".join(text))
                text.clear()
            ids.append(tokenizer.token_id(piece))
        else:
            text.append(piece)
    return ids + tokenizer.encode("".join(text)) if text else ids
