"""The roles that the published system gives its experts.

ToolOrchestra (arXiv 2511.21689) has three: `enhance_reasoning` writes code that is run, `search`
writes a query, `answer` ends an attempt. Their experts read the whole problem with what the attempt
has found, cut to the expert's token budgets; the policy chooses the expert alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanorchestra.evidence import Budget, shown
from nanorchestra.records import Evidence, ToolResult, part
from nanorchestra.tools.experts import BYTES_PER_TOKEN
from nanorchestra.tools.models import Expert

KINDS = {"enhance_reasoning": "code", "search": "search", "answer": "answer"}  # of each role
CODE = (
    "Do not answer the question. Write Python code, complete in itself, that works out or checks "
    "what the answer needs, and prints intermediate results. Put it between ```python and ```."
)
QUERY = (
    "Some information that the answer needs is missing. Write one short query that a search engine "
    "can find it with, between <query> and </query>."
)
TAGS = "Think between <think> and </think>, then write the answer between <answer> and </answer>."
BOXED = "Reason step by step, and put the final answer within \\boxed{}."
QUERY_CHARS = (10, 390)  # a shorter query is not run, a longer one is cut
WHOLE = 10**9  # characters of a document
NO_HELPER = "Error: nothing to search in; the catalogue offers no search"
NO_OUTPUT = "(no output)"  # of an interpreter
NESTED = r"\{(?:[^{}]|\{[^{}]*\})*\}"


@dataclass
class RoleTool:
    """A published role: the policy chooses one of `experts` by its alias.

    `helpers` are the tools for what the expert writes: searches, of which the first that finds a
    document counts, or an interpreter.
    `given` are the parameters of a published file; without them the experts describe themselves.
    `tokenizer` cuts what an expert reads; None: its tokens are estimated.
    """

    name: str
    description: str
    experts: dict[str, Expert]
    helpers: Sequence[Any] = ()
    given: dict[str, Any] | None = None
    tokenizer: Any = None
    evidence: Evidence = field(default_factory=lambda: Evidence(""))
    blocking = True

    @property
    def kind(self) -> str:
        """The kind of observation: code, search or answer."""
        return KINDS[self.name]

    @property
    def parameters(self) -> dict[str, Any]:
        """One argument, `model`; its description has the aliases, notes, prices and latencies."""
        if self.given:
            return self.given
        lines = [f"The model used. Choices: {list(self.experts)}."]
        lines += [f"{alias} {expert.note}" for alias, expert in self.experts.items() if expert.note]
        table = [
            "Model | price per million input tokens | price per million output tokens | "
            "average latency"
        ]
        for alias, expert in self.experts.items():
            usd = expert.price
            prices = f"${usd.input_per_million:g} | ${usd.output_per_million:g}"
            table.append(f"{alias} | {prices} | {expert.latency_s:g}s")
        model = {"type": "string", "description": "\n".join([" ".join(lines), *table])}
        return {"type": "object", "properties": {"model": model}, "required": ["model"]}

    def bind(self, evidence: Evidence) -> RoleTool:
        """Returns this tool for one attempt."""
        return replace(self, evidence=evidence)

    def most_usd(self, arguments: dict[str, Any]) -> float:
        """Returns the US dollars of the longest reply."""
        expert = self.experts.get(arguments["model"])
        return expert.most_usd(self.prompt(expert)) if expert else 0.0

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns code and its output, documents, or an answer; each also as `found`."""
        alias = arguments["model"]
        if alias not in self.experts:
            problem = f"Error: {self.name}: no model {alias!r}; there are {', '.join(self.experts)}"
            return ToolResult(problem, error=True, refused=True)
        expert = self.experts[alias]
        reply = expert.ask(self.prompt(expert), alias)
        if reply.error:
            return reply
        if self.name == "answer":
            text = final_answer(reply.content, expert.boxed)
            return replace(reply, content=text, found={"attempts": [[alias, text]]})
        written = (query if self.name == "search" else code)(reply.content)
        if not written:
            problem = f"Error: {alias} wrote no {'query' if self.name == 'search' else 'code'}"
            return replace(reply, content=problem, error=True)
        return self._help(reply, written)

    def _help(self, reply: ToolResult, written: str) -> ToolResult:
        """Returns what the helpers make of a query or a program, with the cost of all calls."""
        search = self.name == "search"
        arguments = {"query" if search else "code": written}
        calls, result = [("expert", {}, reply)], ToolResult(NO_HELPER, error=True)
        for helper in self.helpers:
            result = helper.call(arguments)
            calls.append((helper.name, arguments, result))
            if not search or result.found.get("documents"):
                break
        content, found = result.content, {}
        if search:
            found = result.found
        elif content != NO_OUTPUT:
            found = {"code": [[written, content]]}
            content = f"```python\n{written}\n```\n\n```output\n{content}\n```"
        return replace(
            reply,
            content=content,
            cost_usd=sum(result.cost_usd for _, _, result in calls),
            latency_s=sum(result.latency_s for _, _, result in calls),
            error=result.error,
            found=found,
            parts=[part(*call) for call in calls],
        )

    def prompt(self, expert: Expert) -> str:
        """Returns what the expert reads: evidence in its budget, the problem, and what to do."""
        ask = {"search": QUERY, "enhance_reasoning": CODE}.get(self.name)
        ask = ask or (BOXED if expert.boxed else TAGS)
        tokenizer, ids = (self.tokenizer, 1) if self.tokenizer else (_Bytes, BYTES_PER_TOKEN)
        problem = self.evidence.problem
        room = expert.context_tokens * ids - len(tokenizer.encode(problem))
        worked = expert.code_tokens * ids
        context = shown(self.evidence, tokenizer, Budget(max(room, 0), worked, worked, WHOLE))
        return "\n\n".join(filter(None, [context.strip(), problem, ask]))


class _Bytes:
    """Stands for a tokenizer that is not known: the bytes of a text."""

    @staticmethod
    def encode(text: str) -> bytes:
        return text.encode("utf-8", "replace")

    @staticmethod
    def decode(ids: bytes) -> str:
        return ids.decode("utf-8", "replace")


def final_answer(text: str, boxed: bool) -> str:
    """Returns what an expert marked as its answer, by a box or by tags; else the whole text."""
    if boxed:
        found = re.findall(r"\\boxed(" + NESTED + ")", text)
        return found[-1][1:-1].strip() if found else text
    found = re.findall(r"<answer>(.*?)(?:</answer>|$)", text, re.DOTALL)
    return found[-1].strip() if found else text


def query(text: str) -> str:
    """Returns the query of an expert's reply, "" for none or one that is too short."""
    written = text.rpartition("<query>")[2].partition("</query>")[0] if "<query>" in text else ""
    shortest, longest = QUERY_CHARS
    written = " ".join(written.split())
    return written[:longest] if len(written) >= shortest else ""


def code(text: str) -> str:
    """Returns the last Python program of an expert's reply, "" for none."""
    return (
        text.rpartition("```python")[2].partition("```")[0].strip() if "```python" in text else ""
    )
