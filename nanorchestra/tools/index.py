"""Finds passages by their words, with BM25, by their meaning, with vectors, or asks a server.

An index is an SQLite database, whose table `passages` holds texts, sources and, by FTS5, the words.
Vectors beside it are searched by FAISS. `Index.of(passages)` is in memory; corpus.py writes one to
a directory, and its `open_index` opens it. A `RemoteIndex` asks a search server
(serving/retrieval.py), which holds one index for all ranks.
"""

import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import faiss
import torch
from typing_extensions import TypedDict

from nanorchestra.agent.failures import EndpointError
from nanorchestra.errors import UserError, require
from nanorchestra.schemas import whole_characters
from nanorchestra.tools.devices import current
from nanorchestra.tools.embed import Embedder
from nanorchestra.tools.http import post

TABLE = "CREATE VIRTUAL TABLE passages USING fts5(text, source UNINDEXED)"
INSERT = "INSERT INTO passages VALUES (?, ?)"
SELECT = "SELECT text, source FROM passages WHERE rowid = ?"
# FTS5's rank is the BM25 of Robertson and Zaragoza (2009), k1 = 1.2, b = 0.75, times -1.
RANK = "SELECT -rank, rowid FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?"
QUERY_CHARS = 8_000  # of a query; what is beyond them is cut
QUERY_WORDS = 64  # of a query: the time of a search grows with the square of their number
TIMEOUT_S = 60.0  # of a question to a server, retries included; of waiting for a local index
STEPS = 10_000  # of SQLite, some milliseconds, between two looks at the clock
ADDRESS = re.compile(r"https?://[^\s/@?#]+/?")
# A word, but none of the commonest of English (Lucene's list): they find nearly every passage.
WORD = re.compile(
    r"\b(?!(a|an|and|are|as|at|be|but|by|for|if|in|into|is|it|no|not|of|on|or|such|that|the|their"
    r"|then|there|these|they|this|to|was|will|with)\b)\w+"
)


class Passage(NamedTuple):
    """A piece of a corpus; `source` is its file or address, "" if the corpus names none.

    One that was found has a `score`: of BM25, or the cosine of the vectors.
    """

    text: str
    source: str = ""
    score: float = 0.0


def database(path: str | Path = ":memory:") -> sqlite3.Connection:
    """Returns the database of a file, for threads that take turns. UserError without FTS5."""
    opened = sqlite3.connect(path, check_same_thread=False)
    modules = {name for (name,) in opened.execute("PRAGMA module_list")}
    lacks = f"SQLite {sqlite3.sqlite_version} of this Python was built without FTS5"
    require("fts5" in modules, f"{lacks}; search needs it: use a Python that has it")
    return opened


def insert(opened: sqlite3.Connection, passages: Iterable[Passage]) -> None:
    """Writes passages into a new database, with their words."""
    opened.execute(TABLE)
    opened.executemany(INSERT, (passage[:2] for passage in passages))


class Found(TypedDict):
    """What a search server answers."""

    passages: list[Passage]


