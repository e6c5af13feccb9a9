"""Context that is composed afresh each turn: the problem and what is known by now, in one message.

The published ToolOrchestra prompts its policy so (arXiv 2511.21689; budgets and order are those of
its training code, made for contexts of 24,000 ids): documents, then code with its output, then
answers of experts, the latest of each. Two things differ. A call that failed leaves a trace, so
that the next prompt is another one. A piece that is cut keeps its head. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nanorchestra.model import chat
from nanorchestra.records import ToolCall, ToolResult

DOCUMENT_CHARS = 4_000  # of each document
TOTAL = 24_000  # ids of all evidence
WORKED = 16_000  # ids of code and attempts
ATTEMPTS = 8_000  # ids of attempts
HEADER, ASK = "Documents:", "Choose an appropriate tool, or answer."
Piece = tuple[str, str]  # its head, which is never cut, and its body


class Notes:
    """What one attempt has found out. Its `messages` are the prompt of the next turn.

    A prompt has at most `prompt_tokens` ids; where these leave less than TOTAL for evidence, all
    budgets shrink in proportion. The tool's kind says what a result is: of "search" a document, of
    "code" code and its output, of "expert" an attempt. Any other result is a document that begins
    with its call. What the policy and the user say becomes part of the problem.
    """

    def __init__(self, tokenizer: Any, env: Any, prompt_tokens: int):
        self.tokenizer, self.prompt_tokens = tokenizer, prompt_tokens
        *self._before, user = env.messages
        self.problem, self.tools, self._kinds = f"Problem: {user['content']}", env.tools, env.kinds
        self.documents: list[Piece] = []
        self.code: list[Piece] = []
        self.attempts: list[Piece] = []

    def observe(self, said: str, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Takes down the results of a turn's calls, or of a turn without calls the user's reply."""
        if not calls:
            self.problem += f"\n\nYou: {said}\n\nUser: {results[0].content}"
        for call, result in zip(calls, results, strict=False):
            kind, text = self._kinds.get(call.name), result.content
            if kind == "code" and isinstance(code := call.arguments.get("code"), str):
                self.code += [("```python\n", f"{code}\n```"), ("```output\n", f"{text}\n```")]
            elif kind == "expert":
                author = result.alias or call.name
                head = f"Attempt{len(self.attempts) + 1} answer by {author}: "
                self.attempts.append((head, text))
            else:
                if kind != "search":
                    text = f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)}): {text}"
                text = text[:DOCUMENT_CHARS]
                if text not in (body for _, body in self.documents):
                    self.documents.append((f"Doc {len(self.documents) + 1}: ", text))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt of the next turn; longer than `prompt_tokens` only if it has no evidence."""
        bare = chat.encode(self.tokenizer, self._messages([]), self.tools)
        return self._messages(self.evidence(self.prompt_tokens - len(bare)))

    def evidence(self, room: int) -> list[str]:
        """Returns the paragraphs between problem and request, at most `room` ids.

        The oldest documents are left out first. Code that would fill the context alone leaves none.
        """
        share = min(1.0, max(room, 0) / TOTAL)
        total, worked, attempted = (int(most * share) for most in (TOTAL, WORKED, ATTEMPTS))
        attempts = self._latest(self.attempts, attempted)
        code = self._latest(self.code, worked - self._count(*attempts))
        uncut = self._count(*(head + body for head, body in self.code), *attempts)
        documents = []
        if uncut < total:
            documents = self._latest(self.documents, total - self._count(HEADER, *code, *attempts))
        return [HEADER, *documents, *code, *attempts] if documents else code + attempts

    def _latest(self, pieces: Sequence[Piece], budget: int) -> list[str]:
        """Returns the last pieces that fit, and what fits of the end of the one before them."""
        kept: list[str] = []
        for head, body in reversed(pieces):
            text = head + body
            if self._count(text) > budget:
                end = self._end(head + "... ", body, budget)
                return [end, *kept] if end else kept
            kept.insert(0, text)
            budget -= self._count(text)
        return kept

    def _end(self, head: str, body: str, budget: int) -> str:
        """Returns the head and as much of the end of the body as fits, or nothing."""
        ids = self.tokenizer.encode(body)
        for start in range(max(1, len(ids) - budget + self._count(head)), len(ids)):
            # A cut may fall into a character, and a text cut elsewhere may have more ids.
            text = head + self.tokenizer.decode(ids[start:]).lstrip("\ufffd")
            if self._count(text) <= budget:
                return text
        return ""

    def _count(self, *paragraphs: str) -> int:
        """Returns the ids of paragraphs with the blank lines after them.

        The counts add up, since no token reaches over a blank line into the next paragraph.
        """
        return sum(len(self.tokenizer.encode(paragraph + "\n\n")) for paragraph in paragraphs)

    def _messages(self, evidence: list[str]) -> list[dict[str, Any]]:
        content = "\n\n".join([self.problem, *evidence, ASK])
        return [*self._before, {"role": "user", "content": content}]
