"""Search without an embedding model, and the small corpus it serves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanorchestra.errors import UserError
from nanorchestra.tools.index import Index, features, load_passages

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "assets" / "nano" / "corpus.jsonl"


@pytest.fixture(scope="module")
def facts():
    return [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def index():
    return Index(load_passages(CORPUS))


def test_nearly_every_fact_is_found_by_its_subject_and_relation(facts, index):
    missed = []
    for fact in facts:
        relation, subject = fact["relation"], fact["subject"]
        for query in (f"{subject} {relation}", f"What is the {relation} of {subject}?"):
            if index.search(query, k=1)[0][1] != fact["text"]:
                missed.append(query)
    assert len(missed) < 0.05 * 2 * len(facts), missed
    assert "76" in index.search("OSMIUM: ATOMIC NUMBER", k=1)[0][1]
    assert "number is 15." in index.search("atomic number of phosphorous", k=1)[0][1]


def test_scores_are_cosines_best_first(index):
    results = index.search("international calling code of France", k=5)
    scores = [score for score, _ in results]
    assert len(results) == 5 and scores == sorted(scores, reverse=True)
    assert all(-1.001 <= score <= 1.001 for score in scores)
    passage = results[0][1]
    assert index.search(passage, k=1)[0] == (pytest.approx(1.0, abs=1e-5), passage)


def test_edges_of_k_and_query():
    index = Index(["one cat", "two dogs", "..."])
    assert len(index.search("cat", k=10)) == 3
    assert index.search("?! ...") == [] and index.search("") == []
    assert index.search("\ud800 cat", k=1)[0][1] == "one cat"


def test_features_do_not_depend_on_the_process():
    """Python's own hash() changes from process to process."""
    text = "Zinc has 30 protons"
    program = (
        "from nanorchestra.tools.index import features; "
        f"print(features({text!r}).nonzero()[0].tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == np.nonzero(features(text))[0].tolist()


@pytest.mark.parametrize(
    "content, complaint",
    [
        ('{"text": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"text": "a"}\n\n{"txt": "b"}\n', "line 3: text is None"),
        ('["a"]\n', "line 1: text is None"),
        ('{"text": "  "}\n', "line 1: text is '  '"),
        ("\n", "no passage"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_of_passages_is_named_with_its_line(tmp_path, content, complaint):
    path = tmp_path / "passages.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"passages.jsonl.*{complaint}"):
        load_passages(path)
