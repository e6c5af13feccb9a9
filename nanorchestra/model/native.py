"""The decoder on a CPU in C: native.c, compiled for this machine at its first use.

`pack` puts a model's matrices in the layout that native.c multiplies. They take the place of the
plain ones, so memory stays as it is; only an output matrix that is tied to the embeddings is held
twice. The model can then be computed and take new weights, not trained. Without a C compiler the
model stays as it is, and torch computes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorchestra.model.quantise import linears
from nanorchestra.model.qwen3 import Qwen3

SOURCE = Path(__file__).with_name("native.c")
HEADER = SOURCE.with_suffix(".h")
COMMAND = "cc -O3 -march=native -fopenmp -fPIC -shared"
BLOCK, PANEL, LARGEST_DIM = 16, 32, 256  # of native.c: keys together, outputs, head size


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return native.c for models of this dtype, or None where it cannot be had.

    It is compiled into ~/.cache/nanorchestra (XDG_CACHE_HOME), once for each source and CPU.
    """
    half = dtype == torch.bfloat16
    if dtype != torch.float32 and not (half and torch.cpu._is_avx512_bf16_supported()):
        return None
    command, info = [*COMMAND.split(), *["-DBF16"] * half], Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else ()
    cpu = [line for line in lines if line.startswith("flags")][:1]
    key = hashlib.sha256(
        f"{command}{cpu}{SOURCE.read_text()}{HEADER.read_text()}".encode()
    ).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanorchestra"
    built = folder / f"native-{key}.so"
    try:
        if not built.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as directory:
                part = Path(directory) / built.name
                whole = [*command, "-o", str(part), str(SOURCE)]
                subprocess.run(whole, check=True, capture_output=True)
                part.replace(built)
        loaded = ctypes.CDLL(str(built))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"native.c cannot be compiled, so torch computes: {error}", file=sys.stderr)
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    inputs = pointer, size, size
    loaded.linear.argtypes = [*inputs, *inputs[:2], pointer, number]
    loaded.forward.argtypes = [pointer, *inputs, ctypes.c_float, pointer, pointer, number]
    return loaded


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on pages of 2 MB, if Linux has them: a step that reads all of it misses less.

    Memory is taken as it is written.
    """
    size, flags = math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, flags=flags)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class PackedLinear(nn.Module):
    """x [T, in] -> x W^T [T, out], with W [out, in] in the layout of native.c."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        columns, pair = library(weight.dtype).panel_columns(), 4 // weight.itemsize
        panels = -(-self.out_features // columns)
        shape = panels, self.in_features // pair, columns, pair
        self.packed = zeros(shape, weight.dtype)
        self.write(slice(0, len(weight)), weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        panels, _, columns, _ = self.packed.shape
        x, out = x.contiguous(), torch.empty(len(x), panels * columns)
        inputs = x.data_ptr(), len(x), self.in_features
        matrix = self.packed.data_ptr(), panels * columns
        threads = torch.get_num_threads()
        library(x.dtype).linear(*inputs, *matrix, out.data_ptr(), threads)
        return out[:, : self.out_features].to(x.dtype)

    @torch.no_grad()
    def write(self, rows: slice, weight: Tensor) -> None:
        """Take `rows` of W, whole panels but for W's last, of any float dtype."""
        _, pairs, columns, pair = self.packed.shape
        whole = F.pad(weight.cpu(), (0, 0, 0, -len(weight) % columns))
        panels = whole.view(-1, columns, pairs, pair).transpose(1, 2)
        self.packed[rows.start // columns :][: len(panels)].copy_(panels)


def pack(model: Qwen3) -> None:
    """Replace the matrices of a model on a CPU, in place, where native.c can compute it.

    It takes head sizes that are multiples of 16, to 256, and multiples of 32 for the hidden sizes
    and for the columns of q, k and v. Quantised models stay as they are, and bfloat16 on a CPU
    without instructions for it.
    """
    weight, shape, names = model.embed_tokens.weight, model.config, [n for n, _ in linears(model)]
    heads, dim = (shape.num_attention_heads, shape.num_key_value_heads), shape.head_dim
    sizes = shape.hidden_size, shape.intermediate_size, *(count * dim for count in heads)
    fits = not (dim % BLOCK or any(size % PANEL for size in sizes)) and dim <= LARGEST_DIM
    if not (names and weight.is_cpu and fits and library(weight.dtype)):
        return
    for name in names:
        module = model.get_submodule(name)
        model.set_submodule(name, PackedLinear(module.weight))
    if model.lm_head is None:
        model.lm_head = PackedLinear(weight)


class Forward:
    """A step of a packed model over KV pages, in one call.

    k_cache and v_cache [layers, pages, Hkv, page_size, D], page_size a multiple of 16. Inside a
    page the order is native.c's.
    """

    def __init__(self, model: Qwen3, k_cache: Tensor, v_cache: Tensor):
        self._c, self._config, config = library(k_cache.dtype), model.config, model.config
        layers = [
            [
                *(block.input_layernorm, (own := block.self_attn).q_norm, own.k_norm),
                *(block.post_attention_layernorm, own.qkv_proj.packed, own.o_proj.packed),
                *(block.gate_up_proj.packed, block.down_proj.packed),
            ]
            for block in model.layers
        ]
        depth, pages, kv_heads, page_size, dim = k_cache.shape
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, output = config.num_attention_heads, model.lm_head.packed
        width = hidden + 3 * inner + 2 * (heads + kv_heads) * dim
        scratch = torch.empty(self._c.chunk_rows() * width)
        tensors = model.embed_tokens.weight, model.norm, output
        tensors += model.rope_frequencies(k_cache.device), k_cache, v_cache, scratch
        self._outputs = output.shape[0] * output.shape[2]
        sizes = depth, hidden, inner, heads, kv_heads, dim, pages, page_size, self._outputs
        pointers = [list(map(Tensor.data_ptr, layer)) for layer in layers]
        self._kept = np.array(pointers, np.int64), tensors
        numbers = self._kept[0].ctypes.data, *map(Tensor.data_ptr, tensors), *sizes
        self._decoder = np.array(numbers, np.int64)

    def __call__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[Sequence[int]],
        wanted: Sequence[int],
    ) -> Tensor:
        """Return the logits fp32 [len(wanted), vocab] of the tokens at `wanted`; store the KV.

        tokens and positions [T] are in parts of `counts` tokens. Each part reads the pages of its
        table, and none that a later one writes.
        """
        starts = accumulate(map(len, tables), initial=0)
        first = [start for start, count in zip(starts, counts, strict=False) for _ in range(count)]
        pages = chain.from_iterable(tables)
        numbers = np.array([*tokens, *positions, *first, *wanted, *pages], np.int64)
        memory = torch.empty(len(tokens), self._config.hidden_size + self._config.head_dim)
        logits = torch.empty(len(wanted), self._outputs)
        self._c.forward(
            self._decoder.ctypes.data,
            numbers.ctypes.data,
            len(tokens),
            len(wanted),
            self._config.rms_norm_eps,
            memory.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits[:, : self._config.vocab_size]
