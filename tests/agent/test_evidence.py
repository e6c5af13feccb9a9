"""Evidence as text: what is left out first, and within which budgets."""

from __future__ import annotations

from nanorchestra.agent.evidence import Evidence, EvidenceBudget


def count(tokenizer, *texts):
    return sum(len(tokenizer.encode(text)) for text in texts)


def test_the_oldest_documents_go_first(nano_tokenizer):
    evidence = Evidence("?", [f"{word} " * 30 for word in ("red", "green", "blue")])
    evidence.code, evidence.attempts = [["a", "b"]], [["orion", "c"]]
    evidence.tokenizer = nano_tokenizer
    worked = "```python\na\n```\n\n```output\nb\n```\n\nAttempt1 answer by orion: c\n"
    newest = f"Doc 3: {'blue ' * 30}\n\n"
    exactly = count(nano_tokenizer, "Documents:\n", newest, worked)

    def text(total):
        return evidence.text(EvidenceBudget(total))

    assert text(exactly) == f"Documents:\n{newest}{worked}"
    more, less = text(exactly + 30), text(exactly - 1)
    assert more.startswith("Documents:\n") and more.endswith(newest + worked)
    assert 0 < more.count("green") < 30
    assert less.startswith("Documents:\n") and less.endswith("blue \n\n" + worked)
    assert "red" not in more + less and text(0) == ""


def test_code_and_attempts_have_shares_of_their_own(nano_tokenizer):
    evidence = Evidence("?", tokenizer=nano_tokenizer)
    budget = EvidenceBudget(240, 160, 80, document_chars=5)
    evidence.attempts = [["orion", f"maybe {i} " * 4] for i in range(9)]
    attempts = evidence.text(budget)
    evidence.documents.append("short " * 9)
    assert 60 < count(nano_tokenizer, attempts) <= 80 and "\nAttempt9 " in attempts
    evidence.code.append(["x = 1\n" * 10, "1\n" * 20])
    text = evidence.text(budget)
    documents = "Documents:\nDoc 1: short\n\n"
    assert text.startswith(documents) and text.endswith(attempts)
    assert count(nano_tokenizer, text.removeprefix(documents)) <= 160
    evidence.code.append(["y = 2\n" * 60, "2"])  # more than all: no room for documents
    text = evidence.text(budget)
    assert 120 < count(nano_tokenizer, text) <= 160 and "Documents:" not in text
    assert "```output\n2\n```" in text and "x = 1" not in text
