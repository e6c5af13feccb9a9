"""The roles that the published system gives its experts.

ToolOrchestra (arXiv 2511.21689) has three: `enhance_reasoning` writes code that is run, `search`
writes a query, `answer` ends an attempt. Their experts read the whole problem with what the attempt
has found, cut to the expert's token budgets; the policy chooses the expert alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from nanorchestra.agent.evidence import Evidence, EvidenceBudget
from nanorchestra.agent.tool import Allowance, RefusedError, Tool, observed
from nanorchestra.records import ToolResult, banned, part
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.models import Expert

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
# The kind of observation, what the expert is asked for, and where it stands in the reply. A pattern
# that skipped spaces beside what may hold spaces would take a time quadratic in the reply.
ROLES = {
    "enhance_reasoning": ("code", CODE, r"```python\s(.*?)(?:```|\Z)"),
    "search": ("search", QUERY, r"<query>([^<]*)"),
    "answer": ("answer", TAGS, ""),
}
LEAST_CHARS = {"code": 1, "query": 10}  # shorter ones are none
ANSWERS = (r"<answer>(.*?)(?:</answer>|\Z)", r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
COLUMNS = (
    "Model | price per million input tokens | price per million output tokens | average latency"
)
WHOLE = 10**9  # characters of a document


@dataclass
class RoleTool(Tool):
    """A published role: the policy chooses one of `experts` by its alias.

    `helpers` are the tools for what the expert writes: searches, of which the first that finds a
    document counts, or an interpreter. A role other than `answer` has at least one.
    `given` are the parameters of a published file; without them the experts describe themselves.
    `text` is what the expert of a prepared call reads: the same that its price was bounded for.
    """

    name: str
    description: str
    experts: dict[str, Expert]
    helpers: Sequence[Tool] = ()
    given: Json | None = None
    evidence: Evidence | None = None
    text: str | None = None
    blocking = True

    @property
    def kind(self) -> str:
        """The kind of observation: code, search or answer."""
        return ROLES[self.name][0]

    @property
    def parameters(self) -> Json:
        """One argument, `model`; its description has the aliases, notes, prices and latencies."""
        if self.given:
            return self.given
        notes = [f"The model used. Choices: {list(self.experts)}."]
        rows = [COLUMNS]
        for alias, expert in self.experts.items():
            if expert.note:
                notes.append(f"{alias} {expert.note}")
            usd = " | ".join(f"${usd:g}" for usd in expert.price)
            latency = f"{expert.latency_s:g}s" if expert.latency_s else "not known"
            rows.append(f"{alias} | {usd} | {latency}")
        schema = arguments_schema(model="string")
        schema["properties"]["model"]["description"] = "\n".join([" ".join(notes), *rows])
        return schema

    def for_attempt(self, evidence: Evidence) -> "RoleTool":
        """Returns the role of an attempt, whose evidence its experts read."""
        return replace(self, evidence=evidence)

    def ban_names(self, arguments: Json | None = None) -> set[str]:
        """Returns the names under which it, or the model that is chosen, can be banned."""
        names = {self.name, self.kind}
        for alias, expert in self.experts.items():
            if arguments is None or arguments["model"] == alias:
                names |= {alias} | expert.ban_names
        return names

    def under(self, arguments: Json, allowance: Allowance) -> "RoleTool":
        """Returns the role without banned helpers, and with its expert held to the allowance.

        Raises RefusedError if no helper is left, if the model is none of `experts`, or if the
        dollars left do not pay for a reply and the helpers.
        """
        alias = arguments["model"]
        if alias not in self.experts:
            known = ", ".join(self.experts)
            raise RefusedError(f"{self.name}: no model {alias!r}; there are {known}")
        bans = [banned(helper.ban_names(), allowance.never) for helper in self.helpers]
        helpers = [helper for helper, ban in zip(self.helpers, bans, strict=True) if not ban]
        if bans and not helpers:
            raise RefusedError(f"the user forbids {bans[0]}, which {self.name} uses")
        text = self.prompt(self.experts[alias])
        helped = replace(self, helpers=helpers, text=text)
        expert = self.experts[alias].under(text, allowance, self.name, helped.helping_usd())
        return replace(helped, experts=self.experts | {alias: expert})

    def alias(self, arguments: Json) -> str:
        """Returns the alias of the model that is chosen."""
        return arguments["model"]

    def helping_usd(self) -> float:
        """Returns the most US dollars that the helpers of a call can cost together."""
        return sum(helper.most_usd({}) for helper in self.helpers)

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars of the longest reply and of all helpers."""
        expert = self.experts[arguments["model"]]
        return expert.most_usd(self.prompt(expert)) + self.helping_usd()

    def call(self, arguments: Json) -> ToolResult:
        """Returns code and its output, documents, or an answer; each also as findings."""
        alias = arguments["model"]
        expert = self.experts[alias]
        reply = replace(expert.ask(self.prompt(expert), alias), alias=alias)
        if reply.error:
            return reply
        if self.kind == "answer":
            text = final_answer(reply.content)
            return replace(reply, content=text, findings={"attempts": [[alias, text]]})
        return self._helped(reply)

    def _helped(self, reply) -> ToolResult:
        """Returns an expert's reply with what the helpers make of the code or query in it."""
        kind, _, mark = ROLES[self.name]
        what = "query" if kind == "search" else "code"
        marked = (text.strip() for text in re.findall(mark, reply.content, re.DOTALL))
        long = [text for text in marked if len(text) >= LEAST_CHARS[what]]
        written = {what: long[-1] if long else ""}
        results, parts = [reply], [part("expert", {}, reply)]
        result = ToolResult(f"Error: {reply.alias} wrote no {what}", error=True)
        down = False  # no search has found anything, and one of them could not be asked
        for helper in self.helpers if written[what] else ():
            # Whatever it raises is a result, since the expert is to be billed.
            result = observed(helper.name, partial(helper.call, written))
            results.append(result)
            parts.append(part(helper.name, written, result))
            down = down or result.infrastructure
            if kind == "code" or result.findings.get("documents"):
                down = result.infrastructure
                break
        program = f"```python\n{written[what]}\n```\n\n```output\n{result.content}\n```"
        return replace(
            reply,
            content=program if "code" in result.findings else result.content,
            cost_usd=sum(each.cost_usd for each in results),
            latency_s=sum(each.latency_s for each in results),
            waited_s=sum(each.waited_s for each in results),
            error=result.error,
            infrastructure=down,
            findings=result.findings,
            parts=parts,
        )

    def prompt(self, expert: Expert) -> str:
        """Returns what the expert reads: evidence in its budget, the problem, and what to do."""
        if self.text is not None:
            return self.text
        evidence, ask = self.evidence, ROLES[self.name][1]
        ask = BOXED if ask == TAGS and expert.boxed else ask
        room = expert.context_tokens - evidence.count(evidence.problem)
        budget = EvidenceBudget(max(room, 0), expert.code_tokens, expert.code_tokens, WHOLE)
        context = evidence.text(budget).strip()
        return "\n\n".join(filter(None, [context, evidence.problem, ask]))


def final_answer(text: str) -> str:
    """Returns what is marked as the answer, by tags or by a box; else the whole text."""
    for mark in ANSWERS:
        if answers := re.findall(mark, text, re.DOTALL):
            return answers[-1].strip()
    return text.strip()
