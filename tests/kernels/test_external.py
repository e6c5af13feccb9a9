"""flash-attn in place of our attention, with a stand-in that computes in plain PyTorch."""

import pytest
import torch
import triton
from kernel_check import flash_attn_varlen_func

from kernels import external
from kernels.compile import Driver
from kernels.external import choose_attention, sequences
from kernels.flash import reference


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(external, "flash_attn_varlen_func", flash_attn_varlen_func)


def test_a_pack_of_trees_and_its_gradients(installed, generator):
    spans = [(0, 7, 0, 7), (7, 12, 0, 7), (7, 12, 7, 12), (12, 15, 0, 7), (12, 15, 7, 12)]
    spans += [(12, 15, 12, 15), (15, 21, 0, 4), (15, 21, 15, 21), (21, 29, 21, 29)]
    grad, *inputs = (
        torch.randn(29, heads, 16, generator=generator, dtype=torch.float64)
        for heads in (4, 4, 2, 2)
    )
    inputs = [x.requires_grad_() for x in inputs]
    got = external.external_attention(*inputs, sequences(spans, "cpu"))
    want = reference(*inputs, spans)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(out, inputs, grad) for out in (got, want))
    torch.testing.assert_close(*grads)
    assert sequences([(0, 5, 0, 5), (5, 9, 5, 9)], "cpu")[0] is None  # nothing to copy


def test_the_choice_says_why(monkeypatch, installed):
    bf16 = torch.bfloat16
    assert choose_attention("triton", bf16) == ("triton", "as asked")
    assert choose_attention("flash-attn", bf16) == ("flash-attn", "as asked")
    for arch, faster in (
        (80, "flash-attn"),
        (86, "flash-attn"),
        (90, "triton"),
        (120, "flash-attn"),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            patch.setattr(triton.runtime.driver, "_active", Driver(arch))
            chosen = choose_attention("auto", torch.float16, 512)
        assert chosen == (faster, "faster on this GPU")
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
