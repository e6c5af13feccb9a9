"""Context that is composed afresh each turn: the problem and what is known by now, in one message.

The published ToolOrchestra prompts its policy so (arXiv 2511.21689), with these sentences; the last
is that of its FRAMES script. docs/differences.md lists what differs. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanorchestra.evidence import Budget, shown
from nanorchestra.model import chat
from nanorchestra.records import Evidence, ToolCall, ToolResult

SYSTEM = {"role": "system", "content": "You are good at using tools."}
ASK = "Choose an appropriate tool."
ANSWER = "answer"  # kind of a tool that gives the final answer
BUDGET = Budget()
JOINTS = 4  # ids that the ends of pieces may add where texts are joined


def counted(calls: Sequence[ToolCall], kinds: dict[str, str]) -> list[ToolCall]:
    """Returns the first call of each tool, up to the one that gives the answer."""
    first: dict[str, ToolCall] = {}
    for call in calls:
        first.setdefault(call.name, call)
        if kinds.get(call.name) == ANSWER:
            break
    return list(first.values())


class Notes:
    """Keeps what one attempt has found out. Its `messages` are the prompt of the next turn.

    A prompt has at most `prompt_tokens` ids. Results say what they add to the evidence (`found`).
    Those that do not are put down by the kind of their tool: "search", a document; "code", code and
    its output; "expert", an attempt. Any other result, and an error, is a document that begins with
    its call. What the policy and the user say becomes part of the problem.
    """

    def __init__(self, tokenizer: Any, env: Any, prompt_tokens: int):
        self.tokenizer, self.prompt_tokens = tokenizer, prompt_tokens
        *before, user = env.messages
        self._before, self.problem = before or [SYSTEM], f"Problem: {user['content']}"
        self.tools, self._kinds = env.tools, env.kinds
        self.evidence = getattr(env, "evidence", None) or Evidence(user["content"])

    def observe(self, said: str, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Takes down the results of a turn's calls, or of a turn without calls the user's reply."""
        if not calls and not results[0].error:
            self.problem += f"\n\nYou: {said}\n\nUser: {results[0].content}"
        for call, result in zip(calls, results, strict=False):
            if not result.found and result.content.strip():
                self.evidence.add(replace(result, found=self._found(call, result)))

    def _found(self, call: ToolCall, result: ToolResult) -> dict[str, list[Any]]:
        kind, text = self._kinds.get(call.name), result.content
        if kind == "code" and isinstance(code := call.arguments.get("code"), str):
            return {"code": [[code, text]]}
        if kind == "expert" and not result.error:
            return {"attempts": [[result.alias or call.name, text]]}
        if kind != "search" or result.error:
            text = f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)}): {text}"
        return {"documents": [text]}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt of the next turn; longer than `prompt_tokens` only if it has no evidence."""
        bare = chat.encode(self.tokenizer, self._messages(""), self.tools)
        room = max(0, self.prompt_tokens - len(bare) - JOINTS)
        budget = replace(BUDGET, total=min(BUDGET.total, room))
        return self._messages(shown(self.evidence, self.tokenizer, budget))

    def _messages(self, evidence: str) -> list[dict[str, Any]]:
        content = f"{self.problem}\n\n{evidence}\n\n{ASK}"
        return [*self._before, {"role": "user", "content": content}]
