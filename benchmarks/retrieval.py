"""Measures IVF-PQ beside flat search: recall, bytes, time to build and time of a query.

    python benchmarks/retrieval.py [--vectors 1000000] [--dimension 64]

The vectors are synthetic: points of a mixture of 1,000 Gaussians in a space of 24 dimensions, laid
into `dimension` of them with a little noise, of length 1. Real embeddings are such a cloud too:
clusters of subjects, of far fewer dimensions than the vectors have. Queries are further points of
the mixture, asked one at a time. Memory is that of the process alone (RssAnon): mapped files are
not in it, because the system takes their pages back when it needs them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nanorchestra.tools import vectors as subject  # noqa: E402

CLUSTERS, INNER, SPREAD, NOISE, QUERIES, K = 1000, 24, 0.6, 0.05, 200, 10


def sample(rng: np.random.Generator, shape: dict[str, np.ndarray], count: int) -> np.ndarray:
    """Returns `count` vectors of the mixture, float32 of length 1."""
    centres, plane = shape["centres"], shape["plane"]
    inner = centres[rng.integers(0, CLUSTERS, count)]
    inner = inner + SPREAD * rng.standard_normal((count, INNER), dtype=np.float32)
    points = inner @ plane
    points += NOISE * rng.standard_normal(points.shape, dtype=np.float32)
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def anonymous_mb() -> int:
    """Returns the MB of memory that belong to this process alone."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) // 1024


def main() -> None:
    """Writes the vectors, builds both kinds, and prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        figures = measure(options.vectors, options.dimension, Path(home))
    for name, value in figures.items():
        print(f"{name:32} {value}")


def measure(count: int, dimension: int, home: Path) -> dict[str, object]:
    """Returns the figures of `count` vectors by name."""
    rng = np.random.default_rng(0)
    shape = {
        "centres": rng.standard_normal((CLUSTERS, INNER), dtype=np.float32),
        "plane": rng.standard_normal((INNER, dimension), dtype=np.float32) / INNER**0.5,
    }
    with open(home / subject.VECTORS, "wb") as file:
        for begin in range(0, count, 20_000):
            file.write(sample(rng, shape, min(20_000, count - begin)).tobytes())
    queries = sample(rng, shape, QUERIES)
    vectors = np.memmap(home / subject.VECTORS, np.float32, "r").reshape(count, dimension)
    settings, cpu = subject.choose(count, dimension, "ivfpq"), torch.device("cpu")
    before, start = anonymous_mb(), time.perf_counter()
    subject.write_ivfpq(vectors, settings, home / subject.CODES)
    figures = {
        "settings": subject.describe(count, settings),
        "build, s": round(time.perf_counter() - start, 1),
        "memory after building, MB": anonymous_mb() - before,
    }
    flat = subject.Vectors(home, subject.choose(count, dimension, "flat"), count, cpu)
    start = time.perf_counter()
    exact = [flat.search(query[None], K)[0] for query in queries]
    figures["flat, ms a query"] = round(1000 * (time.perf_counter() - start) / QUERIES, 2)
    before = anonymous_mb()
    codes = subject.Vectors(home, settings, count, cpu)
    figures["memory of the open index, MB"] = anonymous_mb() - before
    figures["file of codes, bytes a vector"] = round(
        (home / subject.CODES).stat().st_size / count, 1
    )
    default, reranked = settings["nprobe"], subject.FEWEST_RERANKED
    for nprobe in sorted({1, default // 4, default, 4 * default}):
        for least in (K, reranked // 3, reranked):
            settings["nprobe"] = nprobe
            subject.FEWEST_RERANKED, subject.RERANKED = least, 1
            start = time.perf_counter()
            found = [codes.search(query[None], K)[0] for query in queries]
            seconds = time.perf_counter() - start
            hits = [
                len({row for _, row in one} & {row for _, row in other})
                for one, other in zip(exact, found, strict=True)
            ]
            figures[f"nprobe {nprobe}, {least} reranked"] = (
                f"recall@{K} {sum(hits) / (K * QUERIES):.3f}, "
                f"{1000 * seconds / QUERIES:.2f} ms a query"
            )
    return figures


if __name__ == "__main__":
    main()
