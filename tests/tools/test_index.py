"""Search in passages by words, in memory and in a mapped directory, and by vectors."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nanorchestra.errors import UserError
from nanorchestra.tools import corpus as corpus_module
from nanorchestra.tools.corpus import build_index, open_index
from nanorchestra.tools.index import Index, Passage
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
    said = capsys.readouterr()
    assert "image.png" in said.err and "UTF-8" in said.err and "indexed 4 passages" in said.out
    index = open_index(out)
    assert index.search("gold")[0].source == "metals/gold.md"
    assert index.search("tin")[0] == ("Tin melts.", "http://tin", pytest.approx(1.4, abs=1))
    assert index.search("secret") == [] and len(index.passages) == 4
    assert all(len(text) <= 1000 for text, _ in index.passages)
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
        found = list(pool.map(lambda query: index.search(query, 2), queries))
    assert found == [index.search(query, 2) for query in queries]


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
    found = index.search("gold", k=10)
    np.testing.assert_allclose([hit.score for hit in found], wanted, atol=1e-6)
    assert index.search(" ") == [] and index.blocking and len(texts) == 2


def test_a_bad_file_of_passages_is_named_with_its_line(tmp_path):
    path = tmp_path / "passages.jsonl"
    with pytest.raises(UserError, match="passages.jsonl.*cannot be read"):
        open_index(path)
    for content, complaint in (
        ('{"text": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"text": "a"}\n\n{"txt": "b"}\n', "line 3: .* not valid under any"),
        ("\n", "no passage"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"passages.jsonl.*{complaint}"):
            open_index(path)
