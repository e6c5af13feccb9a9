"""Forward pass of linear_logprob (the formulas are in logprob.py), with logits in registers only.

FLOPs: 2 * T * vocab * N, the limit. Bytes: weight once for each GROUP * BLOCK_T rows, hidden once
for each BLOCK_V ids, mostly from L2, and 16 bytes of partial results for each row and chunk.

One program of `_chunk` owns BLOCK_T rows and one chunk of BLOCK_V ids. It writes the maximum m of
its logits, s = sum exp(z - m), w = sum exp(z - m) (z - m), and the target's logit. One program of
`_merge` owns a row and adds its chunks (Milakov & Gimelshein 2018). w is taken about m so that the
entropy of large logits does not cancel. Tiles come through tensor descriptors: bulk copies (TMA) on
sm_90, 16-byte copies before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, pick, require

GROUP = 16  # tiles of rows that run together and share the chunks in L2


def logprob_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> Tensor:
    """Returns log-probabilities, entropies and logsumexp, fp32 [3, T], as linear_logprob.

    ValueError if the shapes do not fit.
    """
    check((len(targets), None), hidden=hidden)
    tokens, width = hidden.shape
    check((None, width), hidden.dtype, weight=weight)
    check((None,), torch.int64, targets=targets)
    require(width % 16 == 0, f"the hidden size is {width}; expected a multiple of 16")
    require(1 <= vocab <= len(weight), f"vocab is {vocab}; expected 1 to {len(weight)}")
    tile = pick("logprob_forward", hidden.dtype)
    tile = tile | {"BLOCK_N": min(tile["BLOCK_N"], width & -width)}  # divides the hidden size
    chunks = triton.cdiv(vocab, tile["BLOCK_V"])
    partials = hidden.new_empty(4, tokens, chunks, dtype=torch.float32)
    results = hidden.new_empty(3, tokens, dtype=torch.float32)
    triton.set_allocator(_scratch)  # of this thread
    _chunk[(triton.cdiv(tokens, tile["BLOCK_T"]) * chunks,)](
        hidden,
        weight,
        targets,
        partials,
        1 / temperature,
        tokens,
        vocab,
        width,
        GROUP,
        **tile,
        num_warps=8,
    )
    block = triton.next_power_of_2(chunks)
    _merge[(tokens,)](partials, targets, results, tokens, vocab, chunks, block, tile["BLOCK_V"])
    return results


def _scratch(size, alignment, stream) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # holds the tensor descriptors


@triton.jit(do_not_specialize=["tokens"])  # the same code, and so the same bits, for any batch
def _chunk(
    hidden,
    weight,
    targets,
    partials,
    scale,
    tokens,
    vocab,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunks = tl.cdiv(vocab, BLOCK_V)
    tile, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    # programs that run together share GROUP tiles of rows and few chunks, and so both stay in L2
    tile, chunk = tl.swizzle2d(tile, chunk, tl.cdiv(tokens, BLOCK_T), chunks, GROUP)
    hiddens = tl.make_tensor_descriptor(hidden, [tokens, N], [N, 1], [BLOCK_T, BLOCK_N])
    weights = tl.make_tensor_descriptor(weight, [vocab, N], [N, 1], [BLOCK_V, BLOCK_N])
    logits = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for n in range(0, N, BLOCK_N):
        right = weights.load([chunk * BLOCK_V, n]).T
        logits = tl.dot(hiddens.load([tile * BLOCK_T, n]), right, logits, input_precision="ieee")
    ids = (chunk * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    logits = tl.where(ids < vocab, logits * scale, -1e30)  # finite: 0 * -inf in w would be NaN
    top = tl.max(logits, 1)  # [BLOCK_T]
    shifted = logits - top[:, None]
    p = tl.exp(shifted)
    rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = rows < tokens
    target = tl.load(targets + rows, inside, -1)[:, None]
    here, plane = partials + rows.to(tl.int64) * chunks + chunk, tokens.to(tl.int64) * chunks
    tl.store(here, top, inside)
    tl.store(here + plane, tl.sum(p, 1), inside)
    tl.store(here + 2 * plane, tl.sum(p * shifted, 1), inside)
    tl.store(here + 3 * plane, tl.sum(tl.where(ids == target, logits, 0.0), 1), inside)


@triton.jit(do_not_specialize=["tokens"])
def _merge(
    partials,
    targets,
    results,
    tokens,
    vocab,
    chunks,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    partials, plane = partials + row * chunks, tokens.to(tl.int64) * chunks
    inside = chunk < chunks
    tops = tl.load(partials + chunk, inside, -1e30)
    top = tl.max(tops, 0)
    shift = tops - top
    sums = tl.load(partials + plane + chunk, inside, 0.0)
    weighted = tl.load(partials + 2 * plane + chunk, inside, 0.0) + sums * shift
    total = tl.sum(sums * tl.exp(shift), 0)
    weighted = tl.sum(weighted * tl.exp(shift), 0)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocab)
    chosen = tl.load(partials + 3 * plane + target // BLOCK_V, known, float("-inf"))
    tl.store(results + row, tl.where(target < 0, 0.0, chosen - top - tl.log(total)))
    tl.store(results + tokens + row, tl.log(total) - weighted / total)
    tl.store(results + 2 * tokens + row, top + tl.log(total))
