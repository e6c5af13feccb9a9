"""q and k norm, rotary positions and the store into cache pages, in one kernel, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, poisoned, randn

from kernels import rope
from kernels.common import FP8

EPS = 1e-6
PAGES, PAGE = 5, 4
SHAPES = [
    (1, 4, 2, 16),
    (5, 1, 1, 32),
    (3, 3, 1, 16),
    (2, 6, 3, 64),
    (2, 2, 1, 128),
    (1, 2, 1, 256),
]


class Case:
    """Inputs of one call, and caches full of NaN, with a page of NaN before and behind."""

    def __init__(self, generator, tokens, heads, kv_heads, dim, dtype=torch.float32, slots=None):
        self.kv_heads = kv_heads
        self.qkv = randn(generator, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        self.norms = tuple(1 + 0.3 * randn(generator, dim, dtype=dtype) for _ in range(2))
        angles = (10 * randn(generator, tokens, dim // 2)).double()
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.guarded = [poisoned(PAGES + 2, kv_heads, PAGE, dim, dtype=dtype) for _ in range(2)]
        self.k_cache, self.v_cache = (cache[1:-1] for cache in self.guarded)
        drawn = torch.randperm(PAGES * PAGE, generator=generator)[:tokens]
        self.slots = (drawn if slots is None else torch.tensor(slots)).to(DEVICE)

    def run(self, tokens=slice(None)):
        rows = (x[tokens] for x in (self.cos, self.sin))
        caches = self.k_cache, self.v_cache
        qkv, slots = self.qkv[tokens], self.slots[tokens]
        return rope.norm_rope_store(qkv, self.norms, *rows, *caches, slots, EPS)

    def expected(self):
        qkv, cos, sin = (x.double() for x in (self.qkv, self.cos, self.sin))
        norms = tuple(weight.double() for weight in self.norms)
        return rope.reference(qkv, norms, cos, sin, self.kv_heads, EPS)

    def stored(self, cache):
        """Returns [T, Hkv, D] of the tokens stored; asserts that nothing else was touched."""
        slots = self.slots[self.slots >= 0]
        found = cache[slots // PAGE, :, slots % PAGE].clone()
        rest = cache.clone()
        rest[slots // PAGE, :, slots % PAGE] = float("nan")
        assert rest.isnan().all() and all(x[[0, -1]].isnan().all() for x in self.guarded)
        return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [32, 2048])
def test_q_is_exact_and_k_and_v_are_in_their_slots(generator, monkeypatch, dtype, tile):
    """Also where q, k and v share a program and the last program has heads to spare."""
    monkeypatch.setattr(rope, "TILE", tile)
    random = [int(torch.randint(1, high, (), generator=generator)) for high in (6, 8, 4)]
    for shape in [*SHAPES, (*random, 16)]:
        case = Case(generator, *shape, dtype=dtype)
        q, (exact_q, exact_k, exact_v) = case.run(), case.expected()
        assert_close(q, exact_q, POINTWISE)
        assert_close(case.stored(case.k_cache), exact_k, POINTWISE)
        assert torch.equal(case.stored(case.v_cache), exact_v.to(dtype))


def test_a_cache_in_8_bits_gets_the_nearest_numbers(generator):
    case = Case(generator, 5, 4, 2, 32)
    case.qkv[0, -32:] *= 1000  # beyond the largest, 448
    case.k_cache, case.v_cache = (x.to(FP8)[1:-1] for x in case.guarded)
    case.run()
    slots = case.slots // PAGE, slice(None), case.slots % PAGE
    for cache, exact in zip((case.k_cache, case.v_cache), case.expected()[1:], strict=True):
        nearest = exact.float().clamp(-448, 448).to(FP8).float()
        assert torch.equal(cache.float()[slots], nearest)


def test_small_heads_feel_eps_and_negative_slots_are_not_stored(generator):
    """The padding rows of a captured graph have negative slots: only their q is computed."""
    case = Case(generator, 4, 2, 2, 16, slots=[7, -1, 0, -2])
    case.qkv[:2] *= 1e-3
    case.qkv[1] = 0
    q, (exact_q, exact_k, exact_v) = case.run(), case.expected()
    for row in range(4):
        assert_close(q[row], exact_q[row], POINTWISE)
    for row, exact_row in zip(case.stored(case.k_cache), exact_k[[0, 2]], strict=True):
        assert_close(row, exact_row, POINTWISE)
    assert torch.equal(case.stored(case.v_cache), exact_v[[0, 2]].float())


def test_a_token_has_the_same_bits_in_any_batch_and_wherever_rows_lie(generator):
    case = Case(generator, 5, 4, 2, 32)
    q, k, v = case.run(), case.stored(case.k_cache), case.stored(case.v_cache)
    wide = poisoned(5, 300, dtype=torch.float32)
    wide[:, 20:276] = case.qkv
    case.qkv = wide[:, 20:276]
    case.k_cache.fill_(float("nan")), case.v_cache.fill_(float("nan"))
    assert all(torch.equal(case.run(slice(t, t + 1))[0], q[t]) for t in range(5))
    assert torch.equal(case.stored(case.k_cache), k) and torch.equal(case.stored(case.v_cache), v)


def test_offsets_beyond_32_bits(generator):
    """A wrapped offset would read the front of the storage. Only the touched pages take memory."""
    case = Case(generator, 3, 2, 1, 16, dtype=torch.float16, slots=[-1, -1, 2**27])
    _, exact_k, exact_v = case.expected()
    storage = torch.empty(2**32 + 256, dtype=torch.float16, device=DEVICE)
    wide = storage.as_strided((3, 64), (2**30, 1), 2**31)
    wide.copy_(case.qkv)
    case.qkv, width = wide, 16 * 2  # of a page of two tokens
    storage[:128] = float("nan")
    case.k_cache, case.v_cache = (
        storage.as_strided((2**26 + 1, 1, 2, 16), (width, width, 16, 1), 2**31 + shift)
        for shift in (64, 96)
    )  # the last page is behind wide
    assert_close(case.run(), case.expected()[0], POINTWISE)
    assert_close(case.k_cache[-1, :, 0], exact_k[2], POINTWISE)
    assert torch.equal(case.v_cache[-1, :, 0], exact_v[2].half())
