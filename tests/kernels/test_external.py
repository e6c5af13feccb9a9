"""flash-attn in place of our own attention, with a stand-in that computes in plain PyTorch what its documentation says it computes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from packed_reference import segment_attention

from kernels import external, prefill
from nanorchestra.model.packed_attention import Segment, packed_attention


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, block_table=None
):
    """Sequence by sequence; the causal mask is aligned with the last query and key; pages hold a multiple of 256 tokens."""
    assert (
        causal
        and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        and len(cu_seqlens_q) == len(cu_seqlens_k)
    )
    outputs = []
    for i in range(len(cu_seqlens_q) - 1):
        (first, last), (start, end) = (x[i : i + 2].tolist() for x in (cu_seqlens_q, cu_seqlens_k))
        rows, length = last - first, end - start
        assert 0 < rows <= max_seqlen_q and length <= max_seqlen_k
        if block_table is None:
            keys, values = k[start:end], v[start:end]
        else:
            assert k.shape[1] % 256 == 0 and k.stride(-1) == 1
            keys, values = (x[block_table[i].long()].flatten(0, 1)[:length] for x in (k, v))
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        heads_first = (x.transpose(0, 1)[None] for x in (q[first:last], keys, values))
        outputs.append(
            F.scaled_dot_product_attention(*heads_first, mask, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    )


def test_a_pack_of_trees_and_its_gradients(installed):
    segments = [
        Segment(0, 7),
        Segment(7, 5, 0, 7),
        Segment(12, 3, 7, 5),
        Segment(15, 4, 7, 5),
        Segment(19, 6, 0, 4),
        Segment(25, 8),
    ]
    generator = torch.Generator().manual_seed(0)
    shapes = ((33, 4, 16), (33, 2, 16), (33, 2, 16))
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    grad = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    outputs = (
        packed_attention(segments, "flash-attn")(0, *inputs),
        segment_attention(segments, *inputs),
    )
    torch.testing.assert_close(*outputs)
    for got, wanted in zip(*(torch.autograd.grad(out, inputs, grad) for out in outputs)):
        torch.testing.assert_close(got, wanted)


def test_sequences_without_prefixes_are_not_copied():
    assert external.sequences([(0, 5, 0, 5), (5, 9, 5, 9)], "cpu").keys is None


def test_chunks_over_pages(installed):
    generator = torch.Generator().manual_seed(1)
    starts, counts = [0, 300, 255], [7, 20, 2]
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((29, 4, 16), (6, 2, 256, 16), (6, 2, 256, 16))
    )
    tables = torch.tensor([[3, 0], [5, 1], [0, 4]], dtype=torch.int32)
    torch.testing.assert_close(
        external.external_prefill(q, k, v, tables, starts, counts),
        prefill.reference(q, k, v, tables, starts, counts),
    )


def test_the_choice_says_why(monkeypatch):
    never = lambda: pytest.fail("nothing is to be timed")
    assert external.choose("triton", "", never) == ("triton", "as asked")
    assert external.choose("flash-attn", "", never) == ("flash-attn", "as asked")
    assert external.choose("auto", "not installed", never) == ("triton", "not installed")
    with pytest.raises(ValueError, match="not installed"):
        external.choose("flash-attn", "not installed", never)
    for mine, theirs, chosen in ((2.0, 1.5, "flash-attn"), (1.5, 2.0, "triton")):
        monkeypatch.setattr(external.triton.testing, "do_bench", lambda run, return_mode: run())
        assert external.choose("auto", "", lambda: (lambda: mine, lambda: theirs)) == (
            chosen,
            f"{mine:.3f} ms by Triton, {theirs:.3f} ms by flash-attn",
        )


def test_what_flash_attn_cannot_do(installed, monkeypatch):
    assert external.unfit(torch.bfloat16, 128) == "" == external.unfit(torch.float16, 64, 512)
    assert "not in float32" in external.unfit(torch.float32, 128)
    assert "at most 256, not of 320" in external.unfit(torch.bfloat16, 320)
    assert "multiple of 256 tokens, not 64" in external.unfit(torch.bfloat16, 128, 64)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert external.unfit(torch.bfloat16, 128) == "flash-attn is not installed"


@pytest.mark.parametrize(
    "choose", [external.choose_training, lambda *shape: external.choose_prefill(*shape, 256)]
)
def test_what_is_timed_runs(installed, monkeypatch, choose):
    timed = []
    monkeypatch.setattr(
        external.triton.testing,
        "do_bench",
        lambda run, return_mode: timed.append(run) or 1.0 / len(timed),
    )
    assert choose("auto", 2, 1, 16, torch.bfloat16, "cpu")[0] == "flash-attn"
    timed[1]()  # ours would take minutes in the interpreter
