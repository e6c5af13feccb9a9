"""Search in passages by words and by vectors, in memory and in a directory."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3Model

from nanorchestra.tools import corpus as corpus_module
from nanorchestra.tools import embed
from nanorchestra.tools import index as index_module
from nanorchestra.tools.corpus import build_index, open_index
from nanorchestra.tools.embed import Embedder
from nanorchestra.tools.index import QUERY_WORDS, Index, Passage
from tools import main

SYNTAX = Index.of([Passage("a b"), Passage("NEAR OR AND NOT text source")])


@settings(max_examples=50)
@given(st.text() | st.text(alphabet='ab "*^:(){}+-_\0\ud800'), st.integers(1, 3))
@example("?! ...", 10**9)
def test_a_query_is_words_whatever_it_is(query, k):
    """It is never the syntax of FTS5."""
    assert len(SYNTAX.search(query, k)) <= k
    for syntax in ("x OR text", "x NEAR text", "source : text", '"text" AND text', "text*"):
        assert [hit.text for hit in SYNTAX.search(syntax)] == ["NEAR OR AND NOT text source"]
    assert SYNTAX.search("tex*") == SYNTAX.search("NOT zebra") == []


def test_scores_are_those_of_bm25_of_the_words_and_their_pairs():
    relations = ("mass", "melting point", "atomic radius")
    texts = [f"Element {n}. Its {relation} is {n}." for n in range(99) for relation in relations]
    spoken = ["".join(c if c.isalnum() else " " for c in text.lower()).split() for text in texts]
    lengths = np.array([len(words) for words in spoken])
    index = Index.of(map(Passage, texts))
    for query in ("element", "Mass of element 9", "atomic number of tin", "radius radius mass"):
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


def test_a_query_of_a_megabyte_is_cut_and_a_search_that_takes_too_long_ends(monkeypatch):
    index = Index.of(Passage(f"gold {i}") for i in range(10_000))
    start = time.monotonic()
    unknown = "".join(f"x{i:04} " for i in range(100_000))
    assert index.search(f"gold {unknown}")
    assert index.search("y " * QUERY_WORDS + "gold") == [] != index.search("y " * 63 + "gold")
    assert time.monotonic() - start < 2
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.001)
    with pytest.raises(TimeoutError, match="has not found passages .interrupted"):
        index.search("gold")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, nano_tokenizer):
    """A backbone as Qwen3-Embedding is published: bare names, an output said not to be tied."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=704, num_attention_heads=4, num_key_value_heads=2, **shape)
    path = tmp_path_factory.mktemp("embedding")
    Qwen3Model(config).save_pretrained(path)
    nano_tokenizer.save(path)
    return path


def test_vectors_are_those_of_transformers(checkpoint, nano_tokenizer, monkeypatch):
    monkeypatch.setattr(embed, "MAX_TOKENS", 60)
    texts = ["Gold has 79.", "<|im_end|>", "", "a longer text about iron " * 20, "Iron has 26."]
    theirs = Qwen3Model.from_pretrained(checkpoint).eval()
    end = nano_tokenizer.token_id("<|endoftext|>")

    def vector(text):
        ids = torch.tensor([[*nano_tokenizer.encode(text)[:59], end]])
        with torch.no_grad():
            return torch.nn.functional.normalize(theirs(ids).last_hidden_state[0, -1], dim=0)

    ours = Embedder(checkpoint)
    vectors = ours.passages(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (5, ours.dimension)
    np.testing.assert_allclose(vectors, torch.stack([vector(t) for t in texts]), atol=2e-6)
    instructed = f"Instruct: {embed.INSTRUCTION}\nQuery:gold"
    np.testing.assert_allclose(ours.queries(["gold"])[0], vector(instructed), atol=2e-6)


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
    out = tmp_path / "index"
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


def test_a_build_of_vectors_that_was_stopped_goes_on(checkpoint, pages, tmp_path, monkeypatch):
    embedded = []

    class Stopping(Embedder):
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
    monkeypatch.setattr(corpus_module, "Embedder", Embedder)
    monkeypatch.setattr(corpus_module, "_write_passages", None)
    assert build_index(pages, out, checkpoint) == 4 and not part.exists()
    index, vectors = open_index(out), Embedder(checkpoint)
    query = vectors.queries(["gold"])[0]
    hits = index.search("gold", k=10)
    wanted = vectors.passages([hit.text for hit in hits]) @ query
    np.testing.assert_allclose([hit.score for hit in hits], wanted, atol=1e-6)
    assert len(hits) == 4 and {*embedded[:2]} <= {hit.text for hit in hits}
    assert index.search(" ") == []
