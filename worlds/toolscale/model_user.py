"""The user of a task as a language model plays it, and what language models are asked here."""

import json
from collections.abc import Callable, Collection, Sequence

from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.tool import Tool
from nanorchestra.model.parser import StreamParser
from nanorchestra.records import ParsedTurn, ToolCall, ToolResult
from worlds.toolscale.program import Json
from worlds.toolscale.user import PATIENCE, STOP, TEXTS, TRANSFER, wishes


class ModelUser:
    """A language model that plays the scenario.

    It opens as the scripted user does, so that no task waits for a model before it begins.
    `functions` are tools of its own, a phone's for instance, and `use` makes a call of one.
    """

    def __init__(
        self,
        task: Json,
        expert: Tool,
        functions: Sequence[Json] = (),
        use: Callable[[ToolCall], ToolResult] | None = None,
    ):
        scenario = task["user_scenario"]
        facts = {"persona": scenario.get("persona")} | scenario["instructions"]
        self.facts = "\n".join(f"{field}: {text}" for field, text in facts.items() if text)
        if functions:
            self.facts += "\n" + TEXTS["tools"].format(tools=json.dumps(functions))
        self.expert, self.use, self.talk = expert, use, [f"You: {wishes(task)[0].opening}"]

    def reply(self, message: str, pending: Collection[int], handed: bool) -> str:
        """Returns the answer to a message of the agent. Raises EndpointError."""
        self.talk.append(f"Agent: {message}")
        for _ in range(PATIENCE):
            talk = "\n".join(self.talk)
            text = TEXTS["role"].format(facts=self.facts, talk=talk, stop=STOP, transfer=TRANSFER)
            answer = ask(self.expert, text)
            self.talk.append(f"You: {answer}")
            calls = parsed(answer).calls if self.use else ()
            if not calls:
                break
            self.talk += [f"Result: {self.use(call).content}" for call in calls]
        return answer


def parsed(text: str) -> ParsedTurn:
    """Returns a turn that a language model has written."""
    parser = StreamParser()
    parser.feed(text)
    return parser.finish()


def ask(expert: Tool, text: str) -> str:
    """Returns what a language model answers. Raises EndpointError."""
    result = expert.call({"task": text})
    if result.error:
        raise EndpointError(result.content)
    return result.content
