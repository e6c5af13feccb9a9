"""Loads a model by the user's word for it: for the library, for serve.py and evaluate.py."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorchestra import formats
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import RolloutSection
from nanorchestra.engine.engine import Engine
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.errors import UserError, require
from nanorchestra.formats.awq import awq_tensors, is_awq
from nanorchestra.model.checkpoint import load_checkpoint, stored_dtype
from nanorchestra.model.native import library, pack
from nanorchestra.model.quantise import FourBit
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.schemas import Json
from nanorchestra.tools.devices import device_named

PAGE = 16  # tokens of a KV page
DOWNLOAD_S = 24 * 3600.0  # that ranks wait for the download of another one


def open_model(word: str | Path) -> tuple[Path, Iterator[tuple[str, Tensor | FourBit]] | None]:
    """Returns the directory that a word for a model means, and its tensors if it is no plain one.

    load_checkpoint takes both. Raises UserError.
    """
    directory = formats.open(word)
    return directory, awq_tensors(directory) if is_awq(directory) else None


def fetch(word: str, ranks: Any) -> str:
    """Returns the word, a hub id with its commit, once the model is on every node. UserError.

    One rank of a node downloads it, or converts a GGUF file. All ranks, of the class
    training.distributed.Ranks, call this.
    """
    name = ranks.broadcast(formats.pinned(word) if ranks.first else "")
    waiting = ranks.new_group(DOWNLOAD_S)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with _interrupted_at_once():
            formats.open(name)
    waiting.barrier()
    return name


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Lets SIGINT and SIGTERM end a download; train.py takes them as a wish to end after a step."""
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as a shell starts a job in background
            handlers[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def load_model(
    word: str | Path,
    device: str = "cpu",
    dtype: str | None = "float32",
    quantise: str | None = None,
    build: Callable[[ModelConfig], Qwen3] = Qwen3,
) -> tuple[Qwen3, Tokenizer | None]:
    """Returns the model of a word and its tokenizer, None without tokenizer.json.

    `word` is a directory in Hugging Face layout, a .gguf file or a hub id, "Qwen/Qwen3-0.6B".
    dtype: of computing; float32 takes twice the memory of a checkpoint in bfloat16. quantise:
    "int8" or "int4" rounds the matrices as they are read; "int4" holds those of AutoAWQ as they are
    stored. `build` makes the model of a configuration. On a CPU, `pack` it before an Engine is
    made. Raises UserError.
    """
    directory, tensors = open_model(word)
    model, tokenizer = load_checkpoint(directory, device, dtype, quantise, build, tensors)
    return model, tokenizer and with_chat(tokenizer, directory)


def with_chat(tokenizer: Tokenizer, directory: Path) -> Tokenizer:
    """Gives a tokenizer without Qwen3's markers the directory's own chat format; returns it.

    UserError if the directory's is wrong.
    """
    if not tokenizer.markers:
        from nanorchestra.formats.template import TemplateFormat

        tokenizer.chat = TemplateFormat(tokenizer, directory)
    return tokenizer


def _dtype(path, device) -> torch.dtype:
    """Returns the dtype of computing: bfloat16 on a GPU, and on a CPU if the weights are stored so.

    A CPU must multiply it, too.
    """
    half = device.type == "cuda" or stored_dtype(path) == "bfloat16" and library(torch.bfloat16)
    return torch.bfloat16 if half else torch.float32


def load_rollout(
    path: Path,
    settings: RolloutSection,
    sampling: Json,
    running: int,
    quantise: str | None = None,
    chats: bool = False,
    **engine_options: int,
) -> Rollout:
    """Returns a rollout of a checkpoint: in bfloat16 on a GPU, in float32 on a CPU.

    A checkpoint in bfloat16 stays so on a CPU that multiplies it, which is faster in half the
    memory. `sampling` has fields of SamplingParams. `running` attempts run at a time; the model's
    positions bound their context too. quantise: "int8" or "int4" rounds the linear layers.
    The KV pool of a GPU is what memory is free, unless engine_options of Engine say another; that
    of a CPU has room for `running` attempts. With `chats` the tokenizer may lack Qwen3's markers:
    such a model answers, but calls no tools. UserError if the checkpoint is not whole.
    """
    device = device_named()
    cuda = device.type == "cuda"
    dtype = str(_dtype(path, device)).removeprefix("torch.")
    model, tokenizer = load_model(path, str(device), dtype, quantise)
    pack(model)
    require(tokenizer, f"{path}: no tokenizer.json; it must lie beside the weights")
    if not chats:
        tokenizer.require_markers(path)
    context = min(settings.context_tokens, model.config.max_position_embeddings)
    if not cuda and not engine_options:
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

    return Rollout(engine, tokenizer, params, replace(settings, context_tokens=context))
