"""q and k norm and rotary positions, into tensors and into cache pages, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, GRADIENT, POINTWISE, assert_close, poisoned, randn

from kernels import qk_norm_rope as module
from kernels.qk_norm_rope import naive_qk_norm_rope, qk_norm_rope, qk_norm_rope_store

EPS = 1e-6
PAGES, PAGE = 5, 4
SHAPES = [  # tokens, query heads, kv heads, head_dim
    (1, 4, 2, 16),
    (5, 1, 1, 32),
    (3, 3, 1, 16),
    (2, 6, 3, 64),
    (2, 2, 1, 128),
    (1, 2, 1, 256),
]


class Case:
    """Inputs of one call, and caches full of NaN, with a page of NaN before and behind."""

    def __init__(
        self, generator, tokens, heads, kv_heads, dim, dtype=torch.float32, slots=None, norm=True
    ):
        self.kv_heads = kv_heads
        self.qkv = randn(generator, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        self.q_norm = self.k_norm = None
        if norm:
            self.q_norm = 1 + 0.3 * randn(generator, dim, dtype=dtype)
            self.k_norm = 1 + 0.3 * randn(generator, dim, dtype=dtype)
        angles = (10 * randn(generator, tokens, dim // 2)).double()
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.guarded = [poisoned(PAGES + 2, kv_heads, PAGE, dim, dtype=dtype) for _ in range(2)]
        self.k_cache, self.v_cache = (cache[1:-1] for cache in self.guarded)
        drawn = torch.randperm(PAGES * PAGE, generator=generator)[:tokens]
        self.slots = (drawn if slots is None else torch.tensor(slots)).int().to(DEVICE)
        self.d_outputs = [
            randn(generator, tokens, count, dim, dtype=dtype)
            for count in (heads, kv_heads, kv_heads)
        ]

    def store(self, tokens=slice(None)):
        """Returns q of some tokens; k and v are in the caches."""
        return qk_norm_rope_store(
            self.qkv[tokens],
            self.q_norm,
            self.k_norm,
            self.cos[tokens],
            self.sin[tokens],
            self.k_cache,
            self.v_cache,
            self.slots[tokens],
            EPS,
        )

    def run(self, tokens=slice(None)):
        """Returns q, k and v of some tokens."""
        rotation = self.cos[tokens], self.sin[tokens]
        return qk_norm_rope(
            self.qkv[tokens], self.q_norm, self.k_norm, *rotation, self.kv_heads, EPS
        )

    def leaves(self, dtype=None):
        """Returns what has a gradient: qkv, and the weights if there is a norm."""
        tensors = [x for x in (self.qkv, self.q_norm, self.k_norm) if x is not None]
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]

    def gradients(self, tokens=slice(None)):
        qkv, *norms = self.leaves()
        rotation = self.cos[tokens], self.sin[tokens]
        outputs = qk_norm_rope(qkv[tokens], *(norms or (None, None)), *rotation, self.kv_heads, EPS)
        d_outputs = [d[tokens] for d in self.d_outputs]
        return torch.autograd.grad(outputs, [qkv, *norms], d_outputs)

    def exact(self):
        return self._exact(self.leaves(torch.float64))

    def _exact(self, leaves):
        qkv, *norms = leaves
        rotation = self.cos.double(), self.sin.double()
        return naive_qk_norm_rope(qkv, *(norms or (None, None)), *rotation, self.kv_heads, EPS)

    def exact_gradients(self):
        leaves = self.leaves(torch.float64)
        d_outputs = [d.double() for d in self.d_outputs]
        return torch.autograd.grad(self._exact(leaves), leaves, d_outputs)

    def stored(self, cache):
        """Returns [T, Hkv, D] of the tokens stored; asserts that nothing else was touched."""
        slots = self.slots[self.slots >= 0]
        stored = cache[slots // PAGE, :, slots % PAGE].clone()
        rest = cache.clone()
        rest[slots // PAGE, :, slots % PAGE] = float("nan")
        assert rest.isnan().all() and all(x[[0, -1]].isnan().all() for x in self.guarded)
        return stored


def shapes_of(tile):
    """Returns the shapes for a size of programs: of small ones there are many."""
    return SHAPES if tile == 2048 else SHAPES[:3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [32, 2048])
@pytest.mark.parametrize("norm", [True, False])
def test_q_k_and_v_are_exact_and_the_same_bits_in_tensors_and_slots(
    generator, monkeypatch, dtype, tile, norm
):
    """Also where q, k and v share a program and the last program has heads to spare."""
    monkeypatch.setattr(module, "TILE", tile)
    random = [int(torch.randint(1, high, (), generator=generator)) for high in (4, 8, 4)]
    for shape in [*shapes_of(tile), (*random, 16)]:
        case = Case(generator, *shape, dtype=dtype, norm=norm)
        exact = case.exact()
        q, k, v = case.run()
        assert_close(q, exact[0], POINTWISE)
        assert_close(k, exact[1], POINTWISE)
        assert torch.equal(v, exact[2].to(dtype))
        assert torch.equal(case.store(), q)
        assert torch.equal(case.stored(case.k_cache), k)
        assert torch.equal(case.stored(case.v_cache), v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [32, 2048])
@pytest.mark.parametrize("norm", [True, False])
def test_gradients_are_exact(generator, monkeypatch, dtype, tile, norm):
    """With a program for each token, and with workers that take several."""
    monkeypatch.setattr(module, "TILE", tile)
    for number, shape in enumerate(shapes_of(tile), start=1):
        monkeypatch.setattr(module, "multiprocessors", lambda device, count=number: count)
        case = Case(generator, *shape, dtype=dtype, norm=norm)
        for got, want in zip(case.gradients(), case.exact_gradients(), strict=True):
            assert got.dtype == dtype
            assert_close(got, want, GRADIENT)


def test_small_heads_feel_eps_and_negative_slots_are_not_stored(generator):
    """The padding rows of a captured graph have negative slots: only their q is computed."""
    case = Case(generator, 4, 2, 2, 16, slots=[7, -1, 0, -1])
    case.qkv[:2] *= 1e-3
    case.qkv[1] = 0
    q, (exact_q, exact_k, exact_v) = case.store(), case.exact()
    for row in range(4):
        assert_close(q[row], exact_q[row], POINTWISE)
    for row, exact_row in zip(case.stored(case.k_cache), exact_k[[0, 2]], strict=True):
        assert_close(row, exact_row, POINTWISE)
    assert torch.equal(case.stored(case.v_cache), exact_v[[0, 2]].float())
    d_qkv, exact_d_qkv = case.gradients()[0], case.exact_gradients()[0]
    for row in range(4):
        assert_close(d_qkv[row], exact_d_qkv[row], GRADIENT)


def test_a_token_has_the_same_bits_in_any_batch_and_wherever_rows_lie(generator):
    case = Case(generator, 5, 4, 2, 32)
    q, k, v = case.run()
    gradients = case.gradients()
    assert all(torch.equal(a, b) for a, b in zip(case.gradients(), gradients, strict=True))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(case.run(), (q, k, v), strict=True))
    wide = poisoned(5, 300, dtype=torch.float32)
    wide[:, 20:276] = case.qkv
    case.qkv = wide[:, 20:276]
    for token in range(5):
        alone = slice(token, token + 1)
        assert torch.equal(case.store(alone)[0], q[token])
        assert torch.equal(case.run(alone)[1][0], k[token])
        assert torch.equal(case.gradients(alone)[0][token], gradients[0][token])
    assert torch.equal(case.stored(case.k_cache), k)
    assert torch.equal(case.stored(case.v_cache), v)


def test_offsets_beyond_32_bits(generator):
    """A wrapped offset would read the front of the storage. Only the touched pages take memory."""
    case = Case(generator, 3, 2, 1, 16, dtype=torch.float16, slots=[-1, -1, 2**27])
    exact, near = case.exact(), case.gradients()
    storage = torch.empty(2**32 + 256, dtype=torch.float16, device=DEVICE)
    wide = storage.as_strided((3, 64), (2**30, 1), 2**31)
    wide.copy_(case.qkv)
    case.qkv, width = wide, 16 * 2  # of a page of two tokens
    storage[:128] = float("nan")
    case.k_cache, case.v_cache = (
        storage.as_strided((2**26 + 1, 1, 2, 16), (width, width, 16, 1), 2**31 + shift)
        for shift in (64, 96)
    )  # the last page is behind wide
    assert_close(case.store(), exact[0], POINTWISE)
    assert_close(case.k_cache[-1, :, 0], exact[1][2], POINTWISE)
    assert torch.equal(case.v_cache[-1, :, 0], exact[2][2].half())
    assert_close(case.run()[1], exact[1], POINTWISE)
    assert all(torch.equal(a, b) for a, b in zip(case.gradients(), near, strict=True))


def test_what_does_not_fit_is_refused(generator):
    for change, message in (
        ({"cos": torch.ones(1, 8)}, r"cos has shape \[1, 8\]; expected \[2, 8\]"),
        ({"k_norm": None}, "q_norm and k_norm: expected two weights, or None twice"),
        ({"slots": torch.ones(2)}, "slots is torch.float32; expected torch.int32"),
        ({"k_cache": torch.ones(1, 1, 4, 24), "v_cache": torch.ones(1, 1, 4, 24)}, "is 24"),
    ):
        case = Case(generator, 2, 2, 1, 16)
        case.__dict__.update(change)
        with pytest.raises(ValueError, match=message):
            case.store()
