"""Finds passages by their words, without an embedding model: hashed words, pairs of words and letter trigrams in a FAISS inner-product index.

A text becomes one vector: each distinct word, each pair of neighbours and each trigram of letters is hashed to a signed coordinate and weighted by its
inverse document frequency; the vector has length 1, so a score is a cosine in [-1, 1]. Words find what is named, trigrams forgive a
plural or a misspelling. Everything is deterministic across machines and runs. faiss is imported in this file only.
"""

from __future__ import annotations

import json
import re
import zlib
from itertools import pairwise
from pathlib import Path

import faiss
import numpy as np

from nanorchestra.errors import UserError

DIMENSIONS = 2048
_TRIGRAM_WEIGHT = 0.5  # against 1 for a word: the best of a few tried on the miniature's corpus
_WORD = re.compile(r"\w+")


class Index:
    """Passages and their vectors, row by row in the same order."""

    def __init__(self, passages: list[str], idf: np.ndarray, vectors: np.ndarray):
        self.passages = passages
        self._idf = idf  # [DIMENSIONS] float32
        self._faiss = faiss.IndexFlatIP(DIMENSIONS)
        self._faiss.add(vectors)  # [passages, DIMENSIONS] float32

    @classmethod
    def build(cls, passages: list[str]) -> Index:
        """Index `passages`. Raises ValueError if there are none."""
        if not passages:
            raise ValueError("an index needs at least one passage")
        counts = np.stack([_features(passage) for passage in passages])  # [passages, DIMENSIONS]
        idf = np.log1p(len(passages) / (1.0 + np.count_nonzero(counts, axis=0))).astype(np.float32)
        vectors = counts * idf
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return cls(list(passages), idf, vectors)

    def search(self, query: str, k: int = 3) -> list[tuple[float, str]]:
        """The `k` passages most like `query` as (cosine, passage), best first; fewer if there are fewer, none for a wordless query."""
        if k < 1:
            raise ValueError(f"k is {k}, it must be at least 1")
        vector = _features(query) * self._idf
        norm = float(np.sqrt(vector @ vector))
        if norm == 0.0:
            return []
        scores, rows = self._faiss.search((vector / norm)[None], min(k, len(self.passages)))
        return [
            (float(score), self.passages[row])
            for score, row in zip(scores[0], rows[0], strict=True)
        ]


def load_passages(path: str | Path) -> list[str]:
    """The "text" of each line of a JSONL file, in order; blank lines are skipped. Raises UserError naming the file, line and field."""
    passages = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that none can have
        raise UserError(
            f'{path}: cannot be read ({error}); it should be a UTF-8 file of lines like {{"text": "..."}}'
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f'{path}, line {number}: not JSON ({error}); it should be an object like {{"text": "..."}}'
            ) from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise UserError(
                f'{path}, line {number}: text is {text!r}, it should be a passage, as in {{"text": "..."}}'
            )
        passages.append(text)
    if not passages:
        raise UserError(f'{path}: holds no passage; it should have lines like {{"text": "..."}}')
    return passages


def _features(text: str) -> np.ndarray:
    """Hash a text's distinct words and trigrams to one float32 vector [DIMENSIONS], without idf and not normalised."""
    weights = {}
    words = _WORD.findall(text.lower())
    weights |= {f"{a} {b}": 1.0 for a, b in pairwise(words)}
    for word in words:
        weights[word] = 1.0
        padded = f"^{word}$"
        for i in range(len(padded) - 2):
            weights["~" + padded[i : i + 3]] = _TRIGRAM_WEIGHT
    vector = np.zeros(DIMENSIONS, np.float32)
    for feature, weight in weights.items():
        # crc32 and not hash(): the same in every process. The sign lets collisions cancel instead of adding up.
        code = zlib.crc32(feature.encode("utf-8", "surrogatepass"))
        vector[(code >> 1) % DIMENSIONS] += weight if code & 1 else -weight
    return vector
