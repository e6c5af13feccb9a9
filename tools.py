"""What the orchestrator may call: Python, search in a corpus, records of a database, experts.

How a new tool reaches the model, in worlds that run calls by `ToolEnvironment` (questions, the
desk, and serve.py with `--tools`; the tools of a ToolScale task are methods of its domain's
toolkit):
1. Write the class here, as a `Tool` (nanorchestra/agent/tool.py): a name, a kind, a description,
   the JSON schema `parameters` of its arguments, `blocking` (True if a call waits), and
   `call(arguments) -> ToolResult`, the observation with its cost and latency. A call that cannot be
   run costs nothing. Prices, or `most_usd`, say the most that a call can cost.
2. List it in the catalogue: add its kind and settings to nanorchestra/tools/entries.py, and make it
   in `Catalogue`, which reads the file given with `--tools`. Or offer it in a world.
3. nanorchestra/model/chat.py renders its schema into the prompt, through `Tool.schema`.
4. `prepare`, beside `Tool`, checks the arguments of each call and holds it to what it may spend;
   `UserLimits`, in nanorchestra/agent/limits.py, runs it.

A Python function decorated with `@tool` needs none of this: `--tools my_tools.py`. One that is said
to search, or to run code, works for the published role of that kind.

Experts are other language models: `ExpertTool` and `RoleTool` ask OpenAI-compatible endpoints.
Worlds simulate others, with virtual money and time (nanorchestra/tools/simulated.py).
"""

import math
import re
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanorchestra.agent.failures import failed
from nanorchestra.agent.tool import Tool
from nanorchestra.errors import ArgumentParser, UserError, command, nearest, require
from nanorchestra.files import merge, read_json, read_toml
from nanorchestra.records import Price, ToolResult
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.corpus import build_index, open_index
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.entries import KINDS, Address, EndpointEntry, ExpertEntry, File
from nanorchestra.tools.functions import load_functions, tool
from nanorchestra.tools.index import Index, RemoteIndex
from nanorchestra.tools.models import SERVED, Expert, ExpertTool, ServedOrchestrator
from nanorchestra.tools.replies import UNRECORDED, Replies
from nanorchestra.tools.roles import ROLES, RoleTool
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.search import QUERY, WebSearch
from nanorchestra.tools.spending import Spending
from nanorchestra.tools.tables import RecordsTool
from nanorchestra.validation import validated

__all__ = ["RecordsTool", "load_tools", "tool"]
SANDBOX_USD = 0.0000083  # a second, as published
PYTHON = (
    "Runs Python code and returns what it prints. "
    "It can import numpy, sympy and pandas, and write no files."
)
CODE = "A whole Python program: it knows no name of an earlier call, and what it prints comes back."
PRESETS = Path(__file__).parent / "assets" / "experts.toml"
LISTED = re.compile(r"([\w.-]+) \| \$+([\d.]+) \| \$+([\d.]+) \| ([\d.]+)s")  # of published roles


@dataclass
class PythonTool(Tool):
    """Runs code in the sandbox; a second of the run costs `usd_per_second`.

    `latency_s` None: measured, the wait for a worker included. A world with a virtual clock states
    it, and waits are not counted.
    """

    name: str
    description: str
    sandbox: Sandbox
    usd_per_call: float = 0.0
    latency_s: float | None = None
    timeout_s: float = 5.0
    usd_per_second: float = 0.0
    replies: Replies = UNRECORDED
    kind, blocking = "code", True
    parameters = arguments_schema({"code": CODE}, code="string")

    def call(self, arguments: Json) -> ToolResult:
        """Returns what the code printed, and its error."""
        body = {
            "code": arguments["code"],
            "timeout_s": self.timeout_s,
            "usd": [self.usd_per_call, self.usd_per_second],
        }
        request = {"url": "code", "body": body}
        return self.replies.result(request, lambda: self._in_sandbox(arguments))

    def _in_sandbox(self, arguments) -> ToolResult:
        result = self.sandbox.run(arguments["code"], timeout_s=self.timeout_s)
        error = f"Error: {result.error}" if result.error else ""
        text = "\n".join(filter(None, [result.stdout.strip(), error])) or "(no output)"
        seconds, waited_s = result.seconds, result.waited_s
        if self.latency_s is not None:
            seconds, waited_s = self.latency_s, 0.0
        usd = self.usd_per_call + self.usd_per_second * min(seconds, self.timeout_s)
        return ToolResult(
            text,
            0.0 if result.died else usd,
            waited_s + seconds,
            error=bool(error),
            infrastructure=result.died,
            findings={"code": [[arguments["code"], text]]},
            waited_s=waited_s,
        )


