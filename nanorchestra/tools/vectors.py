"""Finds the nearest of many vectors: exactly (`flat`), or by an inverted file of codes (`ivfpq`).

The vectors lie in one file, float32 [n, dimension], each of length 1, and are mapped into memory.
`flat` compares a query with all of them. `ivfpq` is FAISS's index "IVF{nlist},PQ{m}" (Jegou, Douze
and Schmid 2011): k-means cuts the vectors into `nlist` lists, and m bytes stand for each vector. A
query visits the `nprobe` nearest lists. The best by their codes are ranked again by their vectors,
so that both kinds return exact inner products.
"""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from tqdm import tqdm

from nanorchestra.errors import require
from nanorchestra.schemas import Json
from nanorchestra.tools.devices import current

VECTORS, CODES = "vectors.f32", "ivfpq.faiss"
KINDS = ("flat", "ivfpq")
FLAT_BYTES = 4 << 30  # of vectors; more are not compared one by one unless the user says so
FEWEST = 10_000  # vectors that k-means of 256 codes needs, as FAISS advises
PER_LIST = 40  # vectors per list in the sample, as FAISS advises
BATCH_BYTES = 64 << 20  # of vectors that are added to an index together
RERANKED = 10  # candidates per result whose vectors are read, and at least
FEWEST_RERANKED = 300


def choose(count: int, dimension: int, kind: str | None = None) -> Json:
    """Returns the settings of an index of `count` vectors; docs/search.md states the rules.

    They are the kind, the dimension, and for ivfpq nlist, m, nprobe and `sample`, the number of
    vectors that it is trained on. UserError if there are too few for ivfpq.
    """
    if kind is None:
        kind = "flat" if 4 * count * dimension <= FLAT_BYTES else "ivfpq"
    if kind == "flat":
        return {"kind": kind, "dimension": dimension}
    require(
        count >= FEWEST,
        f"--kind ivfpq: {count:,} passages are too few; it needs {FEWEST:,}, so use --kind flat",
    )
    nlist = 2 ** round(np.log2(4 * count**0.5))
    while nlist * PER_LIST > count:
        nlist //= 2
    smallest = min(dimension, 64, max(8, dimension // 16))
    return {
        "kind": kind,
        "dimension": dimension,
        "nlist": nlist,
        "m": next(m for m in range(smallest, dimension + 1) if dimension % m == 0),
        "nprobe": max(16, nlist // 64),
        "sample": min(count, max(nlist * PER_LIST, FEWEST)),
    }


def describe(count: int, settings: Json) -> str:
    """Returns the kind of an index with its settings and bytes, for a person."""
    raw = f"{count:,} vectors of {settings['dimension']:,} numbers, "
    raw += f"{4 * count * settings['dimension'] / 1e9:,.2f} GB"
    if settings["kind"] == "flat":
        return f"flat: {raw}"
    names = ", ".join(f"{name} {settings[name]:,}" for name in ("nlist", "m", "nprobe"))
    codes = f"{count * (settings['m'] + 8) / 1e9:,.2f} GB of codes"
    return f"ivfpq: {raw} and {codes}, {names}, trained on {settings['sample']:,}"


def write_ivfpq(vectors: np.ndarray, settings: Json, path: Path) -> None:
    """Trains an IVF-PQ index of vectors [n, dimension] on a sample and writes it to `path`.

    The memory that it takes is the sample's and the index's; vectors are added in batches.
    """
    count, dimension = vectors.shape
    # "np": codes are not also trained to be compared bit by bit, which takes most of the time.
    name = f"IVF{settings['nlist']},PQ{settings['m']}np"
    index = faiss.index_factory(dimension, name, faiss.METRIC_INNER_PRODUCT)
    chosen = np.random.default_rng(0).choice(count, settings["sample"], replace=False)
    index.train(vectors[np.sort(chosen)])
    step = max(1, BATCH_BYTES // (4 * dimension))
    with tqdm(total=count, desc="adding", unit="vector", unit_scale=True) as progress:
        for begin in range(0, count, step):
            batch = vectors[begin : begin + step]
            index.add(batch)
            progress.update(len(batch))
    faiss.write_index(index, str(path))


class Vectors:
    """The `count` vectors of a directory with their index, to search in.

    Flat vectors are searched in fp16 on `device` alone, if it is a GPU and FAISS was built for
    GPUs: each rank has its own. All else is searched on the CPU. UserError if a GPU lacks the room.
    """

    def __init__(self, path: Path, settings: Json, count: int, device: torch.device):
        self.settings = settings
        shape = (count, settings["dimension"])
        self._vectors = np.memmap(path / VECTORS, np.float32, "r", shape=shape)
        self._codes = self._on_gpu = None
        self._device = device
        if settings["kind"] == "ivfpq":
            mapped = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
            self._codes = faiss.read_index(str(path / CODES), mapped)
        elif device.type == "cuda" and faiss.get_num_gpus():
            self._on_gpu = self._copy_to_gpu(device)

    @property
    def first(self) -> np.ndarray:
        """The vector of the first passage, float32 [dimension]."""
        return self._vectors[0]

    def _copy_to_gpu(self, device) -> Any:
        """Returns the vectors on a GPU, in fp16. UserError if they do not fit there."""
        count, dimension = self._vectors.shape
        needed, free = 2 * count * dimension, torch.cuda.mem_get_info(device)[0]
        require(
            needed < free,
            f"flat: {count:,} vectors take {needed / 1e9:.1f} GB on {device}, which has "
            f"{free / 1e9:.1f} GB free; build with --kind ivfpq, or search with --device cpu",
        )
        config = faiss.GpuIndexFlatConfig()
        config.device, config.useFloat16 = device.index, True
        self._resources = faiss.StandardGpuResources()  # FAISS needs it as long as the index
        with current(device):
            index = faiss.GpuIndexFlatIP(self._resources, dimension, config)
            index.add(self._vectors)  # page by page
        return index

    def search(self, queries: np.ndarray, k: int) -> list[list[tuple[float, int]]]:
        """Returns for each query, float32 [queries, dimension], the nearest as (score, row)."""
        k = min(k, len(self._vectors))
        if self._codes is not None:
            return self._search_codes(queries, k)
        if self._on_gpu is not None:
            with current(self._device):
                scores, rows = self._on_gpu.search(queries, k)
        else:
            scores, rows = faiss.knn(queries, self._vectors, k, faiss.METRIC_INNER_PRODUCT)
        nearest = []
        for its_scores, its_rows in zip(scores.tolist(), rows.tolist(), strict=True):
            nearest.append(list(zip(its_scores, its_rows, strict=True)))
        return nearest

    def _search_codes(self, queries, k):
        candidates = min(max(k * RERANKED, FEWEST_RERANKED), len(self._vectors))
        nprobe = faiss.SearchParametersIVF(nprobe=self.settings["nprobe"])
        _, near = self._codes.search(queries, candidates, params=nprobe)
        nearest = []
        for query, rows in zip(queries, near, strict=True):
            rows = np.sort(rows[rows >= 0])  # the lists may hold fewer; sorted, the file is read on
            scores = self._vectors[rows] @ query
            best = np.argsort(-scores, kind="stable")[:k]
            nearest.append(list(zip(scores[best].tolist(), rows[best].tolist(), strict=True)))
        return nearest
