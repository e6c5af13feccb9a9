"""What the orchestrator may call: a Python interpreter, lookup in a corpus, records of a database, and experts.

A tool has a name, a description, JSON-schema parameters, a price and `call(arguments) -> ToolResult`; every call is billed. Experts are
other language models: `HttpExpert` is any OpenAI-compatible endpoint, `SimulatedExpert` is a declared simulation (a skill by subject
and difficulty, errors drawn from a seed, the prices of its task, a latency that only moves a virtual clock). `load_tools` reads a tool file.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.files import is_utf8, read_json
from nanorchestra.records import Price, ToolResult
from nanorchestra.tools.experts import EndpointError, chat_completion, is_base_url
from nanorchestra.tools.index import Index, load_passages
from nanorchestra.tools.sandbox import Sandbox

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def _one_string(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


@dataclass
class PythonTool:
    """Runs code for real, in a restricted subprocess. Costs `usd_per_call`, takes `latency_s` on the clock (None: the measured time)."""

    name: str
    description: str
    sandbox: Sandbox
    usd_per_call: float = 0.0
    latency_s: float | None = None
    timeout_s: float = 5.0
    kind: str = "code"
    parameters: dict[str, Any] = field(default_factory=lambda: _one_string("code"))
    blocking: bool = True

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        result = self.sandbox.run(arguments["code"], timeout_s=self.timeout_s)
        text = "\n".join(
            part
            for part in (result.stdout.strip(), f"Error: {result.error}" if result.error else "")
            if part
        )
        seconds = result.seconds if self.latency_s is None else self.latency_s
        return ToolResult(
            text or "(no output)", self.usd_per_call, seconds, error=bool(result.error)
        )


@dataclass
class LookupTool:
    """The best passage of a corpus for a query."""

    name: str
    description: str
    index: Index
    usd_per_call: float = 0.0
    latency_s: float = 0.0
    passages: int = 1
    kind: str = "search"
    parameters: dict[str, Any] = field(default_factory=lambda: _one_string("query"))
    blocking: bool = False

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        found = [text for _, text in self.index.search(arguments["query"], k=self.passages)]
        return ToolResult("\n".join(found) or "nothing found", self.usd_per_call, self.latency_s)


@dataclass
class RecordsTool:
    """Reads one row of a table by its id. `tables` is {table: {id as text: row}}."""

    name: str
    description: str
    tables: dict[str, dict[str, dict[str, Any]]]
    usd_per_call: float = 0.0
    latency_s: float = 0.0
    kind: str = "records"
    parameters: dict[str, Any] = field(
        default_factory=lambda: {
            "type": "object",
            "properties": {"table": {"type": "string"}, "id": {"type": "integer"}},
            "required": ["table", "id"],
        }
    )
    blocking: bool = False

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        table, key = arguments["table"], str(arguments["id"])
        if table not in self.tables:
            text = f"Error: no table {table}; there are {', '.join(self.tables)}"
        elif key not in self.tables[table]:
            text = f"Error: no {table} {key}"
        else:
            return ToolResult(
                json.dumps(self.tables[table][key]), self.usd_per_call, self.latency_s
            )
        return ToolResult(text, self.usd_per_call, self.latency_s, error=True)


@dataclass(frozen=True)
class Skill:
    """How a simulated expert does at one question: P(right), and P(it says that it is unsure) when it is right or wrong."""

    right: float
    unsure_if_right: float
    unsure_if_wrong: float


@dataclass
class SimulatedExpert:
    """A simulated language model. It answers the question of the task; what it knows is decided by its skill and its seed.

    Asked again within one attempt it says the same again; in another attempt (another seed) it may err differently.
    """

    name: str
    description: str
    skill: Skill
    gold: str
    wrong: tuple[str, ...]
    price: Price
    input_tokens: int
    output_tokens: int
    latency_s: float
    seed: str
    kind: str = "expert"
    parameters: dict[str, Any] = field(default_factory=lambda: dict(NO_PARAMETERS))
    blocking: bool = False

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        rng = random.Random(f"{self.seed}/{self.name}")
        right = rng.random() < self.skill.right
        unsure = rng.random() < (
            self.skill.unsure_if_right if right else self.skill.unsure_if_wrong
        )
        answer = self.gold if right else rng.choice(self.wrong)
        output = round(self.output_tokens * rng.uniform(0.85, 1.15))
        seconds = self.latency_s * rng.uniform(0.85, 1.15)
        cost = self.price.cost(self.input_tokens, output)
        return ToolResult(
            f"{'unsure' if unsure else 'sure'}: {answer}",
            cost,
            seconds,
            input_tokens=self.input_tokens,
            output_tokens=output,
        )


@dataclass
class HttpExpert:
    """An expert behind any OpenAI-compatible endpoint. The key comes from the environment variable `key_variable`, and from nowhere else.

    One call is one request with `timeout_s`, tried at most `attempts` times; what still fails is an infrastructure error.
    """

    name: str
    description: str
    base_url: str
    model: str
    price: Price
    question: str = ""
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0
    attempts: int = 3
    max_tokens: int = 4096
    kind: str = "expert"
    parameters: dict[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {"task": {"type": "string"}}}
    )
    blocking: bool = True

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        words = arguments.get("task") or self.question
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self.max_tokens,
        }
        start = time.monotonic()
        try:
            message, tokens = chat_completion(
                self.base_url,
                body,
                key_variable=self.key_variable,
                timeout_s=self.timeout_s,
                attempts=self.attempts,
            )
        except EndpointError as error:
            return ToolResult(
                f"Error: {self.name} did not answer ({error})",
                0.0,
                time.monotonic() - start,
                error=True,
                infrastructure=True,
            )
        return ToolResult(
            message.get("content") or "",
            self.price.cost(*tokens),
            time.monotonic() - start,
            False,
            False,
            *tokens,
        )


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and is_utf8(value)


def _like(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _number(kinds: Any, low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
    )


# What a field must be: a check, and the same in words.
_TEXT = (_text, "text, not empty")
_PRICE = (_number((int, float), 0, 1e6), "a number of US dollars, 0 to 1000000")
_SECONDS = (_number((int, float), 0.1, 3600), "a number of seconds, 0.1 to 3600")
_ALL = {
    "name": (_like(r"[\w.-]{1,64}"), "1 to 64 letters, digits or any of _ . -"),
    "description": _TEXT,
    "kind": _TEXT,
}
NEEDED = {
    "code": {"usd_per_call": _PRICE},
    "search": {
        "corpus": (
            lambda path: _text(path) and Path(path).is_file(),
            'a file of lines like {"text": "..."}',
        ),
        "usd_per_call": _PRICE,
    },
    "expert": {
        "base_url": (
            lambda url: _text(url) and is_base_url(url),
            "a base URL such as http://localhost:8000/v1, without a key",
        ),
        "model": _TEXT,
        "input_usd_per_million": _PRICE,
        "output_usd_per_million": _PRICE,
    },
}
OPTIONAL = {
    "code": {"timeout_s": _SECONDS},
    "search": {"passages": (_number(int, 1, 100), "a whole number, 1 to 100")},
    "expert": {
        "key_variable": (
            _like(r"[A-Za-z_][A-Za-z0-9_]*"),
            "the name of an environment variable, such as OPENAI_API_KEY",
        ),
        "timeout_s": _SECONDS,
        "max_tokens": (_number(int, 1, 1_000_000), "a whole number, 1 to 1000000"),
    },
}


def load_tools(path: str | Path, question: str, sandbox: Sandbox) -> list[Any]:
    """The tools of a JSON tool file: a list of objects with `name`, `description`, `kind` ("code", "search" or "expert") and its settings.

    code: usd_per_call, and optionally timeout_s. search: corpus (a JSONL file of {"text"}), usd_per_call, and optionally passages. expert: base_url,
    model, input_usd_per_million, output_usd_per_million, and optionally key_variable, timeout_s, max_tokens. Raises UserError that names the
    entry, the field and what would be right.
    """
    entries = read_json(Path(path))
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        raise UserError(
            f"{path}: must be a JSON list of objects, each a tool, and hold one at least"
        )
    tools: list[Any] = []
    for position, entry in enumerate(entries):
        where, kind = (
            f"{path}: tool {position} ({_short(entry.get('name', 'no name'))})",
            entry.get("kind"),
        )
        if not isinstance(kind, str) or kind not in NEEDED:
            raise UserError(
                f"{where}: kind is {_short(kind)}; it must be one of {', '.join(NEEDED)}"
            )
        needed = _ALL | NEEDED[kind]
        allowed = needed | OPTIONAL[kind]
        for name, value in entry.items():
            if name not in allowed:
                raise UserError(
                    f"{where}: unknown field {_short(name)}; a {kind} tool has {', '.join(allowed)}"
                )
            fits, words = allowed[name]
            if not fits(value):
                raise UserError(f"{where}: {name} is {_short(value)}; it must be {words}")
        missing = next((name for name in needed if name not in entry), None)
        if missing:
            raise UserError(
                f"{where}: field {missing!r} is missing; it must be {needed[missing][1]}"
            )
        if any(tool.name == entry["name"] for tool in tools):
            raise UserError(f"{where}: name is used twice; names must differ")
        settings = {name: value for name, value in entry.items() if name != "kind"}
        if kind == "code":
            tools.append(PythonTool(sandbox=sandbox, **settings))
        elif kind == "search":
            try:
                passages = load_passages(settings.pop("corpus"))
            except UserError as error:
                raise UserError(f"{where}: corpus: {error}") from None
            tools.append(LookupTool(index=Index.build(passages), **settings))
        else:
            price = Price(
                settings.pop("input_usd_per_million"), settings.pop("output_usd_per_million")
            )
            tools.append(HttpExpert(price=price, question=question, **settings))
    return tools


def _short(value: Any) -> str:
    """As Python writes it, cut to what one line can bear."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