class Index:
    """The passages of a database, ranked by BM25 over the words and the word pairs of a query.

    Threads take turns to search. `blocking`: whether a search may take as long as reading a file.
    """

    def __init__(self, opened: sqlite3.Connection, blocking: bool = True):
        self._database, self.blocking = opened, blocking
        self._lock = threading.Lock()
        (count,) = opened.execute("SELECT max(id) FROM passages_content").fetchone()
        self.count = count or 0

    @classmethod
    def of(cls, passages: Iterable[Passage]) -> "Index":
        """Returns an index in memory, of some thousand passages."""
        opened = database()
        insert(opened, passages)
        return cls(opened, blocking=False)

    @property
    def about(self) -> str:
        """The number of passages and how they are found, for a person."""
        return f"{self.count:,} passages, found by BM25"

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """Returns the `k` best passages, best first; fewer if fewer have anything in common."""
        return self.search_all([query], k)[0]

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Returns what `search` does, for each query; vectors of all are computed together.

        TimeoutError if other threads search all the time, or if it takes too long itself.
        """
        queries = [whole_characters(query[:QUERY_CHARS]) for query in queries]
        if not self._lock.acquire(timeout=TIMEOUT_S):
            raise TimeoutError(f"other searches have held the index for {TIMEOUT_S:g} s")
        try:
            return [self._passages(ranking) for ranking in self._rank_all(queries, k)]
        finally:
            self._lock.release()

    def _passages(self, ranking) -> list[Passage]:
        found = []
        for score, row in ranking:
            text, source = self._database.execute(SELECT, (row,)).fetchone()
            found.append(Passage(text, source, score))
        return found

    def _rank_all(self, queries, k) -> list[list[tuple[float, int]]]:
        """Returns (score, row of the database) of the best passages for each query."""
        end = time.monotonic() + TIMEOUT_S
        self._database.set_progress_handler(lambda: time.monotonic() > end, STEPS)
        try:
            return [self._database.execute(RANK, (match(query), k)).fetchall() for query in queries]
        except sqlite3.OperationalError as error:
            raise TimeoutError(f"SQLite has not found passages ({error})") from None
        finally:
            self._database.set_progress_handler(None, STEPS)


def match(query: str) -> str:
    """Returns a query of FTS5 for any of the words of a text, and any two that are neighbours.

    >>> match('the mass OF "gold')
    '"mass" OR "gold" OR "mass gold"'
    """
    words = [found[0] for found in WORD.finditer(query.lower())][:QUERY_WORDS]
    terms = [*words, *map(" ".join, pairwise(words))]
    return " OR ".join(f'"{term}"' for term in terms) or '""'


class VectorIndex(Index):
    """Passages ranked by the inner products of vectors; an index of FAISS has those of row 1 on.

    `embedder` makes the queries' vectors; it must be the one that made the passages'. FAISS
    searches on its device, in fp16 on a GPU. UserError if the vectors cannot be held there.
    """

    def __init__(self, opened: sqlite3.Connection, vectors: faiss.Index, embedder: Embedder):
        super().__init__(opened)
        self._vectors, self._embedder = vectors, embedder
        if embedder.device.type == "cuda" and faiss.get_num_gpus():
            self._vectors = self._on_gpu(vectors, embedder.device)

    def _on_gpu(self, vectors, device: torch.device) -> faiss.Index:
        self._resources = faiss.StandardGpuResources()  # FAISS needs it as long as the index
        options = faiss.GpuClonerOptions()
        options.useFloat16 = True
        try:
            with current(device):
                return faiss.index_cpu_to_gpu(self._resources, device.index, vectors, options)
        except RuntimeError as error:
            problem = " ".join(str(error).split())[:300]
            right = "search on the CPU, with CUDA_VISIBLE_DEVICES= before the command"
            raise UserError(f"{device} cannot hold the vectors ({problem}); {right}") from None

    @property
    def about(self) -> str:
        """The number of passages, the size of their vectors, and the device, for a person."""
        size = f"{self.count:,} passages, found by vectors of {self._vectors.d:,} numbers"
        return f"{size} on {self._embedder.device}"

    def _rank_all(self, queries, k) -> list[list[tuple[float, int]]]:
        """Returns (cosine, row) of the nearest passages, best first; none for an empty query."""
        asked = [i for i, query in enumerate(queries) if query.strip()]
        rankings = [[] for _ in queries]
        if asked:
            vectors = self._embedder.queries([queries[i] for i in asked])
            with current(self._embedder.device):
                scores, rows = self._vectors.search(vectors, min(k, self.count))
            for i, its_scores, its_rows in zip(asked, scores.tolist(), rows.tolist(), strict=True):
                for score, row in zip(its_scores, its_rows, strict=True):
                    if row >= 0:  # -1: the lists that were visited hold fewer than k
                        rankings[i].append((score, row + 1))
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
        body = {"query": whole_characters(query[:QUERY_CHARS]), "k": k}
        url = f"{self.address}/search"
        reply = post(url, body, Found, "", TIMEOUT_S)
        if reply.problem:
            raise EndpointError(reply.problem)
        return reply.content["passages"]
