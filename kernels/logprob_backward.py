"""Backward pass of linear_logprob, exact, over chunks of the vocabulary that are sized by memory.

    d logprob[t] / d z[t, v] = (v == target[t]) - p[t, v];  g = grad[t] * this / temperature
    dhidden = g @ weight;  dweight = g.T @ hidden

The forward pass left logsumexp, so each chunk of ids is finished by itself: recompute its logits in
fp32 (cuBLAS), turn them into g with one Triton kernel, multiply twice. With chunks of the
vocabulary, a row of dweight is one product over all T rows, accumulated in fp32 and rounded once.
Chunks of rows would need an fp32 copy of dweight, 2.5 GB for Qwen3-8B. dhidden is added up over the
chunks in fp32.

FLOPs: 6 * T * vocab * N. Memory: CHUNK_BYTES, and dhidden in fp32: 638 MB at T = 8192, N = 4096,
bf16. Extra bytes moved: 10 * T * vocab, and 16 * T * N a chunk. Deterministic. One program of
`_gradient` owns BLOCK ids of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
CHUNK_BYTES = 512_000_000  # of a chunk's logits, fp32, and their gradient


def logprob_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    temperature: float,
    vocab: int,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Returns (dhidden [T, N], dweight [V, N]), None where not needed.

    grad of the log-probabilities and logsumexp fp32 [T]; the rest as for linear_logprob. g has the
    dtype of hidden, so fp16 needs loss scaling.
    """
    tokens, width = hidden.shape
    ids = chunk_width(tokens, vocab, hidden.element_size())
    logits = hidden.new_empty(tokens * max(ids, width), dtype=torch.float32)
    gradient = hidden.new_empty(tokens * ids)
    dhidden = torch.zeros_like(hidden, dtype=torch.float32) if needed[0] else None
    dweight = torch.zeros_like(weight) if needed[1] else None
    for start in range(0, vocab, ids):
        rows = weight[start : min(start + ids, vocab)]  # [ids of the chunk, N]
        count = len(rows)
        z, g = (flat[: tokens * count].view(tokens, count) for flat in (logits, gradient))
        _product(hidden, rows.T, z)
        _gradient[(tokens, triton.cdiv(count, BLOCK))](
            z, g, targets, logsumexp, grad, 1 / temperature, start, count, BLOCK
        )
        if dweight is not None:
            _product(g.T, hidden, dweight[start : start + count])
        if dhidden is not None:  # z is used up, and its memory is free
            dhidden += _product(g, rows, logits[: tokens * width].view(tokens, width))
    return None if dhidden is None else dhidden.to(hidden.dtype), dweight


def chunk_width(tokens: int, vocab: int, element_size: int) -> int:
    """Returns the ids of a chunk within CHUNK_BYTES, a multiple of 256 for full tiles."""
    fitting = CHUNK_BYTES // ((4 + element_size) * max(tokens, 1))
    return min(vocab, max(256, fitting // 256 * 256))


@triton.jit
def _gradient(logits, out, targets, logsumexp, grad, scale, start, width, BLOCK: tl.constexpr):
    """Fills out [T, width] from logits fp32 [T, width] of the ids from `start` on."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, inside = row * width + columns, columns < width
    logp = tl.load(logits + here, inside, 0.0) * scale - tl.load(logsumexp + row)
    onehot = tl.where(start + columns == tl.load(targets + row), 1.0, 0.0)
    tl.store(out + here, tl.load(grad + row) * (onehot - tl.exp(logp)) * scale, inside)


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Writes a @ b to out, accumulated in fp32; out may have a wider dtype than the factors."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a.float() @ b.float())
