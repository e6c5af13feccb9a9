"""Finds passages by their words, with BM25, or by their meaning, with vectors in a FAISS index.

An index of a few thousand passages is built in memory: `Index(passages)`. corpus.py builds larger
ones in a directory, which its `open_index` maps into memory. Threads take turns to search.
"""

import logging
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import bm25s
import faiss
import torch
from bm25s.stopwords import STOPWORDS_EN

from nanorchestra.errors import require
from nanorchestra.files import read_json
from nanorchestra.tools.embed import Embedder

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it has a root handler print its DEBUG lines
WORD, COMMON = r"\w+", frozenset(STOPWORDS_EN)
CANDIDATES = 10  # passages by BM25 whose word pairs are compared with the query's
SIMILAR = 0.8  # ratio of difflib above which an unknown word is read as a known one


class Passage(NamedTuple):
    """A piece of a corpus; `source` is its file or address, "" if the corpus names none.

    One that was found has a `score`: of BM25, or the cosine of the vectors.
    """

    text: str
    source: str = ""
    score: float = 0.0


class Index:
    """Passages ranked by BM25 (Robertson and Zaragoza 2009); pairs of neighbours weigh more.

    An unknown word of a query is read as the most similar known one that begins alike, if there is
    one. `words` is a saved index of the passages; None: it is made. UserError without any word.
    """

    blocking = False

    def __init__(self, passages: Sequence[Passage], words: bm25s.BM25 | None = None):
        self.passages, self._lock = passages, threading.Lock()
        self._words = words or word_index(passage.text for passage in passages)
        self._alike: dict[str, list[str]] = defaultdict(list)  # by their first two letters
        for word in self._words.vocab_dict:
            self._alike[word[:2]].append(word)

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """Returns the `k` best passages, best first; fewer if fewer have anything in common."""
        with self._lock:  # a saved corpus is read by one thread at a time
            found = self._rank(query, k)
            return [Passage(*self.passages[row][:2], score) for score, row in found]

    def _rank(self, query, k) -> list[tuple[float, int]]:
        """Returns (score, row) of the passages with a word of the query, best first."""
        words = [known for word in words_of(query) for known in self._known(word)]
        if not words:
            return []
        scores = torch.from_numpy(self._words.get_scores(words))  # [passages]
        pairs, found = set(pairwise(words)), []
        for row in scores.topk(min(max(k, CANDIDATES), len(scores))).indices.sort().values.tolist():
            there = pairs.intersection(pairwise(words_of(self.passages[row][0])))
            score = scores[row].item() * (1 + len(there) / max(1, len(pairs)))
            if score > 0:
                found.append((score, row))
        return sorted(found, key=lambda pair: -pair[0])[:k]

    def _known(self, word) -> list[str]:
        if word in self._words.vocab_dict:
            return [word]
        return get_close_matches(word, self._alike.get(word[:2], ()), n=1, cutoff=SIMILAR)


class VectorIndex(Index):
    """Passages ranked by exact inner products in FAISS, on all GPUs if faiss-gpu is installed."""

    blocking = True

    def __init__(self, passages: Sequence[Passage], path: Path):
        self.passages, self._lock = passages, threading.Lock()
        self._embedder = Embedder(read_json(path / "settings.json")["checkpoint"])
        self._faiss = faiss.read_index(str(path / "flat.faiss"), faiss.IO_FLAG_MMAP_IFC)
        if faiss.get_num_gpus():
            options = faiss.GpuMultipleClonerOptions()
            options.shard = options.useFloat16 = True
            self._faiss = faiss.index_cpu_to_all_gpus(self._faiss, options)

    def _rank(self, query, k) -> list[tuple[float, int]]:
        """Returns (cosine, row) of the nearest passages, best first; none for an empty query."""
        if not query.strip():
            return []
        vector = self._embedder.queries([query])
        scores, rows = self._faiss.search(vector, min(k, self._faiss.ntotal))
        return list(zip(scores[0].tolist(), rows[0].tolist(), strict=True))


def word_index(texts: Iterable[str]) -> bm25s.BM25:
    """Returns the BM25 index of texts. UserError if there is no word in them."""
    tokens = bm25s.tokenize(texts, token_pattern=WORD, show_progress=False)
    require(tokens.vocab, "the passages hold no word; an index needs text")
    index = bm25s.BM25(backend="numpy")
    index.index(tokens, create_empty_token=False, show_progress=False)
    return index


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without the commonest of English."""
    return [word for word in re.findall(WORD, text.lower()) if word not in COMMON]
