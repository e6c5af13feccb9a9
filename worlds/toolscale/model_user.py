"""The user of a task as a language model plays it, and what language models are asked here."""

from collections.abc import Collection

from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.tool import Tool
from nanorchestra.model.parser import StreamParser
from nanorchestra.records import ParsedTurn
from worlds.toolscale.program import Json
from worlds.toolscale.user import STOP, TEXTS, TRANSFER, wishes


class ModelUser:
    """A language model that plays the scenario.

    It opens as the scripted user does, so that no task waits for a model before it begins.
    """

    def __init__(self, task: Json, expert: Tool):
        scenario = task["user_scenario"]
        facts = {"persona": scenario.get("persona")} | scenario["instructions"]
        self.facts = "\n".join(f"{field}: {text}" for field, text in facts.items() if text)
        self.expert, self.talk = expert, [f"You: {wishes(task)[0].opening}"]

    def reply(self, message: str, pending: Collection[int], handed: bool) -> str:
        """Returns the answer to a message of the agent. Raises EndpointError."""
        self.talk.append(f"Agent: {message}")
        talk = "\n".join(self.talk)
        text = TEXTS["role"].format(facts=self.facts, talk=talk, stop=STOP, transfer=TRANSFER)
        answer = ask(self.expert, text)
        self.talk.append(f"You: {answer}")
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
