"""What the orchestrator may call: Python, search in a corpus, records of a database, experts.

How a new tool reaches the model, in worlds that run calls by `ToolEnvironment` (the miniature, and
serve.py with `--tools`). A ToolScale task has tools of another form, data that
worlds/toolscale/program.py interprets, and its environment runs these itself:
1. Write the class here: a name, a kind, a description, the JSON schema `parameters` of its
   arguments, `blocking` (True if a call waits), and `call(arguments) -> ToolResult`, the
   observation with its cost and latency. The contract is `Tool` in
   nanorchestra/agent/environment.py. A call that cannot be run costs nothing.
2. List it in the catalogue: add its kind and settings to nanorchestra/tools/catalogue.json, and
   make it in `Catalogue`, which reads the file given with `--tools`. Or offer it in a world.
3. nanorchestra/model/chat.py renders its schema into the prompt, through `function_schema`.
4. nanorchestra/agent/environment.py checks the arguments of each call and runs it.

A Python function decorated with `@tool` needs none of this: `--tools my_tools.py`.

Experts are other language models: `ExpertTool` and `RoleTool` ask OpenAI-compatible endpoints,
`SimulatedExpert` is a declared simulation with the prices of its task and a virtual latency.
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanorchestra.agent.environment import Tool, schema_error
from nanorchestra.agent.nested import Orchestrator
from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.files import read_json, read_toml
from nanorchestra.records import Price, ToolResult, arguments_schema
from nanorchestra.tools.corpus import build_index, read_passages
from nanorchestra.tools.functions import load_functions, tool
from nanorchestra.tools.index import Index
from nanorchestra.tools.models import Endpoint, Expert, ExpertTool, Spending
from nanorchestra.tools.roles import KINDS as ROLES
from nanorchestra.tools.roles import RoleTool
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.search import WebSearch
from nanorchestra.tools.simulated import RecordsTool, SimulatedExpert, Skill

__all__ = [
    "RecordsTool",
    "SimulatedExpert",
    "Skill",
    "load_tools",
    "tool",
]  # beside the tools below
SANDBOX_USD = 0.0000083  # a second, as published
PRESETS = Path(__file__).parent / "assets" / "experts.toml"
CATALOGUE = Path(__file__).parent / "nanorchestra" / "tools" / "catalogue.json"


@dataclass
class PythonTool:
    """Runs code in the sandbox; a second costs `usd_per_second`. `latency_s` None: measured."""

    name: str
    description: str
    sandbox: Sandbox
    usd_per_call: float = 0.0
    latency_s: float | None = None
    timeout_s: float = 5.0
    usd_per_second: float = 0.0
    kind, blocking, parameters = "code", True, arguments_schema(code="string")

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns what the code printed, and its error."""
        result = self.sandbox.run(arguments["code"], timeout_s=self.timeout_s)
        error = f"Error: {result.error}" if result.error else ""
        text = "\n".join(part for part in (result.stdout.strip(), error) if part)
        seconds = result.seconds if self.latency_s is None else self.latency_s
        usd = self.usd_per_call + self.usd_per_second * seconds
        return ToolResult(text or "(no output)", usd, seconds, error=bool(error))


