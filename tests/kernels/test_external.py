"""flash-attn in place of our attention, with a stand-in that computes in plain PyTorch."""

import pytest
import torch
from kernel_check import flash_attn_varlen_func

from kernels import attention, external
from kernels.external import choose_attention, external_prefill, sequences, sizes_of
from kernels.flash import reference


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(external, "flash_attn_varlen_func", flash_attn_varlen_func)


def test_a_pack_of_trees_and_its_gradients(installed, generator):
    spans = [(0, 7, 0, 7), (7, 12, 0, 7), (7, 12, 7, 12), (12, 15, 0, 7), (12, 15, 7, 12)]
    spans += [(12, 15, 12, 15), (15, 21, 0, 4), (15, 21, 15, 21), (21, 29, 21, 29)]
    draw = lambda heads: torch.randn(29, heads, 16, generator=generator, dtype=torch.float64)
    inputs, grad = [draw(heads).requires_grad_() for heads in (4, 2, 2)], draw(4)
    got = external.external_attention(*inputs, sequences(spans, "cpu"))
    want = reference(*inputs, spans)[0]
    torch.testing.assert_close(got, want)
    for one, two in zip(*(torch.autograd.grad(out, inputs, grad) for out in (got, want))):
        torch.testing.assert_close(one, two)
    assert sequences([(0, 5, 0, 5), (5, 9, 5, 9)], "cpu")[0] is None  # nothing to copy


def test_chunks_over_pages(installed, generator):
    starts, counts = [0, 300, 255], [7, 20, 2]
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((29, 4, 16), (6, 2, 256, 16), (6, 2, 256, 16))
    )
    tables = torch.tensor([[3, 0], [5, 1], [0, 4]], dtype=torch.int32)
    sizes = sizes_of(counts, [7, 320, 257], "cpu")
    want = attention.reference(q, k, v, tables, starts, counts)
    torch.testing.assert_close(external_prefill(q, k, v, tables, sizes), want)


def test_the_choice_says_why(monkeypatch, installed):
    bf16 = torch.bfloat16
    assert choose_attention("triton", bf16) == ("triton", "as asked")
    assert choose_attention("flash-attn", bf16) == ("flash-attn", "as asked")
    assert choose_attention("auto", torch.float16, 512) == ("flash-attn", "installed")
    for dtype, page_size, why in (
        (torch.float32, 256, "not in torch.float32"),
        (bf16, 64, "not 64"),
    ):
        kernel, obstacle = choose_attention("auto", dtype, page_size)
        assert kernel == "triton" and why in obstacle
        with pytest.raises(ValueError, match=why):
            choose_attention("flash-attn", dtype, page_size)
    monkeypatch.setattr(external, "flash_attn_varlen_func", None)
    assert choose_attention("auto", bf16) == ("triton", "flash-attn is not installed")