@dataclass
class LookupTool(Tool):
    """Finds the passages of a corpus that fit a query best, and names their sources."""

    name: str
    description: str
    index: Index | RemoteIndex
    usd_per_call: float = 0.0
    passages: int = 1
    replies: Replies = UNRECORDED
    kind = "search"
    parameters = arguments_schema({"query": QUERY}, query="string")

    def __post_init__(self) -> None:
        self.blocking = self.index.blocking

    def call(self, arguments: Json) -> ToolResult:
        """Returns the best passages, one a line, and [source] after those that have one.

        An index that fails, on its device or at a search server, is a failure of the
        infrastructure, and costs nothing.
        """
        body = {"query": arguments["query"], "passages": self.passages, "usd": self.usd_per_call}
        request = {"url": f"search {self.name}", "body": body}
        return self.replies.result(request, lambda: self._search(arguments))

    def _search(self, arguments) -> ToolResult:
        start = time.monotonic()
        try:
            hits = self.index.search(arguments["query"], k=self.passages)
        except Exception as error:  # a server, a device, a file: the query is text
            seconds = time.monotonic() - start
            return failed(self.name, error, infrastructure=True, seconds=seconds)
        seconds = time.monotonic() - start
        passages = [f"{hit.text} [{hit.source}]" if hit.source else hit.text for hit in hits]
        text = "\n".join(passages) or "nothing found"
        best_last = {"documents": passages[::-1]}
        return ToolResult(text, self.usd_per_call, seconds, findings=best_last)


def python_tool(sandbox: Sandbox, replies: Replies = UNRECORDED) -> PythonTool:
    """Returns the tool that is on offer where no catalogue states one, or where "python" does."""
    limits = {"timeout_s": 60.0, "usd_per_second": SANDBOX_USD}
    return PythonTool("python", PYTHON, sandbox, replies=replies, **limits)


def load_tools(
    path: str | Path,
    sandbox: Sandbox,
    spending: Spending | None = None,
    simulated: bool = False,
    more: Sequence[Tool] = (),
    aside: Sequence[str] = (),
) -> list[Tool]:
    """Returns the tools of a catalogue; docs/tools.md describes its form. `spending` bounds them.

    `path` names files, with commas between them. A TOML or JSON file holds `tools`, OpenAI function
    objects with a kind and its settings, and may hold `experts`, `endpoints`, `aliases` and
    `max_usd`, which change the presets of assets/experts.toml. A JSON list is the `tools` alone. A
    Python file holds functions decorated with @tool. The word "python" in place of a file stands
    for `python_tool`. `more` are tools of the caller's beside these. `aside` names experts that the
    caller asks itself, of `tools` or of `experts`. `simulated`: the caller simulates what a role
    without a helper needs. UserError names file, entry, setting and what is right.
    """
    tables, entries, functions = read_toml(PRESETS), [], []
    for file in map(str.strip, str(path).split(",")):
        if file == "python":
            functions.append(python_tool(sandbox))
            continue
        if file.endswith(".py"):
            functions += load_functions(file)
            continue
        table = read_toml(file) if file.endswith(".toml") else read_json(file)
        table = validated(File, {"tools": table} if isinstance(table, list) else table, file)
        for number, entry in enumerate(table.pop("tools", [])):
            entries.append(_entry(entry, f"{file}: tools[{number}]"))
        tables = merge(tables, table)
    catalogue = Catalogue(str(path), tables, sandbox, spending or Spending(), simulated)
    tools = catalogue.tools(entries, [*functions, *more])
    require(tools, f"{path}: no tool; [[tools]] must name one")
    ((name, count),) = Counter(each.name for each in tools).most_common(1)
    require(count == 1, f"{path}: two tools are named {name!r}")
    for name in set(aside) & catalogue.experts.keys() - {each.name for each in tools}:
        tools.append(catalogue.expert_tool(name))
    return tools


