"""Finds passages by their words, with BM25, by their meaning, with vectors, or asks a server.

An index of a few thousand passages is built in memory: `Index(passages)`. corpus.py builds larger
ones in a directory, which its `open_index` maps into memory. Threads take turns to search. A
`RemoteIndex` asks a search server (serving/retrieval.py), which holds one index for all ranks.
"""

import logging
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import NamedTuple

import bm25s
import torch
from bm25s.stopwords import STOPWORDS_EN

from nanorchestra.errors import UserError, require
from nanorchestra.schemas import SHAPES, whole_characters
from nanorchestra.tools.embed import Embedder
from nanorchestra.tools.http import EndpointError, post
from nanorchestra.tools.vectors import Vectors, describe

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it has a root handler print its DEBUG lines
WORD, COMMON = r"\w+", frozenset(STOPWORDS_EN)
CANDIDATES = 10  # passages by BM25 whose word pairs are compared with the query's
SIMILAR = 0.8  # ratio of difflib above which an unknown word is read as a known one
CORRECTED = 16  # unknown words of a query that are read so: each is compared with thousands
QUERY_CHARS = 8_000  # of a query; what is beyond them is cut
TIMEOUT_S = 60.0  # of a question to a server, retries included; of waiting for a local index
ADDRESS = re.compile(r"https?://[^\s/@?#]+/?")


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

    @property
    def about(self) -> str:
        """The number of passages and how they are found, for a person."""
        return f"{len(self.passages):,} passages, found by BM25"

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """Returns the `k` best passages, best first; fewer if fewer have anything in common."""
        return self.search_all([query], k)[0]

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Returns what `search` does, for each query; vectors of all are computed together.

        TimeoutError if other threads search all the time.
        """
        queries = [whole_characters(query[:QUERY_CHARS]) for query in queries]
        if not self._lock.acquire(timeout=TIMEOUT_S):  # one thread has the model and FAISS
            raise TimeoutError(f"other searches have held the index for {TIMEOUT_S:g} s")
        try:
            rankings = self._rank_all(queries, k)
        finally:
            self._lock.release()
        return [
            [self.passages[row]._replace(score=score) for score, row in ranking]
            for ranking in rankings
        ]

    def _rank_all(self, queries, k) -> list[list[tuple[float, int]]]:
        return [self._rank(query, k) for query in queries]

    def _rank(self, query, k) -> list[tuple[float, int]]:
        """Returns (score, row) of the passages with a word of the query, best first."""
        words, unknown = [], 0
        for word in words_of(query):
            if word in self._words.vocab_dict:
                words.append(word)
            elif unknown < CORRECTED:
                unknown += 1
                alike = self._alike.get(word[:2], ())
                words += get_close_matches(word, alike, n=1, cutoff=SIMILAR)
        if not words:
            return []
        scores = torch.from_numpy(self._words.get_scores(words))  # [passages]
        pairs, ranking = set(pairwise(words)), []
        for row in scores.topk(min(max(k, CANDIDATES), len(scores))).indices.sort().values.tolist():
            there = pairs.intersection(pairwise(words_of(self.passages[row].text)))
            score = scores[row].item() * (1 + len(there) / max(1, len(pairs)))
            if score > 0:
                ranking.append((score, row))
        return sorted(ranking, key=lambda pair: -pair[0])[:k]


class VectorIndex(Index):
    """Passages ranked by the inner products of vectors, on one device.

    `embedder` makes the queries' vectors; it must be the one that made the passages'.
    """

    blocking = True

    def __init__(self, passages: Sequence[Passage], vectors: Vectors, embedder: Embedder):
        self.passages, self._lock = passages, threading.Lock()
        self._vectors, self._embedder = vectors, embedder

    @property
    def about(self) -> str:
        """The number of passages, the kind of index with its settings, and the device."""
        kind = describe(len(self.passages), self._vectors.settings)
        return f"{kind}; queries are embedded on {self._embedder.device}"

    def _rank_all(self, queries, k) -> list[list[tuple[float, int]]]:
        """Returns (cosine, row) of the nearest passages, best first; none for an empty query."""
        asked = [i for i, query in enumerate(queries) if query.strip()]
        rankings = [[] for _ in queries]
        if asked:
            vectors = self._embedder.queries([queries[i] for i in asked])
            for i, ranking in zip(asked, self._vectors.search(vectors, k), strict=True):
                rankings[i] = ranking
        return rankings


class RemoteIndex:
    """The index behind a search server, at an address as "http://127.0.0.1:8100".

    UserError if no search server answers there.
    """

    blocking = True

    def __init__(self, address: str):
        require(ADDRESS.fullmatch(address), f"{address}: it must be like http://127.0.0.1:8100")
        self.address = address.rstrip("/")
        try:
            self.search("", k=1)
        except EndpointError as error:
            raise UserError(
                f"{address}: no search server answers ({error}); "
                "start one: python tools.py serve-index DIR"
            ) from None

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """Returns what the server's index finds. Raises EndpointError, in bounded time."""
        body = {"query": query[:QUERY_CHARS], "k": k}
        url = f"{self.address}/search"
        reply, _ = post(url, body, SHAPES["search_reply"], "", TIMEOUT_S)
        return [Passage(row["text"], row["source"], row["score"]) for row in reply["passages"]]


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
