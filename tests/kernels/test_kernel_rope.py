"""q/k norm, rotary positions and the store into cache pages, in one kernel, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, poisoned, randn

from kernels import rope

EPS = 1e-6
PAGES, PAGE = 5, 4
SHAPES = [
    (1, 4, 2, 16),
    (3, 4, 2, 16),
    (5, 1, 1, 32),
    (3, 3, 1, 16),
    (2, 6, 3, 64),
    (2, 2, 1, 128),
    (1, 2, 1, 256),
]  # T, H, Hkv, D


class Case:
    """Inputs of one call, and caches full of NaN, with a page of NaN before and behind."""

    def __init__(self, generator, T, H, Hkv, D, dtype=torch.float32, slots=None):
        self.H, self.Hkv = H, Hkv
        self.qkv = randn(generator, T, (H + 2 * Hkv) * D, dtype=dtype)
        self.q_weight, self.k_weight = (
            1 + 0.3 * randn(generator, D, dtype=dtype) for _ in range(2)
        )
        angles = (10 * randn(generator, T, D // 2)).double()
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.k_guarded, self.v_guarded = (
            poisoned(PAGES + 2, Hkv, PAGE, D, dtype=dtype) for _ in range(2)
        )
        self.k_cache, self.v_cache = self.k_guarded[1:-1], self.v_guarded[1:-1]
        self.slots = (
            torch.randperm(PAGES * PAGE, generator=generator)[:T]
            if slots is None
            else torch.tensor(slots)
        ).to(DEVICE)

    def run(self, tokens=slice(None), **how):
        return rope.norm_rope_store(
            self.qkv[tokens],
            self.q_weight,
            self.k_weight,
            self.cos[tokens],
            self.sin[tokens],
            self.k_cache,
            self.v_cache,
            self.slots[tokens],
            EPS,
            **how,
        )

    def expected(self):
        return rope.reference(
            *(x.double() for x in (self.qkv, self.q_weight, self.k_weight, self.cos, self.sin)),
            self.Hkv,
            EPS,
        )

    def stored(self, cache):
        """[T, Hkv, D] of the tokens stored; asserts that nothing else was touched."""
        slots = self.slots[self.slots >= 0]
        found = cache[slots // PAGE, :, slots % PAGE].clone()
        rest = cache.clone()
        rest[slots // PAGE, :, slots % PAGE] = float("nan")
        assert rest.isnan().all()
        return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [32, 2048])
def test_q_is_exact_and_k_and_v_are_in_their_slots(generator, dtype, tile):
    """Also where q, k and v share a program (large tiles), and where the last program has heads to spare."""
    random = [int(torch.randint(1, high, (), generator=generator)) for high in (6, 8, 4)]
    for shape in [*SHAPES, (*random, 16)]:
        case = Case(generator, *shape, dtype=dtype)
        T, H, _, D = shape
        q = case.run(out=poisoned(T, H, D, dtype=dtype), config={"TILE": tile})
        exact_q, exact_k, exact_v = case.expected()
        assert_close(q, exact_q, POINTWISE)
        assert_close(case.stored(case.k_cache), exact_k, POINTWISE)
        assert torch.equal(case.stored(case.v_cache), exact_v.to(dtype))


def test_the_rotation_is_that_of_transformers(generator):
    """rotate_half as published with the models: (-x2, x1), not pairs of neighbours, not the other way round."""
    case = Case(generator, 2, 1, 1, 16)
    case.cos.zero_(), case.sin.fill_(1.0)  # a quarter turn
    q = case.run()[:, 0]
    x = case.qkv[:, :16]
    normed = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * case.q_weight
    torch.testing.assert_close(q, torch.cat((-normed[:, 8:], normed[:, :8]), 1))


def test_small_heads_feel_eps(generator):
    case = Case(generator, 3, 2, 1, 16)
    case.qkv *= 1e-3
    case.qkv[1] = 0
    assert_close(case.run(), case.expected()[0], POINTWISE)
    assert_close(case.stored(case.k_cache), case.expected()[1], POINTWISE)


def test_tokens_with_negative_slots_are_not_stored(generator):
    """The padding rows of a captured graph: their q is computed, the caches stay as they are."""
    case = Case(generator, 4, 2, 2, 16, slots=[7, -1, 0, -2])
    q = case.run()
    assert all(pages[[0, -1]].isnan().all() for pages in (case.k_guarded, case.v_guarded))
    exact_q, exact_k, exact_v = case.expected()
    assert_close(q, exact_q, POINTWISE)
    assert_close(case.stored(case.k_cache), exact_k[[0, 2]], POINTWISE)
    assert torch.equal(case.stored(case.v_cache), exact_v[[0, 2]].float())


def test_a_token_alone_is_bitwise_the_token_in_a_batch_and_so_is_a_second_run(generator):
    case = Case(generator, 5, 4, 2, 32)
    q, k, v = case.run(), case.k_cache.clone(), case.v_cache.clone()
    assert torch.equal(case.run(), q) and torch.equal(case.stored(case.k_cache), case.stored(k))
    case.k_cache.fill_(float("nan")), case.v_cache.fill_(float("nan"))
    assert all(torch.equal(case.run(slice(t, t + 1))[0], q[t]) for t in range(5))
    assert torch.equal(case.stored(case.k_cache), case.stored(k)) and torch.equal(
        case.stored(case.v_cache), case.stored(v)
    )


def test_rows_that_lie_apart(generator):
    case = Case(generator, 3, 2, 1, 16)
    q, k = case.run(), case.k_cache.clone()
    wide = poisoned(3, 100, dtype=torch.float32)
    wide[:, 20:84] = case.qkv
    case.qkv = wide[:, 20:84]
    assert torch.equal(case.run(), q) and torch.equal(case.stored(case.k_cache), case.stored(k))


def test_a_slot_and_a_row_beyond_two_billion_elements(generator):
    """An offset in 32 bits would wrap around to the front of the storage. Only the pages touched take memory."""
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


def test_no_tokens(generator):
    case = Case(generator, 0, 2, 1, 16)
    assert case.run().shape == (0, 2, 16)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("k_cache", lambda c: c.k_cache[:, :, :, :12], "k_cache has strides"),
        ("k_cache", lambda c: torch.ones(2, 1, 4, 24), "v_cache has shape"),
        ("v_cache", lambda c: c.v_cache.half(), "v_cache is torch.float16; expected torch.float32"),
        (
            "v_cache",
            lambda c: c.v_cache.transpose(0, 2).contiguous().transpose(0, 2),
            "v_cache has strides",
        ),
        (
            "qkv",
            lambda c: c.qkv[:, :60],
            r"qkv has 60 columns; expected \(H \+ 2 \* 1\) \* 16 with H >= 1",
        ),
        ("qkv", lambda c: c.qkv[:, :32], "qkv has 32 columns"),
        ("q_weight", lambda c: torch.ones(8), "q_weight has shape"),
        ("k_weight", lambda c: torch.ones(16, 16).T[0], "k_weight has strides"),
        ("cos", lambda c: c.cos.bfloat16(), "cos is torch.bfloat16; expected torch.float32"),
        ("sin", lambda c: torch.ones(3, 16), r"sin has shape \(3, 16\); expected \[3, 8\]"),
        ("slots", lambda c: c.slots.int(), "slots is torch.int32; expected torch.int64"),
        ("slots", lambda c: c.slots[:2], "slots has shape"),
    ],
)
def test_refusals(generator, name, value, message):
    case = Case(generator, 3, 2, 1, 16)
    setattr(case, name, value(case).to(DEVICE))
    with pytest.raises(ValueError, match=message):
        case.run()


def test_refused_head_sizes_and_outputs(generator):
    with pytest.raises(
        ValueError, match="heads of 24 elements; supported are 16, 32, 64, 128 and 256"
    ):
        Case(generator, 3, 2, 1, 24).run()
    case = Case(generator, 3, 2, 1, 16)
    with pytest.raises(ValueError, match=r"out has shape \(3, 3, 16\); expected \[3, 2, 16\]"):
        case.run(out=torch.empty(3, 3, 16, device=DEVICE))
