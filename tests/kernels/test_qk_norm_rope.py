"""q and k norm and rotary positions, into tensors and into cache pages, against float64."""

import pytest
import torch
from kernel_check import DEVICE, GRADIENT, POINTWISE, assert_close, poisoned, randn

from kernels import qk_norm_rope as module
from kernels.qk_norm_rope import naive_qk_norm_rope, qk_norm_rope, qk_norm_rope_store

EPS = 1e-6
PAGES, PAGE = 5, 4
SHAPES = [  # tokens, query heads, kv heads, head_dim
    (1, 4, 2, 16),
    (5, 1, 1, 32),
    (3, 3, 1, 16),
    (2, 6, 3, 64),
    (1, 2, 1, 256),
]


class Case:
    """Inputs of one call, and caches full of NaN, with a page of NaN before and behind."""

    def __init__(
        self, generator, tokens, heads, kv_heads, dim, dtype=torch.float32, slots=None, norm=True
    ):
        self.kv_heads = kv_heads
        self.leaves = [randn(generator, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)]
        if norm:
            self.leaves += [1 + 0.3 * randn(generator, dim, dtype=dtype) for _ in range(2)]
        angles = (10 * randn(generator, tokens, dim // 2)).double()
        self.rotation = angles.cos().float(), angles.sin().float()
        self.guarded = [poisoned(PAGES + 2, kv_heads, PAGE, dim, dtype=dtype) for _ in range(2)]
        self.k_cache, self.v_cache = (cache[1:-1] for cache in self.guarded)
        drawn = torch.randperm(PAGES * PAGE, generator=generator)[:tokens]
        self.slots = (drawn if slots is None else torch.tensor(slots)).int().to(DEVICE)
        counts = heads, kv_heads, kv_heads
        self.d_outputs = [randn(generator, tokens, n, dim, dtype=dtype) for n in counts]

    def store(self):
        """Returns q; k and v are in the caches."""
        qkv, *norms = self.leaves
        caches = self.k_cache, self.v_cache
        return qk_norm_rope_store(
            qkv, *(norms or (None, None)), *self.rotation, *caches, self.slots, EPS
        )

    def run(self):
        """Returns q, k and v, and the gradients of qkv and of the weights of the norms."""
        return self._computed(qk_norm_rope, self.leaves, self.rotation, self.d_outputs)

    def exact(self):
        """Returns what `run` does, in float64."""
        tensors = self.leaves, self.rotation, self.d_outputs
        return self._computed(naive_qk_norm_rope, *([x.double() for x in xs] for xs in tensors))

    def _computed(self, function, leaves, rotation, d_outputs):
        leaves = [x.detach().requires_grad_() for x in leaves]
        norms = leaves[1:] or (None, None)
        outputs = function(leaves[0], *norms, *rotation, self.kv_heads, EPS)
        return outputs, torch.autograd.grad(outputs, leaves, d_outputs)

    def stored(self, cache):
        """Returns [T, Hkv, D] of the tokens stored; asserts that nothing else was touched."""
        slots = self.slots[self.slots >= 0]
        stored = cache[slots // PAGE, :, slots % PAGE].clone()
        rest = cache.clone()
        rest[slots // PAGE, :, slots % PAGE] = float("nan")
        assert rest.isnan().all() and all(x[[0, -1]].isnan().all() for x in self.guarded)
        return stored


@pytest.mark.parametrize(
    "dtype, tile, norm",
    [
        (torch.bfloat16, 32, True),
        (torch.bfloat16, 2048, False),
        (torch.float16, 2048, True),
        (torch.float32, 32, False),
        (torch.float32, 2048, True),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_exact_and_the_same_bits_in_tensors_and_slots(
    generator, monkeypatch, dtype, tile, norm
):
    """Also where q, k and v share a program and the last program has heads to spare.

    With a program for each token, and with workers of the backward pass that take several.
    """
    monkeypatch.setattr(module, "TILE", tile)
    random = [int(torch.randint(1, high, (), generator=generator)) for high in (4, 8, 4)]
    shapes = [*(SHAPES if tile == 2048 else SHAPES[:3]), (*random, 16)]
    for number, shape in enumerate(shapes, start=1):
        monkeypatch.setattr(module, "multiprocessors", lambda device, count=number: count)
        case = Case(generator, *shape, dtype=dtype, norm=norm)
        (q, k, v), gradients = case.run()
        (exact_q, exact_k, exact_v), exact_gradients = case.exact()
        assert_close(q, exact_q, POINTWISE)
        assert_close(k, exact_k, POINTWISE)
        assert torch.equal(v, exact_v.to(dtype))
        assert torch.equal(case.store(), q)
        assert torch.equal(case.stored(case.k_cache), k)
        assert torch.equal(case.stored(case.v_cache), v)
        for got, want in zip(gradients, exact_gradients, strict=True):
            assert got.dtype == dtype
            assert_close(got, want, GRADIENT)


def test_small_heads_feel_eps_and_negative_slots_are_not_stored(generator):
    """The padding rows of a captured graph have negative slots: only their q is computed."""
    case = Case(generator, 4, 2, 2, 16, slots=[7, -1, 0, -1])
    case.leaves[0][:2] *= 1e-3
    case.leaves[0][1] = 0
    (exact_q, exact_k, exact_v), exact_gradients = case.exact()
    _, gradients = case.run()
    for row, q in enumerate(case.store()):
        assert_close(q, exact_q[row], POINTWISE)
        assert_close(gradients[0][row], exact_gradients[0][row], GRADIENT)
    for row, exact_row in zip(case.stored(case.k_cache), exact_k[[0, 2]], strict=True):
        assert_close(row, exact_row, POINTWISE)
    assert torch.equal(case.stored(case.v_cache), exact_v[[0, 2]].float())
