"""Language models behind OpenAI-compatible endpoints, offered as tools with their prices.

What an expert cannot do is an observation, never an exception. What it has cost is counted also
where it has failed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from nanorchestra.agent.evidence import Evidence
from nanorchestra.agent.failures import failed
from nanorchestra.agent.tool import Allowance, Tool
from nanorchestra.errors import UserError
from nanorchestra.records import Price, ToolResult
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.http import Reply
from nanorchestra.tools.spending import Charge, Spending

TEMPLATE_TOKENS = 100  # that a chat template adds to a message at most
LEAST_REPLY_TOKENS = 256  # a reply that is cut shorter is not worth its price
LEAST_REASONING_TOKENS = 2048  # nor that of a reasoning model, whose reasoning counts
TASK = "What to do, with all that it needs to know; left out, it is the whole question."
SERVED = "+tools"  # after the name of a model: the whole loop of an orchestrator (serve.py --http)


@dataclass(frozen=True)
class Expert:
    r"""A language model with its price.

    `offered_as` is its name in the catalogue's tools, whatever its alias in a task, `listed_as` its
    name in the catalogue's table of experts and in the bill, `model` its name at the server.
    A `reasoning` model has a fixed temperature, and its limit is named max_completion_tokens.
    `reasoning_effort` is sent as it is, "" not at all.
    `code_tokens` and `context_tokens` bound what it reads in a published role. `boxed`: it marks
    its answer by \boxed{}, not by tags. `note` and `latency_s` are told to the policy.
    `owner` is who made it. A user who bans "proprietary" models bans those without `open_weights`.
    A call is given up after `seconds`, if the user has a limit.
    """

    offered_as: str
    endpoint: Endpoint
    model: str
    price: Price
    spending: Spending
    reasoning: bool = False
    temperature: float | None = None
    max_tokens: int = 4096
    code_tokens: int = 12_000
    context_tokens: int = 24_000
    boxed: bool = False
    note: str = ""
    latency_s: float = 0.0
    reasoning_effort: str = ""
    listed_as: str = ""
    owner: str = ""
    open_weights: bool = False
    seconds: float = math.inf

    def most_usd(self, text: str) -> float:
        """Returns the US dollars of the longest reply to `text`.

        A token of the text has one byte at least, whatever the tokenizer.
        """
        return self.price.cost(most_tokens(text), self.max_tokens)

    def under(
        self, text: str, allowance: Allowance, name: str, helping_usd: float = 0.0
    ) -> "Expert":
        """Returns the expert as `name` may ask it for a reply to `text`, within the user's seconds.

        The reply has the tokens that its share of the dollars buys, beside the US dollars of its
        helpers; the fewest that are of use, if the share buys fewer. Raises RefusedError if the
        dollars left do not pay for these.
        """
        least = LEAST_REASONING_TOKENS if self.reasoning else LEAST_REPLY_TOKENS
        usd = min(allowance.usd_share, allowance.usd_left) - helping_usd
        tokens = max(self._reply_tokens(text, usd), min(least, self.max_tokens))
        asked = replace(self, max_tokens=tokens, seconds=allowance.seconds)
        if asked.most_usd(text) + helping_usd > allowance.usd_left:
            raise allowance.too_little(name, self.most_usd(text) + helping_usd)
        return asked

    def _reply_tokens(self, text, usd) -> int:
        """Returns how many tokens the reply to `text` may have for so many US dollars."""
        if self.most_usd(text) <= usd:
            return self.max_tokens
        read, token_usd = most_tokens(text), self.price.cost(0, 1)
        tokens = int(max(usd - self.price.cost(read, 0), 0) / token_usd) if token_usd else 0
        while tokens and self.price.cost(read, tokens) > usd:  # by rounding
            tokens -= 1
        return tokens

    @property
    def ban_names(self) -> set[str]:
        """The names under which a user can ban it."""
        openness = "open" if self.open_weights else "proprietary"
        names = {self.listed_as, self.model, self.model.rpartition("/")[2], self.owner, openness}
        return names - {""}

    def ask(self, text: str, name: str) -> ToolResult:
        """Returns the reply to one message; the policy knows this expert as `name`.

        What fails beside the endpoint, such as a disk that is full, is the infrastructure's fault.
        """
        payee = self.listed_as or self.offered_as
        charge = Charge(payee, self.most_usd(text), partial(self.price_of, text))
        try:
            reply = self.endpoint.ask(self._body(text), self.spending, charge, self.seconds)
        except UserError as error:
            return failed(name, error, infrastructure=True)
        if reply.problem:
            problem, answer = f"did not answer: {reply.problem}", ""
        else:  # an answer that is empty or refused is the model's own
            answer = reply.content["content"].rpartition("</think>")[2]
            problem = "" if answer.strip() else _emptiness(reply.content)
        if problem:
            answer = f"Error: {name} {problem}"
        input_tokens, output_tokens = self._counted(text, reply)
        return ToolResult(
            answer.strip(),
            self.price_of(text, reply),
            reply.seconds,
            error=bool(problem),
            infrastructure=reply.infrastructure,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            retries=reply.retries,
            waited_s=reply.waited,
            given_up=reply.given_up,
        )

    def _body(self, text) -> Json:
        """Returns the request of a reply to `text`."""
        limit = "max_completion_tokens" if self.reasoning else "max_tokens"
        body = {"model": self.model, limit: self.max_tokens}
        body["messages"] = [{"role": "user", "content": text}]
        if self.temperature is not None and not self.reasoning:
            body["temperature"] = self.temperature
        if self.reasoning_effort:
            body["reasoning_effort"] = self.reasoning_effort
        return body

    def _counted(self, text: str, reply: Reply) -> tuple[int, int]:
        """Returns the tokens of a reply to `text`, input and output: as many as were asked for."""
        read, written = reply.tokens
        return min(read, most_tokens(text)), min(written, self.max_tokens)

    def price_of(self, text: str, reply: Reply) -> float:
        """Returns the US dollars of a reply to `text`."""
        return self.price.cost(*self._counted(text, reply))


@dataclass(frozen=True)
class ServedOrchestrator(Expert):
    """An orchestrator behind `serve.py --http`, NAME+tools, which plays a whole loop for a task.

    A task may cost `task_usd` US dollars, last `seconds`, and call nothing that is in `never`.
    These limits go with the request and hold for all that is called in turn, so that a limit holds
    for a whole tree. The reply says what the task has cost.
    """

    task_usd: float = 1.0
    never: Sequence[str] = ()

    def most_usd(self, text: str) -> float:
        """Returns the US dollars that it may spend."""
        return self.task_usd

    def under(
        self, text: str, allowance: Allowance, name: str, helping_usd: float = 0.0
    ) -> "ServedOrchestrator":
        """Returns it with what it may spend, its seconds, and the names that are forbidden.

        Raises RefusedError if it may spend nothing.
        """
        usd = min(allowance.usd_share, allowance.usd_left) - helping_usd
        if usd <= 0:
            raise allowance.too_little(name, self.task_usd + helping_usd)
        usd = min(usd, self.task_usd)
        return replace(self, task_usd=usd, seconds=allowance.seconds, never=allowance.never)

    def _body(self, text) -> Json:
        limits = {"usd": self.task_usd, "never": list(self.never)}
        if self.seconds < math.inf:
            limits["seconds"] = self.seconds
        return super()._body(text) | {"metadata": {"limits": limits}}

    def _counted(self, text: str, reply: Reply) -> tuple[int, int]:
        return reply.tokens

    def price_of(self, text: str, reply: Reply) -> float:
        """Returns what the reply says that it has cost, or its tokens cost if it says nothing.

        What a task has cost that failed under way is not known: it counts at its most.
        """
        if reply.problem:
            worked = reply.worked or reply.status >= 500
            return self.task_usd if worked else 0.0
        usd = reply.content.get("cost_usd", self.price.cost(*reply.tokens))
        return min(usd, self.task_usd)


def most_tokens(text: str) -> int:
    """Returns the most tokens that a text can have as the only message of a request."""
    return len(text.encode("utf-8", "replace")) + TEMPLATE_TOKENS


def _emptiness(message) -> str:
    """Returns why a message has no content."""
    if refusal := message.get("refusal"):
        return f"refused: {' '.join(refusal[:200].split())}"
    reasoned = message.get("reasoning") or message.get("reasoning_content")
    after = "reasoning alone" if reasoned else "nothing"
    reason = str(message["finish_reason"])[:50]
    return f"gave no answer: {after} (finish_reason {reason!r})"


@dataclass
class ExpertTool(Tool):
    """An expert for a task that the policy writes; without one it receives the whole problem."""

    name: str
    description: str
    expert: Expert
    evidence: Evidence | None = None
    kind, blocking = "expert", True
    parameters = arguments_schema({"task": TASK}, task="string") | {"required": []}

    def for_attempt(self, evidence: Evidence) -> "ExpertTool":
        """Returns the tool of an attempt, whose evidence has the problem."""
        return replace(self, evidence=evidence)

    def ban_names(self, arguments: Json | None = None) -> set[str]:
        """Returns the names under which it or its model can be banned."""
        return super().ban_names(arguments) | self.expert.ban_names

    def under(self, arguments: Json, allowance: Allowance) -> "ExpertTool":
        """Returns the tool with its expert held to the allowance. Raises RefusedError."""
        expert = self.expert.under(self._task(arguments), allowance, self.name)
        return replace(self, expert=expert)

    @property
    def experts(self) -> dict[str, Expert]:
        """The expert under the name of the tool, as a role has several under their aliases."""
        return {self.name: self.expert}

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars of the longest answer."""
        return self.expert.most_usd(self._task(arguments))

    def call(self, arguments: Json) -> ToolResult:
        """Returns the expert's answer to the task."""
        result = self.expert.ask(self._task(arguments), self.name)
        findings = {} if result.error else {"attempts": [[self.name, result.content]]}
        return replace(result, findings=findings)

    def _task(self, arguments) -> str:
        return arguments.get("task") or self.evidence.problem
