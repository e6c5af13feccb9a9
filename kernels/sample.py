"""Draws a token a row from its logits, after top-k and top-p (Holtzman et al. 2020).

    kept = the ids whose logits are at least the row's floor
    p = softmax(logits[kept] / temperature)
    token = the first id v of the vocabulary with p[0] + ... + p[v] > uniform

uniform, in [0, 1), is a hash of (seed, position) that the host makes: a request draws the same
token in any batch, and on a CPU. A temperature below 1e-5 is greedy: the lowest id among the
largest logits, all ids kept, and p at temperature 1. The log-probability is that of the token under
p. It is NaN if a logit is NaN or plus infinity, or if all are minus infinity; the token is below
vocab even then.

The draw. Bandwidth is the limit: each logit is read once, 4 B V bytes. One program of
`_block_weights` owns BLOCK ids of a row and writes their largest z = logit / temperature, and the
sum of the weights exp(z - largest). One program of `_draw` owns a row: it finds the block, then the
id within. Sums of blocks are fp64, as on the CPU.

The floor, in four launches. Top-k keeps the k largest logits; of these, top-p keeps as few of the
largest as have the share p of their probability. Both are a threshold, so equal logits are kept or
left out together. Few ids can be near it, and only these are searched:

1. `_group_maxima`: the largest logit and the sum of the weights of each GROUP of ids.
2. `_candidate_bounds`: a bound that no kept logit is below. With top-k it is the k-th largest of
   the group maxima, since k logits are at least as large. With top-p alone, V ids of a weight below
   (1 - p) * total / V could not hold the share 1 - p that is left out.
3. `_gather_candidates`: the logits from the bound on, usually little more than k, as a list.
4. `_search_floors`: the bits of a float, with the sign turned, are an integer in the same order.
   The floor is the largest integer at or above which enough ids, or enough weight, lie. One program
   a row finds its 32 bits one after the other in the list, for top-k and then for top-p.

Weights are integers in units of 1 / ONE, whose sums are exact in any order: the list's order
depends on which program comes first, the floor does not.

Cost on an H100 (132 multiprocessors at 1.7 GHz, 3.0 TB/s), V = 151,936, top_k 20, top_p 0.95. For
B = 1 the logits, 0.6 MB, lie in L2, and a program of steps 1 and 3 reads 16 KB of them: about 3 us
each with its start. Step 2 passes 33 times over 1,216 maxima and step 4 passes 65 times over a list
of some 20 logits; a pass is one tile and takes about 450 cycles, mostly the latency of its sum: 9
and 17 us. With the gaps between launches that is about 40 us. One program that reads the whole row
65 times takes 1,300 us. For B = 128 steps 1 and 3 read 78 MB each, 52 us, and the searches of the
rows run beside each other: about 90 us. A row that keeps n ids by top-p alone takes 33 passes of
0.3 us for 1,000 candidates and 1.5 us for 10,000. Beyond CANDIDATES, or with top_k above the number
of groups, the row itself is searched: 0.5 ms for one limit, 1 ms for both.

A sort in the graph would be as good for B = 1: four radix passes over 12 bytes an id, the softmax
and the sums are some 20 launches, 60 to 100 us. From two rows on torch sorts twice, by value and by
row, and from 128 rows on one block sorts a row: 19 million ids with 64-bit indices move 2 to 4 GB,
1 to 3 ms. A graph would pay that in each step, with limits or without. These four launches cost a
step without limits 6 us, since a program of such a row ends after three loads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, require

BLOCK = 1024  # ids of a program of the draw
GROUP = 128  # ids that share a maximum
GROUPS = 32  # groups of a program
TILE = 2048  # logits that a search reads at a time
CANDIDATES = 16384  # logits of a row's list
GREEDY = tl.constexpr(1e-5)  # temperatures below
LOWEST = tl.constexpr(-1e30)  # finite, where all ids of a block may be forbidden
ONE = tl.constexpr(1 << 44)  # the weight of the largest logit; 2^18 of them fit 63 bits

# Vectors with a value a row, of which a launch may take any part: their alignment is not compiled
# into a kernel.
ROWS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "uniform_ptr", "floors_ptr"]


def naive_truncation_floor(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, vocab: int
) -> Tensor:
    """Returns what truncation_floor does, by sorting, in the dtype of logits."""
    floors = []
    for row in range(len(logits)):
        kept = logits[row, :vocab].sort(descending=True).values
        kept = kept[kept > float("-inf")]
        limited = top_k[row] > 0 or top_p[row] < 1
        if temperature[row] < 1e-5 or not limited or len(kept) == 0:
            floors.append(float("-inf"))
            continue
        if top_k[row] > 0:
            smallest = kept[min(int(top_k[row]), len(kept)) - 1]
            kept = kept[kept >= smallest]  # with all that equal the k-th
        if top_p[row] < 1:
            p = (kept / temperature[row]).softmax(0)
            mass, count = 0.0, 0
            while count < len(kept) and mass < top_p[row]:
                mass += p[count]
                count += 1
            kept = kept[: max(count, 1)]
        floors.append(float(kept[-1]))
    return logits.new_tensor(floors)


def naive_sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Returns what sample does, id by id, in the dtype of logits."""
    floors = naive_truncation_floor(logits, temperature, top_k, top_p, vocab)
    tokens, logprobs = [], []
    for row in range(len(logits)):
        greedy = temperature[row] < 1e-5
        z = logits[row, :vocab] / (1.0 if greedy else temperature[row])
        z = torch.where(logits[row, :vocab] < floors[row], float("-inf"), z)
        p = z.softmax(0)
        token = int(z.argmax())
        if not greedy:
            mass = 0.0
            for v in range(vocab):
                mass += p[v]
                if p[v] > 0:
                    token = v  # the last one, should rounding leave the sum below the noise
                if mass > uniform[row]:
                    break
        tokens.append(token)
        logprobs.append(p[token].log())
    return torch.tensor(tokens, device=logits.device), torch.stack(logprobs)


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Returns tokens int64 [B] and their log-probabilities fp32 [B], in nats.

    logits fp32 [B, >= vocab], rows any stride apart; uniform fp64 [B] in [0, 1). The limits are
    those of truncation_floor. Minus infinity forbids an id. ValueError if the shapes do not fit.
    """
    floors = truncation_floor(logits, temperature, top_k, top_p, vocab)
    batch = len(logits)
    check((batch,), torch.float64, uniform=uniform)
    blocks = triton.cdiv(vocab, BLOCK)
    largest = logits.new_empty(batch, blocks)
    sums = logits.new_empty(batch, blocks)
    tokens = uniform.new_empty(batch, dtype=torch.int64)
    logprobs = logits.new_empty(batch)
    row_stride = logits.stride(0)
    _block_weights[(blocks, batch)](
        logits, temperature, floors, largest, sums, row_stride, vocab, BLOCK
    )
    _draw[(batch,)](
        logits,
        temperature,
        floors,
        largest,
        sums,
        uniform,
        tokens,
        logprobs,
        row_stride,
        vocab,
        blocks,
        BLOCK,
        triton.next_power_of_2(blocks),
        num_warps=8,
    )
    return tokens, logprobs


def truncation_floor(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, vocab: int
) -> Tensor:
    """Returns fp32 [B]: the ids with logits below it are left out; minus infinity keeps all.

    logits fp32 [B, >= vocab], rows any stride apart; temperature fp32 [B], below 1e-5 greedy, all
    kept; top_k int32 [B], 0 for no limit; top_p fp32 [B] above 0, 1 for no limit. ValueError if the
    shapes do not fit.
    """
    batch = len(logits)
    check((batch, None), torch.float32, strided=True, logits=logits)
    check((batch,), torch.float32, temperature=temperature, top_p=top_p)
    check((batch,), torch.int32, top_k=top_k)
    require(1 <= vocab <= logits.shape[1], f"vocab is {vocab}; expected 1 to {logits.shape[1]}")
    blocks = triton.cdiv(vocab, GROUP * GROUPS)
    groups = blocks * GROUPS
    maxima = logits.new_empty(batch, groups)
    sums = logits.new_empty(batch, groups)
    bounds = logits.new_empty(batch)
    totals = top_k.new_empty(batch, dtype=torch.int64)
    counts = top_k.new_empty(batch)  # candidates of each row
    candidates = logits.new_empty(batch, CANDIDATES)
    floors = logits.new_empty(batch)
    limits = temperature, top_k, top_p
    row_stride = logits.stride(0)
    _group_maxima[(blocks, batch)](
        logits, *limits, maxima, sums, row_stride, vocab, GROUPS, GROUP, num_warps=8
    )
    _candidate_bounds[(batch,)](
        *limits,
        maxima,
        sums,
        bounds,
        totals,
        counts,
        vocab,
        groups,
        triton.next_power_of_2(groups),
        TILE,
        num_warps=8,
    )
    _gather_candidates[(blocks, batch)](
        logits,
        *limits,
        maxima,
        bounds,
        counts,
        candidates,
        row_stride,
        vocab,
        CANDIDATES,
        GROUPS,
        GROUP,
        num_warps=8,
    )
    _search_floors[(batch,)](
        logits,
        *limits,
        maxima,
        totals,
        counts,
        candidates,
        floors,
        row_stride,
        vocab,
        groups,
        CANDIDATES,
        triton.next_power_of_2(groups),
        TILE,
        num_warps=8,
    )
    return floors


@triton.jit
def _scaled(logits_ptr, temperature_ptr, floors_ptr, row, block, row_stride, vocab, BLOCK):
    """Returns z of a block of a row, fp32 [BLOCK]: minus infinity where an id cannot be drawn."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * row_stride + ids, ids < vocab, float("-inf"))
    kept = tl.where(logits < tl.load(floors_ptr + row), float("-inf"), logits)  # NaN stays
    temperature = tl.load(temperature_ptr + row)
    return kept * (1.0 / tl.where(temperature < GREEDY, 1.0, temperature))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _block_weights(
    logits_ptr,  # fp32 [B, >= vocab]
    temperature_ptr,  # fp32 [B]
    floors_ptr,  # fp32 [B]
    largest_ptr,  # fp32 [B, blocks]
    sums_ptr,  # fp32 [B, blocks]
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1)
    z = _scaled(logits_ptr, temperature_ptr, floors_ptr, row, block, row_stride, vocab, BLOCK)
    largest = tl.maximum(tl.max(z, 0), LOWEST)
    offset = row * tl.num_programs(0) + block
    tl.store(largest_ptr + offset, largest)
    tl.store(sums_ptr + offset, tl.sum(tl.exp(z - largest), 0))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _draw(
    logits_ptr,  # fp32 [B, >= vocab]
    temperature_ptr,  # fp32 [B]
    floors_ptr,  # fp32 [B]
    largest_ptr,  # fp32 [B, blocks]
    sums_ptr,  # fp32 [B, blocks]
    uniform_ptr,  # fp64 [B]
    tokens_ptr,  # int64 [B]
    logprobs_ptr,  # fp32 [B]
    row_stride,
    vocab,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # the next power of two
):
    row = tl.program_id(0)
    each = tl.arange(0, BLOCKS)
    inside = each < blocks
    largest = tl.load(largest_ptr + row * blocks + each, inside, LOWEST)
    sums = tl.load(sums_ptr + row * blocks + each, inside, 0.0)
    peak, first = tl.max(largest, 0, return_indices=True)
    weights = (sums * tl.exp(largest - peak)).to(tl.float64)
    total = tl.sum(weights, 0)
    block, target = _invert(weights, tl.load(uniform_ptr + row) * total)
    greedy = tl.load(temperature_ptr + row) < GREEDY
    block = tl.minimum(tl.where(greedy, first, block), blocks - 1)

    z = _scaled(logits_ptr, temperature_ptr, floors_ptr, row, block, row_stride, vocab, BLOCK)
    _, best = tl.max(z, 0, return_indices=True)
    index, _ = _invert(tl.exp(z - peak).to(tl.float64), target)
    index = tl.minimum(tl.where(greedy, best, index), BLOCK - 1)
    chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == index, z, 0.0), 0)
    tl.store(logprobs_ptr + row, chosen - peak - tl.log(total.to(tl.float32)))
    tl.store(tokens_ptr + row, tl.minimum(block * BLOCK + index, vocab - 1).to(tl.int64))


