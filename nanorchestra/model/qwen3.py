"""The Qwen3 dense decoder, used by the trainer and the engine alike.

It computes packed tokens, [T], without a batch dimension or padding. The caller supplies positions
and `attend(layer, q, k, v)`, which decides what attends to what. hf_config.py reads configurations,
weights.py reads and writes weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanorchestra.model.ops import (
    Attend,
    apply_rope,
    rms_norm,
    rope_frequencies,
    rope_tables,
    swiglu,
)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. heads * head_dim may differ from the hidden size."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    max_position_embeddings: int = 40960
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float = 0.02


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys; one matrix computes q, k and v."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps, self.head_dim = layer, config.rms_norm_eps, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden = config.hidden_size
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(hidden, rows, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = nn.Parameter(torch.ones(self.head_dim))
        self.k_norm = nn.Parameter(torch.ones(self.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the attention's output [T, hidden]: x [T, hidden], cos and sin [T, 1, D]."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [T, H + 2 Hkv, D]
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        # One norm and one rotation for q and k: in a small model, calls cost more than arithmetic.
        weight = torch.cat(
            (self.q_norm.expand(self.heads, -1), self.k_norm.expand(self.kv_heads, -1))
        )
        qk = apply_rope(rms_norm(qk, weight, self.eps), cos, sin)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        return self.o_proj(attend(self.layer, q, k, v).flatten(1))


class Block(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + SwiGLU(norm(x)).

    With `recompute` set, training keeps only x and the backward pass computes the layer again
    (Chen et al. 2016, arXiv 1604.06174).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.eps = config.rms_norm_eps
        self.recompute = False
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the layer's output [T, hidden]: x [T, hidden], cos and sin [T, 1, D]."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self._forward, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False
            )
        return self._forward(x, cos, sin, attend)

    def _forward(self, x, cos, sin, attend) -> Tensor:
        x = x + self.self_attn(rms_norm(x, self.input_layernorm, self.eps), cos, sin, attend)
        gate_up = self.gate_up_proj(rms_norm(x, self.post_attention_layernorm, self.eps))
        return x + self.down_proj(swiglu(gate_up))


class Qwen3(nn.Module):
    """The decoder. `lm_head` is None if the output is tied to the embeddings.

    native.py alone gives such a model one: a copy of the embeddings.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        table = torch.empty(config.vocab_size, config.hidden_size)
        # nn.Embedding() would draw weights, which on "meta" imports torch._dynamo: 1.4 s
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """Return the matrix of the logits [vocab, hidden]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> torch.Generator:
        """Draw normal weights of std `initializer_range`, and norms of 1.

        The same for a seed on every device and dtype. The two projections into the residual stream
        are divided by sqrt(2 * layers), as in GPT-2 (Radford et al. 2019, section 2.3). Returns
        the generator, for draws that follow.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        residual = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            std = self.config.initializer_range * scale
            parameter.copy_(values.normal_(0.0, std, generator=generator))
        return generator

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states after the final norm, [T, hidden]; inputs are int64 [T]."""
        x = self.embed_tokens(tokens)
        cos, sin = rope_tables(positions, self.rope_frequencies(positions.device), x.dtype)
        for block in self.layers:
            x = block(x, cos, sin, attend)
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, vocab] of hidden [T, hidden]."""
        if self.lm_head is None:
            return F.linear(hidden, self.embed_tokens.weight)
        return self.lm_head(hidden)

    def rope_frequencies(self, device: torch.device) -> Tensor:
        """Return the rotary angles per position, fp32 [head_dim / 2] on `device`."""
        return rope_frequencies(self.config.head_dim, self.config.rope_theta, device)
