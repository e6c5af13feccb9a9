"""Log-probabilities of given ids as a differentiable function of hidden states and output matrix.

    z[t, v] = hidden[t] . weight[v] / temperature  for the ids v < vocab;  p = softmax(z)
    logprob[t] = z[t, target] - logsumexp(z[t])
    entropy[t] = logsumexp(z[t]) - sum_v p[t, v] z[t, v]
    d logprob[t] / d z[t, v] = (v == target[t]) - p[t, v];  g = grad[t] * this / temperature
    dhidden = g @ weight;  dweight = g.T @ hidden

No pass holds [T, vocab] logits, whose fp32 copy takes 10 GB at T = 16,384.

Forward, 2 T vocab N FLOPs, which are the limit. One program of `_logprob_chunks` owns BLOCK_T rows
and one chunk of BLOCK_V ids, with the logits in registers. It writes the maximum m of its logits,
s = sum exp(z - m), w = sum exp(z - m) (z - m), and the target's logit. One program of
`_logprob_merge` owns a row and adds its chunks (Milakov & Gimelshein 2018). w is taken about m so
that the entropy of large logits does not cancel. Bytes: weight once for each GROUP * BLOCK_T rows,
hidden once for each BLOCK_V ids, mostly from L2, and 16 bytes of partial results a row and chunk.
Tiles come through tensor descriptors: bulk copies (TMA) on sm_90, 16-byte copies before.

Backward, 6 T vocab N FLOPs, exact, over chunks of the vocabulary that are sized by memory. The
forward pass left logsumexp, so each chunk of ids is finished by itself: its logits are computed
again in fp32 (cuBLAS), `_logit_gradients` turns them into g, and two products follow. With chunks
of the vocabulary, a row of dweight is one product over all T rows, accumulated in fp32 and rounded
once. Chunks of rows would need an fp32 copy of dweight, 2.5 GB for Qwen3-8B. dhidden is added up
over the chunks in fp32. Memory: CHUNK_BYTES, and dhidden in fp32: 638 MB at T = 8192, N = 4096,
bf16. Extra bytes moved: 10 T vocab, and 16 T N a chunk. One program of `_logit_gradients` owns
BLOCK ids of one row.

Both passes are deterministic. No kernel is compiled for a number of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, pick, require

GROUP = 16  # tiles of rows that run together and share the chunks in L2
BLOCK = 2048  # ids of a program of the backward pass
CHUNK_BYTES = 512_000_000  # of a chunk's logits, fp32, and their gradients

# Vectors with a value a token, of which a call may take any part: their alignment is not compiled
# into a kernel.
TOKENS = ["targets_ptr", "logprobs_ptr", "entropy_ptr", "logsumexp_ptr", "grad_ptr"]


def naive_linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns what linear_logprob does, token by token, in the dtype of hidden.

    Differentiable by torch, in the entropies too.
    """
    logprobs = []
    entropies = []
    for token, target in enumerate(targets.tolist()):
        logits = weight[:vocab] @ hidden[token] / temperature  # [vocab]
        logp = logits - logits.logsumexp(0)
        entropies.append(-(logp.exp() * logp).sum())
        if target < 0:
            logprobs.append(logp.new_zeros(()))
        elif target < vocab:
            logprobs.append(logp[target])
        else:
            logprobs.append(logp.new_tensor(float("-inf")))
    return torch.stack(logprobs), torch.stack(entropies)


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies fp32 [T], in nats.

    hidden [T, N], weight [V, N] of one dtype, targets int64 [T]. The log-probabilities are
    differentiable in hidden and weight, the entropies are not; gradients have the dtype of hidden,
    so fp16 needs loss scaling. Only the first `vocab` rows of weight count. A negative target is
    ignored: its log-probability and gradient are 0, so a mask meets no infinity. A target from
    vocab on has the log-probability minus infinity: a check would cost a synchronisation.
    ValueError if the shapes do not fit, or N is no multiple of 16.
    """
    check((len(targets), None), hidden=hidden)
    check((None, hidden.shape[1]), hidden.dtype, weight=weight)
    check((None,), torch.int64, targets=targets)
    width = hidden.shape[1]
    require(width % 16 == 0, f"the hidden size is {width}; expected a multiple of 16")
    require(1 <= vocab <= len(weight), f"vocab is {vocab}; expected 1 to {len(weight)}")
    return _LinearLogprob.apply(hidden, weight, targets, temperature, vocab)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab):
        logprobs, entropy, logsumexp = _forward(hidden, weight, targets, temperature, vocab)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.temperature = temperature
        ctx.vocab = vocab
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, _):
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        dhidden, dweight = _backward(
            grad_logprobs.contiguous(),
            hidden,
            weight,
            targets,
            logsumexp,
            ctx.temperature,
            ctx.vocab,
            with_weight=ctx.needs_input_grad[1],
        )
        return dhidden, dweight, None, None, None


def _forward(hidden, weight, targets, temperature, vocab) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities, entropies and logsumexp, fp32 [T]."""
    tokens, width = hidden.shape
    tile = dict(pick("logprob_forward", hidden.dtype))
    largest_divisor = width & -width  # of the powers of two
    tile["BLOCK_N"] = min(tile["BLOCK_N"], largest_divisor)
    chunks = triton.cdiv(vocab, tile["BLOCK_V"])
    partials = hidden.new_empty(4, tokens, chunks, dtype=torch.float32)
    logprobs = hidden.new_empty(tokens, dtype=torch.float32)
    entropy = logprobs.new_empty(tokens)
    logsumexp = logprobs.new_empty(tokens)

    triton.set_allocator(_scratch(hidden.device))  # for the descriptors of this thread's launches
    _logprob_chunks[(triton.cdiv(tokens, tile["BLOCK_T"]) * chunks,)](
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
    _logprob_merge[(tokens,)](
        partials,
        targets,
        logprobs,
        entropy,
        logsumexp,
        tokens,
        vocab,
        chunks,
        triton.next_power_of_2(chunks),
        tile["BLOCK_V"],
    )
    return logprobs, entropy, logsumexp


def _scratch(device):
    """Returns an allocator. Triton keeps it, so it holds the device alone and no tensor."""
    return lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=TOKENS)
