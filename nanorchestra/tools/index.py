"""Finds passages by their words, without an embedding model, in a FAISS inner-product index.

Each distinct word, each pair of neighbouring words and each trigram of letters of a text is hashed
to a signed coordinate, weighted by its inverse document frequency. Vectors have length 1, so a
score is a cosine in [-1, 1]. Trigrams forgive a plural or a misspelling. The index is the same on
every machine. Only this file imports faiss.
"""

from __future__ import annotations

import re
import zlib
from itertools import pairwise
from pathlib import Path

import faiss
import numpy as np

from nanorchestra.errors import require
from nanorchestra.files import read_json_lines

DIMENSIONS = 2048
TRIGRAM_WEIGHT = 0.5  # against 1 for a word: the best of a few tried on the miniature's corpus


class Index:
    """Passages and their vectors, row by row in the same order."""

    def __init__(self, passages: list[str]):
        self.passages = passages
        counts = np.stack([features(passage) for passage in passages])  # [passages, DIMENSIONS]
        used = np.count_nonzero(counts, axis=0)
        self._idf = np.log1p(len(passages) / (1.0 + used)).astype(np.float32)  # [DIMENSIONS]
        vectors = counts * self._idf
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        self._faiss = faiss.IndexFlatIP(DIMENSIONS)
        self._faiss.add(vectors)

    def search(self, query: str, k: int = 3) -> list[tuple[float, str]]:
        """Returns the `k` passages most like `query` as (cosine, passage), best first.

        There are fewer if the index holds fewer, and none for a query without words.
        """
        vector = features(query) * self._idf
        norm = float(np.sqrt(vector @ vector))
        if norm == 0.0:
            return []
        scores, rows = self._faiss.search((vector / norm)[None], min(k, len(self.passages)))
        found = zip(scores[0], rows[0], strict=True)
        return [(float(score), self.passages[row]) for score, row in found]


def load_passages(path: str | Path) -> list[str]:
    """Returns the "text" of each line of a JSONL file. UserError names file, line and field."""
    passages = []
    for number, row in read_json_lines(path):
        text = row.get("text") if isinstance(row, dict) else None
        problem = f'{path}, line {number}: text is {text!r}; it must be as in {{"text": "..."}}'
        require(isinstance(text, str) and text.strip(), problem)
        passages.append(text)
    require(passages, f'{path}: no passage; it must have lines like {{"text": "..."}}')
    return passages


def features(text: str) -> np.ndarray:
    """Returns a text's hashed words, pairs and trigrams, float32 [DIMENSIONS], without idf."""
    words = re.findall(r"\w+", text.lower())
    weights = {f"{a} {b}": 1.0 for a, b in pairwise(words)}
    for word in words:
        weights[word] = 1.0
        padded = f"^{word}$"
        for i in range(len(padded) - 2):
            weights["~" + padded[i : i + 3]] = TRIGRAM_WEIGHT
    vector = np.zeros(DIMENSIONS, np.float32)
    for feature, weight in weights.items():
        # crc32 is the same in every process, unlike hash(). With signs, collisions cancel.
        code = zlib.crc32(feature.encode("utf-8", "surrogatepass"))
        vector[(code >> 1) % DIMENSIONS] += weight if code & 1 else -weight
    return vector
