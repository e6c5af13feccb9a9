"""The Qwen3 dense decoder: its configuration, the published shapes, and one definition used by trainer and engine alike.

It works on packed tokens, [T], without batch dimension or padding; what attends to what is the caller's business, through `attend`.
Reading and writing checkpoints is in weights.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanorchestra.errors import UserError
from nanorchestra.model.ops import (
    Attend,
    apply_rope,
    linear,
    rms_norm,
    rope_frequencies,
    rope_tables,
    swiglu,
)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Qwen3 decoder. head_dim is free: heads * head_dim need not be the hidden size."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    max_position_embeddings: int = 40960
    rope_theta: float = 1_000_000.0
    rope_scaling: dict[str, Any] | None = None  # None or YaRN, with the keys of a HF config
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float = 0.02
    awq_group_size: int | None = (
        None  # input columns that share a scale in an AWQ 4-bit checkpoint; None for full-precision weights
    )

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """From the contents of a HF config.json, in the `rope_theta`/`rope_scaling` form or the newer `rope_parameters` one.

        Of quantised checkpoints, AWQ's with 4 bits in the "gemm" layout are taken.
        Raises UserError, naming `source`, for a field that is missing, malformed, or asks for something this decoder does not do.
        """
        return _ConfigReader(data, source).read()

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json that transformers (4.51 and later) loads as Qwen3ForCausalLM."""
        ours = asdict(self)
        eos = list(ours.pop("eos_token_ids"))
        del ours["awq_group_size"]
        return ours | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None,
        }


LARGEST = (
    2**24
)  # of any size in a config.json: far above all that are published, and products of two and three of them can still be computed with


class _ConfigReader:
    """Checks the fields of a config.json one by one; every refusal is one line."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data, self.source = data, source

    def refuse(self, field: str, value: Any, right: str) -> UserError:
        return UserError(f"{self.source}: {field} = {value!r}: expected {right}")

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.data.get(field)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise self.refuse(field, value, f"a positive integer, at most {LARGEST}")
        return value

    def number(self, field: str, default: float | None = None, within: str = "") -> float:
        """A positive number; `within` names the object that holds the field."""
        value = (self.data[within] if within else self.data).get(field)
        if value is None:
            value = default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise self.refuse(f"{within}.{field}" if within else field, value, "a positive number")
        return value

    def boolean(self, field: str) -> bool:
        value = self.data.get(field, False)
        if not isinstance(value, bool):
            raise self.refuse(field, value, "true or false")
        return value

    def read(self) -> ModelConfig:
        if not isinstance(self.data, Mapping):
            raise UserError(f"{self.source}: expected a JSON object")
        if self.data.get("model_type") != "qwen3":
            raise self.refuse(
                "model_type", self.data.get("model_type"), "'qwen3' (a dense Qwen3 decoder)"
            )
        known, named = ("Qwen3ForCausalLM", "Qwen3Model"), self.data.get("architectures")
        if named is not None and (
            not isinstance(named, list) or not any(name in known for name in named)
        ):
            raise self.refuse("architectures", named, f"a list with {' or '.join(known)}")
        if self.data.get("hidden_act", "silu") != "silu":
            raise self.refuse(
                "hidden_act", self.data["hidden_act"], "'silu', the only one supported"
            )
        layers, heads = self.integer("num_hidden_layers"), self.integer("num_attention_heads")
        kv_heads, head_dim = (
            self.integer("num_key_value_heads", heads),
            self.integer("head_dim", 128),
        )
        if heads % kv_heads:
            raise self.refuse(
                "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}"
            )
        if head_dim % 2 or heads * head_dim > LARGEST:
            raise self.refuse(
                "head_dim",
                head_dim,
                f"an even number, times num_attention_heads = {heads} at most {LARGEST}",
            )
        self.check_sliding_window(layers)
        max_position = self.integer("max_position_embeddings", 32768)
        theta, scaling = self.rope(max_position)
        return ModelConfig(
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            intermediate_size=self.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=self.boolean("tie_word_embeddings"),
            attention_bias=self.boolean("attention_bias"),
            eos_token_ids=eos_ids(
                self.data.get("eos_token_id"), self.source, self.integer("vocab_size")
            ),
            initializer_range=self.number("initializer_range", 0.02),
            awq_group_size=self.awq_group_size(),
        )

    def awq_group_size(self) -> int | None:
        data = self.data.get("quantization_config")
        if data is None:
            return None
        if not isinstance(data, Mapping):
            raise self.refuse("quantization_config", data, "an object or null")
        group = data.get("group_size", 128)
        checks = {
            "quant_method": (data.get("quant_method") == "awq", "'awq', the only one supported"),
            "bits": (data.get("bits") == 4, "4, the only one supported"),
            "version": (
                str(data.get("version", "gemm")).lower() == "gemm",
                "'gemm', the only one supported",
            ),
            "group_size": (
                isinstance(group, int) and group > 0 and group % 32 == 0,
                "a positive multiple of 32",
            ),
            # either way the zero points stand in the checkpoint, and are read from there
            "zero_point": (isinstance(data.get("zero_point", True), bool), "true or false"),
        }
        for field, (right, expected) in checks.items():
            if not right:
                raise self.refuse(f"quantization_config.{field}", data.get(field), expected)
        return group

    def check_sliding_window(self, layers: int) -> None:
        kinds = self.data.get("layer_types") or []
        for kind in kinds:
            if kind != "full_attention":
                raise self.refuse(
                    "layer_types",
                    kind,
                    "'full_attention' in every layer (sliding windows are not supported)",
                )
        in_use = self.data.get("use_sliding_window") and self.data.get("sliding_window") is not None
        if in_use and not kinds and self.data.get("max_window_layers", 28) < layers:
            raise self.refuse(
                "use_sliding_window", True, "false (sliding windows are not supported)"
            )

    def rope(self, max_position: int) -> tuple[float, dict[str, Any] | None]:
        within = "rope_scaling" if self.data.get("rope_scaling") else "rope_parameters"
        rope = self.data.get(within) or {}
        if not isinstance(rope, Mapping):
            raise self.refuse(within, rope, "an object or null")
        theta = self.number(
            "rope_theta", 10_000.0, within if rope.get("rope_theta") is not None else ""
        )
        rotated = rope.get("partial_rotary_factor", self.data.get("partial_rotary_factor", 1.0))
        if rotated != 1.0:
            raise self.refuse("partial_rotary_factor", rotated, "1.0, the only one supported")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return float(theta), None
        if kind != "yarn":
            raise self.refuse(f"{within}.rope_type", kind, "'default' or 'yarn'")
        original = self.number("original_max_position_embeddings", max_position, within)
        scaling = {
            "rope_type": "yarn",
            "factor": self.number("factor", max_position / original, within),
            "original_max_position_embeddings": original,
        }
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if rope.get(name) is not None:
                scaling[name] = self.number(name, None, within)
        if "truncate" in rope:
            scaling["truncate"] = bool(rope["truncate"])
        return float(theta), scaling


def eos_ids(value: Any, source: str, vocab_size: int) -> tuple[int, ...]:
    """The `eos_token_id` of a HF config, an int, a list of ints or null, as a tuple. Raises UserError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
        raise UserError(
            f"{source}: eos_token_id = {value!r}: expected a token id or a list of them, below vocab_size = {vocab_size}"
        )
    return tuple(ids)


