"""Initial weights that can already copy a little: a draft of an induction circuit, which training then completes.

A small model finds out late, and by chance, how to copy from its prompt (Olsson et al. 2022, arXiv 2209.11895): nano needed 300 warm-start
steps to copy digits with one seed, and never copied them with another. The circuit has two halves, one in each of two layers:

    first layer    head d of the first group looks d + 1 ids back and notes the id that stands there
    second layer   a head looks for the position whose noted ids are the latest ids of the query, and says what stands there

Both are written into the random weights, which they outweigh; nothing is frozen, and nothing depends on the data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# q_norm and k_norm at the start. At 1.0 no attention score exceeds sqrt(head_dim), so a small head
# spreads its attention over hundreds of keys.
NORM = 1.3
FAST = 3  # rotations that tell one offset from the next,
FAST_NORM = 2.5  # their weight in q_norm and k_norm of the first layer,
LOOK_BACK = 5.0  # and the strength of looking back, in units of the random weights
DISTANCE = 200  # ids over which a rotation must stay below one radian to compare codes by it
MATCH_NORM = 1.8  # the weight of these rotations in q_norm and k_norm of the second layer,
MATCH = 8.0  # the strength of matching,
KEEP = 0.1  # what is left of the random weights there,
RECENT = (1.0, 0.7, 0.5)  # how much an equal id counts, one, two and three ids back,
COPIERS = 2  # how many heads copy: the first matches one id, the second two,
COPY = 4.0  # and how loud they are


@torch.no_grad()
def draft_induction(model, generator: torch.Generator) -> None:
    """Write the circuit into a model that Qwen3.init_weights has filled, and set its q_norm and k_norm.

    `generator` is the one that init_weights returns. The circuit needs two layers and slow enough
    rotations; other models only get the norms.
    """
    for block in model.layers:
        block.self_attn.q_norm.fill_(NORM)
        block.self_attn.k_norm.fill_(NORM)
    config, frequencies = model.config, model.rope_frequencies(torch.device("cpu"))
    slow = (torch.cat((frequencies, frequencies)) * DISTANCE < 1).nonzero()[:, 0]
    if config.num_hidden_layers < 2 or not len(slow) or len(frequencies) < FAST:
        return
    parts = ("qkv_proj.weight", "o_proj.weight", "q_norm", "k_norm")
    parameters = [model.embed_tokens.weight] + [
        block.self_attn.get_parameter(part) for block in model.layers[:2] for part in parts
    ]
    embedding, *layers = (
        parameter.float().cpu() for parameter in parameters
    )  # fp32, so that any dtype starts alike
    first, second = layers[:4], layers[4:]
    common = _look_back(config, embedding, *first, frequencies, generator)
    _copy(config, first, second, slow, common, generator)
    for parameter, draft in zip(parameters, [embedding, *layers]):
        parameter.copy_(draft)


def _look_back(
    config,
    embedding: Tensor,
    qkv: Tensor,
    out: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    frequencies: Tensor,
    generator,
) -> Tensor:
    """Lets the heads of the first group look 1, 2, 3, ... ids back. Returns the direction [hidden] that all embeddings now share.

    The common component is as large as the rest of an embedding; it shifts all logits alike. Keys and queries made from it are k and
    R(-offset) k everywhere, R the rotation of RoPE, so that the score is largest at that offset.
    """
    dim, half = config.head_dim, config.head_dim // 2
    direction = F.normalize(
        torch.randn(config.hidden_size, generator=generator, device="cpu"), dim=0
    )

    def start(row: int, offset: int) -> None:
        rotated = torch.zeros(dim, device="cpu")
        rotated[:FAST], rotated[half : half + FAST] = (
            (frequencies[:FAST] * offset).cos(),
            -(frequencies[:FAST] * offset).sin(),
        )
        qkv[row : row + dim] += (
            LOOK_BACK * config.initializer_range * dim**0.5 * rotated[:, None] * direction
        )

    embedding += config.initializer_range * config.hidden_size**0.5 * direction
    for head in range(_group(config)):
        start(head * dim, head + 1)
    start(config.num_attention_heads * dim, 0)  # the key head that they share
    for norm in (q_norm, k_norm):
        norm[[*range(FAST), *range(half, half + FAST)]] = FAST_NORM
    return direction


def _copy(
    config,
    first: list[Tensor],
    second: list[Tensor],
    slow: Tensor,
    common: Tensor,
    generator: torch.Generator,
) -> None:
    """Lets the first heads of the second layer match what the first layer noted, and say what stands at the match.

    The first layer writes O_d V e(x) for the id x that stands d back, V and O_d its value and output weights. O_d^T reads V e(x) back, up to
    a factor and noise, so that a key sees the ids before it and a query the latest ids through the same random codes C_d:

        key(s) = sum_d C_d O_d^T r(s)        query(t) = C_1 V r(t) + sum_{d > 1} C_d O_{d-1}^T r(t)        r the residual stream

    The codes lie in the `slow` dimensions, which RoPE turns so little that distance does not matter. What is in `common` to all ids is
    left out of the values: it would make all of them alike.
    """
    (qkv, out, _, _), (next_qkv, next_out, *norms) = first, second
    dim, depth = config.head_dim, min(len(RECENT), _group(config))
    keys, values = (
        config.num_attention_heads * dim,
        (config.num_attention_heads + config.num_key_value_heads) * dim,
    )

    def distinct(weights: Tensor) -> Tensor:
        value = weights[values : values + dim]
        value -= torch.outer(value @ common, common)
        return value

    def match(row: int, readers: list[Tensor]) -> None:
        next_qkv[row : row + dim] *= KEEP
        next_qkv[row + slow] += MATCH * sum(readers)

    codes = [
        torch.randn(len(slow), dim, generator=generator, device="cpu") * dim**-0.5 * recent
        for recent in RECENT[:depth]
    ]
    noted = [out[:, d * dim : (d + 1) * dim].T for d in range(depth)]
    seen, said = [distinct(qkv), *noted], distinct(next_qkv)
    match(keys, [code @ note for code, note in zip(codes, noted)])
    for norm in norms:
        norm[slow] = MATCH_NORM
    for head in range(min(COPIERS, _group(config))):
        match(head * dim, [code @ reader for code, reader in zip(codes[: head + 1], seen)])
        next_out[:, head * dim : (head + 1) * dim] += COPY * said.T


def _group(config) -> int:
    """Query heads for each key/value head."""
    return config.num_attention_heads // config.num_key_value_heads
