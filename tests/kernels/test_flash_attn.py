"""flash-attn in place of our attention, with a stand-in that computes in plain PyTorch."""

import pytest
import torch
from kernel_check import flash_attn_varlen_func

from kernels import flash_attn
from kernels.flash import Span, naive_attention
from kernels.flash_attn import choose_attention, external_attention, external_plan


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash_attn_varlen_func)


def test_a_pack_of_trees_and_its_gradients(installed, generator):
    spans = [
        Span(0, 7, 0, 7),
        Span(7, 12, 0, 7),
        Span(7, 12, 7, 12),
        Span(12, 15, 0, 7),
        Span(12, 15, 7, 12),
        Span(12, 15, 12, 15),
        Span(15, 21, 0, 4),
        Span(15, 21, 15, 21),
        Span(21, 29, 21, 29),
    ]
    grad, *inputs = (
        torch.randn(29, heads, 16, generator=generator, dtype=torch.float64)
        for heads in (4, 4, 2, 2)
    )
    inputs = [x.requires_grad_() for x in inputs]
    got = external_attention(*inputs, external_plan(spans, "cpu"))
    want = naive_attention(*inputs, spans)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(out, inputs, grad) for out in (got, want))
    torch.testing.assert_close(*grads)


def test_a_pack_without_prefixes_copies_no_keys():
    assert external_plan([Span(0, 5, 0, 5), Span(5, 9, 5, 9)], "cpu").key_order is None


def test_a_plan_of_other_tokens_or_of_none_is_refused(installed):
    """flash-attn itself would read past the end, or leave rows unwritten."""
    for spans in ([Span(0, 5, 0, 5)], [Span(0, 3, 0, 3), Span(3, 5, 0, 3), Span(3, 5, 3, 5)]):
        plan = external_plan(spans, "cpu")
        q, k = torch.ones(5, 4, 16), torch.ones(5, 2, 16)
        external_attention(q, k, k, plan)
        for arguments, name in (((q[:4], k, k), "q"), ((q, k[:4], k), "k"), ((q, k, k[1:]), "v")):
            with pytest.raises(ValueError, match=rf"{name} has shape \[4, .*expected \[5, "):
                external_attention(*arguments, plan)
    with pytest.raises(ValueError, match="the pack has no spans; expected at least one"):
        external_plan([], "cpu")


def test_flash_attn_is_taken_before_hopper_where_it_is_installed(monkeypatch, installed):
    for capability, choice in (
        ((8, 0), "flash-attn"),
        ((8, 6), "flash-attn"),
        ((9, 0), "triton"),
        ((12, 0), "triton"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
            assert choose_attention("auto", torch.float16, "cuda") == choice
            assert choose_attention("triton", torch.float16, "cuda") == "triton"
            assert choose_attention("auto", torch.float32, "cuda") == "triton"
            patch.setattr(flash_attn, "flash_attn_varlen_func", None)
            assert choose_attention("auto", torch.bfloat16, "cuda") == "triton"


def test_a_cpu_is_never_asked_for_its_architecture(installed):
    assert choose_attention("auto", torch.bfloat16, torch.device("cpu")) == "triton"