class Linear(nn.Linear):
    """nn.Linear by `ops.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys; q, k and v come from one matrix."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps, self.head_dim = layer, config.rms_norm_eps, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = Linear(
            self.heads * self.head_dim, config.hidden_size, bias=config.attention_bias
        )
        self.q_norm = nn.Parameter(torch.ones(self.head_dim))
        self.k_norm = nn.Parameter(torch.ones(self.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [T, hidden] -> [T, hidden]; cos and sin [T, 1, D]."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [T, H + 2 Hkv, D]
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        # one norm and one rotation for queries and keys together: on a small model the calls cost more than the arithmetic
        weight = torch.cat(
            (self.q_norm.expand(self.heads, -1), self.k_norm.expand(self.kv_heads, -1))
        )
        qk = apply_rope(rms_norm(qk, weight, self.eps), cos, sin)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        return self.o_proj(attend(self.layer, q, k, v).flatten(1))


class Block(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + SwiGLU(norm(x)). The unit of sharding and of activation checkpointing."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.recompute = False  # in training: keep only x for the backward, which computes the layer once more (Chen et al. 2016, arXiv 1604.06174)
        self.input_layernorm = nn.Parameter(torch.ones(config.hidden_size))
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.Parameter(torch.ones(config.hidden_size))
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self._forward, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False
            )
        return self._forward(x, cos, sin, attend)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(rms_norm(x, self.input_layernorm, self.eps), cos, sin, attend)
        return x + self.down_proj(
            swiglu(self.gate_up_proj(rms_norm(x, self.post_attention_layernorm, self.eps)))
        )


class Qwen3(nn.Module):
    """The decoder. Invariant: tied models have no lm_head; `output_weight` is the [vocab, hidden] matrix of the logits either way.

    The linear layers may be quantise.QuantisedLinear instead; an lm_head of that kind has `logits`, but no `output_weight`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        # plain attributes, not buffers: the frequencies stay fp32 when the model is cast
        frequencies, self._rope_factor = rope_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self._rope_frequencies = {torch.device("cpu"): frequencies}

    @property
    def output_weight(self) -> Tensor:
        """[vocab, hidden]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def init_weights(self, seed: int) -> torch.Generator:
        """Normal weights of std `initializer_range`, zero biases, norms of 1; the same for a seed on every device and dtype.

        The two projections into the residual stream are divided by sqrt(2 * layers), as in GPT-2
        (Radford et al. 2019, section 2.3). Returns the generator, for draws that follow.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        residual = (2 * self.config.num_hidden_layers) ** -0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    scale = (
                        residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                    )
                    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                    parameter.copy_(
                        values.normal_(
                            0.0, self.config.initializer_range * scale, generator=generator
                        )
                    )
        return generator

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens and positions int64 [T] -> hidden states after the final norm [T, hidden]."""
        x = self.embed_tokens(tokens)
        cos, sin = rope_tables(
            positions, self._frequencies_on(positions.device), self._rope_factor, x.dtype
        )
        for block in self.layers:
            x = block(x, cos, sin, attend)
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, vocab]."""
        return (
            linear(hidden, self.embed_tokens.weight)
            if self.lm_head is None
            else self.lm_head(hidden)
        )

    def _frequencies_on(self, device: torch.device) -> Tensor:
        if device not in self._rope_frequencies:
            self._rope_frequencies[device] = self._rope_frequencies[torch.device("cpu")].to(device)
        return self._rope_frequencies[device]


_BIG = ModelConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    eos_token_ids=(151645,),
)

PRESETS: dict[str, ModelConfig] = {
    "nano": ModelConfig(
        vocab_size=896,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": replace(
        _BIG,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": replace(
        _BIG,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": replace(_BIG, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "qwen3-8b": _BIG,
    "qwen3-14b": replace(
        _BIG,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
    ),
    "qwen3-32b": replace(
        _BIG,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
    ),
}
