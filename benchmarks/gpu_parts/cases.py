"""Every kernel at the shapes of a model: arguments, bytes and FLOPs.

compile.py compiles the cases of several models, benchmarks/gpu.py times those of Qwen3-8B, and
tests/kernels runs those of SMALL in the interpreter. Inputs are made on torch's default device, in
bf16. The file computes nothing itself.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.flash import Span, flash_attention, flash_work
from kernels.paged_decode import (
    SharedPrefix,
    decode_attention,
    decode_items,
    rows_per_item,
    split_bounds,
    split_scratch,
)
from kernels.paged_prefill import (
    LEAST_SPLIT,
    prefill_attention,
    prefill_items,
    tokens_per_item,
)
from kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_store
from kernels.quantised import quantised_linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.swiglu import swiglu

EPS = 1e-6
randn = partial(torch.randn, dtype=torch.bfloat16)
Function = Callable[..., Any]
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and of the batches at which its kernels are called."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ff: int
    page: int = 64  # tokens, as in the engine
    tokens: int = 8192  # of a training pack, and of a prefill
    chunk: int = 100  # tokens of a short prefill on long_context / 2
    rows: int = 64  # of a decode step
    context: int = 4096  # keys of a row
    long_context: int = 32768  # keys of one row alone
    max_context: int = 40960  # for which the scratch of a decode step is made
    prefix: int = 4096  # keys that the rows of a sample group share
    samples: int = 16  # rows of a sample group

    @property
    def qkv(self) -> int:
        """Columns of the joint projection of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


