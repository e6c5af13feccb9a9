"""Context that is composed afresh each turn: the problem and what is known by now, in one message.

The published ToolOrchestra prompts its policy so (arXiv 2511.21689), with these sentences; the last
is that of its FRAMES script. docs/differences.md lists what differs. No torch.
"""

from collections.abc import Sequence
from typing import Any

from nanorchestra.evidence import EvidenceBudget
from nanorchestra.model import chat
from nanorchestra.records import ToolCall, ToolResult
from nanorchestra.schemas import Json

SYSTEM = {"role": "system", "content": "You are good at using tools."}
ASK = "Choose an appropriate tool."
ANSWER = "answer"  # kind of a tool that gives the final answer
JOINTS = 4  # ids that the ends of pieces may add where texts are joined


def first_calls(calls: Sequence[ToolCall], kinds: dict[str, str]) -> list[ToolCall]:
    """Returns the first call of each tool, up to the one that gives the answer."""
    first: dict[str, ToolCall] = {}
    for call in calls:
        first.setdefault(call.name, call)
        if kinds.get(call.name) == ANSWER:
            break
    return list(first.values())


class Notes:
    """Composes the prompt of each turn, its `messages`, from the problem and `env.evidence`.

    A prompt has at most `prompt_tokens` ids. What the policy and the user say becomes part of the
    problem. `prompt` is empty, as that of an environment whose messages are not encoded yet.
    """

    prompt: Sequence[int] = ()

    def __init__(self, tokenizer: Any, env: Any, prompt_tokens: int):
        self.tokenizer = tokenizer
        self.prompt_tokens = prompt_tokens
        *before, user = env.messages
        self._before = before or [SYSTEM]
        self.problem = f"Problem: {user['content']}"
        self.tools = env.tools
        self.evidence = env.evidence
        self.evidence.tokenizer = tokenizer

    def hear(self, message: str, reply: ToolResult) -> None:
        """Adds a message without calls, and the user's reply to it, to the problem."""
        if not reply.error:
            self.problem += f"\n\nYou: {message}\n\nUser: {reply.content}"

    @property
    def messages(self) -> list[Json]:
        """The prompt of the next turn; longer than `prompt_tokens` only if it has no evidence."""
        bare = chat.encode(self.tokenizer, self._messages(""), self.tools)
        room = max(0, self.prompt_tokens - len(bare) - JOINTS)
        budget = EvidenceBudget(total=min(EvidenceBudget.total, room))
        return self._messages(self.evidence.text(budget))

    def _messages(self, evidence) -> list[Json]:
        content = f"{self.problem}\n\n{evidence}\n\n{ASK}"
        return [*self._before, {"role": "user", "content": content}]
