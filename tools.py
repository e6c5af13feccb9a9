"""What the orchestrator may call: a Python interpreter, lookup in a corpus, records of a database, and experts.

A tool has a name, a description, JSON-schema parameters, a price and `call(arguments) -> ToolResult`; every call is billed. Experts are
other language models: `HttpExpert` is any OpenAI-compatible endpoint, `SimulatedExpert` is a declared simulation (a skill by subject
and difficulty, errors drawn from a seed, the prices of its task, a latency that only moves a virtual clock). `load_tools` reads a tool file.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from nanorchestra.metrics import read_json
from nanorchestra.retrieval import Index, load_passages
from nanorchestra.sandbox import Sandbox
from nanorchestra.types import ToolResult, UserError
from reward import Price, expert_cost

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
        text = "\n".join(part for part in (result.stdout.strip(), f"Error: {result.error}" if result.error else "") if part)
        seconds = result.seconds if self.latency_s is None else self.latency_s
        return ToolResult(text or "(no output)", self.usd_per_call, seconds, error=bool(result.error))


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
    parameters: dict[str, Any] = field(default_factory=lambda: {
        "type": "object", "properties": {"table": {"type": "string"}, "id": {"type": "integer"}}, "required": ["table", "id"]})
    blocking: bool = False

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        table, key = arguments["table"], str(arguments["id"])
        if table not in self.tables:
            text = f"Error: no table {table}; there are {', '.join(self.tables)}"
        elif key not in self.tables[table]:
            text = f"Error: no {table} {key}"
        else:
            return ToolResult(json.dumps(self.tables[table][key]), self.usd_per_call, self.latency_s)
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
        unsure = rng.random() < (self.skill.unsure_if_right if right else self.skill.unsure_if_wrong)
        answer = self.gold if right else rng.choice(self.wrong)
        output = round(self.output_tokens * rng.uniform(0.85, 1.15))
        seconds = self.latency_s * rng.uniform(0.85, 1.15)
        cost = expert_cost(self.input_tokens, output, self.price)
        return ToolResult(f"{'unsure' if unsure else 'sure'}: {answer}", cost, seconds, input_tokens=self.input_tokens, output_tokens=output)


class EndpointError(Exception):
    """An endpoint that did not answer, or not as it should, after all attempts."""


def chat_completion(base_url: str, body: dict[str, Any], *, key_variable: str = "OPENAI_API_KEY", timeout_s: float = 120.0, attempts: int = 3) -> tuple[dict[str, Any], tuple[int, int]]:
    """The message of an OpenAI-compatible chat completion, with its `finish_reason`, and its (input, output) tokens. The key comes from the environment
    variable `key_variable`.

    A request has `timeout_s` and is tried at most `attempts` times. Raises EndpointError, which never holds the key.
    """
    key, problem = "".join(os.environ.get(key_variable, "").split()), ""        # a line break in it would stand in requests' complaint
    headers = {"Authorization": f"Bearer {key}"}
    for attempt in range(attempts):
        if attempt:
            time.sleep(min(2.0 ** attempt, 10.0))
        try:
            reply = requests.post(f"{base_url.rstrip('/')}/chat/completions", json=body, headers=headers, timeout=timeout_s)
            if reply.status_code in (408, 409, 429) or reply.status_code >= 500:
                problem = f"HTTP {reply.status_code}"
                continue
            if reply.status_code >= 400:
                problem = f"HTTP {reply.status_code}: {' '.join(reply.text.split())}"
                break
            data = reply.json()
            choice, usage = data["choices"][0], data.get("usage") or {}
            return {**choice["message"], "finish_reason": choice.get("finish_reason")}, (int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))
        except (requests.ConnectionError, requests.Timeout) as error:
            problem = type(error).__name__
        except (requests.RequestException, ValueError, OverflowError, KeyError, IndexError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            break
    raise EndpointError((problem.replace(key, "...") if key else problem)[:300])


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
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {"task": {"type": "string"}}})
    blocking: bool = True

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        words = arguments.get("task") or self.question
        body = {"model": self.model, "messages": [{"role": "user", "content": words}], "max_tokens": self.max_tokens}
        start = time.monotonic()
        try:
            message, tokens = chat_completion(self.base_url, body, key_variable=self.key_variable, timeout_s=self.timeout_s, attempts=self.attempts)
        except EndpointError as error:
            return ToolResult(f"Error: {self.name} did not answer ({error})", 0.0, time.monotonic() - start, error=True, infrastructure=True)
        return ToolResult(message.get("content") or "", expert_cost(*tokens, self.price), time.monotonic() - start, False, False, *tokens)


def load_tools(path: str | Path, question: str, sandbox: Sandbox) -> list[Any]:
    """The tools of a JSON tool file: a list of objects with `name`, `description`, `kind` ("code", "search" or "expert") and its settings.

    code: usd_per_call. search: corpus (a JSONL file of {"text"}), usd_per_call. expert: base_url, model, input_usd_per_million,
    output_usd_per_million, and optionally key_variable, timeout_s. Raises UserError that names the entry, the field and what would be right.
    """
    wanted = {"code": {"usd_per_call": float}, "search": {"corpus": str, "usd_per_call": float},
              "expert": {"base_url": str, "model": str, "input_usd_per_million": float, "output_usd_per_million": float}}
    optional = {"code": {"timeout_s": float}, "search": {"passages": int}, "expert": {"key_variable": str, "timeout_s": float, "max_tokens": int}}
    entries = read_json(Path(path))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: must be a JSON list of objects, each a tool")
    tools: list[Any] = []
    for position, entry in enumerate(entries):
        where = f"{path}: tool {position} ({entry.get('name', 'no name')!s})"
        kind = entry.get("kind")
        if kind not in wanted:
            raise UserError(f"{where}: kind is {kind!r}; it must be one of {', '.join(wanted)}")
        fields = {"name": str, "description": str, "kind": str, **wanted[kind]}
        allowed = {**fields, **optional[kind]}
        for name, value in entry.items():
            if name not in allowed:
                raise UserError(f"{where}: unknown field {name!r}; a {kind} tool has {', '.join(allowed)}")
            if not isinstance(value, (int, float) if allowed[name] is float else allowed[name]) or isinstance(value, bool):
                raise UserError(f"{where}: {name} is {value!r}; it must be a {allowed[name].__name__}")
            if allowed[name] in (int, float) and value < 0:
                raise UserError(f"{where}: {name} is {value}; it must not be negative")
        missing = [name for name in fields if name not in entry]
        if missing:
            raise UserError(f"{where}: field {missing[0]!r} is missing; it must be a {fields[missing[0]].__name__}")
        if any(tool.name == entry["name"] for tool in tools):
            raise UserError(f"{where}: name is used twice; names must differ")
        settings = {name: value for name, value in entry.items() if name != "kind"}
        if kind == "code":
            tools.append(PythonTool(sandbox=sandbox, **settings))
        elif kind == "search":
            tools.append(LookupTool(index=Index.build(load_passages(settings.pop("corpus"))), **settings))
        else:
            price = Price(settings.pop("input_usd_per_million"), settings.pop("output_usd_per_million"))
            tools.append(HttpExpert(price=price, question=question, **settings))
    return tools
