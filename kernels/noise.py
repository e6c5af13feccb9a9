"""Random numbers for sampling that depend on (seed, position, id) alone.

So a request draws the same token whatever else is in its batch.

    E = -log(1 - w), exponentially distributed;  w = (x + 1/2) / 2^32;  x = hash of (key, id)

The 64-bit key of a row is mix(mix(seed + 0x9E3779B97F4A7C15) ^ position), where mix is the
finaliser of splitmix64 (Steele et al. 2014). x is the finaliser of MurmurHash3 over the id plus the
low half of the key, with the high half put in midway. It is one-to-one in the id: no two ids of a
row share an x. w lies strictly between 0 and 1 and is finest near 0, where the small E are, which
win. (-log(w) is finest at the large E: the winner among 150,000 equal ids would have one of some
fifty values, and low ids would win the ties.) Wrapping integer arithmetic and one logarithm an
element; nothing is loaded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def exponential(seeds, positions, ids):
    """Returns E, fp32; seeds and positions int64, ids int32, of shapes that broadcast."""
    key = _mix(_mix(seeds.to(tl.uint64) + 0x9E3779B97F4A7C15) ^ positions.to(tl.uint64))
    x = ids.to(tl.uint32) + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ (key >> 32).to(tl.uint32)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    # the fp32 below 2^-32: x may round up to 2^32, and w must stay below 1
    w = (x.to(tl.float32) + 0.5) * 2.3283062977608182e-10
    series = w * (1.0 + w * (0.5 + w * 0.33333333))  # 1 - w would lose the digits of a small w
    return tl.where(w < 0.015625, series, -tl.log(1.0 - w))


def reference(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Returns E of the ids 0..vocab-1, float64 [B, vocab]; seeds and positions int64 [B]."""
    key = _mixed(_mixed(seeds + (0x9E3779B97F4A7C15 - 2**64)) ^ positions)[:, None]
    x = (torch.arange(vocab, device=seeds.device) + key) & 0xFFFFFFFF  # [B, vocab]
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13 ^ _shifted(key, 32)) * 0xC2B2AE35 & 0xFFFFFFFF
    w = ((x ^ x >> 16).float() + 0.5).double() * 2.3283062977608182e-10
    return -torch.log1p(-w)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << 64 - by) - 1)  # int64 has no logical shift of its own
