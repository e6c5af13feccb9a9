"""What the kernels of cases.py are timed beside: torch, SDPA, cuBLAS, flash-attn."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_parts.cases import FF, HIDDEN, Case, T, randn
from kernels import external, norm, swiglu

Function = Callable[..., Any]


def sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Causal attention over one sequence: q [T, H, D], k and v [T, Hkv, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


@cache
def pack() -> Any:
    """The pack of the training cases, as flash-attn takes it."""
    return external.sequences([(0, T, 0, T)], "cuda")


@cache
def gate_up() -> Tensor:
    """The gate and up projection that the quantised cases have in 8 or 4 bits."""
    return randn(2 * FF, HIDDEN, device="cuda")


def flash_attn(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """The same attention by flash-attn."""
    return external.external_attention(q, k, v, pack())


PEERS: dict[str, dict[str, Function]] = {
    "rms_norm": {"eager": norm.reference},
    "swiglu": {"eager": swiglu.reference},
    "flash_attention": {
        "SDPA": sdpa,
        "SDPA cuDNN": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(sdpa),
        **({"flash-attn": flash_attn} if external.flash_attn_varlen_func else {}),
    },
    # writes the logits
    "linear_logprob": {"cuBLAS": lambda hidden, weight, *_: hidden @ weight.T},
    "quantised_linear": {"cuBLAS": lambda x, *_: x @ gate_up().T},
}
ALONE = ("rms_norm, residual", "linear_logprob backward")  # has no peer of the same job


def functions(case: Case) -> dict[str, Function]:
    """Returns what is measured: the kernel, under "own", and its peers."""
    peers = {} if case.name in ALONE else dict(PEERS.get(case.name.split()[0], {}))
    if "eager" in peers:
        peers["compiled"] = torch.compile(peers["eager"], dynamic=False)
    return {"own": case.call} | {name: partial(case.call, run=run) for name, run in peers.items()}