def _entry(entry, where) -> tuple[str, Json]:
    """Returns kind and settings of an entry, of which an OpenAI function object may have a part."""
    settings = validated(dict[str, Any], entry.get("function", {}), f"{where}.function") | entry
    for nesting in ("type", "function"):
        settings.pop(nesting, None)
    usual = "role" if settings.get("name") in list(ROLES) else ""
    kind = str(settings.pop("kind", usual))
    form = _known(KINDS, kind, f"{where}.kind")
    if kind == "mcp":
        right = f"{where}: it must have either a command or a url"
        require(("command" in settings) != ("url" in settings), right)
        form = Address if "url" in settings else form
    return kind, validated(form, settings, where)


@dataclass
class Catalogue:
    """Makes the tools of merged tables; `path` stands in messages.

    `simulated`: a role may lack a helper.
    """

    path: str
    tables: Json
    sandbox: Sandbox
    spending: Spending
    simulated: bool = False

    def __post_init__(self) -> None:
        self.endpoints, self.experts = {}, {}
        for name, settings in self.tables["endpoints"].items():
            where = f"{self.path}: endpoints.{name}"
            self.endpoints[name] = Endpoint(**validated(EndpointEntry, settings, where))
        for name, settings in self.tables["experts"].items():
            where = f"{self.path}: experts.{name}"
            self.experts[name] = validated(ExpertEntry, settings, where)
        self.spending.bound(self.tables.get("max_usd", math.inf))

    def tools(self, entries: list[tuple[str, Json]], given: Sequence[Tool] = ()) -> list[Tool]:
        """Returns the tools of kinds and settings, without those that only help a role."""
        made = [self._make(kind, **settings) for kind, settings in entries if kind != "mcp"]
        made += self._served([settings for kind, settings in entries if kind == "mcp"])
        made += [replace(each, replies=self.spending.replies) for each in given]
        roles = [tool for tool in made if isinstance(tool, RoleTool)]
        helping = []
        for role in roles:
            role.helpers = self._helpers(role, [tool for tool in made if tool not in roles])
            helping += role.helpers
        return [tool for tool in made if tool not in helping]

    def _helpers(self, role, tools) -> list[Tool]:
        """Returns those of the tools that do what the role's experts write. UserError."""
        helpers = [tool for tool in tools if tool.kind == role.kind]
        if role.kind == "code" and not helpers:
            helpers = [python_tool(self.sandbox, self.spending.replies)]
        require(
            helpers or role.kind != "search" or self.simulated,
            f"{self.path}: {role.name}: nothing to search in; add a tool of the kind search or "
            'web, or a function with @tool(kind="search"), as docs/tools.md shows',
        )
        return helpers

    def _make(self, kind, **settings) -> Tool:
        """Returns the tool of one entry."""
        where = f"{self.path}: {settings['name']}"
        if kind == "code":
            return PythonTool(sandbox=self.sandbox, replies=self.spending.replies, **settings)
        if kind == "search":
            index = open_index(settings.pop("corpus"))
            return LookupTool(index=index, replies=self.spending.replies, **settings)
        if kind == "web":
            return WebSearch(spending=self.spending, **settings)
        if kind == "expert":
            expert = self._expert(settings.pop("expert"), where, settings["name"])
            return ExpertTool(expert=expert, **settings)
        return self._role(where, settings)

    def _served(self, entries) -> list[Tool]:
        """Returns the tools of MCP servers."""
        if not entries:
            return []
        needs = "a tool of the kind mcp needs the package mcp: pip install mcp==2.3.0"
        require(find_spec("mcp"), f"{self.path}: {entries[0]['name']}: {needs}")
        from nanorchestra.tools.mcp import open_servers  # brings mcp, a second to import

        return open_servers(self.path, entries, self.spending.replies)

    def expert_tool(self, name: str) -> ExpertTool:
        """Returns a tool that asks an expert of the table. UserError."""
        return ExpertTool(name, "", self._expert(name, f"{self.path}: {name}", name))

    def _role(self, where, entry) -> RoleTool:
        """Returns a published role; published parameters state aliases, prices and latencies."""
        given, experts = entry.get("parameters"), {}
        try:
            stated = given["properties"]["model"]["description"] if given else ""
        except (KeyError, TypeError):
            right = "they must have the property model, with a description"
            raise UserError(
                f"{where}: parameters are those of no published role; {right}"
            ) from None
        listed = {alias: map(float, numbers) for alias, *numbers in LISTED.findall(stated)}
        models = entry.get("models", listed)
        require(models, f"{where}: models is missing; it must list experts or aliases")
        for alias in models:
            behind = self.tables["aliases"].get(alias, alias)
            expert = self._expert(behind, f"{where}: {alias}", alias)
            if alias in listed:
                *usd, seconds = listed[alias]
                expert = replace(expert, price=Price(*usd), latency_s=seconds)
            experts[alias] = expert
        return RoleTool(entry["name"], entry["description"], experts, given=given)

    def _expert(self, listed_as, where, offered_as) -> Expert:
        """Returns an expert by its name in the table, for a tool that offers it under another."""
        settings = {**_known(self.experts, listed_as, f"{where}: expert")}
        place = f"{self.path}: experts.{listed_as}.endpoint"
        host = _known(self.endpoints, settings.pop("endpoint"), place)
        settings |= {"price": Price(*settings.pop("usd")), "spending": self.spending}
        settings |= {"listed_as": listed_as, "offered_as": offered_as}
        if settings["model"].endswith(SERVED):
            host = replace(host, most_requests=1)  # one that failed may have spent its limit
            return ServedOrchestrator(endpoint=host, **settings)
        alone = f"{self.path}: experts.{listed_as}.task_usd: only a model NAME{SERVED} has it"
        require("task_usd" not in settings, alone)
        return Expert(endpoint=host, **settings)


