"""The decoder on a CPU in C: native.c.

`pack` puts a model's matrices in the layout that native.c multiplies. They take the place of the
plain ones, so memory stays as it is; only an output matrix that is tied to the embeddings is held
twice. `Forward` then computes a step in one call. A packed model takes new weights, but is not
trained. Without a C compiler the model stays as it is, and torch computes it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorchestra.model.compiler import LARGEST_DIM, address, compiled_for
from nanorchestra.model.quantise import linears
from nanorchestra.model.qwen3 import Qwen3

STRIP = 16  # keys of a page that lie together, as in native.h
WIDEST_PANEL = 32  # outputs of a matrix that lie together: the largest PANEL of native.h


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Returns native.c for models of this dtype, or None where it cannot be had."""
    loaded = compiled_for(dtype, "native.c")
    if loaded is not None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        loaded.linear.argtypes = [pointer, size, size, pointer, size, pointer, number]
        loaded.forward.argtypes = [pointer, pointer, number]
    return loaded


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns zeros on pages of 2 MB, if Linux has them: reading them all has fewer TLB misses.

    Linux gives memory when it is first written.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class PackedLinear(nn.Module):
    """x [T, in] -> x W^T + bias [T, out], with W [out, in] in the layout of native.c."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        columns = library(weight.dtype).panel_columns()
        pair = 4 // weight.itemsize
        panels = -(-self.out_features // columns)
        self.packed = zeros((panels, self.in_features // pair, columns, pair), weight.dtype)
        self.write(slice(0, len(weight)), weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product, summed in fp32 and rounded once to x's dtype."""
        panels, _, columns, _ = self.packed.shape
        x = x.contiguous()
        out = torch.empty(len(x), panels * columns)
        library(x.dtype).linear(
            x.data_ptr(),
            len(x),
            self.in_features,
            self.packed.data_ptr(),
            panels * columns,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        out = out[:, : self.out_features]
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)

    @torch.no_grad()
    def write(self, rows: slice, weight: Tensor) -> None:
        """Overwrites `rows` of W by weight [rows, in], of any float dtype and device.

        They begin at a panel, and end at one or at the end of W.
        """
        _, pairs, columns, pair = self.packed.shape
        padded = F.pad(weight.cpu(), (0, 0, 0, -len(weight) % columns))
        panels = padded.view(-1, columns, pairs, pair).transpose(1, 2)
        first = rows.start // columns
        self.packed[first : first + len(panels)].copy_(panels)


def pack(model: Qwen3) -> None:
    """Replaces the matrices of a model on a CPU, in place, where native.c can compute it.

    It takes head sizes that are multiples of 16, to 256, and multiples of 32 for the hidden sizes
    and for the columns of q, k and v. Quantised models stay as they are, and bfloat16 on a CPU
    without instructions for it.
    """
    config = model.config
    weight = model.embed_tokens.weight
    names = [name for name, _ in linears(model)]
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    head_fits = config.head_dim % STRIP == 0 and config.head_dim <= LARGEST_DIM
    panels_fit = all(size % WIDEST_PANEL == 0 for size in sizes)
    fits = head_fits and panels_fit
    if not (names and weight.is_cpu and fits and library(weight.dtype)):
        return
    for name in names:
        module = model.get_submodule(name)
        model.set_submodule(name, PackedLinear(module.weight, module.bias))
    if model.lm_head is None:
        model.lm_head = PackedLinear(weight)


