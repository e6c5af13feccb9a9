"""Context that is composed afresh each turn: the problem and what is known by now, in one user message under token budgets. No torch.

The published ToolOrchestra prompts its policy so (arXiv 2511.21689; budgets and order are those of its training code, chosen there for contexts of
24,000 ids): documents, then code with its output, then answers of experts, of each the latest. Unlike there, a call that failed leaves
a trace, or the same prompt would come again; and a cut piece keeps its head, in place of a repair afterwards.
"""

from __future__ import annotations

import json
from typing import Any, Sequence

from nanorchestra.model import chat
from nanorchestra.records import ToolCall, ToolResult

DOCUMENT_CHARS = 4_000  # of each document
TOTAL, WORKED, ATTEMPTS = (
    24_000,
    16_000,
    8_000,
)  # ids: of all evidence; of code and attempts; of attempts
HEADER, ASK = "Documents:", "Choose an appropriate tool, or answer."
Piece = tuple[str, str]  # its head, which is never cut, and its body


class Notes:
    """What one attempt has found out. `prompt_tokens` bounds a prompt in ids; where it leaves less than TOTAL for evidence, all budgets shrink alike.

    What a call brought counts by the tool's kind (Environment.kinds): that of a search is a document, that of code is code and its output,
    that of an expert is an attempt. That of any other tool, a database's say, and an error of no tool, is a document that begins
    with the call. What is said between policy and user becomes part of the problem.
    """

    def __init__(self, tokenizer, env, prompt_tokens: int, enable_thinking: bool | None = None):
        self.tokenizer, self.prompt_tokens, self.enable_thinking = (
            tokenizer,
            prompt_tokens,
            enable_thinking,
        )
        *self._before, user = env.messages
        self.problem, self.tools, self._kinds = f"Problem: {user['content']}", env.tools, env.kinds
        self.documents: list[Piece] = []
        self.code: list[Piece] = []
        self.attempts: list[Piece] = []

    def see(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Takes down what the calls of a turn brought. The same document again is no news."""
        for call, result in zip(calls, results, strict=True):
            kind, text = self._kinds.get(call.name), result.content
            if kind == "code" and isinstance(code := call.arguments.get("code"), str):
                self.code += [("```python\n", f"{code}\n```"), ("```output\n", f"{text}\n```")]
            elif kind == "expert":
                self.attempts.append(
                    (
                        f"Attempt{len(self.attempts) + 1} answer by {result.alias or call.name}: ",
                        text,
                    )
                )
            else:
                text = (
                    text
                    if kind == "search"
                    else f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)}): {text}"
                )
                if text[:DOCUMENT_CHARS] not in (body for _, body in self.documents):
                    self.documents.append(
                        (f"Doc {len(self.documents) + 1}: ", text[:DOCUMENT_CHARS])
                    )

    def hear(self, said: str, reply: str) -> None:
        """Takes down a message to the user and the answer."""
        self.problem += f"\n\nYou: {said}\n\nUser: {reply}"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The next turn's prompt."""
        return self._messages(
            self.evidence(self.prompt_tokens - len(self._encode(self._messages([]))))
        )

    def prompt(self) -> list[int]:
        """Its ids. More than `prompt_tokens` only if they are so without any evidence."""
        return self._encode(self.messages)

    def evidence(self, room: int) -> list[str]:
        """The paragraphs between problem and request, at most `room` ids with the blank lines after them. The newest stay, so that what goes
        first is the oldest document; there are none beside code that would fill the context alone."""
        total, worked, attempted = (
            int(budget * min(1.0, max(room, 0) / TOTAL)) for budget in (TOTAL, WORKED, ATTEMPTS)
        )
        attempts = self._latest(self.attempts, attempted)
        code = self._latest(self.code, worked - self._count(*attempts))
        uncut = self._count(*(head + body for head, body in self.code), *attempts)
        documents = (
            self._latest(self.documents, total - self._count(HEADER, *code, *attempts))
            if uncut < total
            else []
        )
        return [HEADER, *documents, *code, *attempts] if documents else code + attempts

    def _latest(self, pieces: Sequence[Piece], budget: int) -> list[str]:
        """The last pieces that fit, and as much as fits of the end of the one before them."""
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
        """The head and as much of the end of the body as fits, or nothing."""
        ids = self.tokenizer.encode(body)
        for start in range(max(1, len(ids) - budget + self._count(head)), len(ids)):
            text = head + self.tokenizer.decode(ids[start:]).lstrip(
                "\ufffd"
            )  # half a character is not one
            if self._count(text) <= budget:  # a text cut elsewhere may have more ids
                return text
        return ""

    def _count(self, *paragraphs: str) -> int:
        """Ids with the blank lines after them; these add up, for no token reaches over the end of a line into the next paragraph."""
        return sum(len(self.tokenizer.encode(paragraph + "\n\n")) for paragraph in paragraphs)

    def _messages(self, evidence: list[str]) -> list[dict[str, Any]]:
        return [
            *self._before,
            {"role": "user", "content": "\n\n".join([self.problem, *evidence, ASK])},
        ]

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        return chat.encode(
            self.tokenizer, messages, self.tools, enable_thinking=self.enable_thinking
        )
