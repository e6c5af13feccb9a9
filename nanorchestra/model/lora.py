"""LoRA (Hu et al. 2021, arXiv 2106.09685): trains W + (alpha / rank) B A in place of W, for every linear layer of the blocks.

A fused matrix (qkv, gate_up) has an A and a B for each of its parts, as if they were apart; so an adapter is the one that PEFT would have
made, and goes out in PEFT's layout. Weights leave the model merged (`named_hf_tensors`): the engine and an export know nothing of adapters.
The model without its adapters is still there, which makes the reference model of a KL term free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from nanorchestra.errors import UserError
from nanorchestra.files import write_whole
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.sharded import fill, whole
from nanorchestra.model.weights import hf_parts


class LoRALinear(nn.Module):
    """x [T, in] -> x W^T + bias + scale * [x A_1^T B_1^T, ...] [T, out]; one term for each part of the fused rows.

    `weight` [out, in] and `bias` keep their names and values, and are frozen. lora_a [parts * rank, in] and lora_b [out, rank] are fp32 whatever
    the dtype of the base (a step of 1e-5 would be lost in bf16), and take x.dtype for the product.
    """

    def __init__(
        self,
        linear: nn.Linear,
        rows: list[int],
        rank: int,
        alpha: float,
        generator: torch.Generator | None = None,
    ) -> None:
        """`rows`: how many output rows each part has. A is uniform within 1 / sqrt(in) and B zero, as in the published code."""
        super().__init__()
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.rows, self.rank, self.scale, self.enabled = rows, rank, alpha / rank, True
        device = linear.weight.device
        self.lora_a = nn.Parameter(torch.empty(len(rows) * rank, linear.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
        if device.type != "meta":
            self.reset(generator)

    def reset(self, generator: torch.Generator | None = None) -> None:
        """The adapter of a model that has learnt nothing yet."""
        bound = self.lora_a.shape[1] ** -0.5
        fill(
            self.lora_a, torch.empty(self.lora_a.shape).uniform_(-bound, bound, generator=generator)
        )
        fill(self.lora_b, torch.zeros(self.lora_b.shape))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.enabled:
            return y
        low = F.linear(x, self.lora_a.to(x.dtype)).split(self.rank, -1)  # [T, rank] for each part
        parts = [F.linear(z, b) for z, b in zip(low, self.lora_b.to(x.dtype).split(self.rows))]
        return y + self.scale * (torch.cat(parts, -1) if len(parts) > 1 else parts[0])

    @torch.no_grad()
    def merged(self) -> Tensor:
        """W + scale B A, whole, [out, in] in the dtype of W, added in fp32."""
        weight, a, b = (whole(p) for p in (self.weight, self.lora_a, self.lora_b))
        delta = torch.cat(
            [rows @ columns for rows, columns in zip(b.split(self.rows), a.split(self.rank))]
        )
        return (weight.to(delta.dtype) + self.scale * delta).to(weight.dtype)


def add_adapters(model: Qwen3, rank: int, alpha: float, seed: int) -> None:
    """Freezes the model and gives every linear layer of its blocks an adapter. Embeddings, norms and lm_head have none. ValueError: rank < 1.

    A model without memory, or one that is sharded afterwards, needs `reset` when it has its weights.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}: it must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, module in list(model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            rows = [
                len(part)
                for _, part in hf_parts(model.config, f"layers.{name}.weight", module.weight)
            ]
            parent, _, own = name.rpartition(".")
            setattr(
                model.layers.get_submodule(parent),
                own,
                LoRALinear(module, rows, rank, alpha, generator),
            )


def adapters(model: nn.Module) -> list[tuple[str, LoRALinear]]:
    return [
        (name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear)
    ]


def reset(model: Qwen3, seed: int) -> None:
    """All adapters as they begin: the model computes what its base does."""
    generator = torch.Generator().manual_seed(seed)
    for _, module in adapters(model):
        module.reset(generator)


def merge(model: Qwen3, seed: int) -> None:
    """Adds what the adapters have learnt to the base and starts them anew: the model computes the same, and is its own new reference."""
    for _, module in adapters(model):
        fill(module.weight, module.merged())
    reset(model, seed)


class Base:
    """The model without its adapters, for a reference: the same weights, no memory. Stands where a frozen copy would."""

    def __init__(self, model: Qwen3) -> None:
        self.model = model

    @property
    def output_weight(self) -> Tensor:
        return self.model.output_weight

    def __call__(self, *args) -> Tensor:
        with without_adapters(self.model):
            return self.model(*args)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())  # they are the model's, and are saved with it


@contextmanager
def without_adapters(model: Qwen3) -> Iterator[None]:
    for _, module in adapters(model):
        module.enabled = False
    try:
        yield
    finally:
        for _, module in adapters(model):
            module.enabled = True


def save_adapter(
    model: Qwen3,
    path: str | Path,
    base: str = "",
    *,
    before: str | Path | None = None,
    write: bool = True,
) -> None:
    """The adapters in PEFT's layout, adapter_config.json and adapter_model.safetensors, which peft.PeftModel loads onto the base model.

    `base` names that model: a directory or a repository. `before`: the saved adapters of this shape that were merged before these began; what is
    written is then their sum, of the rank of both together. All ranks of a sharded model call it, one with `write`. Files are written
    aside and renamed. UserError: `before` cannot be read, or `path` not be written.
    """
    path = Path(path)
    tensors, targets = {}, set()
    for name, module in adapters(model):
        a, b = whole(module.lora_a), whole(module.lora_b)
        for (part, rows), columns in zip(
            hf_parts(model.config, f"{name}.weight", b), a.split(module.rank)
        ):
            part = part.removesuffix(".weight")
            targets.add(part.rpartition(".")[2])
            tensors[f"base_model.model.{part}.lora_A.weight"] = columns.cpu().contiguous()
            tensors[f"base_model.model.{part}.lora_B.weight"] = rows.cpu().contiguous()
    if not write:
        return
    rank = module.rank
    try:
        if before is not None:  # B_1 A_1 + B_2 A_2 = [B_1 B_2] [A_1; A_2]
            earlier = load_file(Path(before) / "adapter_model.safetensors")
            tensors = {
                name: torch.cat([earlier[name], tensor], 0 if "lora_A" in name else 1)
                for name, tensor in tensors.items()
            }
            rank = next(len(tensor) for name, tensor in tensors.items() if "lora_A" in name)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{before or path}: {error}; the run's adapters cannot be read or written there"
        ) from None
    alpha = module.scale * rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    for file, data in (
        ("adapter_config.json", (json.dumps(config, indent=2) + "\n").encode()),
        ("adapter_model.safetensors", save(tensors, {"format": "pt"})),
    ):
        write_whole(path / file, data)


def parameters_of(config, rank: int) -> int:
    """How many numbers the adapters of a ModelConfig hold."""
    heads, kv, dim, hidden, wide = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
        config.intermediate_size,
    )
    shapes = [
        (hidden, heads * dim),
        (hidden, kv * dim),
        (hidden, kv * dim),
        (heads * dim, hidden),
        (hidden, wide),
        (hidden, wide),
        (wide, hidden),
    ]
    return config.num_hidden_layers * rank * sum(into + out for into, out in shapes)