class _Layer(ctypes.Structure):
    """`layer` of native.c: addresses, None where a model has no such tensor."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "input_norm",
            "q_norm",
            "k_norm",
            "post_attention_norm",
            "qkv",
            "qkv_bias",
            "o",
            "gate_up",
            "down",
        )
    ]


class _Decoder(ctypes.Structure):
    """`decoder` of native.c."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("embeddings", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("frequencies", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),
        ("depth", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("pages", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("attention_factor", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    """`step` of native.c."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("output_count", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("table_starts", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("output_rows", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("rotations", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


class Forward:
    """A step of a packed model over KV pages, in one call.

    k_cache and v_cache [layers, pages, Hkv, page_size, D], page_size a multiple of 16. Inside a
    page the order is native.c's.
    """

    def __init__(self, model: Qwen3, k_cache: Tensor, v_cache: Tensor):
        config = model.config
        self._config = config
        self._library = library(k_cache.dtype)
        depth, pages, kv_heads, page_size, dim = k_cache.shape
        output = model.lm_head.packed  # [panels, in / pair, columns, pair]
        self._outputs = output.shape[0] * output.shape[2]
        frequencies = model.rope_frequencies(k_cache.device)
        rows, attended = self._library.rows_at_once(), config.num_attention_heads * dim
        dtype, inner = k_cache.dtype, config.intermediate_size
        buffers = {
            "qkv": torch.empty(rows, attended + 2 * kv_heads * dim),
            "gate_up": torch.empty(rows, 2 * inner),
            "normed": torch.empty(rows, config.hidden_size, dtype=dtype),
            "attended": torch.empty(rows, attended, dtype=dtype),
            "gated": torch.empty(rows, inner, dtype=dtype),
        }
        self._kept = model, k_cache, v_cache, frequencies, buffers  # native.c has addresses alone

        layers = (_Layer * depth)(*(_layer(layer) for layer in model.layers))
        self._decoder = _Decoder(
            layers=layers,
            embeddings=model.embed_tokens.weight.data_ptr(),
            norm=model.norm.data_ptr(),
            output=output.data_ptr(),
            frequencies=frequencies.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            **{name: buffer.data_ptr() for name, buffer in buffers.items()},
            depth=depth,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            dim=dim,
            pages=pages,
            page_size=page_size,
            outputs=self._outputs,
            eps=config.rms_norm_eps,
            attention_factor=model.rope_attention_factor,
        )

    def __call__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        counts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        output_rows: Sequence[int],
    ) -> Tensor:
        """Returns the logits fp32 [len(output_rows), vocab] of the tokens that output_rows names.

        tokens and positions [T] are in parts of `counts` tokens, and their keys and values are
        stored. Each part reads the pages of its block table, and none that a later one writes.
        MemoryError if the system has no memory for the step.
        """
        table_starts = []  # of each token
        pages = []
        for count, table in zip(counts, block_tables, strict=True):
            table_starts += [len(pages)] * count
            pages += table
        given = {
            "tokens": tokens,
            "positions": positions,
            "table_starts": table_starts,
            "block_tables": pages,
            "output_rows": output_rows,
        }
        arrays = {name: array("q", numbers) for name, numbers in given.items()}  # of int64
        stream = torch.empty(len(tokens), self._config.hidden_size)
        rotations = torch.empty(len(tokens), self._config.head_dim)
        logits = torch.empty(len(output_rows), self._outputs)
        step = _Step(
            rows=len(tokens),
            output_count=len(output_rows),
            **{name: numbers.buffer_info()[0] for name, numbers in arrays.items()},
            stream=stream.data_ptr(),
            rotations=rotations.data_ptr(),
            logits=logits.data_ptr(),
        )
        failed = self._library.forward(
            ctypes.byref(self._decoder), ctypes.byref(step), torch.get_num_threads()
        )
        if failed:
            raise MemoryError(f"native.c: no memory for a step of {len(tokens)} tokens")
        return logits[:, : self._config.vocab_size]


def _layer(layer) -> _Layer:
    """Returns the addresses of a layer's weights."""
    attention = layer.self_attn
    return _Layer(
        input_norm=address(layer.input_layernorm),
        q_norm=address(attention.q_norm),
        k_norm=address(attention.k_norm),
        post_attention_norm=address(layer.post_attention_layernorm),
        qkv=address(attention.qkv_proj.packed),
        qkv_bias=address(attention.qkv_proj.bias),
        o=address(attention.o_proj.packed),
        gate_up=address(layer.gate_up_proj.packed),
        down=address(layer.down_proj.packed),
    )
