"""A domain: its tables, tools and policy, and the directory that holds them.

DIR/db.json      {table: {key: record}}
DIR/tools.json   [{"kind", "function", "program"}, ...] (see program.py)
DIR/policy.md    the rules in words
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from nanorchestra.errors import UserError
from nanorchestra.files import merge, read_json, read_text, write_whole
from nanorchestra.schemas import argument_error
from worlds.toolscale.program import Json, Tables, ToolError, parse, run

_NUMBER = re.compile(r"(?<![\w.])(?<!\d[-:])\d+(?:\.\d+)?(?!\w)(?![-:.]\d)")


@dataclass
class Domain:
    """The tables as every task of the domain finds them, and what can be done with them."""

    name: str
    tables: Tables
    tools: list[Json]
    policy: str
    keyed = True  # tables are {key: record}

    @cached_property
    def by_name(self) -> dict[str, Json]:
        """The tools by their names."""
        return {tool["function"]["name"]: tool for tool in self.tools}

    @cached_property
    def columns(self) -> dict[str, set[str]]:
        """The texts in the records in small letters, by the name of their field."""
        columns: dict[str, set[str]] = {}
        for field, text in leaves(self.tables):
            if isinstance(text, str):
                columns.setdefault(field, set()).add(text.casefold())
        return columns

    def call(self, tables: Tables, name: str, arguments: Any) -> Any:
        """Returns what the tool returns; may put new tables into `tables`. Raises ToolError."""
        if name not in self.by_name:
            raise ToolError(f"no tool named {name!r}")
        tool = self.by_name[name]
        problem = argument_error(arguments, tool["function"]["parameters"])
        if problem is not None:
            raise ToolError(f"{name}: {problem}")
        return self.invoke(tables, name, arguments)

    def invoke(self, tables: Tables, name: str, arguments: Json) -> Any:
        """Does a call that has been checked, or one of a task's set-up."""
        return run(self.by_name[name], arguments, tables)

    def started(self, state: Json | None) -> Self:
        """Returns the domain as a tau2 `initial_state` says. Raises ToolError if a call fails."""
        if not state:
            return self
        data = state.get("initialization_data", {}).get("agent_data") or {}
        tables = self.merged(data)
        for action in state.get("initialization_actions", ()):
            self.invoke(tables, action["func_name"], action["arguments"])
        return replace(self, tables=tables)

    def merged(self, data: Json) -> Tables:
        """Returns the tables with a task's data in them."""
        return merge(self.tables, data)

    def functions(self, names: Collection[str]) -> list[Json]:
        """Returns the OpenAI function objects of the tools named."""
        return [
            {"type": "function", "function": tool["function"]}
            for name, tool in self.by_name.items()
            if name in names
        ]

    def save(self, directory: Path) -> None:
        """Writes the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "db.json", self.tables)
        write_json(directory / "tools.json", self.tools)
        write_whole(directory / "policy.md", self.policy)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads a directory. Raises UserError if a part is missing or a program cannot be read."""
        tables, tools = read_json(directory / "db.json"), read_json(directory / "tools.json")
        for line in (line for tool in tools for line in tool["program"]):
            try:
                parse(line)
            except ValueError as error:
                raise UserError(f"{directory / 'tools.json'}: {error}") from None
        return cls(directory.name, tables, tools, read_text(directory / "policy.md"))


def leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what is in a JSON value, however deep, each after the name of its field."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, field)
    else:
        yield field, value


def communicated(info: str, messages: Sequence[str]) -> bool:
    """Returns whether a message holds `info`: as a number, or as whole words in any case."""
    info, messages = _spoken(info), [_spoken(message) for message in messages]
    if re.fullmatch(r"\$?\d+(\.\d+)?", info):
        return any(float(info.lstrip("$")) in numbers(message) for message in messages)
    words = rf"(?<!\w){re.escape(info)}(?!\w)"
    return any(info in message and re.search(words, message) for message in messages)


def numbers(text: str) -> set[float]:
    """Returns the numbers in a text; "1,000" is 1000, and 5 is not in 15."""
    return set(map(float, _NUMBER.findall(_spoken(text))))


def _spoken(text) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).casefold().strip()


def write_json(path: Path, value: Any) -> None:
    """Replaces the file by the value as JSON, one entry a line."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
