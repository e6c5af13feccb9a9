"""Lookup without an embedding model, and the small corpus it serves."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nanorchestra.errors import UserError
from nanorchestra.tools import index as retrieval
from nanorchestra.tools.index import Index, load_passages

CORPUS = Path(__file__).resolve().parents[2] / "assets" / "nano" / "corpus.jsonl"


@pytest.fixture(scope="module")
def facts():
    return [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def index():
    return Index.build(load_passages(CORPUS))


def test_nearly_every_fact_is_found_by_its_subject_and_relation(facts, index):
    missed = []
    for fact in facts:
        for query in (
            f"{fact['subject']} {fact['relation']}",
            f"What is the {fact['relation']} of {fact['subject']}?",
        ):
            if index.search(query, k=1)[0][1] != fact["text"]:
                missed.append(query)
    assert len(missed) < 0.05 * 2 * len(facts), missed


def test_spelling_and_case_are_forgiven(index):
    assert "76" in index.search("OSMIUM: ATOMIC NUMBER", k=1)[0][1]
    assert "number is 15." in index.search("atomic number of phosphorous", k=1)[0][1]


def test_scores_are_cosines_best_first(index):
    results = index.search("international calling code of France", k=5)
    scores = [score for score, _ in results]
    assert (
        len(results) == 5
        and scores == sorted(scores, reverse=True)
        and all(-1.001 <= score <= 1.001 for score in scores)
    )
    passage = results[0][1]
    assert index.search(passage, k=1)[0] == (pytest.approx(1.0, abs=1e-5), passage)


def test_edges_of_k_and_query():
    index = Index.build(["one cat", "two dogs"])
    assert len(index.search("cat", k=10)) == 2
    assert index.search("?! ...") == [] and index.search("") == []
    assert index.search("\ud800 cat", k=1)[0][1] == "one cat"
    with pytest.raises(ValueError, match="k is 0"):
        index.search("cat", k=0)
    with pytest.raises(ValueError, match="at least one"):
        Index.build([])
    assert (
        Index.build(["...", "a cat"]).search("cat", k=1)[0][1] == "a cat"
    )  # a wordless passage is no division by zero


def test_features_do_not_depend_on_the_process():
    """Python's own hash() changes from process to process; an index built on it would not be reproducible."""
    program = (
        "import sys, types; package = types.ModuleType('nanorchestra'); package.__path__ = ['nanorchestra']; "  # without the rest of it
        "sys.modules['nanorchestra'] = package; from nanorchestra.tools.index import _features; "
        "print(_features('Zinc has 30 protons').nonzero()[0].tolist())"
    )
    root = CORPUS.parent.parent.parent
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        json.loads(run.stdout) == np.nonzero(retrieval._features("Zinc has 30 protons"))[0].tolist()
    )


def test_search_is_fast(index):
    big = Index.build((index.passages * 2)[:500])
    seconds = []
    for _ in range(100):
        start = time.perf_counter()
        big.search("What is the international calling code of Sierra Leone?")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3e-3  # what the code costs when the machine is not busy with others


@pytest.mark.parametrize(
    "content, complaint",
    [
        ('{"text": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"text": "a"}\n\n{"txt": "b"}\n', "line 3: text is None"),
        ('["a"]\n', "line 1: text is None"),
        ('{"text": "  "}\n', "line 1: text is '  '"),
        ("\n", "holds no passage"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_passages_file_is_named_with_its_line(tmp_path, content, complaint):
    path = tmp_path / "passages.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load_passages(path)
    message = str(caught.value)
    assert str(path) in message and complaint in message and "\n" not in message


def test_passages_keep_their_order_and_line_separators(tmp_path):
    path = tmp_path / "passages.jsonl"
    texts = [
        "b",
        "a\u2028c",
        "é",
    ]  # U+2028 is a line break to str.splitlines, and none to JSON lines
    path.write_text(
        "".join(json.dumps({"text": text, "id": 1}, ensure_ascii=False) + "\n" for text in texts),
        encoding="utf-8",
    )
    assert load_passages(path) == texts


def test_the_corpus_is_consistent(facts):
    assert (
        len({(fact["subject"], fact["relation"]) for fact in facts})
        == len(facts)
        == len({fact["text"] for fact in facts})
    )
    for fact in facts:
        assert list(fact) == ["subject", "relation", "value", "text"]
        assert re.fullmatch(
            r"[a-z]+( [a-z]+)?|(element|country) \d+", fact["subject"]
        ) and re.fullmatch(r"[1-9]\d{0,2}", fact["value"])
        assert re.search(rf"\b{fact['value']}\b", fact["text"])
    numbers = [int(fact["value"]) for fact in facts if fact["relation"] == "atomic number"]
    assert numbers == list(range(1, 119))
    known = {
        ("gold", "atomic number"): "79",
        ("element 79", "mass"): "197",
        ("element 79", "period"): "6",
        ("country 250", "calling code"): "33",
        ("nepal", "calling code"): "977",
        ("piano", "number of keys"): "88",
    }
    values = {(fact["subject"], fact["relation"]): fact["value"] for fact in facts}
    assert known.items() <= values.items()
