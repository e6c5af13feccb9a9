"""The text of what an attempt has found out, within token budgets: for the policy and for experts.

Published ToolOrchestra shows documents, then code with its output, then answers of experts, the
latest of each (arXiv 2511.21689; budgets are those of its training code). A piece that is cut keeps
its head here. Nothing imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanorchestra.records import Evidence

HEADER = "Documents:\n"
Piece = tuple[str, str]  # its head, which is never cut, and its body


@dataclass(frozen=True)
class Budget:
    """The most that a text of evidence may have, in token ids."""

    total: int = 24_000
    worked: int = 16_000  # of code and attempts
    attempts: int = 8_000
    document_chars: int = 4_000  # of each document


def shown(evidence: Evidence, tokenizer: Any, budget: Budget) -> str:
    """Returns the evidence that fits, "" if there is none.

    The oldest documents are left out first. Code that would fill the text alone leaves none.
    """
    cut = _Cut(tokenizer)
    documents = [
        (f"Doc {i}: ", text[: budget.document_chars] + "\n\n")
        for i, text in enumerate(evidence.documents, 1)
    ]
    programs = []
    for code, output in evidence.code:
        programs.append(("```python\n", f"{code}\n```\n\n"))
        programs.append(("```output\n", f"{output}\n```\n\n"))
    answers = [
        (f"Attempt{i} answer by {author}: ", f"{answer}\n")
        for i, (author, answer) in enumerate(evidence.attempts, 1)
    ]
    attempts = cut.latest(answers, min(budget.attempts, budget.total))
    room = min(budget.worked, budget.total) - cut.count(attempts)
    worked = cut.latest(programs, room) + attempts
    if cut.count([head + body for head, body in programs] + attempts) < budget.total:
        kept = cut.latest(documents, budget.total - cut.count([HEADER, *worked]))
        worked = [HEADER, *kept, *worked] if kept else worked
    return "".join(worked)


@dataclass
class _Cut:
    """Cuts pieces to budgets of token ids.

    The counts of pieces add up, since no token reaches over the end of a line into the next piece.
    """

    tokenizer: Any

    def count(self, texts: Sequence[str]) -> int:
        return sum(len(self.tokenizer.encode(text)) for text in texts)

    def latest(self, pieces: Sequence[Piece], budget: int) -> list[str]:
        """Returns the last pieces that fit, and what fits of the end of the one before them."""
        kept: list[str] = []
        for head, body in reversed(pieces):
            length = self.count([head + body])
            if length > budget:
                end = self.end(head + "... ", body, budget)
                return [end, *kept] if end else kept
            kept.insert(0, head + body)
            budget -= length
        return kept

    def end(self, head: str, body: str, budget: int) -> str:
        """Returns the head and as much of the end of the body as fits, or nothing."""
        ids = self.tokenizer.encode(body)
        for start in range(max(1, len(ids) - budget + self.count([head])), len(ids)):
            # A cut may fall into a character, and a text cut elsewhere may have more ids.
            text = head + self.tokenizer.decode(ids[start:]).lstrip("\ufffd")
            if self.count([text]) <= budget:
                return text
        return ""
