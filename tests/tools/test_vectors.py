"""Nearest vectors: the two kinds of index beside computations in numpy."""

from __future__ import annotations

from types import SimpleNamespace

import faiss
import numpy as np
import pytest
import torch
from four_gpus import FourGpus

from nanorchestra.errors import UserError
from nanorchestra.tools import vectors as module
from nanorchestra.tools.vectors import CODES, FEWEST, VECTORS, Vectors, choose, write_ivfpq

CPU = torch.device("cpu")
DIMENSION = 16


def cloud(count, seed):
    """Unit vectors around 40 points of a plane of 8 dimensions."""
    space = np.random.default_rng(0)
    centres, plane = space.standard_normal((40, 8)), space.standard_normal((8, DIMENSION))
    rng = np.random.default_rng(seed)
    inner = centres[rng.integers(0, 40, count)] + 0.6 * rng.standard_normal((count, 8))
    points = inner @ plane + 0.05 * rng.standard_normal((count, DIMENSION))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Vectors in a directory, with an index of codes to which they were added in four batches."""
    path = tmp_path_factory.mktemp("vectors")
    vectors = cloud(FEWEST, 1)
    vectors.tofile(path / VECTORS)
    settings = choose(FEWEST, DIMENSION, "ivfpq") | {"m": 4}  # trained in half the time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_BYTES", 4 * DIMENSION * 3001)
        write_ivfpq(vectors, settings, path / CODES)
    return path, vectors, settings


def rows(nearest):
    return [[row for _, row in one] for one in nearest]


def test_flat_finds_the_nearest(built):
    path, vectors, _ = built
    queries = cloud(50, 2)
    nearest = Vectors(path, choose(FEWEST, DIMENSION, "flat"), FEWEST, CPU).search(queries, 7)
    cosines = queries.astype(float) @ vectors.astype(float).T  # [queries, n]
    near = np.argsort(-cosines, axis=1)[:, :7]
    assert rows(nearest) == near.tolist()
    scores = [[score for score, _ in one] for one in nearest]
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, near, 1), atol=1e-5)


def test_ivfpq_finds_nearly_the_same_with_exact_scores_in_the_lists_that_it_visits(built):
    path, vectors, settings = built
    queries, index = cloud(50, 2), Vectors(path, settings, FEWEST, CPU)
    exact = vectors @ queries.T  # [n, queries]
    wanted = np.argsort(-exact, axis=0)[:10].T
    nearest = index.search(queries, 10)
    recall = np.mean([len({*a} & {*b}) / 10 for a, b in zip(wanted, rows(nearest), strict=True)])
    assert recall > 0.95, recall
    # What numpy says of the lists: a vector lies in the nearest one, a query visits nprobe of them.
    codes = faiss.read_index(str(path / CODES))
    centroids = codes.quantizer.reconstruct_n(0, settings["nlist"])
    lists = np.argmax(vectors @ centroids.T, axis=1)
    visited = np.argsort(-(queries @ centroids.T), axis=1)[:, : settings["nprobe"]]
    for i, one in enumerate(nearest):
        scores = [score for score, _ in one]
        assert scores == sorted(scores, reverse=True) and len(one) == 10
        np.testing.assert_allclose(scores, [exact[row, i] for _, row in one], atol=1e-6)
        assert {lists[row] for _, row in one} <= {*visited[i]}
    everything = Vectors(path, settings | {"nprobe": settings["nlist"]}, FEWEST, CPU)
    (whole,) = everything.search(queries[:1], FEWEST)
    np.testing.assert_allclose([score for score, _ in whole], np.sort(exact[:, 0])[::-1], atol=1e-6)
    few = settings | {"nprobe": 1}
    assert 0 < len(Vectors(path, few, FEWEST, CPU).search(queries[:1], FEWEST)[0]) < FEWEST


def test_settings_follow_from_the_size():
    assert choose(10**6, 1024)["kind"] == "flat" and choose(1_100_000, 1024)["kind"] == "ivfpq"
    wikipedia = choose(21_000_000, 1024)
    assert wikipedia == {
        "kind": "ivfpq",
        "dimension": 1024,
        "nlist": 16384,
        "m": 64,
        "nprobe": 256,
        "sample": 655_360,
    }
    for count, dimension in ((10_000, 32), (123_456, 2560), (10**9, 4096), (10**5, 90), (10**5, 7)):
        settings = choose(count, dimension, "ivfpq")
        assert dimension % settings["m"] == 0 and settings["nprobe"] <= settings["nlist"]
        assert settings["nlist"] * 39 <= settings["sample"] <= count  # what FAISS advises
    with pytest.raises(UserError, match="--kind ivfpq: 9,999 passages are too few; .*flat"):
        choose(9_999, 32, "ivfpq")


def test_a_gpu_holds_flat_vectors_alone_and_only_if_they_fit(built, monkeypatch):
    path, vectors, settings = built
    flat, gpu, made = {"kind": "flat", "dimension": DIMENSION}, torch.device("cuda", 3), []
    used = []  # the GPU that is current where FAISS is at work

    class FakeIndex(faiss.IndexFlatIP):
        def __init__(self, resources, dimension, config):
            super().__init__(dimension)
            made.append(config)

        def search(self, queries, k):
            used.append(torch.cuda.current_device())
            return super().search(queries, k)

    FourGpus().patch(monkeypatch)

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 8)
    monkeypatch.setattr(faiss, "GpuIndexFlatConfig", SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatIP", FakeIndex, raising=False)
    room = [2 * vectors.size + 1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room[0], 1 << 40))
    on_cpu = Vectors(path, flat, FEWEST, CPU).search(vectors[:2], 5)
    assert made == []
    on_gpu = Vectors(path, flat, FEWEST, gpu).search(vectors[:2], 5)
    assert rows(on_gpu) == rows(on_cpu)
    assert [(config.device, config.useFloat16) for config in made] == [(3, True)] and used == [3]
    Vectors(path, settings, FEWEST, gpu)
    assert len(made) == 1, "codes are searched on the CPU"
    room[0] -= 1
    with pytest.raises(UserError, match="10,000 vectors take 0.0 GB on cuda:3, .*--kind ivfpq"):
        Vectors(path, flat, FEWEST, gpu)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)  # faiss-cpu
    assert rows(Vectors(path, flat, FEWEST, gpu).search(vectors[:2], 5)) == rows(on_cpu)
