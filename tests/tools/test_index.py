"""Search in passages by words, in memory and in a mapped directory, and by vectors."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from nanorchestra.errors import UserError
from nanorchestra.tools import corpus as corpus_module
from nanorchestra.tools import vectors as vectors_module
from nanorchestra.tools.corpus import build_index, open_index
from nanorchestra.tools.index import COMMON, WORD, Index, Passage, words_of
from tools import main

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "assets" / "nano" / "corpus.jsonl"


def test_nearly_every_fact_is_found_by_its_subject_and_relation():
    facts = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    index, missed = Index([Passage(fact["text"]) for fact in facts]), []
    for fact in facts:
        relation, subject = fact["relation"], fact["subject"]
        for query in (f"{subject} {relation}", f"What is the {relation} of {subject}?"):
            if index.search(query, k=1)[0].text != fact["text"]:
                missed.append(query)
    assert len(missed) < 0.01 * 2 * len(facts), missed
    assert "76" in index.search("OSMIUM: ATOMIC NUMBER", k=1)[0].text
    assert "number is 15." in index.search("atomic number of phosphorous", k=1)[0].text


def test_edges_of_k_and_query():
    others = map(Passage, ("one dog", "...", "a cat and one more"))
    index = Index([Passage("one cat", "a.txt"), *others])
    best, *others = index.search("one cat", k=10)
    assert best.text == "one cat" and best.source == "a.txt" and len(others) == 2
    assert best.score > others[0].score >= others[1].score > 0
    assert index.search("?! ...") == index.search("") == index.search("zebra") == []
    with pytest.raises(UserError, match="no word"):
        Index([Passage("...")])


def test_scores_are_those_of_bm25_and_of_the_neighbouring_words():
    texts = [json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    spoken = [[w for w in re.findall(WORD, text.lower()) if w not in COMMON] for text in texts]
    vocabulary = {word: column for column, word in enumerate(sorted({*chain(*spoken)}))}
    counts = np.zeros((len(texts), len(vocabulary)))  # [passages, words]
    for row, words in enumerate(spoken):
        for word in words:
            counts[row, vocabulary[word]] += 1
    lengths, frequency = counts.sum(1, keepdims=True), (counts > 0).sum(0)
    rarity = np.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
    weights = counts / (counts + 1.5 * (0.25 + 0.75 * lengths / lengths.mean())) * rarity
    index = Index([Passage(text) for text in texts])
    for query in ("gold", "Period of iron", "atomic number of tin", "gold gold iron"):
        words = words_of(query)
        scores = weights[:, [vocabulary[word] for word in words]].sum(1)
        wanted = []
        for row in np.argsort(-scores, kind="stable")[:10]:
            pairs = {*pairwise(words)}
            there = pairs & {*pairwise(words_of(texts[row]))}
            wanted.append(scores[row] * (1 + len(there) / max(1, len(pairs))))
        hits = index.search(query, k=10)
        wanted = sorted((score for score in wanted if score > 0), reverse=True)
        np.testing.assert_allclose([hit.score for hit in hits], wanted, rtol=1e-5)
        for hit in hits[:3]:
            assert {*re.findall(WORD, hit.text.lower())} & {*words}


def test_a_query_of_a_megabyte_is_cut_and_ends():
    words = [f"{a}{b}{i}" for a in "abc" for b in "abc" for i in range(2000)]
    index = Index([Passage(" ".join(words)), Passage("gold")])
    start = time.monotonic()
    unknown = "".join(f"ab{i:04}xyz " for i in range(100_000))
    assert [hit.text for hit in index.search(f"gold {unknown}")] == ["gold"]
    assert index.search("x" * 8000 + " gold") == [] != index.search("x" * 7990 + " gold")
    assert index.search("x" * (1 << 20)) == [] and len(index.search("gold", k=10**9)) == 1
    assert time.monotonic() - start < 2


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


def test_a_directory_is_indexed_once_and_again_when_it_changes(pages, tmp_path, capsys):
    out, missing = tmp_path / "index", tmp_path / "none"
    assert main(["index", str(pages), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert (
        "image.png" in printed.err
        and "UTF-8" in printed.err
        and "indexed 4 passages" in printed.out
    )
    index = open_index(out)
    assert index.search("gold")[0].source == "metals/gold.md"
    assert index.search("tin")[0] == ("Tin melts.", "http://tin", pytest.approx(1.4, abs=1))
    assert index.search("secret") == [] and len(index.passages) == 4
    assert all(len(passage.text) <= 1000 for passage in index.passages)
    words = (out / "bm25" / "vocab.index.json").stat()
    assert build_index(pages, out) == 4  # nothing is done again
    assert (out / "bm25" / "vocab.index.json").stat() == words
    (pages / "iron.txt").write_text("Steel does not rust.")
    build_index(pages, out)
    assert open_index(out).search("steel") and not open_index(out).search("iron")
    assert main(["index", str(missing), "--out", str(out)]) == 2
    assert main(["index", str(pages), "--out", str(tmp_path)]) == 2
    assert "--out must be new" in capsys.readouterr().err and pages.is_dir()


def test_many_threads_search_one_saved_index(tmp_path):
    build_index(CORPUS, tmp_path / "index")
    index = open_index(tmp_path / "index")
    queries = [f"element {i} period" for i in range(1, 100)] * 2
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
    with pytest.raises(UserError, match="not a whole index"):
        open_index(out)
    (part,) = out.glob("*.part")
    with open(part, "ab") as file:
        file.write(b"torn")  # half a vector
    monkeypatch.setattr(corpus_module, "Embedder", corpus_module.Embedder.__base__)
    assert build_index(pages, out, checkpoint) == 4 and not part.exists()
    index, texts = open_index(out), embedded[:2]
    vectors = corpus_module.Embedder(checkpoint)
    query = vectors.queries(["gold"])[0]
    wanted = np.sort(vectors.passages([text for text, *_ in index.passages]) @ query)[::-1]
    hits = index.search("gold", k=10)
    np.testing.assert_allclose([hit.score for hit in hits], wanted, atol=1e-6)
    assert index.search(" ") == [] and index.blocking and len(texts) == 2
    together = index.search_all(["gold", " ", "tin"], 2)
    alone = [index.search(query, 2) for query in ("gold", " ", "tin")]
    for one, other in zip(together, alone, strict=True):
        assert [hit.text for hit in one] == [hit.text for hit in other]


def test_another_kind_of_index_is_built_from_the_same_vectors(
    checkpoint, tmp_path, monkeypatch, capsys
):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "index"
    monkeypatch.setattr(vectors_module, "FEWEST", 300)  # FAISS warns, and is quick
    texts = [f"text {i}" for i in range(400)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    embedded = Counter()

    class Words(corpus_module.Embedder):
        """Makes a vector of 32 numbers of the digits of a text."""

        def passages(self, texts):
            embedded.update(texts)
            digits = [[int(c) for c in f"{int(re.sub('[^0-9]', '', t)):032}"] for t in texts]
            vectors = np.array(digits, np.float32) + 1e-3 * np.arange(32, dtype=np.float32)
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    monkeypatch.setattr(corpus_module, "Embedder", Words)
    monkeypatch.setattr(corpus_module, "BLOCK", 100)
    arguments = ["index", str(corpus), "--out", str(out), "--embed", str(checkpoint)]
    hits = {}
    for kind in ("flat", "ivfpq", "flat"):
        assert main([*arguments, "--kind", kind]) == 0
        printed = capsys.readouterr().out
        assert f"{kind}: 400 vectors of 32 numbers, 0.00 GB" in printed
        settings = json.loads((out / "vectors" / "settings.json").read_text())
        assert settings["kind"] == kind and settings.get("nlist", 8) == 8
        hits[kind] = open_index(out, "cpu").search("395", k=3)
        assert hits[kind][0].text == "text 395" and hits[kind][0].score > 0.999
        assert main(arguments) == 0 and "flat:" not in capsys.readouterr().out  # it is kept
        assert (out / "vectors" / "ivfpq.faiss").exists() == (kind == "ivfpq")
    assert embedded.pop("text 0") == 4  # the first of them is made again at each opening
    assert max(embedded[text] for text in texts[1:]) == 1 and not list(out.glob("*.part"))


def test_a_mistake_of_a_build_or_an_opening_is_one_line(checkpoint, pages, tmp_path, capsys):
    out = tmp_path / "index"
    assert build_index(pages, out, checkpoint) == 4
    vectors = out / "vectors" / "vectors.f32"
    kept = vectors.read_bytes()
    vectors.write_bytes(b"\0" * len(kept))
    for path, embedder, says in (
        (pages, None, "pages: not a whole index; build it"),
        (out, None, "these are the vectors of another embedder"),
    ):
        with pytest.raises(UserError, match=says) as refused:
            open_index(path, "cpu", embedder)
        assert "\n" not in str(refused.value)
    vectors.write_bytes(kept)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    arguments = [str(pages), "--out", str(out), "--embed", str(checkpoint), "--kind", "ivfpq"]
    for given, says in (
        (arguments, "4 passages are too few; it needs 10,000"),
        ([str(empty), "--out", str(tmp_path / "new")], "no text to index"),
        ([str(pages), "--out", str(out), "--kind", "flat"], "give --embed"),
    ):
        assert main(["index", *given]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("tools.py: ") and says in error, error
    assert not (tmp_path / "new").exists()
    assert open_index(out).search("gold"), "a build that failed leaves what was there"


def test_a_bad_file_of_passages_is_named_with_its_line(tmp_path):
    path = tmp_path / "passages.jsonl"
    with pytest.raises(UserError, match="passages.jsonl.*cannot be read"):
        open_index(path)
    for content, complaint in (
        ('{"text": "a"}\nnot json\n', "line 2: not JSON"),
        (
            '{"text": "a"}\n\n{"txt": "b"}\n',
            "line 3: one of text, contents, content must be a text",
        ),
        ("\n", "no passage"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"passages.jsonl.*{complaint}"):
            open_index(path)