QWEN3_8B = Shape("Qwen3-8B", 32, 8, 128, 4096, 12288)
# Other numbers of query heads a kv head, of which decode attention makes tiles of 16 rows.
OTHER_GROUPS = (
    Shape("Qwen3-0.6B", 16, 8, 128, 1024, 3072),  # 2
    Shape("Qwen3-32B", 64, 8, 128, 5120, 25600),  # 8
)
# Heads that every kernel of attention and rotation is compiled for.
OTHER_HEADS = (
    Shape("Qwen3-14B", 40, 8, 128, 5120, 17408),  # 5, no power of two
    Shape("Llama-3.2-1B", 32, 8, 64, 2048, 8192),  # of dimension 64
)
SMALL = Shape(
    "small",
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=64,
    ff=96,
    page=16,
    tokens=20,
    chunk=5,
    rows=2,
    context=140,
    long_context=260,
    max_context=400,
    prefix=128,
    samples=2,
)


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: `make` gives the arguments of `run`."""

    name: str
    make: Callable[[], Inputs]
    run: Function
    bytes: float  # that must be moved
    flops: float = 0.0
    gradients: int = 0  # of the first so many arguments are computed too

    def call(self, *arguments: Any, run: Function | None = None) -> Any:
        """Returns what the kernel does, or `run` in its place: its gradients if the case has any.

        The gradient of each output is 1 everywhere.
        """
        run = run or self.run
        if not self.gradients:
            return run(*arguments)
        leaves = [x.detach().requires_grad_() for x in arguments[: self.gradients]]
        outputs = run(*leaves, *arguments[self.gradients :])
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs])


def select(word: str, cases: list[Case] | None = None) -> list[Case]:
    """Returns the cases whose name contains the word, among those of Qwen3-8B if not given.

    Exits with status 2 if there are none.
    """
    cases = all_cases(QWEN3_8B) if cases is None else cases
    chosen = [case for case in cases if word in case.name]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name.split()[0] for case in cases))
        print(f"--kernel {word}: no such kernel; there are {names}", file=sys.stderr)
        sys.exit(2)
    return chosen


def all_cases(shape: Shape) -> list[Case]:
    """Returns every kernel at the sizes of a model."""
    return [
        *norms(shape),
        *rotations(shape),
        activation(shape),
        decode(shape, shape.rows, shape.context),
        decode(shape, 1, shape.long_context),
        decode(shape, shape.rows, shape.prefix + 4 * shape.page, shared=shape.prefix),
        prefill(shape, 0, shape.tokens),
        prefill(shape, shape.tokens, -(-shape.tokens // 4)),
        prefill(shape, shape.long_context // 2, shape.chunk, whole=False),
        *training(shape),
        *products(shape),
    ]


def other_shapes() -> list[Case]:
    """Returns the kernels whose code depends on the heads of a model, for heads of other models."""
    cases = []
    for shape in (*OTHER_GROUPS, *OTHER_HEADS):
        cases_of_shape = [decode(shape, shape.rows, shape.context)]
        if shape in OTHER_HEADS:
            cases_of_shape += [*rotations(shape), *training(shape)]
            cases_of_shape.append(prefill(shape, 0, shape.tokens))
            cases_of_shape.append(prefill(shape, 16384, shape.chunk, whole=False))
        cases += [replace(case, name=f"{case.name} {shape.name}") for case in cases_of_shape]
    return cases


def norms(shape: Shape) -> list[Case]:
    """Returns RMSNorm, alone and after a residual addition."""
    tokens, size = shape.tokens, 2 * shape.tokens * shape.hidden

    def alone():
        return randn(tokens, shape.hidden), randn(shape.hidden), EPS

    def residual():
        return (*randn(2, tokens, shape.hidden), randn(shape.hidden), EPS)

    return [
        Case("rms_norm", alone, rms_norm, 2 * size),
        Case("add_rms_norm", residual, add_rms_norm, 4 * size),
    ]


def rotations(shape: Shape) -> list[Case]:
    """Returns norm and rotation of queries and keys, for a training pack and for a KV cache."""
    tokens = shape.tokens
    size = 2 * tokens * shape.qkv
    pages = -(-tokens // shape.page)

    def pack():
        norms = randn(2, shape.head_dim)
        angles = torch.rand(2, tokens, shape.head_dim // 2)
        return randn(tokens, shape.qkv), *norms, *angles, shape.kv_heads, EPS

    def store():
        qkv, q_norm, k_norm, cos, sin, _, _ = pack()
        caches = randn(2, pages, shape.kv_heads, shape.page, shape.head_dim)
        slots = torch.arange(tokens, dtype=torch.int32)
        return qkv, q_norm, k_norm, cos, sin, *caches, slots, EPS

    v_size = 2 * tokens * shape.kv_heads * shape.head_dim  # bytes of v, which backward never reads
    return [
        Case("qk_norm_rope", pack, qk_norm_rope, 2 * size),
        Case("qk_norm_rope backward", pack, qk_norm_rope, 5 * size - v_size, gradients=3),
        Case("qk_norm_rope_store", store, qk_norm_rope_store, 2 * size),
    ]


def activation(shape: Shape) -> Case:
    """Returns SwiGLU with its gradient."""
    tokens, ff = shape.tokens, shape.ff
    return Case("swiglu", lambda: (randn(tokens, 2 * ff),), swiglu, 16 * tokens * ff, gradients=1)


def decode(shape: Shape, rows: int, context: int, shared: int = 0) -> Case:
    """Returns a decode step at one length; with `shared`, sample groups have so many keys alike."""
    heads, kv_heads, dim, page = shape.heads, shape.kv_heads, shape.head_dim, shape.page
    width = -(-context // page)  # pages of a row
    groups = rows // shape.samples if shared else 0

    def make():
        block_tables = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
        prefixes = []
        for group in range(groups):
            first = group * shape.samples
            prefixes.append(SharedPrefix(first, shape.samples, shared))
            members = slice(first, first + shape.samples)
            block_tables[members, : shared // page] = block_tables[first, : shared // page]
        lengths = [context] * rows
        device = torch.get_default_device()
        bounds = split_bounds(shape.max_context)
        (scratch,) = split_scratch([(rows, bounds)], heads, dim, device)
        with torch.device("cpu"):  # what the engine makes on the host
            items = decode_items(lengths, prefixes, bounds, rows_per_item(heads // kv_heads))
            items = torch.from_numpy(items)
            num_items = torch.tensor([len(items)], dtype=torch.int32)
        caches = randn(2, rows * width, kv_heads, page, dim)
        context_lens = torch.tensor(lengths, dtype=torch.int32)
        q, out = randn(2, rows, heads, dim)
        work = items.to(device), num_items.to(device), scratch
        return q, *caches, block_tables, context_lens, *work, out

    keys = rows * (context - shared) + groups * shared
    name = f"decode_attention B={rows} n={context} shared={shared}"
    flops = 4.0 * rows * context * heads * dim
    return Case(name, make, decode_attention, 4 * keys * kv_heads * dim, flops)


def prefill(shape: Shape, start: int, count: int, whole: bool = True) -> Case:
    """Returns the prefill of `count` tokens on `start` earlier ones, in whole or split items."""
    heads, kv_heads, dim, end = shape.heads, shape.kv_heads, shape.head_dim, start + count
    pages = -(-end // shape.page)

    def make():
        device = torch.get_default_device()
        bounds = split_bounds(shape.max_context, LEAST_SPLIT)
        (scratch,) = split_scratch([(count, bounds)], heads, dim, device)
        with torch.device("cpu"):  # what the engine makes on the host
            most = tokens_per_item(heads // kv_heads, dim, torch.bfloat16)
            items = torch.from_numpy(prefill_items([start], [count], bounds, most, whole))
            num_items = torch.tensor([len(items)], dtype=torch.int32)
        block_tables = torch.arange(pages, dtype=torch.int32)[None]
        caches = randn(2, pages, kv_heads, shape.page, dim)
        context_lens = torch.arange(start + 1, end + 1, dtype=torch.int32)
        q, out = randn(2, count, heads, dim)
        work = items.to(device), num_items.to(device), scratch
        return q, *caches, block_tables, context_lens, *work, out, whole

    flops = 4 * heads * dim * (count * start + count * (count + 1) / 2)
    name = f"prefill_attention {count} on {start}"
    size = 4 * end * kv_heads * dim
    return Case(name, make, prefill_attention, size, flops)


def training(shape: Shape) -> list[Case]:
    """Returns attention over a pack of one sequence, and over two answers to one prompt."""
    tokens, heads, kv_heads, dim = shape.tokens, shape.heads, shape.kv_heads, shape.head_dim

    first, second = tokens // 2, 3 * tokens // 4  # where the answers begin
    sequence = [Span(0, tokens, 0, tokens)]
    tree = [Span(0, first, 0, first)]
    for start, end in ((first, second), (second, tokens)):
        tree += [Span(start, end, 0, first), Span(start, end, start, end)]

    def make(spans):
        work = flash_work(spans, torch.get_default_device(), torch.bfloat16)
        return randn(tokens, heads, dim), *randn(2, tokens, kv_heads, dim), work

    size = 4 * tokens * (heads + kv_heads) * dim
    flops = 2.0 * heads * dim * tokens * (tokens + 1)
    tree_flops = flops * 7 / 8  # 7/16 of tokens^2 are visible, 1/2 in one sequence
    packed, branched = partial(make, sequence), partial(make, tree)
    # backward counts 5 products, the fewest known; ours computes 7
    return [
        Case("flash_attention", packed, flash_attention, size, flops),
        Case("flash_attention backward", packed, flash_attention, 3 * size, 3.5 * flops, 3),
        Case(
            "flash_attention backward, tree",
            branched,
            flash_attention,
            3 * size,
            3.5 * tree_flops,
            3,
        ),
    ]


def products(shape: Shape) -> list[Case]:
    """Returns the gate and up projection with weights in int8, int4, int4 with zeros (awq)."""
    cases = []
    for mode in ("int8", "int4", "awq"):
        for rows in (1, 16, 64, 128):
            cases.append(_product(shape, mode, rows))
    return cases


def _product(shape: Shape, mode: str, rows: int) -> Case:
    n, k = 2 * shape.ff, shape.hidden
    packed = mode in ("int4", "awq")
    group = min(128, k)  # columns that share a scale, of 4-bit weights

    def make():
        x = randn(rows, k)
        if packed:
            values = torch.randint(126, (n, k // 2), dtype=torch.uint8)
            scales = torch.rand(n, k // group, dtype=torch.float16)
        else:
            values = torch.randint(126, (n, k), dtype=torch.int8)
            scales = torch.rand(n, 1)
        zeros = None
        if mode == "awq":
            zeros = torch.randint(16, (n, k // group), dtype=torch.uint8)
        return x, values, scales, torch.bfloat16, zeros

    size = n * k * (0.5 + 2 / group if packed else 1)
    name = f"quantised_linear {mode} M={rows}"
    return Case(name, make, quantised_linear, size, 2.0 * rows * n * k)
