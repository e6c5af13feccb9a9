"""Search without an embedding model, and the small corpus it serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanorchestra.errors import UserError
from nanorchestra.tools.index import Index, load_passages

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "assets" / "nano" / "corpus.jsonl"


def test_nearly_every_fact_is_found_by_its_subject_and_relation():
    facts = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    index, missed = Index(load_passages(CORPUS)), []
    for fact in facts:
        relation, subject = fact["relation"], fact["subject"]
        for query in (f"{subject} {relation}", f"What is the {relation} of {subject}?"):
            if index.search(query, k=1)[0][1] != fact["text"]:
                missed.append(query)
    assert len(missed) < 0.05 * 2 * len(facts), missed
    assert "76" in index.search("OSMIUM: ATOMIC NUMBER", k=1)[0][1]
    assert "number is 15." in index.search("atomic number of phosphorous", k=1)[0][1]


def test_edges_of_k_and_query():
    index = Index(["one cat", "two dogs", "..."])
    (best, passage), *others = index.search("one cat", k=10)
    assert (best, passage) == (pytest.approx(1.0, abs=1e-5), "one cat") and len(others) == 2
    assert index.search("?! ...") == [] and index.search("") == []


def test_a_bad_file_of_passages_is_named_with_its_line(tmp_path):
    path = tmp_path / "passages.jsonl"
    with pytest.raises(UserError, match="passages.jsonl.*cannot be read"):
        load_passages(path)
    for content, complaint in (
        ('{"text": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"text": "a"}\n\n{"txt": "b"}\n', "line 3: text is None"),
        ("\n", "no passage"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"passages.jsonl.*{complaint}"):
            load_passages(path)
