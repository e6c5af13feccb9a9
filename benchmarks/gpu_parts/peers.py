"""What the kernels of cases.py are timed beside: torch, SDPA, cuBLAS, flash-attn."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_parts.cases import QWEN3_8B, Case, randn
from kernels.flash import Span
from kernels.flash_attn import (
    ExternalPlan,
    external_attention,
    external_plan,
    flash_attn_varlen_func,
)

Function = Callable[..., Any]


def sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Causal attention over one sequence: q [T, H, D], k and v [T, Hkv, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


@cache
def pack() -> ExternalPlan:
    """The pack of the training cases, as flash-attn takes it."""
    tokens = QWEN3_8B.tokens
    return external_plan([Span(0, tokens, 0, tokens)], "cuda")


@cache
def gate_up() -> Tensor:
    """The gate and up projection that the quantised cases have in 8 or 4 bits."""
    return randn(2 * QWEN3_8B.ff, QWEN3_8B.hidden, device="cuda")


def flash_attn(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """The same attention by flash-attn."""
    return external_attention(q, k, v, pack())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm by torch."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The addition and the norm by torch."""
    summed = x + residual
    return rms_norm(summed, weight, eps), summed


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU by torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


PEERS: dict[str, dict[str, Function]] = {
    "rms_norm": {"eager": rms_norm},
    "add_rms_norm": {"eager": add_rms_norm},
    "swiglu": {"eager": swiglu},
    "flash_attention": {
        "SDPA": sdpa,
        "SDPA cuDNN": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(sdpa),
        **({"flash-attn": flash_attn} if flash_attn_varlen_func else {}),
    },
    # writes the logits
    "linear_logprob": {"cuBLAS": lambda hidden, weight, *_: hidden @ weight.T},
    "quantised_linear": {"cuBLAS": lambda x, *_: x @ gate_up().T},
}
# have no peer of the same job
ALONE = ("linear_logprob backward", "flash_attention backward, tree")


def functions(case: Case) -> dict[str, Function]:
    """Returns what is measured: the kernel, under "own", and its peers."""
    peers = {} if case.name in ALONE else dict(PEERS.get(case.name.split()[0], {}))
    if "eager" in peers:
        peers["compiled"] = torch.compile(peers["eager"], dynamic=False)
    return {"own": case.call} | {name: partial(case.call, run=run) for name, run in peers.items()}
