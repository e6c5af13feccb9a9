"""flash-attn (Dao, 2023; arXiv 2307.08691) in place of our own attention in training and in prefill: where it is installed, fits, and is faster.

It knows sequences, not trees, so a prefix that several samples share is gathered once for each of them; its pages hold a multiple of 256
tokens; it takes bf16 and fp16. Which of the two computes is settled once, by name or by timing both on the GPU at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate

import torch
import triton
from torch import Tensor

from kernels.flash_plan import flash_attention, plan
from kernels.prefill import prefill_attention, prefill_work

NAMES = ("auto", "triton", "flash-attn")
PAGE = 256  # flash-attn's pages hold a multiple of so many tokens


@dataclass(frozen=True)
class Sequences:
    """A pack as flash-attn takes it: queries and keys of sequence i end at q_ends[i] and k_ends[i] (int32 [B + 1], from 0); which keys of the
    pack stand in that order (int64, or None: all, as they are); the longest of each."""

    q_ends: Tensor
    k_ends: Tensor
    keys: Tensor | None
    longest_q: int
    longest_k: int


def sequences(spans: Sequence[tuple[int, int, int, int]], device: torch.device | str) -> Sequences:
    """From spans (start, end, key_start, key_end), those of the same queries one after the other, a query's own span last (ops.py)."""
    keys: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, end, *span in spans:
        keys.setdefault((start, end), []).append(tuple(span))
    q_lengths = [end - start for start, end in keys]
    k_lengths = [sum(last - first for first, last in seen) for seen in keys.values()]
    ends = [
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (q_lengths, k_lengths)
    ]
    index = None
    if q_lengths != k_lengths:
        index = torch.cat([torch.arange(*span) for seen in keys.values() for span in seen]).to(
            device
        )
    return Sequences(*ends, index, max(q_lengths), max(k_lengths))


def external_attention(q: Tensor, k: Tensor, v: Tensor, pack: Sequences) -> Tensor:
    """What flash_plan.flash_attention computes: q [T, H, D], k and v [T, Hkv, D] -> [T, H, D], differentiable."""
    if pack.keys is not None:
        k, v = k.index_select(0, pack.keys), v.index_select(0, pack.keys)
    return import_module("flash_attn").flash_attn_varlen_func(
        q, k, v, pack.q_ends, pack.k_ends, pack.longest_q, pack.longest_k, causal=True
    )


def external_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    """What prefill.prefill_attention computes: counts[i] new tokens at positions starts[i].., caches [pages, Hkv, page_size, D]."""
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    q_ends, k_ends = (
        torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=q.device)
        for n in (counts, lengths)
    )
    return import_module("flash_attn").flash_attn_varlen_func(
        q,
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        q_ends,
        k_ends,
        max(counts),
        max(lengths),
        causal=True,
        block_table=tables,
    )


def unfit(dtype: torch.dtype, dim: int, page_size: int = PAGE) -> str:
    """Why flash-attn cannot compute with these; empty if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    if dim > 256:
        return f"flash-attn takes heads of at most 256, not of {dim}"
    if page_size % PAGE:
        return f"flash-attn's pages hold a multiple of {PAGE} tokens, not {page_size}"
    try:
        import_module("flash_attn")
    except ImportError:
        return "flash-attn is not installed"
    return ""


def choose(
    wanted: str,
    obstacle: str,
    make: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
) -> tuple[str, str]:
    """("triton" or "flash-attn", why), for `wanted`, one of NAMES; auto times the two calls that `make` gives. ValueError if what is asked for
    cannot be had."""
    if wanted == "flash-attn" and obstacle:
        raise ValueError(obstacle)
    if wanted != "auto":
        return wanted, "as asked"
    if obstacle:
        return "triton", obstacle
    mine, theirs = (triton.testing.do_bench(run, return_mode="median") for run in make())
    return (
        "flash-attn" if theirs < mine else "triton"
    ), f"{mine:.3f} ms by Triton, {theirs:.3f} ms by flash-attn"


def choose_training(
    wanted: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[str, str]:
    """Times forward and backward of a pack of 4 sequences of 2,048 tokens."""

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        q, k, v = (
            torch.randn(4 * 2048, n, dim, dtype=dtype, device=device, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )
        spans, grad = (
            [(start, start + 2048) * 2 for start in range(0, 4 * 2048, 2048)],
            torch.randn_like(q),
        )
        work, pack = plan(spans, device, dtype), sequences(spans, device)
        return (
            lambda: torch.autograd.grad(flash_attention(q, k, v, work), (q, k, v), grad),
            lambda: torch.autograd.grad(external_attention(q, k, v, pack), (q, k, v), grad),
        )

    return choose(wanted, unfit(dtype, dim), make)


def choose_prefill(
    wanted: str,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    page_size: int,
) -> tuple[str, str]:
    """Times 2,048 new tokens after 2,048."""

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        q, pages = torch.randn(2048, heads, dim, dtype=dtype, device=device), -(-4096 // page_size)
        k, v = (
            torch.randn(pages, kv_heads, page_size, dim, dtype=dtype, device=device)
            for _ in range(2)
        )
        tables, work = (
            torch.arange(pages, dtype=torch.int32, device=device)[None],
            torch.from_numpy(prefill_work([2048], [2048])).to(device),
        )
        return lambda: prefill_attention(q, k, v, tables, work), lambda: external_prefill(
            q, k, v, tables, [2048], [2048]
        )

    return choose(wanted, unfit(dtype, dim, page_size), make)
