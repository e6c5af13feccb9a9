"""The dense decoder of Qwen3 and its kin, the one in PyTorch, of trainer and engine alike.

It says what a layer computes but for attention (attention.py) and the formulas of norm, activation
and rotation (ops.py, rope.py); native/native.c repeats all of them in C for CPUs. It works on
packed tokens, [T], without a batch dimension or padding. The caller supplies positions and an
attention object, which decides what attends to what. Qwen3, Qwen2.5 and Llama differ by three
switches of ModelConfig: the norm of queries and keys, a bias on q, k and v, and the scaling of the
rotary frequencies. checkpoint.py reads and writes configurations and weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.common import wide_product
from nanorchestra.model.attention import Attention
from nanorchestra.model.ops import add_rms_norm, rms_norm, swiglu
from nanorchestra.model.rope import RopeScaling, Rotation, scaled_frequencies


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
    qk_norm: bool = True  # RMSNorm of each query and key head
    attention_bias: bool = False  # of the matrices of q, k and v
    rope: RopeScaling | None = None  # None: the frequencies of rope_theta as they are


class SelfAttention(nn.Module):
    """Grouped-query attention; one matrix computes q, k and v.

    An attention object reads `index`, `kv_heads` and the norms, which are None without qk_norm.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.kv_heads = config.num_key_value_heads
        self.eps = config.rms_norm_eps
        heads, head_dim = config.num_attention_heads, config.head_dim
        rows = (heads + 2 * self.kv_heads) * head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=False)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(head_dim))
            self.k_norm = nn.Parameter(torch.ones(head_dim))

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """Returns the attention's output [T, hidden] of x [T, hidden]."""
        qkv = self.qkv_proj(x)  # [T, (H + 2 Hkv) D]
        out = attention(self, qkv, rotation)  # [T, H, D]
        return self.o_proj(out.flatten(1))


class DecoderLayer(nn.Module):
    """One layer: x + attention(norm(x)), then x + SwiGLU(norm(x)).

    The last addition is left to the next layer, where one kernel adds and normalises: what goes
    from layer to layer is (x, residual), and their sum is the residual stream. With `recompute`
    set, training keeps only that sum, and the backward pass computes the layer again (Chen et al.
    2016, arXiv 1604.06174).
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.eps = config.rms_norm_eps
        self.recompute = False
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.self_attn = SelfAttention(config, index)
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Returns (x, residual), both [T, hidden], from those of the layer before.

        The returned x is the MLP's output, which is not added to the residual yet. residual None:
        x is the whole stream, the embeddings.
        """
        if self.recompute and torch.is_grad_enabled():
            if residual is not None:
                x = x + residual  # outside of the checkpoint, which then keeps one tensor
            return checkpoint(
                self._forward,
                x,
                None,
                rotation,
                attention,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return self._forward(x, residual, rotation, attention)

    def _forward(self, x, residual, rotation, attention) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = x
            x = rms_norm(x, self.input_layernorm, self.eps)
        else:
            x, residual = add_rms_norm(x, residual, self.input_layernorm, self.eps)
        x = self.self_attn(x, rotation, attention)
        x, residual = add_rms_norm(x, residual, self.post_attention_layernorm, self.eps)
        x = self.down_proj(swiglu(self.gate_up_proj(x)))
        return x, residual


class Qwen3(nn.Module):
    """The decoder. `lm_head` is None if the output is tied to the embeddings.

    `pack` of native/ gives a tied model one too: the embeddings again, in the layout of native.c.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        table = torch.empty(config.vocab_size, config.hidden_size)
        # nn.Embedding() would draw weights, which on "meta" imports torch._dynamo, slow to import.
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """Returns the matrix of the logits [vocab, hidden]; a packed or quantised head has none."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> torch.Generator:
        """Draws normal weights of std `initializer_range`; norms are 1 and biases 0.

        The same for a seed on every device and dtype. The two projections into the residual stream
        are divided by sqrt(2 * layers), as in GPT-2 (Radford et al. 2019, section 2.3). Returns
        the generator, for draws that follow.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        residual = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            std = self.config.initializer_range * scale
            parameter.copy_(values.normal_(0.0, std, generator=generator))
        return generator

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Returns the hidden states after the final norm, [T, hidden]; inputs are integers [T]."""
        rotation = self.rotation(positions)
        x = self.embed_tokens(tokens)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, attention)
        hidden, _ = add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [T, vocab] of hidden [T, hidden]."""
        if self.lm_head is None:
            return F.linear(hidden, self.embed_tokens.weight)
        return self.lm_head(hidden)

    def wide_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the logits in fp32, [T, vocab]; in `out` (fp32) if that is given.

        A GPU samples from these: `logits` would round them to the dtype of the weights. A head that
        is no nn.Linear, a quantised one, has a `product` of its own.
        """
        if self.lm_head is None or isinstance(self.lm_head, nn.Linear):
            return wide_product(hidden, self.output_weight.T, out)
        logits = self.lm_head.product(hidden, torch.float32)
        return logits if out is None else out.copy_(logits)

    def rope_frequencies(self, device: torch.device) -> Tensor:
        """Returns the rotary angles per position, fp32 [head_dim / 2] on `device`."""
        config = self.config
        return scaled_frequencies(config.head_dim, config.rope_theta, config.rope, device)

    @property
    def rope_attention_factor(self) -> float:
        """Returns what cosines and sines are multiplied by: YaRN's factor, else 1."""
        return 1.0 if self.config.rope is None else self.config.rope.attention_factor

    def rotation(self, positions: Tensor) -> Rotation:
        """Returns the rotation of positions, integers [T]."""
        angles = positions[:, None].float() * self.rope_frequencies(positions.device)  # [T, D / 2]
        cos, sin = angles.cos(), angles.sin()
        factor = self.rope_attention_factor
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return Rotation(cos, sin)