@dataclass
class LookupTool:
    """Finds the passages of a corpus that fit a query best, and names their sources."""

    name: str
    description: str
    index: Index
    usd_per_call: float = 0.0
    latency_s: float = 0.0
    passages: int = 1
    kind, parameters = "search", arguments_schema(query="string")

    @property
    def blocking(self) -> bool:
        """True if a search takes long."""
        return self.index.blocking

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns the best passages, one a line, and [source] after those that have one."""
        hits = self.index.search(arguments["query"], k=self.passages)
        found = [f"{hit.text} [{hit.source}]" if hit.source else hit.text for hit in hits]
        text = "\n".join(found) or "nothing found"
        return ToolResult(text, self.usd_per_call, self.latency_s, found={"documents": found[::-1]})


def load_tools(path: str | Path, sandbox: Sandbox, tokenizer: Any = None) -> list[Tool]:
    """Returns the tools of a catalogue; docs/tools.md describes its form.

    `path` names files, with commas between them. A TOML or JSON file holds `tools`, OpenAI function
    objects with a kind and its settings, and may hold `experts`, `endpoints`, `aliases` and
    `max_usd`, which change the presets of assets/experts.toml. A JSON list is the `tools` alone. A
    Python file holds functions decorated with @tool. `tokenizer` cuts what the experts of a
    published role read. UserError names file, entry, setting and what is right.
    """
    tables, functions = read_toml(PRESETS), []
    for file in map(str.strip, str(path).split(",")):
        if file.endswith(".py"):
            functions += load_functions(file)
        else:
            tables = _merged(tables, _table(file))
    problem = schema_error(tables, read_json(CATALOGUE))
    require(not problem, f"{path}: {problem}")
    tools = Catalogue(str(path), tables, sandbox, tokenizer).tools() + functions
    require(tools, f"{path}: no tool; [[tools]] must name one")
    names = [each.name for each in tools]
    twice = [name for name in names if names.count(name) > 1]
    require(not twice, f"{path}: two tools are named {''.join(twice[:1])!r}")
    return tools


def _table(file: str) -> Any:
    """Returns one file of a catalogue, with its tools as flat objects. UserError."""
    table = read_toml(file) if file.endswith(".toml") else read_json(file)
    table = {"tools": table} if isinstance(table, list) else table
    if isinstance(table, dict) and isinstance(entries := table.get("tools"), list):
        table["tools"] = [_flat(entry) if isinstance(entry, dict) else entry for entry in entries]
    return table


def _merged(old: Any, new: Any, key: str = "") -> Any:
    """Returns `new` over `old`: tables are merged, and the lists of `tools` joined."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merged(old.get(name), value, name) for name, value in new.items()}
    joined = key == "tools" and isinstance(old, list) and isinstance(new, list)
    return old + new if joined else new


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry without the nesting of an OpenAI function object."""
    function = entry.get("function")
    if isinstance(function, dict):
        entry = function | {k: v for k, v in entry.items() if k not in ("type", "function")}
    is_role = entry.get("name") in ROLES and "model" in str(entry.get("parameters"))
    return ({"kind": "role"} if is_role else {}) | entry


@dataclass
class Catalogue:
    """Makes the tools of merged tables, whose form is checked. `path` stands in messages."""

    path: str
    tables: dict[str, Any]
    sandbox: Sandbox
    tokenizer: Any

    def __post_init__(self) -> None:
        endpoints = {name: Endpoint(**s) for name, s in self.tables["endpoints"].items()}
        spending = Spending(self.tables.get("max_usd", math.inf))
        self.experts, self.unset = {}, set()
        for name, settings in self.tables["experts"].items():
            where = f"{self.path}: experts.{name}.endpoint"
            host = self._known(endpoints, settings["endpoint"], where)
            price = Price(*settings["usd"])
            rest = {key: value for key, value in settings.items() if key not in ("endpoint", "usd")}
            self.experts[name] = Expert(host, price=price, spending=spending, **rest)

    def tools(self) -> list[Tool]:
        """Returns the tools on offer, without those that only help a role."""
        made = [self._make(entry) for entry in self.tables.get("tools", [])]
        roles = [t for t in made if isinstance(t, RoleTool)]
        helpers = []
        for role in roles:
            role.helpers = [t for t in made if t.kind == role.kind and t not in roles]
            helpers += role.helpers
            if role.kind == "code" and not role.helpers:
                limits = {"timeout_s": 60.0, "usd_per_second": SANDBOX_USD}
                role.helpers = [PythonTool("python", "", self.sandbox, **limits)]
        offered = [t for t in made if t not in helpers]
        plain = [t for t in offered if not isinstance(t, Orchestrator)]
        for outer in offered:
            while isinstance(outer, Orchestrator):
                inner = replace(outer, depth=outer.depth - 1) if outer.depth > 1 else None
                outer.tools = plain + [inner] * (inner is not None)
                outer = inner
        return offered

    def _make(self, entry: dict[str, Any]) -> Tool:
        """Returns the tool of one entry."""
        settings = {key: value for key, value in entry.items() if key != "kind"}
        if entry["kind"] == "code":
            return PythonTool(sandbox=self.sandbox, **settings)
        if entry["kind"] == "search":
            corpus = Path(settings.pop("corpus"))
            index = Index.open(corpus) if corpus.is_dir() else Index(read_passages(corpus))
            return LookupTool(index=index, **settings)
        if entry["kind"] == "web":
            return WebSearch(**settings)
        where = f"{self.path}: {entry['name']}"
        if entry["kind"] == "expert":
            expert = self._expert(settings.pop("expert"), where)
            return ExpertTool(expert=expert, **settings)
        if entry["kind"] == "role":
            return self._role(where, **settings)
        found = (Path(entry["model"]) / "config.json").exists()
        require(found, f"{where}: model is {entry['model']!r}; it must be a checkpoint's directory")
        return Orchestrator(**settings)

    def _role(
        self,
        where: str,
        name: str,
        description: str,
        models: list[str] = (),
        parameters: dict[str, Any] | None = None,
    ) -> RoleTool:
        """Returns a published role; published parameters state aliases, prices and latencies."""
        stated = str(parameters)
        choices = re.search(r"Choices: \[([^]]*)\]", stated)
        aliases = models or re.findall(r"[\w.-]+", choices[1] if choices else "")
        require(aliases, f"{where}: models is missing; it must list experts or aliases of them")
        experts = {}
        for alias in aliases:
            model = self.tables["aliases"].get(alias, alias)
            expert = self._expert(model, f"{where}: {alias}")
            row = re.search(
                re.escape(alias) + r" \| \$+([\d.]+) \| \$+([\d.]+) \| ([\d.]+)s", stated
            )
            if row:
                usd_in, usd_out, seconds = map(float, row.groups())
                expert = replace(expert, price=Price(usd_in, usd_out), latency_s=seconds)
            experts[alias] = expert
        return RoleTool(name, description, experts, (), parameters, self.tokenizer)

    def _expert(self, name: str, where: str) -> Expert:
        """Returns an expert by its name."""
        expert = self._known(self.experts, name, where)
        key = expert.endpoint.key_variable
        if key and key not in self.unset and not os.environ.get(key, "").strip():
            self.unset.add(key)
            print(f"{where}: {name} needs {key}, which is not set", file=sys.stderr)
        return expert

    def _known(self, table: dict[str, Any], name: str, where: str) -> Any:
        """Returns an entry of a table. UserError lists those that there are."""
        require(name in table, f"{where} is {name!r}; it must be one of {', '.join(table)}")
        return table[name]


@command("tools.py")
def main(arguments: list[str]) -> int:
    """Builds an index of a corpus, for tools of the kind "search"."""
    parser = ArgumentParser(prog="tools.py", description="What the tools need on disk.")
    index = parser.add_subparsers(required=True).add_parser("index", help="index a corpus")
    index.add_argument("path", help="a directory of texts, or a JSONL file")
    index.add_argument("--out", required=True, help="the directory of the index")
    index.add_argument("--embed", metavar="CHECKPOINT", help="index vectors of Qwen3-Embedding")
    given = parser.parse_args(arguments)
    print(f"indexed {build_index(given.path, given.out, given.embed)} passages in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
