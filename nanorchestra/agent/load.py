"""Loads the checkpoint that serve.py and evaluate.py run."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from nanorchestra.agent.loop import AttemptLimits, Rollout
from nanorchestra.engine.engine import Engine
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.errors import UserError, require
from nanorchestra.model.hf_config import stored_dtype
from nanorchestra.model.native import library, pack
from nanorchestra.model.weights import load_model
from nanorchestra.schemas import Json
from nanorchestra.tools.devices import device_named

NANO = Path(__file__).resolve().parents[2] / "assets" / "nano"  # the bundled checkpoint
PAGE = 16  # tokens of a KV page


def load_rollout(
    path: Path,
    limits: AttemptLimits,
    sampling: Json,
    running: int,
    quantise: str | None = None,
    device: torch.device | None = None,
    least_pool: bool = False,
    **engine_options: int,
) -> Rollout:
    """Returns a rollout of a checkpoint: in bfloat16 on a GPU, in float32 on a CPU.

    A checkpoint in bfloat16 stays so on a CPU that multiplies it, which is faster in half the
    memory. `sampling` has fields of SamplingParams. `running` attempts run at a time; the model's
    positions bound their context too. quantise: "int8", "int4" or "fp8" rounds the linear layers.
    device: None: this thread's GPU, else the CPU. The KV pool of a GPU is what memory is free,
    unless engine_options of Engine say another, or `least_pool`, with which it has room for
    `running` attempts, as on a CPU. UserError if the checkpoint is not whole.
    """
    device = device or device_named()
    cuda = device.type == "cuda"
    half = cuda or stored_dtype(path) == "bfloat16" and library(torch.bfloat16)
    dtype = "bfloat16" if half else "float32"
    model, tokenizer = load_model(path, str(device), dtype, quantise)
    pack(model)
    require(tokenizer, f"{path}: no tokenizer.json; it must lie beside the weights")
    context = min(limits.context_tokens, model.config.max_position_embeddings)
    if (least_pool or not cuda) and not engine_options:
        pages_per_attempt = -(-context // PAGE) + 1
        engine_options = {"num_pages": running * pages_per_attempt, "page_size": PAGE}
    try:
        engine = Engine(
            model, tokenizer, max_running=running, max_context=context, **engine_options
        )
    except (OSError, torch.OutOfMemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else "out of GPU memory"
        raise UserError(
            f"{path}: the KV cache of {running} x {context:,} tokens does not fit in the memory "
            f"({reason}); max_position_embeddings in its config.json bounds the context"
        ) from None
    if cuda:
        print(f"KV pool: {engine.limits.pool:,} tokens", file=sys.stderr)

    def params(seed, budget):
        return SamplingParams(budget, seed=seed, **sampling)

    return Rollout(engine, tokenizer, params, replace(limits, context_tokens=context))