def _logprob_chunks(
    hidden_ptr,  # [T, N]
    weight_ptr,  # [>= vocab, N]
    targets_ptr,  # int64 [T]
    partials_ptr,  # fp32 [4, T, chunks]
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
    tiles = tl.cdiv(tokens, BLOCK_T)
    program = tl.program_id(0)
    # Programs that run together share GROUP tiles of rows and few chunks, and so both stay in L2.
    tile, chunk = tl.swizzle2d(program // chunks, program % chunks, tiles, chunks, GROUP)
    hidden = tl.make_tensor_descriptor(hidden_ptr, [tokens, N], [N, 1], [BLOCK_T, BLOCK_N])
    weight = tl.make_tensor_descriptor(weight_ptr, [vocab, N], [N, 1], [BLOCK_V, BLOCK_N])
    logits = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for n in range(0, N, BLOCK_N):
        left = hidden.load([tile * BLOCK_T, n])
        right = weight.load([chunk * BLOCK_V, n]).T
        logits = tl.dot(left, right, logits, input_precision="ieee")
    ids = (chunk * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    logits = tl.where(ids < vocab, logits * scale, -1e30)  # finite: 0 * -inf in w would be NaN

    top = tl.max(logits, 1)  # [BLOCK_T]
    shifted = logits - top[:, None]
    p = tl.exp(shifted)
    rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = rows < tokens
    target = tl.load(targets_ptr + rows, inside, -1)[:, None]
    partials_ptrs = partials_ptr + rows.to(tl.int64) * chunks + chunk
    plane = tokens.to(tl.int64) * chunks
    tl.store(partials_ptrs, top, inside)
    tl.store(partials_ptrs + plane, tl.sum(p, 1), inside)
    tl.store(partials_ptrs + 2 * plane, tl.sum(p * shifted, 1), inside)
    tl.store(partials_ptrs + 3 * plane, tl.sum(tl.where(ids == target, logits, 0.0), 1), inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=TOKENS)
def _logprob_merge(
    partials_ptr,  # fp32 [4, T, chunks]
    targets_ptr,  # int64 [T]
    logprobs_ptr,  # fp32 [T]
    entropy_ptr,  # fp32 [T]
    logsumexp_ptr,  # fp32 [T]
    tokens,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,  # the next power of two
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    row_ptr = partials_ptr + row * chunks
    plane = tokens.to(tl.int64) * chunks
    tops = tl.load(row_ptr + chunk, inside, -1e30)
    sums = tl.load(row_ptr + plane + chunk, inside, 0.0)
    weighted = tl.load(row_ptr + 2 * plane + chunk, inside, 0.0)

    top = tl.max(tops, 0)
    shift = tops - top
    total = tl.sum(sums * tl.exp(shift), 0)
    weighted = tl.sum((weighted + sums * shift) * tl.exp(shift), 0)
    log_total = tl.log(total)

    target = tl.load(targets_ptr + row)
    is_token = (target >= 0) & (target < vocab)
    chosen = tl.load(row_ptr + 3 * plane + target // BLOCK_V, is_token, float("-inf"))
    tl.store(logprobs_ptr + row, tl.where(target < 0, 0.0, chosen - top - log_total))
    tl.store(entropy_ptr + row, log_total - weighted / total)
    tl.store(logsumexp_ptr + row, top + log_total)


def _backward(
    grad, hidden, weight, targets, logsumexp, temperature, vocab, with_weight
) -> tuple[Tensor, Tensor | None]:
    """Returns dhidden and, if asked for, dweight, from the gradient of the log-probabilities."""
    tokens, width = hidden.shape
    ids = chunk_width(tokens, vocab, hidden.element_size())
    # Holds a chunk's logits, and after these a chunk's part of dhidden.
    wide = hidden.new_empty(tokens * max(ids, width), dtype=torch.float32)
    narrow = hidden.new_empty(tokens * ids)
    dhidden = torch.zeros_like(hidden, dtype=torch.float32)
    dweight = torch.zeros_like(weight) if with_weight else None
    for start in range(0, vocab, ids):
        end = min(start + ids, vocab)
        count = end - start
        rows = weight[start:end]  # [count, N]
        logits = wide[: tokens * count].view(tokens, count)
        gradients = narrow[: tokens * count].view(tokens, count)
        _product(hidden, rows.T, logits)
        _logit_gradients[(tokens, triton.cdiv(count, BLOCK))](
            logits, gradients, targets, logsumexp, grad, 1 / temperature, start, count, BLOCK
        )
        if dweight is not None:
            _product(gradients.T, hidden, dweight[start:end])
        dhidden += _product(gradients, rows, wide[: tokens * width].view(tokens, width))
    return dhidden.to(hidden.dtype), dweight


def chunk_width(tokens: int, vocab: int, element_size: int) -> int:
    """Returns the ids of a chunk within CHUNK_BYTES, a multiple of 256 for full tiles."""
    fitting = CHUNK_BYTES // ((4 + element_size) * max(tokens, 1))
    return min(vocab, max(256, fitting // 256 * 256))


@triton.jit(do_not_specialize=["start"], do_not_specialize_on_alignment=TOKENS)
def _logit_gradients(
    logits_ptr,  # fp32 [T, width], of the ids from `start` on
    out_ptr,  # [T, width]
    targets_ptr,  # int64 [T]
    logsumexp_ptr,  # fp32 [T]
    grad_ptr,  # fp32 [T]
    scale,
    start,
    width,  # a multiple of 16 if vocab is, whatever the number of tokens
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    offsets = row * width + columns
    logits = tl.load(logits_ptr + offsets, inside, 0.0)
    logp = logits * scale - tl.load(logsumexp_ptr + row)
    target = tl.load(targets_ptr + row)
    onehot = tl.where(start + columns == target, 1.0, 0.0)
    slope = tl.where(target < 0, 0.0, tl.load(grad_ptr + row) * scale)
    tl.store(out_ptr + offsets, slope * (onehot - tl.exp(logp)), inside)


def _product(a, b, out) -> Tensor:
    """Writes a @ b to out, accumulated in fp32; out may have a wider dtype than the factors."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a.float() @ b.float())
