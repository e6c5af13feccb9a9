"""The evidence that an attempt has gathered, as text within token budgets: for policy and experts.

Published ToolOrchestra shows documents, then code with its output, then answers of experts, the
latest of each (arXiv 2511.21689; budgets and cuts are those of its training code). Nothing imports
torch.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from nanorchestra.records import ToolCall, ToolResult

HEADER = "Documents:\n"


@dataclass(frozen=True)
class EvidenceBudget:
    """The most that a text of evidence may have, in token ids."""

    total: int = 24_000
    worked: int = 16_000  # of code and attempts
    attempts: int = 8_000
    document_chars: int = 4_000  # of each document


@dataclass
class Evidence:
    """What calls have brought about `problem`; the experts of the published roles read it.

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
        """Adds the evidence of a result; one that names none is a document with its call.

        A document that is there already is not added again.
        """
        evidence = result.findings
        if not evidence and result.content.strip():
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            evidence = {"documents": [f"{call.name}({arguments}): {result.content}"]}
        documents = evidence.get("documents", ())
        self.documents += [text for text in documents if text not in self.documents]
        self.code += evidence.get("code", ())
        self.attempts += evidence.get("attempts", ())

    def text(self, budget: EvidenceBudget) -> str:
        """Returns the evidence that fits the budget, of each kind the newest; "" if there is none.

        Code that would fill the text alone leaves no documents.
        """
        documents = "".join(
            f"Doc {i}: {document[: budget.document_chars]}\n\n"
            for i, document in enumerate(self.documents, 1)
        )
        programs = "".join(
            f"```python\n{code}\n```\n\n```output\n{output}\n```\n\n" for code, output in self.code
        )
        answers = "".join(
            f"Attempt{i} answer by {author}: {answer}\n"
            for i, (author, answer) in enumerate(self.attempts, 1)
        )
        attempts = self._end(answers, min(budget.attempts, budget.total))
        room = min(budget.worked, budget.total) - self.count(attempts)
        worked = self._end(programs, room) + attempts
        if self.count(programs, attempts) < budget.total:
            kept = self._end(documents, budget.total - self.count(HEADER, worked))
            worked = HEADER + kept + worked if kept else worked
        return worked

    def count(self, *texts: str) -> int:
        """Returns the ids of texts of whole lines, over whose ends no token reaches."""
        return sum(len(self.tokenizer.encode(text)) for text in texts)

    def _end(self, text, budget):
        """Returns as much of the end of a text as fits."""
        ids = self.tokenizer.encode(text)
        for start in range(max(0, len(ids) - budget), len(ids)):
            # A cut may fall into a character, and a text cut elsewhere may have more ids.
            end = self.tokenizer.decode(ids[start:]).lstrip("\ufffd")
            if self.count(end) <= budget:
                return end
        return ""
