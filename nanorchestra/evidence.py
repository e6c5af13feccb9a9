"""What an attempt has found out, as text within token budgets: for the policy and for experts.

Published ToolOrchestra shows documents, then code with its output, then answers of experts, the
latest of each (arXiv 2511.21689; budgets are those of its training code). A piece that is cut keeps
its head here. Nothing imports torch.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from nanorchestra.records import ToolCall, ToolResult

HEADER = "Documents:\n"
Piece = tuple[str, str]  # its head, which is never cut, and its body


@dataclass(frozen=True)
class Budget:
    """The most that a text of evidence may have, in token ids."""

    total: int = 24_000
    worked: int = 16_000  # of code and attempts
    attempts: int = 8_000
    document_chars: int = 4_000  # of each document


@dataclass
class Evidence:
    """What an attempt has found out about `problem`; the experts of the published roles read it.

    `code` holds pairs of a program and its output, `attempts` pairs of an expert's alias and its
    answer. The last document is the best hit of the newest search. `tokenizer` is the policy's,
    which the loop brings: it counts the ids of budgets.
    """

    problem: str
    documents: list[str] = field(default_factory=list)
    code: list[list[str]] = field(default_factory=list)
    attempts: list[list[str]] = field(default_factory=list)
    tokenizer: Any = None

    def add(self, call: ToolCall, result: ToolResult) -> None:
        """Adds what a call found; a result that names no findings is a document with its call.

        A document that is there already is not added again.
        """
        found = result.found
        if not found and result.content.strip():
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            found = {"documents": [f"{call.name}({arguments}): {result.content}"]}
        for name, items in found.items():
            known = getattr(self, name)
            known += [item for item in items if name != "documents" or item not in known]

    def shown(self, budget: Budget) -> str:
        """Returns the evidence that fits, "" if there is none.

        The oldest documents are left out first. Code that would fill the text alone leaves none.
        """
        documents = [
            (f"Doc {i}: ", text[: budget.document_chars] + "\n\n")
            for i, text in enumerate(self.documents, 1)
        ]
        programs = []
        for code, output in self.code:
            programs.append(("```python\n", f"{code}\n```\n\n"))
            programs.append(("```output\n", f"{output}\n```\n\n"))
        answers = [
            (f"Attempt{i} answer by {author}: ", f"{answer}\n")
            for i, (author, answer) in enumerate(self.attempts, 1)
        ]
        attempts = self._latest(answers, min(budget.attempts, budget.total))
        room = min(budget.worked, budget.total) - self.count(*attempts)
        worked = self._latest(programs, room) + attempts
        if self.count(*map("".join, programs), *attempts) < budget.total:
            kept = self._latest(documents, budget.total - self.count(HEADER, *worked))
            worked = [HEADER, *kept, *worked] if kept else worked
        return "".join(worked)

    def count(self, *texts: str) -> int:
        """Returns the ids of texts of whole lines, over whose ends no token reaches."""
        return sum(len(self.tokenizer.encode(text)) for text in texts)

    def _latest(self, pieces, budget) -> list[str]:
        """Returns the last pieces that fit, and what fits of the end of the one before them."""
        kept = []
        for head, body in reversed(pieces):
            budget -= self.count(head + body)
            if budget < 0:
                end = self._end(head + "... ", body, budget + self.count(head + body))
                return [end, *kept] if end else kept
            kept.insert(0, head + body)
        return kept

    def _end(self, head, body, budget) -> str:
        """Returns the head and as much of the end of the body as fits, or nothing."""
        ids = self.tokenizer.encode(body)
        for start in range(max(1, len(ids) - budget + self.count(head)), len(ids)):
            # A cut may fall into a character, and a text cut elsewhere may have more ids.
            text = head + self.tokenizer.decode(ids[start:]).lstrip("\ufffd")
            if self.count(text) <= budget:
                return text
        return ""
