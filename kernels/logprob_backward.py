"""Gradients of linear_logprob, exact, over chunks of the vocabulary that are sized by memory.

    d logprob[t] / d z[t, v] = (v == target[t]) - p[t, v]         d entropy[t] / d z[t, v] = -p[t, v] (log p[t, v] + entropy[t])
    g = (grad_logprob * the former + grad_entropy * the latter) / temperature;   dhidden = g @ weight;   dweight = g.T @ hidden

Since the forward pass left logsumexp, each chunk of ids can be finished by itself: recompute its logits in fp32 (cuBLAS), turn them into g with
one Triton kernel, multiply twice. Chunks of the vocabulary and not of the rows, because then a row of dweight is the result of one product with
all T rows, accumulated in fp32 inside and rounded once: there is no fp32 copy of dweight (2.5 GB for Qwen3-8B) to be read and written by
every chunk, and no bf16 running sum that loses the small terms. What runs over the chunks is dhidden, in fp32.

FLOPs: 6 * T * vocab * N. Extra memory: CHUNK_BYTES, and dhidden in fp32: 638 MB at T 8192, N 4096, bf16. Extra bytes moved: 10 T vocab, and 16 T N
a chunk. Deterministic. One program of `_gradient` owns BLOCK ids of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require

CONFIGS: dict[int, Config] = {
    arch: {"BLOCK": 2048, "num_warps": 4, "num_stages": 1} for arch in (80, 89, 90)
}
CHUNK_BYTES = 512_000_000  # of a chunk's logits, fp32, and their gradient


@torch.library.custom_op("nanorchestra::linear_logprob_backward", mutates_args=())
def logprob_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    entropy: Tensor,
    logsumexp: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
    vocab: int,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor]:
    """hidden [T, N], weight [V, N], targets int64 [T], the rest fp32 [T] -> dhidden [T, N], dweight [V, N], empty where not asked for.

    fp16 needs loss scaling as everywhere: g is stored in the dtype of hidden.
    """
    tokens, width = hidden.shape
    ids = chunk_width(tokens, vocab, hidden.element_size())
    logits = torch.empty(tokens * max(ids, width), dtype=torch.float32, device=hidden.device)
    gradient = torch.empty(tokens * ids, dtype=hidden.dtype, device=hidden.device)
    grad_hidden = torch.zeros(
        hidden.shape if for_hidden else 0, dtype=torch.float32, device=hidden.device
    )
    grad_weight = torch.empty(
        weight.shape if for_weight else 0, dtype=weight.dtype, device=weight.device
    )
    grad_weight[vocab:].zero_()
    for start in range(0, vocab, ids):
        rows = weight[start : min(start + ids, vocab)]  # [ids of the chunk, N]
        z, g = (flat[: tokens * len(rows)].view(tokens, len(rows)) for flat in (logits, gradient))
        _product(hidden, rows.T, z)
        gradient_of_logits(
            z, g, targets, entropy, logsumexp, grad_logprobs, grad_entropy, temperature, start
        )
        if for_weight:
            _product(g.T, hidden, grad_weight[start : start + len(rows)])
        if for_hidden:
            grad_hidden += _product(
                g, rows, logits[: tokens * width].view(tokens, width)
            )  # z is spent: its memory is free
    return grad_hidden.to(hidden.dtype), grad_weight


@logprob_backward.register_fake
def _(
    hidden,
    weight,
    targets,
    entropy,
    logsumexp,
    grad_logprobs,
    grad_entropy,
    temperature,
    vocab,
    for_hidden,
    for_weight,
):
    return hidden.new_empty(hidden.shape if for_hidden else 0), weight.new_empty(
        weight.shape if for_weight else 0
    )


def chunk_width(tokens: int, vocab: int, element_size: int) -> int:
    """How many ids a chunk has: a multiple of 256 (full tiles, and rows that 16-byte accesses fit) within CHUNK_BYTES, but 256 at least."""
    return min(vocab, max(256, CHUNK_BYTES // ((4 + element_size) * max(tokens, 1)) // 256 * 256))


def gradient_of_logits(
    logits: Tensor,
    gradient: Tensor,
    targets: Tensor,
    entropy: Tensor,
    logsumexp: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
    start: int,
    config: Config | None = None,
) -> None:
    """logits fp32 [T, ids], not yet divided by the temperature, of the ids from `start` on -> gradient [T, ids], of any dtype."""
    tokens, width = logits.shape
    check("logits", logits, (tokens, width), (torch.float32,), inner=2)
    check("gradient", gradient, (tokens, width), inner=2)
    check("targets", targets, (tokens,), (torch.int64,))
    for name, x in {
        "entropy": entropy,
        "logsumexp": logsumexp,
        "grad_logprobs": grad_logprobs,
        "grad_entropy": grad_entropy,
    }.items():
        check(name, x, (tokens,), (torch.float32,), inner=0)
        require(x.is_contiguous(), f"{name} is not contiguous")
    tile = pick(CONFIGS, config)
    _gradient[(tokens, triton.cdiv(width, tile["BLOCK"]))](
        logits,
        gradient,
        targets,
        entropy,
        logsumexp,
        grad_logprobs,
        grad_entropy,
        1 / temperature,
        start,
        width,
        **tile,
    )


@triton.jit
def _gradient(
    logits_ptr,
    gradient_ptr,
    targets_ptr,
    entropy_ptr,
    logsumexp_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    scale,
    start,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, inside = row * width + columns, columns < width
    logp = tl.load(logits_ptr + here, mask=inside, other=0.0) * scale - tl.load(logsumexp_ptr + row)
    p = tl.exp(logp)
    onehot = tl.where(start + columns == tl.load(targets_ptr + row), 1.0, 0.0)
    gradient = tl.load(grad_logprobs_ptr + row) * (onehot - p) - tl.load(
        grad_entropy_ptr + row
    ) * p * (logp + tl.load(entropy_ptr + row))
    tl.store(gradient_ptr + here, (gradient * scale).to(gradient_ptr.dtype.element_ty), mask=inside)


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into out, whose dtype may be fp32 where the factors' is not. cuBLAS accumulates in fp32; on the CPU the factors are widened."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a.float() @ b.float())


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight[:vocab].T / temperature).log_softmax(-1)  # [T, vocab]
    p, onehot = logp.exp(), torch.nn.functional.one_hot(targets, vocab)
    entropy = -(p * logp).sum(-1, keepdim=True)
    g = (
        grad_logprobs[:, None] * (onehot - p) - grad_entropy[:, None] * p * (logp + entropy)
    ) / temperature
    return g @ weight[:vocab], torch.cat([g.T @ hidden, torch.zeros_like(weight[vocab:])])
