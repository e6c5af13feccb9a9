"""flash-attn in place of our attention, with a stand-in that computes in plain PyTorch."""

import pytest
import torch
import triton
from kernel_check import flash_attn_varlen_func

from benchmarks.gpu_parts.compile import Driver
from kernels import external
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


def test_flash_attn_is_taken_where_it_is_installed_and_faster(monkeypatch, installed):
    for arch, faster in (
        (80, "flash-attn"),
        (86, "flash-attn"),
        (90, "triton"),
        (120, "flash-attn"),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            patch.setattr(triton.runtime.driver, "_active", Driver(arch))
            assert choose_attention("auto", torch.float16) == faster
            assert choose_attention("triton", torch.float16) == "triton"
            assert choose_attention("auto", torch.float32) == "triton"
            patch.setattr(external, "flash_attn_varlen_func", None)
            assert choose_attention("auto", torch.bfloat16) == "triton"
