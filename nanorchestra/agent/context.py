"""What the policy reads before each turn, composed in one of two ways.

`GrowingContext` is one conversation, to which each turn's observations are appended: its KV cache
survives the calls. `RebuiltContext`, where a tool gives the answer, composes every prompt afresh,
as the published ToolOrchestra does (arXiv 2511.21689) and with its sentences; the last is that of
its FRAMES script. docs/differences.md lists what differs. No torch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from nanorchestra.agent.environment import ANSWER, Environment
from nanorchestra.agent.evidence import EvidenceBudget
from nanorchestra.agent.truncation import shortened
from nanorchestra.config import RolloutSection
from nanorchestra.model import chat
from nanorchestra.records import RESULT_WORDS, ToolCall, ToolResult, Turn
from nanorchestra.schemas import Json

SYSTEM = {"role": "system", "content": "You are good at using tools."}
ASK = "Choose an appropriate tool."
JOINTS = 4  # ids that the ends of pieces may add where texts are joined
LEAST_CHARS = 64  # of a result that is shortened to fit the context


class Prompt(NamedTuple):
    """What a conversation begins with: messages, and the ids of these and of the tools."""

    messages: list[Json]
    ids: list[int]


class Observation(NamedTuple):
    """What is appended to a conversation: results (role "tool") or the user's reply ("user")."""

    ids: list[int]
    role: str
    contents: list[str]


class Context(Protocol):
    """Composes what the policy reads. `survives_cuts`: a turn that was cut ends no attempt."""

    survives_cuts: bool

    def prompt(self) -> Prompt | None:
        """Returns the prompt of the next turn; None if the open conversation goes on."""

    def chosen(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Returns those of a turn's calls that are made."""

    def observe(self, turn: Turn, results: Sequence[ToolResult], room: float) -> Observation | None:
        """Takes the results of a turn's calls, or the reply to its message.

        Returns what is appended, if possible in `room` ids; None: the next prompt says it.
        """


def context_of(settings: RolloutSection, tokenizer: Any, env: Environment) -> Context:
    """Returns the context of an attempt."""
    env.evidence.tokenizer = tokenizer
    if ANSWER in env.kinds.values():
        return RebuiltContext(tokenizer, env, settings.context_tokens - settings.turn_tokens)
    return GrowingContext(tokenizer, env)


class GrowingContext:
    """One conversation, which begins with the environment's messages."""

    survives_cuts = False

    def __init__(self, tokenizer: Any, env: Environment):
        self.tokenizer, self.env, self._begun = tokenizer, env, False

    def prompt(self) -> Prompt | None:
        """Returns the first prompt, then None."""
        if self._begun:
            return None
        self._begun = True
        env = self.env
        ids = list(env.prompt) or chat.encode(self.tokenizer, env.messages, env.tools)
        return Prompt(env.messages, ids)

    def chosen(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Returns all calls."""
        return list(calls)

    def observe(self, turn: Turn, results: Sequence[ToolResult], room: float) -> Observation:
        """Returns the results of calls, or a reply; the longest are shortened first."""
        role = "tool" if turn.calls else "user"
        whole = [result.content for result in results]
        contents, chars = list(whole), [len(content) for content in whole]
        ids = chat.encode_reply(self.tokenizer, role, contents)
        while len(ids) > room:
            longest = chars.index(max(chars))
            chars[longest] = int(chars[longest] * min(0.9, max(room, 0) / len(ids)))
            if chars[longest] < LEAST_CHARS:
                break
            contents[longest] = shortened(whole[longest], RESULT_WORDS, chars[longest])
            ids = chat.encode_reply(self.tokenizer, role, contents)
        return Observation(ids, role, contents)


class RebuiltContext:
    """A prompt for every turn, of the problem and of `env.evidence`.

    A prompt has at most `prompt_tokens` ids, and more only if it has no evidence. A turn has one
    call of each tool, and a turn without a call that can be made is void, as in the published
    system.
    """

    survives_cuts = True

    def __init__(self, tokenizer: Any, env: Environment, prompt_tokens: int):
        self.tokenizer, self.env, self.prompt_tokens = tokenizer, env, prompt_tokens
        *before, user = env.messages
        self._before = before or [SYSTEM]
        self._problem = f"Problem: {user['content']}"

    def prompt(self) -> Prompt:
        """Returns the prompt of the next turn."""
        _, bare = self._composed("")
        room = max(0, self.prompt_tokens - len(bare) - JOINTS)
        budget = EvidenceBudget(total=min(EvidenceBudget.total, room))
        return self._composed(self.env.evidence.text(budget))

    def _composed(self, evidence: str) -> Prompt:
        content = f"{self._problem}\n\n{evidence}\n\n{ASK}"
        messages = [*self._before, {"role": "user", "content": content}]
        return Prompt(messages, chat.encode(self.tokenizer, messages, self.env.tools))

    def chosen(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Returns the first call of each tool, up to that of the one that gives the answer."""
        first: dict[str, ToolCall] = {}
        for call in calls:
            first.setdefault(call.name, call)
            if self.env.kinds.get(call.name) == ANSWER:
                break
        return list(first.values())

    def observe(self, turn: Turn, results: Sequence[ToolResult], room: float) -> None:
        """Marks a void turn as badly formed; the evidence has the results of calls."""
        if all(result.refused for result in results):
            turn.well_formed = False
