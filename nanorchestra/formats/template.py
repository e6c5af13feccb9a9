"""Prompts of models that have a chat template of their own: Jinja, as transformers renders it.

No text forges a marker, such as <|im_end|>: in messages and tools each is broken by a space, "< |",
before the template puts them between its own.
"""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, read_text
from nanorchestra.model.checkpoint import stated_eos_ids
from nanorchestra.model.parser import CALL, THINK, THINK_END
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.schemas import Json, whole_characters


class TemplateFormat:
    """The ChatFormat of a directory: its template, and the tokens that its files name.

    UserError if no file names the token that ends a turn, or if the template is no Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, directory: Path) -> None:
        self._backend = tokenizer.backend
        file = directory / "tokenizer_config.json"
        config = read_json(file) if file.exists() else {}
        template = config.get("chat_template")
        if (directory / "chat_template.jinja").exists():
            file = directory / "chat_template.jinja"
            template = read_text(file)
        if isinstance(template, list):  # of several, by name
            template = {each["name"]: each["template"] for each in template}.get("default")
        self._source, self.template = file, template
        self.bos, self._eos = _token(config, "bos_token"), _token(config, "eos_token")

        added = self._backend.get_added_tokens_decoder().values()
        self._markers = [token.content for token in added if re.search(r"[^\w\s]", token.content)]
        self.eos_ids = self._ending_ids(directory)
        begin = self._backend.encode("").ids[:1]
        self.bos_ids = begin if self.bos and begin == [tokenizer.token_id(self.bos)] else []
        self._compiled = None
        self.reads_calls = False
        if template is not None:
            with_tools = re.search(r"\btools\b", template) is not None
            self.reads_calls = with_tools and CALL in template
            try:
                self._compiled = _environment().from_string(template)
            except jinja2.TemplateError as error:
                raise self._failed(error) from None

    def encode(
        self, messages: list[Json], tools: list[Json] | None, enable_thinking: bool | None
    ) -> list[int]:
        """Returns the ids of a prompt, up to where the model's turn begins. UserError."""
        where = self._source
        require(
            self._compiled, f"{where}: the model has no chat template; it completes prompts alone"
        )
        variables = {
            "bos_token": self.bos,
            "eos_token": self._eos,
            "enable_thinking": enable_thinking,
        }
        try:
            text = self._compiled.render(
                messages=[self._harmless(self._as_templates_read(each)) for each in messages],
                tools=self._harmless(tools) or None,
                add_generation_prompt=True,
                **{name: value for name, value in variables.items() if value is not None},
            )
        except Exception as error:  # templates can raise anything, for some messages alone
            raise self._failed(error) from None
        return self._backend.encode(text, add_special_tokens=False).ids

    def _harmless(self, value: Any) -> Any:
        """Returns a JSON value in which no text, nor key, holds a marker."""
        if isinstance(value, dict):
            return {self._harmless(key): self._harmless(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._harmless(each) for each in value]
        if not isinstance(value, str):
            return value
        for marker in self._markers:
            value = value.replace(marker, f"{marker[0]} {marker[1:]}")
        return whole_characters(value)

    def _as_templates_read(self, message: Json) -> Json:
        """Returns a message without fields that are null, and with arguments as an object.

        Reasoning that an assistant's text holds between markers is a field of its own: templates
        look for the markers to leave it out, and would not find broken ones.
        """
        message = {name: value for name, value in message.items() if value is not None}
        if "tool_calls" in message:
            message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        content = message.get("content")
        if (
            message["role"] == "assistant"
            and THINK_END in self._markers
            and isinstance(content, str)
        ):
            reasoning, closed, answer = content.rpartition(THINK_END)
            if closed:
                reasoning = reasoning.rpartition(THINK)[2].strip("\n")
                message = {"reasoning_content": reasoning} | message | {"content": answer}
        if "reasoning_content" in message:
            message.setdefault("thinking", message["reasoning_content"])
        return message

    def _ending_ids(self, directory) -> tuple[int, ...]:
        """Returns the ids that end a turn, first that of tokenizer_config.json."""
        ids = [] if self._eos is None else [self._backend.token_to_id(self._eos)]
        ids += stated_eos_ids(directory)
        where = directory / "tokenizer_config.json"
        require(ids, f"{where}: has no eos_token; expected the token that ends a turn")
        if "<|im_end|>" in self._markers and "<|im_end|>" in (self.template or ""):
            ids.append(self._backend.token_to_id("<|im_end|>"))  # base models do not name it
        return tuple(dict.fromkeys(ids))

    def _failed(self, error) -> UserError:
        """Returns the error of a template, in one line."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return UserError(f"{self._source}: the chat template failed: {reason[:300]}")


class _Generation(Extension):
    """The tag `generation`, which marks what a model writes: its body alone."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Returns the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the sandbox as transformers configures it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Returns JSON in which, unlike in Jinja's own, HTML is not escaped."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message):
    raise jinja2.TemplateError(message)


def _strftime_now(format) -> str:
    return datetime.now().strftime(format)


def _token(config, field) -> str | None:
    """Returns the text of a token that tokenizer_config.json states, as text or as an object."""
    stated = config.get(field)
    return stated.get("content") if isinstance(stated, dict) else stated


def _with_object(call: Json) -> Json:
    """Returns a call whose arguments are an object, if they are the JSON of one."""
    if "function" in call:
        return call | {"function": _with_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return call | {"arguments": arguments} if isinstance(arguments, dict) else call
