"""What the launchers refuse, each with a line that says what would be right."""

import pytest
import torch
from paged_cache import Cache

from kernels import decode, flash_plan, logprob, norm, quantised, rope, sample, swiglu
from kernels.common import check
from kernels.decode_plan import decode_work

ONES = torch.ones(4, 8)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"x": ONES.T}, r"x has shape \[8, 4\]; expected \[4, None\]"),
        ({"x": ONES[None]}, r"x has shape \[1, 4, 8\]"),
        ({"x": ONES, "y": ONES.double()}, "y is torch.float64"),
        ({"x": torch.ones(8, 4).T}, r"x has strides \(1, 4\); it must be contiguous"),
        ({"x": torch.ones(4, 16)[:, :8]}, r"x has strides \(16, 1\); it must be contiguous"),
    ],
)
def test_shapes_dtypes_and_strides(given, message):
    check((4, None), x=ONES)
    check((4, None), strided=True, x=torch.ones(4, 16)[:, :8])
    with pytest.raises(ValueError, match=message):
        check((4, None), **given)


def test_limits(generator):
    def decoded(**shape):
        cache = Cache(generator, [20, 30], torch.float32, **shape)
        inputs = cache.q, cache.k, cache.v, cache.tables, cache.lengths
        return decode.decode_attention(*inputs, decode_work([20, 30], ()), cache.q)

    ids, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    hidden, weight = torch.ones(4, 32), torch.ones(40, 32)
    cache, eighth = torch.ones(2, 1, 16, 16), torch.ones(4, 64, dtype=torch.uint8)
    pack = flash_plan.plan([(0, 5, 0, 5)], "cpu", torch.float32)
    qkv = [torch.ones(5, heads, 16) for heads in (3, 2, 2)]
    for run, message in (
        (lambda: decoded(heads=3), "3 query heads; expected a multiple of 2"),
        (lambda: decoded(dim=24), "head_dim is 24; expected one of"),
        (lambda: decoded(page=8), "page_size is 8"),
        (lambda: norm.rms_norm(torch.ones(1, 8193), torch.ones(8193), 1e-6), "expected 1 to 8192"),
        (lambda: swiglu.swiglu(torch.ones(4, 7)), "7 columns; expected an even number"),
        (lambda: rope.norm_rope_store(hidden, (), ids, ids, cache, cache, ids, 0), "32 columns"),
        (lambda: flash_plan.flash_attention(*qkv, pack), "3 query heads; expected a multiple of 2"),
        (
            lambda: flash_plan.flash_attention(*(x[:4] for x in qkv), pack),
            r"\[4, 3, 16\]; expected \[5",
        ),
        (lambda: logprob.linear_logprob(ONES, ONES, ids, 1.0, 4), "hidden size is 8"),
        (lambda: logprob.linear_logprob(hidden, weight, ids, 1.0, 41), "expected 1 to 40"),
        (lambda: sample.sample(hidden, ones.double(), ones, 33), "expected 1 to 32"),
        (lambda: quantised.quantised_linear(ONES, eighth, eighth.half(), ONES.dtype), "group is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run()
