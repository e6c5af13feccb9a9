"""Prompts of models that have a chat template of their own: Jinja text, rendered in a sandbox.

No text of messages or tools can forge a marker, as in chat.py. Before a template is rendered, each
punctuation mark of the markers becomes its shadow in these texts: an unassigned character, which is
turned back after the markers have been cut out. Templates strip, split and join texts as ever;
literals that a template looks for in texts (`'</think>' in content`) are shadowed as well.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanorchestra.errors import UserError, require
from nanorchestra.model.parser import CALL
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.schemas import Json

SHADOWS = 0x40000  # code points between a character and its shadow, in plane 4: unassigned
# Methods of texts that look for their first argument in the text.
SEARCHES = {
    *("split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex", "count"),
    *("replace", "startswith", "endswith", "removeprefix", "removesuffix"),
    *("strip", "lstrip", "rstrip"),
}
# What tokens with lstrip or rstrip take beside them: Unicode's white space, not Python's.
_WHITE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f")
_WHITE_SPACE = re.compile(f"[{_WHITE}]*")


@cache
def template_of(tokenizer: Tokenizer) -> "ChatTemplate":
    """Returns the template of a tokenizer without Qwen3's markers, compiled once. UserError."""
    return ChatTemplate(tokenizer)


class ChatTemplate:
    """A compiled template. `parses_calls`: it takes tools, and has models write calls as Qwen's do.

    UserError if the tokenizer has none, or if it is no Jinja.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        require(
            tokenizer.template is not None,
            f"{tokenizer.source}: the model has no chat template; it completes prompts alone",
        )
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._markers = {token.content: token for token in added if _punctuation(token.content)}
        marks = set().union(*map(_punctuation, self._markers))
        self._shadow = {ord(mark): ord(mark) + SHADOWS for mark in marks}
        self._unshadow = {shadow: mark for mark, shadow in self._shadow.items()}
        self._given = dict.fromkeys(self._unshadow, 0xFFFD) | self._shadow
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        environment = _Environment(self._tojson)
        try:
            tree = environment.parse(tokenizer.template)
            names = {node.name for node in tree.find_all(nodes.Name)}
            self.parses_calls = "tools" in names and CALL in tokenizer.template
            _shadow_literals(tree, self._shadow)
            self._template = environment.from_string(tree)
        except Exception as error:  # templates can raise anything, also as they are compiled
            raise self._failed(error) from None

    def encode(
        self, messages: list[Json], tools: list[Json] | None, enable_thinking: bool | None
    ) -> list[int]:
        """Returns the ids of a prompt, up to where the model's turn begins.

        Markers are those that the template writes. UserError if it fails.
        """
        text, ids, start = self._render(messages, tools, enable_thinking), [], 0
        for match in self._pattern.finditer(text):
            marker, between = self._markers[match[0]], text[start : match.start()]
            ids += self._encode_text(between.rstrip(_WHITE) if marker.lstrip else between)
            ids.append(self._tokenizer.token_id(match[0]))
            start = match.end()
            if marker.rstrip:
                start = _WHITE_SPACE.match(text, start).end()
        return ids + self._encode_text(text[start:])

    def _encode_text(self, text):
        return self._tokenizer.encode(text.translate(self._unshadow))

    def _render(self, messages, tools, enable_thinking) -> str:
        tokenizer = self._tokenizer
        given = {"add_generation_prompt": True}
        given["eos_token"] = tokenizer.backend.id_to_token(tokenizer.im_end)
        if tokenizer.bos is not None:
            given["bos_token"] = tokenizer.bos
        if enable_thinking is not None:
            given["enable_thinking"] = enable_thinking
        texts = {
            "messages": [_as_templates_read(each) for each in messages],
            "tools": tools or None,
        }
        given |= _mapped(texts, lambda text: text.translate(self._given))
        try:
            return self._template.render(given)
        except Exception as error:
            raise self._failed(error) from None

    def _tojson(self, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        """The filter as transformers has it: HTML is not escaped."""
        text = json.dumps(
            _mapped(value, lambda text: text.translate(self._unshadow)),
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        return text.translate(self._shadow)

    def _failed(self, error) -> UserError:
        """Returns the error of a template, in one line."""
        reason = error.message if isinstance(error, jinja2.TemplateError) else str(error)
        reason = " ".join((reason or "").translate(self._unshadow).split())[:300]
        if not isinstance(error, jinja2.TemplateError):
            reason = f"{type(error).__name__}: {reason}"
        line = getattr(error, "lineno", None)
        place = f"line {line}: " if line else ""
        source = self._tokenizer.template_source
        return UserError(f"{source}: the chat template failed: {place}{reason}")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox as transformers configures it."""

    def __init__(self, tojson: Callable) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


class _Generation(Extension):
    """The tag `generation`, which marks what a model writes: its body alone."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Returns the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _shadow_literals(tree: nodes.Template, shadow: Mapping[int, int]) -> None:
    """Shadows the literals that a template looks for in texts."""
    looked_for = list(tree.find_all(nodes.Compare))
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCHES:
            looked_for += call.args[:1]
    for each in tree.find_all((nodes.Filter, nodes.Test)):
        if each.name in ("replace", "in", "eq", "equalto", "==", "ne", "!="):
            looked_for += each.args[:1]
    for node in looked_for:
        literals = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
        for literal in literals:
            if isinstance(literal.value, str):
                literal.value = literal.value.translate(shadow)


def _as_templates_read(message: Json) -> Json:
    """Returns a message without fields that are null, and with arguments as an object."""
    message = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    if "reasoning_content" in message:
        message.setdefault("thinking", message["reasoning_content"])
    return message


def _with_object(call: Json) -> Json:
    """Returns a call whose arguments are an object, if they are the JSON of one."""
    if "function" in call:
        return call | {"function": _with_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return call | {"arguments": arguments} if isinstance(arguments, dict) else call


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with each text, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _punctuation(marker: str) -> set[str]:
    """Returns the characters of a marker that are no letters, digits, underscores or spaces."""
    return set(re.sub(r"[\w\s]|[^\0-\uffff]", "", marker))


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _strftime_now(format) -> str:
    return datetime.now().strftime(format)