@triton.jit
def _invert(weights, target):
    """Returns the first index whose cumulative weight exceeds the target, and what is left of it.

    The target is kept inside, so that rounding never leads to an index without weight.
    """
    cumulative = tl.cumsum(weights, 0)
    target = tl.minimum(tl.maximum(target, 0.0), tl.max(cumulative, 0) * (1 - 1e-12))
    passed = cumulative <= target
    index = tl.sum(passed.to(tl.int32), 0)
    before = tl.max(tl.where(passed, cumulative, 0.0), 0)
    return index, target - before


@triton.jit
def _is_limited(temperature, top_k, top_p):
    return (temperature >= GREEDY) & ((top_k > 0) | (top_p < 1.0))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _group_maxima(
    logits_ptr,  # fp32 [B, >= vocab]
    temperature_ptr,  # fp32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # fp32 [B]
    maxima_ptr,  # fp32 [B, groups]
    sums_ptr,  # fp32 [B, groups]
    row_stride,
    vocab,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if not _is_limited(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)):
        return
    scale = 1.0 / temperature
    groups = block * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    logits = tl.load(logits_ptr + row.to(tl.int64) * row_stride + ids, ids < vocab, float("-inf"))
    maxima = tl.maximum(tl.max(logits, 1), LOWEST)
    weights = tl.exp((logits - maxima[:, None]) * scale)
    offsets = row * tl.num_programs(0) * GROUPS + groups
    tl.store(maxima_ptr + offsets, maxima)
    tl.store(sums_ptr + offsets, tl.sum(weights, 1))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _candidate_bounds(
    temperature_ptr,  # fp32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # fp32 [B]
    maxima_ptr,  # fp32 [B, groups]
    sums_ptr,  # fp32 [B, groups]
    bounds_ptr,  # fp32 [B]
    totals_ptr,  # int64 [B]
    counts_ptr,  # int32 [B], set to 0
    vocab,
    groups,
    WIDTH: tl.constexpr,  # groups, to the next power of two
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.minimum(tl.load(top_k_ptr + row), vocab)  # times ONE it fits 63 bits
    top_p = tl.load(top_p_ptr + row)
    if not _is_limited(temperature, top_k, top_p):
        return
    each = tl.arange(0, WIDTH)
    maxima_ptr += row * groups
    maxima = tl.load(maxima_ptr + each, each < groups, LOWEST)
    sums = tl.load(sums_ptr + row * groups + each, each < groups, 0.0)
    peak = tl.max(maxima, 0)
    weights = sums * tl.exp((maxima - peak) * (1.0 / temperature))
    total = tl.sum(weights.to(tl.float64), 0)
    if top_k > 0:
        needed = top_k.to(tl.int64) * ONE
        key = _search(maxima_ptr, groups, peak, 0.0, tl.zeros([], tl.uint32), needed, TILE)
        bound = _float_of(key)
    else:
        # Half the weight that would do: rounding must not lose a candidate.
        smallest = 0.5 * (1.0 - top_p) * total.to(tl.float32) / vocab
        bound = peak + temperature * tl.log(smallest)
    tl.store(bounds_ptr + row, bound)
    tl.store(totals_ptr + row, (total * ONE).to(tl.int64))
    tl.store(counts_ptr + row, 0)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _gather_candidates(
    logits_ptr,  # fp32 [B, >= vocab]
    temperature_ptr,  # fp32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # fp32 [B]
    maxima_ptr,  # fp32 [B, groups]
    bounds_ptr,  # fp32 [B]
    counts_ptr,  # int32 [B]
    candidates_ptr,  # fp32 [B, CANDIDATES]
    row_stride,
    vocab,
    CANDIDATES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if not _is_limited(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)):
        return
    bound = tl.load(bounds_ptr + row)
    groups = block * GROUPS + tl.arange(0, GROUPS)
    maxima = tl.load(maxima_ptr + row * tl.num_programs(0) * GROUPS + groups)
    if tl.max(maxima, 0) < bound:
        return
    ids = block * GROUPS * GROUP + tl.arange(0, GROUPS * GROUP)
    logits = tl.load(logits_ptr + row.to(tl.int64) * row_stride + ids, ids < vocab, float("-inf"))
    chosen = (logits >= bound) & (logits > float("-inf"))
    before = tl.cumsum(chosen.to(tl.int32), 0) - 1
    first = tl.atomic_add(counts_ptr + row, tl.sum(chosen.to(tl.int32), 0))
    slots = first + before
    candidates_ptrs = candidates_ptr + row * CANDIDATES + slots
    tl.store(candidates_ptrs, logits, chosen & (slots < CANDIDATES))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _search_floors(
    logits_ptr,  # fp32 [B, >= vocab]
    temperature_ptr,  # fp32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # fp32 [B]
    maxima_ptr,  # fp32 [B, groups]
    totals_ptr,  # int64 [B]
    counts_ptr,  # int32 [B]
    candidates_ptr,  # fp32 [B, CANDIDATES]
    floors_ptr,  # fp32 [B]
    row_stride,
    vocab,
    groups,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.minimum(tl.load(top_k_ptr + row), vocab)  # times ONE it fits 63 bits
    top_p = tl.load(top_p_ptr + row)
    if not _is_limited(temperature, top_k, top_p):
        tl.store(floors_ptr + row, float("-inf"))
        return
    values_ptr = candidates_ptr + row * CANDIDATES
    count = tl.load(counts_ptr + row)
    if count > CANDIDATES:  # the row itself
        values_ptr = logits_ptr + row.to(tl.int64) * row_stride
        count = vocab
    each = tl.arange(0, WIDTH)
    peak = tl.max(tl.load(maxima_ptr + row * groups + each, each < groups, LOWEST), 0)
    scale = 1.0 / temperature
    floor = tl.zeros([], tl.uint32)
    total = tl.load(totals_ptr + row)
    if top_k > 0:
        needed = top_k.to(tl.int64) * ONE
        floor = _search(values_ptr, count, peak, 0.0, floor, needed, TILE)
        total = _amount(values_ptr, count, peak, scale, floor, TILE)
    if top_p < 1.0:
        needed = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        floor = _search(values_ptr, count, peak, scale, floor, tl.maximum(needed, 1), TILE)
    tl.store(floors_ptr + row, _float_of(floor))


@triton.jit
def _search(values_ptr, count, peak, scale, floor, needed, TILE: tl.constexpr):
    """Returns the largest key from `floor` on, at or above which `needed` lies; else `floor`."""
    key = tl.zeros([], tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        tried = key | bit
        amount = _amount(values_ptr, count, peak, scale, tl.maximum(tried, floor), TILE)
        key = tl.where(amount >= needed, tried, key)
        bit = bit >> 1
    return tl.maximum(key, floor)


@triton.jit
def _amount(values_ptr, count, peak, scale, floor, TILE: tl.constexpr):
    """Returns the sum of exp((x - peak) * scale) over the values with keys from `floor` on.

    int64 in units of 1 / ONE; scale 0 counts.
    """
    amounts = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        each = start + tl.arange(0, TILE)
        x = tl.load(values_ptr + each, each < count, float("-inf"))
        inside = (_key_of(x) >= floor) & (x > float("-inf"))
        below_peak = tl.where(inside, x - peak, 0.0)
        weights = tl.where(inside, tl.exp(below_peak * scale), 0.0)
        amounts += (weights * ONE).to(tl.int64)
    return tl.sum(amounts, 0)


@triton.jit
def _key_of(x):
    """Returns the bits of floats as uint32 in the order of the floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _float_of(key):
    """Returns the float of a key; minus infinity for keys below those of all numbers."""
    bits = key ^ tl.where(key >> 31 == 1, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    x = bits.to(tl.float32, bitcast=True)
    return tl.where(key < 0x00800000, float("-inf"), x)