def _known(table, name, where) -> Any:
    """Returns an entry of a table. UserError lists those that there are, and tells the nearest."""
    right = f"it must be one of {', '.join(table)}{nearest(name, table)}"
    require(name in table, f"{where} is {name!r}; {right}")
    return table[name]


def parse(arguments: list[str]) -> Namespace:
    """Returns the options. UserError."""
    parser = ArgumentParser(prog="tools.py", description="What search needs.")
    commands = parser.add_subparsers(required=True, dest="command")
    index = commands.add_parser("index", help="index a corpus")
    index.add_argument("path", help="a directory of texts, or a JSONL file")
    index.add_argument("--out", required=True, help="the directory of the index")
    index.add_argument("--embed", metavar="CHECKPOINT", help="index vectors of Qwen3-Embedding")
    index.add_argument(
        "--faiss", metavar="KIND", help="of faiss.index_factory, as IVF4096,SQ8 (default: Flat)"
    )
    serve = commands.add_parser("serve-index", help="answer searches over HTTP")
    serve.add_argument("path", help="the directory of an index, or a small JSONL file")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8100, help="(default: 8100)")
    return parser.parse_args(arguments)


@command("tools.py")
def main(arguments: list[str]) -> int:
    """Builds an index of a corpus for tools of the kind "search", or serves one to many of them."""
    given = parse(arguments)
    if given.command == "serve-index":
        from nanorchestra.serving.retrieval import serve_index  # brings FastAPI

        def load():
            index = open_index(given.path)
            require(isinstance(index, Index), f"{given.path}: it is served there already")
            return index

        serve_index(load, given.host, given.port)
        return 0
    count = build_index(given.path, given.out, given.embed, given.faiss)
    print(f"indexed {count} passages in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
