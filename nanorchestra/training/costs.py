"""What a decoder computes and keeps per token, and what GPUs provide: for MFU and the planner."""

from __future__ import annotations

import timeit
from dataclasses import dataclass
from pathlib import Path

import torch

from nanorchestra.files import read_toml
from nanorchestra.model.qwen3 import ModelConfig

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: dense bf16 FLOP/s, bytes of memory."""

    flops: float
    memory: float


GPUS = {
    name: Gpu(**sheet) for name, sheet in read_toml(Path(__file__).with_name("gpus.toml")).items()
}


@dataclass(frozen=True)
class Costs:
    """FLOPs of a forward pass, bytes of keys and values in bf16, and what a backward pass needs."""

    numbers: int  # of the model, without its norms
    token_flops: int  # of a token in the layers
    logit_flops: int  # of a token's logits
    pair_flops: int  # of a pair of query and key
    kv_bytes: int  # of a token's keys and values
    activations: int  # numbers that a layer keeps of a token for its backward pass, with kernels
    adapter_numbers: int  # numbers of adapters of rank 1

    @classmethod
    def of(cls, config: ModelConfig) -> Costs:
        """Returns the costs of a decoder."""
        layers, hidden = config.num_hidden_layers, config.hidden_size
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        linear = layers * hidden * (2 * q + 2 * kv + 3 * config.intermediate_size)
        head = config.vocab_size * hidden
        # A layer keeps its input, the sum after attention and both after their norms; qkv; q, k and
        # v as attention takes them, and its output; gate, up and their product. Left out: the
        # log-sum-exps, one number a query head, and one number of each norm.
        kept = 4 * hidden + 3 * q + 4 * kv + 3 * config.intermediate_size
        adapters = layers * (7 * hidden + 2 * q + 2 * kv + 3 * config.intermediate_size)
        flops = 2 * linear, 2 * head, 4 * layers * q
        numbers = linear + head * (1 if config.tie_word_embeddings else 2)
        return cls(numbers, *flops, 4 * layers * kv, kept, adapters)


def model_flops(
    config: ModelConfig,
    tokens: int,
    pairs: int,
    sampled: int,
    *,
    adapters: bool = False,
    reference: bool = False,
) -> float:
    """Returns the FLOPs that a training step asks for, as MFU counts them.

    PaLM (arXiv 2204.02311, appendix B): forward 1, backward 2, and nothing for recomputation. The
    base of adapters has no weight gradient, so its backward is 1. A reference adds its forward. The
    vocabulary counts for sampled ids only, and an id that packed samples share counts once.
    """
    costs = Costs.of(config)
    passes = 4 if reference else 3
    passes_of_products = passes - 1 if adapters else passes
    products = tokens * costs.token_flops + sampled * costs.logit_flops
    return products * passes_of_products + pairs * costs.pair_flops * passes


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the FLOP/s that MFU is a share of.

    On CUDA the data sheet's bf16; None for another dtype or a GPU that is not in GPUS. On a CPU the
    best of five products of 1024 x 1024 matrices in `dtype`, with torch's threads.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        if dtype != torch.bfloat16 or any(x in name for x in ("h100 pcie", "nvl", "laptop")):
            return None  # siblings that share a name, but not a data sheet
        return next((gpu.flops for key, gpu in GPUS.items() if key in name), None)
    matrix = torch.ones(1024, 1024, dtype=dtype)
    matrix @ matrix  # the first product in bfloat16 also compiles
    return 2 * 1024**3 / min(timeit.repeat(lambda: matrix @ matrix, repeat=5, number=1))
