"""Loads a checkpoint for answering: an engine of the right dtype and pool, and the tool loop on it.

serve.py and evaluate.py begin here.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from nanorchestra.agent.loop import Rollout
from nanorchestra.config import RolloutSection
from nanorchestra.engine.cpu_runner import PAGE_SIZE
from nanorchestra.engine.engine import Engine
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.errors import UserError, require
from nanorchestra.formats.load import load_model
from nanorchestra.model.checkpoint import stored_dtype
from nanorchestra.model.native import library, pack
from nanorchestra.schemas import Json
from nanorchestra.tools.devices import own_device


def load_rollout(
    path: Path,
    settings: RolloutSection,
    sampling: Json,
    running: int,
    quantise: str | None = None,
    chats: bool = False,
    named: str = "",
    **engine_options: int,
) -> Rollout:
    """Returns a rollout of a checkpoint: in bfloat16 on a GPU, in float32 on a CPU.

    A checkpoint in bfloat16 stays so on a CPU that multiplies it, which is faster in half the
    memory. `sampling` has fields of SamplingParams. `running` attempts run at a time; the model's
    positions bound their context too. quantise: "int8" or "int4" rounds the linear layers.
    The KV pool of a GPU is what memory is free, unless engine_options of Engine say another; that
    of a CPU has room for `running` attempts. With `chats` the tokenizer may lack Qwen3's markers:
    such a model answers, but calls no tools. named: the user's word for the model, for the message
    that it lacks them. UserError if the checkpoint is not whole.
    """
    device = own_device()
    cuda = device.type == "cuda"
    dtype = str(_dtype(path, device)).removeprefix("torch.")
    model, tokenizer = load_model(path, str(device), dtype, quantise)
    pack(model)
    require(tokenizer, f"{path}: no tokenizer.json; it must lie beside the weights")
    if not chats:
        tokenizer.require_markers(named or path)
    context = min(settings.context_tokens, model.config.max_position_embeddings)
    if not cuda and not engine_options:
        pages_per_attempt = -(-context // PAGE_SIZE) + 1
        engine_options = {"num_pages": running * pages_per_attempt, "page_size": PAGE_SIZE}
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

    return Rollout(engine, tokenizer, params, replace(settings, context_tokens=context))


def _dtype(path, device) -> torch.dtype:
    """Returns the dtype of computing: bfloat16 on a GPU, and on a CPU if the weights are stored so.

    A CPU must multiply it, too.
    """
    half = device.type == "cuda" or stored_dtype(path) == "bfloat16" and library(torch.bfloat16)
    return torch.bfloat16 if half else torch.float32
