"""LoRA (Hu et al. 2021, arXiv 2106.09685): trains W + (alpha / rank) B A in place of W.

Every linear layer of the blocks has an adapter. A fused matrix (qkv, gate_up) has an A and a B for
each of its parts, so that an adapter is the one PEFT would make. `named_hf_tensors` gives merged
weights, so the engine and exports know nothing of adapters.

A base in 4 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314) cannot be merged without rounding
again. There the engine computes with adapters too: `on_the_same_base` gives it a model of its own
adapters, and of the trainer's base.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from nanorchestra.files import write_whole
from nanorchestra.model.checkpoint import hf_rows
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.sharded import fill, whole


class LoRALinear(nn.Module):
    """x [T, in] -> x W^T + scale * [x A_1^T B_1^T, ...] [T, out], one term per fused part.

    W [out, in] is that of `base`, which is frozen: an nn.Linear, or a QuantisedLinear. lora_a
    [parts * rank, in] and lora_b [out, rank] are fp32, because bf16 would lose steps of 1e-5; the
    product casts them to x.dtype.
    """

    def __init__(
        self, base: nn.Linear | QuantisedLinear, rows: list[int], rank: int, alpha: float
    ) -> None:
        """Wraps `base`, with `rows` output rows in each part; `reset` fills the adapter."""
        super().__init__()
        self.base = base
        self.rows, self.rank, self.scale, self.enabled = rows, rank, alpha / rank, True
        device = base.scales.device if isinstance(base, QuantisedLinear) else base.weight.device
        self.lora_a = nn.Parameter(torch.empty(len(rows) * rank, base.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product [T, out] with the adapter, or without it if not `enabled`."""
        y = self.base(x)
        if not self.enabled:
            return y
        low = F.linear(x, self.lora_a.to(x.dtype))  # [T, parts * rank]
        return torch.addmm(y, low, self.spread(x.dtype).T, alpha=self.scale)

    def spread(self, dtype: torch.dtype) -> Tensor:
        """Returns B in dtype, [out, parts * rank], zero where a part's rows meet another's columns.

        One product then adds all parts, and no further [T, out] is in memory.
        """
        b = self.lora_b.to(dtype)
        return torch.block_diag(*b.split(self.rows)) if len(self.rows) > 1 else b

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Returns W + scale B A, whole, [out, in] in the dtype of W, added in fp32.

        Of a base in 4 bits it is in the dtype of the adapter.
        """
        a, b = whole(self.lora_a), whole(self.lora_b)
        if isinstance(self.base, QuantisedLinear):
            weight = self.base.dequantise(b.dtype)
        else:
            weight = whole(self.base.weight)
        parts = zip(b.split(self.rows), a.split(self.rank), strict=True)
        delta = torch.cat([rows @ columns for rows, columns in parts])
        return (weight.to(delta.dtype) + self.scale * delta).to(weight.dtype)


def add_adapters(model: Qwen3, rank: int, alpha: float, seed: int) -> None:
    """Freezes the model and gives every linear layer of its blocks an adapter.

    A model without memory, or one that is sharded afterwards, needs `reset` once it has weights.
    """
    model.requires_grad_(False)
    for name, module in linears(model.layers, (nn.Linear, QuantisedLinear)):
        parts = hf_rows(model.config, f"layers.{name}.weight", module.out_features)
        rows = [part.stop - part.start for _, part in parts]
        model.layers.set_submodule(name, LoRALinear(module, rows, rank, alpha))
    reset(model, seed)


def adapters(model: nn.Module) -> list[tuple[str, LoRALinear]]:
    """Returns (name, module) of all adapters."""
    return linears(model, LoRALinear)


def reset(model: Qwen3, seed: int) -> None:
    """Sets all adapters to their initial values: the model computes what its base does.

    A is uniform within 1 / sqrt(in) and B is zero, as in the published code.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, module in adapters(model):
        bound = module.lora_a.shape[1] ** -0.5
        values = torch.empty(module.lora_a.shape).uniform_(-bound, bound, generator=generator)
        fill(module.lora_a, values)
        fill(module.lora_b, torch.zeros(module.lora_b.shape))


def on_the_same_base(model: Qwen3, dtype: torch.dtype) -> Qwen3:
    """Returns a model with adapters of its own, in dtype, and the very tensors of the base.

    It is frozen. Its adapters are spread: each is of one part, so that a step of an engine need not
    spread them. `copy_adapters` brings them up to date.
    """
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    shared = [*model.parameters(), *model.buffers()]
    memo = {id(tensor): tensor for tensor in shared if id(tensor) not in own}
    other = copy.deepcopy(model, memo)
    for _, module in adapters(other):
        module.lora_a = nn.Parameter(module.lora_a.to(dtype), requires_grad=False)
        module.lora_b = nn.Parameter(module.spread(dtype), requires_grad=False)
        module.rows, module.rank = [len(module.lora_b)], len(module.lora_a)
    return other


@torch.no_grad()
def copy_adapters(source: Qwen3, target: Qwen3) -> None:
    """Overwrites the adapters of `target`, of `on_the_same_base`, by those of `source`."""
    for (_, new), (_, old) in zip(adapters(source), adapters(target), strict=True):
        old.lora_a.copy_(new.lora_a)
        old.lora_b.copy_(new.spread(old.lora_b.dtype))


@contextmanager
def disabled(model: Qwen3) -> Iterator[None]:
    """Lets the model compute without its adapters: a reference model that takes no memory."""
    modules = adapters(model)
    for _, module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for _, module in modules:
            module.enabled = True


def save_adapter(model: Qwen3, path: Path, base: str = "", write: bool = True) -> None:
    """Writes the adapters in PEFT's layout, which peft.PeftModel loads onto the model named `base`.

    `base` is a path, or a hub id, with its commit as owner/name@COMMIT.
    All ranks of a sharded model call this, one of them with `write`. Raises UserError if `path`
    cannot be written.
    """
    tensors, targets = {}, set()
    for name, module in adapters(model):
        a, b = whole(module.lora_a).cpu(), whole(module.lora_b).cpu()
        parts = hf_rows(model.config, f"{name}.weight", len(b))
        for (part, rows), columns in zip(parts, a.split(module.rank), strict=True):
            part = part.removesuffix(".weight")
            targets.add(part.rpartition(".")[2])
            tensors[f"base_model.model.{part}.lora_A.weight"] = columns.contiguous()
            tensors[f"base_model.model.{part}.lora_B.weight"] = b[rows].contiguous()
    if not write:
        return
    pinned = re.fullmatch(r"(.+)@([0-9a-f]{40})", base)
    name, revision = pinned.groups() if pinned else (base, None)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": module.rank,
        "lora_alpha": module.scale * module.rank,
        "target_modules": sorted(targets),
    }
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / "adapter_config.json", json.dumps(config, indent=2) + "\n")
    write_whole(path / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
