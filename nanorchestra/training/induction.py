"""Writes a draft of an induction circuit into initial weights, which training completes.

A small model discovers copying from its prompt late and by chance (Olsson et al. 2022, arXiv
2209.11895). The circuit has two halves, one in each of the first two layers:

    first layer    head d of the first group attends d + 1 ids back and writes the id found there
    second layer   a head attends to the position whose written ids are the latest ids of the query,
                   and outputs the id there

Both are added to the random weights, which they outweigh. Nothing is frozen, and nothing depends on
data.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nanorchestra.model.qwen3 import Qwen3

# q_norm and k_norm at the start. At 1.0 no attention score exceeds sqrt(head_dim), so a small head
# spreads its attention over hundreds of keys.
NORM = 1.3
FAST = 3  # RoPE frequencies that tell one offset from the next
FAST_NORM = 2.5  # their weight in q_norm and k_norm of the first layer
LOOK_BACK = 5.0  # strength of looking back, in units of the random weights
DISTANCE = 200  # ids over which a slow rotation stays below one radian, so that codes compare
MATCH_NORM = 1.8  # weight of the slow rotations in q_norm and k_norm of the second layer
MATCH = 8.0  # strength of matching
KEEP = 0.1  # share of the random weights that the matching heads keep
RECENT = (1.0, 0.7, 0.5)  # weight of an equal id one, two and three ids back
COPIERS = 2  # heads that copy: the first matches one id, the second two
COPY = 4.0  # strength of copying


@torch.no_grad()
def draft_induction(model: Qwen3, generator: torch.Generator) -> None:
    """Writes the circuit into a model that Qwen3.init_weights has filled, and sets its norms.

    `generator` is the one that init_weights returns. The model is a float32 one on the CPU, of at
    least two layers, with three or more query heads for each key head.
    """
    for block in model.layers:
        block.self_attn.q_norm.fill_(NORM)
        block.self_attn.k_norm.fill_(NORM)
    config, frequencies = model.config, model.rope_frequencies(torch.device("cpu"))
    slow = (torch.cat((frequencies, frequencies)) * DISTANCE < 1).nonzero()[:, 0]
    first, second = (block.self_attn for block in model.layers[:2])
    common = _look_back(config, model.embed_tokens.weight, first, frequencies, generator)
    _copy(config, first, second, slow, common, generator)


def _look_back(config, embedding, layer, frequencies, generator) -> Tensor:
    """Lets the heads of the first group attend 1, 2, 3, ... ids back.

    Returns the direction [hidden] that is added to all embeddings. It is as large as the rest of an
    embedding, and shifts all logits alike. Keys and queries made from it are k and R(-offset) k
    everywhere, R the rotation of RoPE, so that the score is largest at that offset.
    """
    qkv, half = layer.qkv_proj.weight, config.head_dim // 2
    std, heads = config.initializer_range, config.num_attention_heads
    direction = F.normalize(torch.randn(config.hidden_size, generator=generator), dim=0)
    embedding += std * config.hidden_size**0.5 * direction
    fast = torch.cat((torch.arange(FAST), torch.arange(FAST) + half))
    # The query heads of the group, and the key head that they share.
    group = heads // config.num_key_value_heads
    offsets = {head: head + 1 for head in range(group)} | {heads: 0}
    for head, offset in offsets.items():
        angles = frequencies[:FAST] * offset
        rotated = torch.cat((angles.cos(), -angles.sin()))
        strength = LOOK_BACK * std * config.head_dim**0.5
        qkv[head * config.head_dim + fast] += strength * rotated[:, None] * direction
    layer.q_norm[fast] = layer.k_norm[fast] = FAST_NORM
    return direction


def _copy(config, first, second, slow, common, generator):
    """Lets the first heads of the second layer match the ids that the first layer wrote.

    The first layer writes O_d V e(x) for the id x that stands d back, V and O_d its value and
    output weights. O_d^T reads V e(x) back, up to a factor and noise, so that a key sees the ids
    before it and a query the latest ids through the same random codes C_d:

        key(s)   = sum_d C_d O_d^T r(s)                          r: the residual stream
        query(t) = C_1 V r(t) + sum_{d > 1} C_d O_{d-1}^T r(t)

    The codes lie in the `slow` dimensions, which RoPE turns so little that distance does not
    matter. What all ids have in `common` is removed from the values, which it would make alike.
    """
    qkv, out = second.qkv_proj.weight, second.o_proj.weight
    dim = config.head_dim
    keys = config.num_attention_heads * dim
    values = keys + config.num_key_value_heads * dim

    def distinct(weights: Tensor) -> Tensor:
        value = weights[values : values + dim]
        value -= torch.outer(value @ common, common)
        return value

    def match(row: int, readers: list[Tensor]) -> None:
        seen = [code @ reader for code, reader in zip(codes, readers, strict=False)]
        qkv[row : row + dim] *= KEEP
        qkv[row + slow] += MATCH * sum(seen)

    codes = [
        torch.randn(len(slow), dim, generator=generator) * dim**-0.5 * recent for recent in RECENT
    ]
    written = [first.o_proj.weight[:, d * dim : (d + 1) * dim].T for d in range(len(RECENT))]
    latest, said = [distinct(first.qkv_proj.weight), *written], distinct(qkv)
    match(keys, written)
    second.q_norm[slow] = second.k_norm[slow] = MATCH_NORM
    for head in range(COPIERS):
        match(head * dim, latest[: head + 1])
        out[:, head * dim : (head + 1) * dim] += COPY * said.T
