"""Search in passages by words and by vectors, in memory and in a directory."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorchestra.errors import UserError
from nanorchestra.tools import corpus as corpus_module
from nanorchestra.tools import index as index_module
from nanorchestra.tools.corpus import build_index, open_index
from nanorchestra.tools.index import QUERY_WORDS, Index, Passage
from tools import main

RELATIONS = ("mass", "melting point", "atomic radius")
FACTS = []
for number in range(1, 100):
    for place, relation in enumerate(RELATIONS):
        subject, text = f"element {number}", f"Its {relation} is {1000 * (place + 1) + number}."
        fact = {"subject": subject, "relation": relation, "text": f"Element {number}. {text}"}
        FACTS.append(fact)


def test_edges_of_k_and_query():
    others = ("one dog", "...", "two more", "a cat and one more")
    index = Index.of([Passage("one cat", "a.txt"), *map(Passage, others)])
    best, *others = index.search("one cat", k=10)
    assert best.text == "one cat" and best.source == "a.txt" and len(others) == 2
    assert best.score > others[0].score >= others[1].score > 0
    assert index.search("?! ...") == index.search("") == index.search("zebra") == []
    assert len(index.search("one", k=10**9)) == 3


SYNTAX = Index.of([Passage("a b"), Passage("NEAR OR AND NOT text source")])


@given(st.text() | st.text(alphabet='ab "*^:(){}+-_\0\ud800'), st.integers(1, 3))
def test_a_query_is_words_whatever_it_is(query, k):
    assert len(SYNTAX.search(query, k)) <= k


def test_a_query_is_never_the_syntax_of_fts5():
    for syntax in (
        "x OR text",
        "x NEAR text",
        "source : text",
        '"text" AND text',
        "text*",
        "(text",
    ):
        assert [hit.text for hit in SYNTAX.search(syntax)] == ["NEAR OR AND NOT text source"]
    assert SYNTAX.search("tex*") == SYNTAX.search("NOT zebra") == []


def test_scores_are_those_of_bm25_of_the_words_and_their_pairs():
    texts = [fact["text"] for fact in FACTS]
    spoken = ["".join(c if c.isalnum() else " " for c in text.lower()).split() for text in texts]
    lengths = np.array([len(words) for words in spoken])
    index = Index.of(map(Passage, texts))
    for query in ("gold", "Period of iron", "atomic number of tin", "gold gold iron"):
        words = query.lower().replace(" of ", " ").split()
        scores = np.zeros(len(texts))
        for term in [[word] for word in words] + [list(pair) for pair in pairwise(words)]:
            starts = [zip(*(row[i:] for i in range(len(term))), strict=False) for row in spoken]
            counts = np.array([list(map(list, row)).count(term) for row in starts])
            with_it = (counts > 0).sum()
            rarity = np.log((len(texts) - with_it + 0.5) / (with_it + 0.5))
            weights = counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * lengths / lengths.mean()))
            scores += max(rarity, 1e-6) * weights
        wanted = np.sort(scores[scores > 0])[::-1][:10]
        np.testing.assert_allclose([hit.score for hit in index.search(query, 10)], wanted, 1e-6)


def test_a_query_of_a_megabyte_is_cut_and_ends():
    words = [f"{a}{b}{i}" for a in "abc" for b in "abc" for i in range(2000)]
    index = Index.of([Passage(" ".join(words)), Passage("gold")])
    start = time.monotonic()
    unknown = "".join(f"x{i:04} " for i in range(100_000))
    assert [hit.text for hit in index.search(f"gold {unknown}")] == ["gold"]
    assert index.search("y " * QUERY_WORDS + "gold") == [] != index.search("y " * 63 + "gold")
    assert index.search("x" * (1 << 20)) == []
    assert time.monotonic() - start < 2


def test_a_search_that_takes_too_long_ends(monkeypatch):
    index = Index.of(Passage(f"gold {i}") for i in range(10_000))
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.001)
    with pytest.raises(TimeoutError, match="has not found passages .interrupted"):
        index.search("gold")
    monkeypatch.setattr(index_module, "TIMEOUT_S", 60.0)
    assert index.search("gold")


@pytest.fixture
def pages(tmp_path):
    """A directory of texts, among them one that is no text."""
    folder = tmp_path / "pages"
    (folder / "metals").mkdir(parents=True)
    (folder / "metals" / "gold.md").write_text("Gold is yellow.\n\n" + "It is soft. " * 150)
    (folder / "iron.txt").write_text("Iron rusts.")
    (folder / "rows.jsonl").write_text('{"contents": "Tin melts.", "url": "http://tin"}\n')
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    return folder


def test_a_directory_is_indexed_and_again_when_it_changes(pages, tmp_path, capsys):
    out, missing = tmp_path / "index", tmp_path / "none"
    assert main(["index", str(pages), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "image.png" in printed.err and "UTF-8" in printed.err
    assert "indexed 4 passages" in printed.out
    index = open_index(out)
    assert index.search("gold")[0].source == "metals/gold.md" and index.blocking
    assert index.search("tin")[0] == ("Tin melts.", "http://tin", pytest.approx(1.4, abs=1))
    assert index.search("secret") == [] and index.count == 4
    assert all(len(passage.text) <= 1000 for passage in index.search("gold iron tin soft", 4))
    (pages / "iron.txt").write_text("Steel does not rust.")
    build_index(pages, out)
    assert open_index(out).search("steel") and not open_index(out).search("iron")
    assert index.search("iron"), "what was open stays as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "pages"]
    assert main(["index", str(missing), "--out", str(out)]) == 2
    assert main(["index", str(pages), "--out", str(tmp_path)]) == 2
    assert "--out must be new" in capsys.readouterr().err and pages.is_dir()


def test_many_threads_search_one_saved_index(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": fact["text"]}) + "\n" for fact in FACTS))
    build_index(corpus, tmp_path / "index")
    index = open_index(tmp_path / "index")
    queries = [f"element {i} mass" for i in range(1, 100)] * 2
    with ThreadPoolExecutor(4) as pool:
        hits = list(pool.map(lambda query: index.search(query, 2), queries))
    assert hits == [index.search(query, 2) for query in queries]


def test_a_build_of_vectors_that_was_stopped_goes_on(checkpoint, pages, tmp_path, monkeypatch):
    embedded = []

    class Stopping(corpus_module.Embedder):
        def passages(self, texts):
            embedded.extend(texts)
            if len(embedded) == 3:
                raise KeyboardInterrupt
            return super().passages(texts)

    monkeypatch.setattr(corpus_module, "BLOCK", 1)
    monkeypatch.setattr(corpus_module, "Embedder", Stopping)
    out = tmp_path / "index"
    with pytest.raises(KeyboardInterrupt):
        build_index(pages, out, checkpoint)
    assert not out.exists()
    (part,) = tmp_path.glob(".index.build/*.float32")
    with open(part, "ab") as file:
        file.write(b"torn")  # half a vector
    monkeypatch.setattr(corpus_module, "Embedder", corpus_module.Embedder.__base__)
    monkeypatch.setattr(corpus_module, "_write_passages", None)
    assert build_index(pages, out, checkpoint) == 4 and not part.exists()
    index, vectors = open_index(out), corpus_module.Embedder(checkpoint)
    query = vectors.queries(["gold"])[0]
    hits = index.search("gold", k=10)
    wanted = vectors.passages([hit.text for hit in hits]) @ query
    np.testing.assert_allclose([hit.score for hit in hits], wanted, atol=1e-6)
    assert len(hits) == 4 and {*embedded[:2]} <= {hit.text for hit in hits}
    assert index.search(" ") == [] and index.blocking
    together = index.search_all(["gold", " ", "tin"], 2)
    alone = [index.search(query, 2) for query in ("gold", " ", "tin")]
    for one, other in zip(together, alone, strict=True):
        assert [hit.text for hit in one] == [hit.text for hit in other]


@pytest.mark.parametrize("kind", ["Flat", "IVF8,SQ8", "HNSW8"])
def test_kinds_of_faiss_find_the_nearest(checkpoint, tmp_path, monkeypatch, kind):
    corpus, out, embedded = tmp_path / "corpus.jsonl", tmp_path / "index", Counter()
    texts = [f"text {i}" for i in range(400)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    class Drawn(corpus_module.Embedder):
        """Draws a vector of 32 numbers, with the number in a text as the seed."""

        def passages(self, texts):
            embedded.update(texts)
            seeds = [int("".join(filter(str.isdigit, text))) for text in texts]
            drawn = [np.random.default_rng(seed).standard_normal(32) for seed in seeds]
            vectors = np.array(drawn, np.float32)
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    monkeypatch.setattr(corpus_module, "Embedder", Drawn)
    monkeypatch.setattr(corpus_module, "BLOCK", 100)
    command = ["index", str(corpus), "--out", str(out), "--embed", str(checkpoint)]
    assert main([*command, "--faiss", kind]) == 0
    assert {*embedded.values()} == {1} and len(embedded) == 400
    index = open_index(out, "cpu")
    best, *others = index.search("395", k=3)
    assert best.text == "text 395" and best.score == pytest.approx(1.0, abs=0.01)
    assert len(others) == 2 and best.score > others[0].score >= others[1].score
    lists = faiss.try_extract_index_ivf(faiss.read_index(str(out / "vectors.faiss")))
    assert lists is None or lists.nprobe == 16


def test_a_mistake_of_a_build_or_an_opening_is_one_line(checkpoint, pages, tmp_path, capsys):
    out = tmp_path / "index"
    assert build_index(pages, out, checkpoint) == 4
    with sqlite3.connect(out / "passages.sqlite") as database:
        ((first,),) = database.execute("SELECT first FROM about")
        database.execute("UPDATE about SET first = ?", (b"\0" * len(first),))
    for path, says in (
        (pages, "pages: no index; build it"),
        (out, "these are the vectors of another embedder"),
    ):
        with pytest.raises(UserError, match=says) as refused:
            open_index(path, "cpu")
        assert "\n" not in str(refused.value)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    arguments = [str(pages), "--out", str(out), "--embed", str(checkpoint), "--faiss"]
    for given_, says in (
        ([*arguments, "IVF64,SQ8"], "points (4) should be at least as large as number of clusters"),
        ([*arguments, "none"], "--faiss none: could not parse index string none; give a kind of"),
        ([str(empty), "--out", str(tmp_path / "new")], "no text to index"),
        ([str(pages), "--out", str(out), "--faiss", "Flat"], "give --embed"),
    ):
        assert main(["index", *given_]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("tools.py: ") and says in error, error
    assert not (tmp_path / "new").exists()
    with sqlite3.connect(out / "passages.sqlite") as database:
        database.execute("UPDATE about SET first = ?", (first,))
    assert open_index(out).search("gold"), "a build that failed leaves what was there"


def test_a_bad_file_of_passages_is_named_with_its_line(tmp_path):
    path = tmp_path / "passages.jsonl"
    with pytest.raises(UserError, match="passages.jsonl.*cannot be read"):
        open_index(path)
    right = "one of text, contents, content must be a text"
    for content, complaint in (
        ('{"text": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"text": "a"}\n\n{"txt": "b"}\n', f"line 3: {right}"),
        ("\n", "no passage"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"passages.jsonl.*{complaint}"):
            open_index(path)
