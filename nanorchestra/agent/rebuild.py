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


def counted(calls: Sequence[ToolCall], kinds: dict[str, str]) -> list[ToolCall]:
    """Returns the first call of each tool, up to the one that gives the answer."""
    first = {}
    for call in calls:
        first.setdefault(call.name, call)
        if kinds.get(call.name) == ANSWER:
            break
    return list(first.values())


class Notes:
    """Composes the prompt of each turn, its `messages`, from the problem and `env.evidence`.

    A prompt has at most `prompt_tokens` ids. What the policy and the user say becomes part of the
    problem.
    """

    def __init__(self, tokenizer: Any, env: Any, prompt_tokens: int):
        self.tokenizer, self.prompt_tokens = tokenizer, prompt_tokens
        *before, user = env.messages
        self._before, self.problem = before or [SYSTEM], f"Problem: {user['content']}"
        self.tools, self.evidence = env.tools, env.evidence
        self.evidence.tokenizer = tokenizer

    def hear(self, said: str, reply: ToolResult) -> None:
        """Takes down a message without calls, and the user's reply to it."""
        if not reply.error:
            self.problem += f"\n\nYou: {said}\n\nUser: {reply.content}"

    @property
    def messages(self) -> list[Json]:
        """The prompt of the next turn; longer than `prompt_tokens` only if it has no evidence."""
        bare = chat.encode(self.tokenizer, self._messages(""), self.tools)
        room = max(0, self.prompt_tokens - len(bare) - JOINTS)
        budget = EvidenceBudget(total=min(EvidenceBudget.total, room))
        return self._messages(self.evidence.shown(budget))

    def _messages(self, evidence) -> list[Json]:
        content = f"{self.problem}\n\n{evidence}\n\n{ASK}"
        return [*self._before, {"role": "user", "content": content}]
