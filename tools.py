"""What the orchestrator may call: Python, search in a corpus, records of a database, experts.

How a new tool reaches the model, in worlds that run calls by `ToolEnvironment` (the miniature, and
serve.py with `--tools`). A ToolScale task has tools of another form, data that
worlds/toolscale/program.py interprets, and its environment runs these itself:
1. Write the class here: a name, a kind, a description, the JSON schema `parameters` of its
   arguments, `blocking` (True if a call waits), and `call(arguments) -> ToolResult`, the
   observation with its cost and latency. The contract is `Tool` in
   nanorchestra/agent/environment.py. A call that cannot be run costs nothing.
2. List it in the catalogue: add its kind and settings to nanorchestra/tools/catalogue.json, and
   make it in `load_tools`, which reads the JSON file given with `--tools`. Or offer it in a world.
3. nanorchestra/model/chat.py renders its schema into the prompt, through `function_schema`.
4. nanorchestra/agent/environment.py checks the arguments of each call and runs it.

Experts are other language models: `EndpointExpert` asks any OpenAI-compatible endpoint,
`SimulatedExpert` is a declared simulation with the prices of its task and a virtual latency.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorchestra.agent.environment import Tool, schema_error
from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.files import read_json
from nanorchestra.records import Price, ToolResult
from nanorchestra.tools.corpus import build_index, read_passages
from nanorchestra.tools.experts import EndpointError, chat_completion
from nanorchestra.tools.index import Index
from nanorchestra.tools.sandbox import Sandbox


def _arguments(**types: str) -> dict[str, Any]:
    """Returns the schema of an object that has all these properties, by their JSON types."""
    schema = {"type": "object", "properties": {name: {"type": t} for name, t in types.items()}}
    return schema | ({"required": list(types)} if types else {})


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
    kind, blocking, parameters = "code", True, _arguments(code="string")

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
    kind, parameters = "search", _arguments(query="string")

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


@dataclass
class RecordsTool:
    """Reads one row of a table by its id. `tables` is {table: {id as text: row}}."""

    name: str
    description: str
    tables: dict[str, dict[str, dict[str, Any]]]
    usd_per_call: float = 0.0
    latency_s: float = 0.0
    kind, blocking, parameters = "records", False, _arguments(table="string", id="integer")

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns the row as JSON."""
        table, key = arguments["table"], str(arguments["id"])
        row = self.tables.get(table, {}).get(key)
        if row is not None:
            text = json.dumps(row)
        elif table in self.tables:
            text = f"Error: no {table} {key}"
        else:
            text = f"Error: no table {table}; there are {', '.join(self.tables)}"
        return ToolResult(text, self.usd_per_call, self.latency_s, error=row is None)


@dataclass(frozen=True)
class Skill:
    """Probabilities of a simulated expert: of being right, and of saying that it is unsure."""

    right: float
    unsure_if_right: float
    unsure_if_wrong: float


@dataclass
class SimulatedExpert:
    """A simulated language model that answers the task's question, as its skill and seed decide.

    Within an attempt it repeats its answer; with another seed it may err differently.
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
    kind, blocking, parameters = "expert", False, _arguments()

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns "sure: ANSWER" or "unsure: ANSWER"."""
        rng, skill = random.Random(f"{self.seed}/{self.name}"), self.skill
        right = rng.random() < skill.right
        unsure = rng.random() < (skill.unsure_if_right if right else skill.unsure_if_wrong)
        answer = self.gold if right else rng.choice(self.wrong)
        tokens = self.input_tokens, round(self.output_tokens * rng.uniform(0.85, 1.15))
        seconds = self.latency_s * rng.uniform(0.85, 1.15)
        text = f"{'unsure' if unsure else 'sure'}: {answer}"
        return ToolResult(text, self.price.cost(*tokens), seconds, False, False, *tokens)


@dataclass
class EndpointExpert:
    """An expert behind an OpenAI-compatible endpoint; its key is in the variable `key_variable`.

    An endpoint that does not answer is an infrastructure error.
    """

    name: str
    description: str
    base_url: str
    model: str
    price: Price
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0
    max_tokens: int = 4096
    kind, blocking, parameters = "expert", True, _arguments(task="string")

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns the model's answer to the task."""
        messages = [{"role": "user", "content": arguments["task"]}]
        body = {"model": self.model, "messages": messages, "max_tokens": self.max_tokens}
        start = time.monotonic()
        try:
            message, tokens = chat_completion(
                self.base_url, body, key_variable=self.key_variable, timeout_s=self.timeout_s
            )
        except EndpointError as error:
            text = f"Error: {self.name} did not answer ({error})"
            return ToolResult(text, error=True, infrastructure=True)
        text, seconds = message.get("content") or "", time.monotonic() - start
        return ToolResult(text, self.price.cost(*tokens), seconds, False, False, *tokens)


CATALOGUE = Path(__file__).parent / "nanorchestra" / "tools" / "catalogue.json"


def load_tools(path: str | Path, sandbox: Sandbox) -> list[Tool]:
    """Returns the tools of a catalogue: a JSON list of objects, as the schema CATALOGUE says.

        [{"name": "python", "kind": "code", "description": "Runs code.", "usd_per_call": 0.001},
         {"name": "wiki", "kind": "search", "description": "Finds facts.", "usd_per_call": 0,
          "corpus": "facts.jsonl"},
         {"name": "big", "kind": "expert", "description": "Answers any task.", "model": "big-72b",
          "base_url": "http://localhost:8000/v1", "key_variable": "BIG_KEY",
          "input_usd_per_million": 0.9, "output_usd_per_million": 0.9}]

    UserError names the entry, the setting and what is right.
    """
    entries, tools = read_json(path), {}
    problem = schema_error(entries, read_json(CATALOGUE))
    require(not problem, f"{path}: {problem}")
    for settings in entries:
        name, kind = settings["name"], settings.pop("kind")
        require(name not in tools, f"{path}: two tools are named {name!r}")
        if kind == "code":
            tools[name] = PythonTool(sandbox=sandbox, **settings)
        elif kind == "search":
            corpus = Path(settings.pop("corpus"))
            index = Index.open(corpus) if corpus.is_dir() else Index(read_passages(corpus))
            tools[name] = LookupTool(index=index, **settings)
        else:
            usd = (settings.pop(f"{side}_usd_per_million") for side in ("input", "output"))
            tools[name] = EndpointExpert(price=Price(*usd), **settings)
    return list(tools.values())


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
