"""Loads a model by the user's word for it."""

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from nanorchestra import formats
from nanorchestra.formats.awq import awq_tensors, is_awq
from nanorchestra.model.checkpoint import load_checkpoint, stored_tensors
from nanorchestra.model.quantise import FourBit
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.tokenizer import Tokenizer


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
    directory, tensors = open_checkpoint(word)
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


def open_checkpoint(word: str | Path) -> tuple[Path, Iterator[tuple[str, Tensor | FourBit]]]:
    """Returns the directory that a word for a model means, and its tensors, which are read later.

    load_checkpoint takes both. Raises UserError.
    """
    directory = formats.directory_of(word)
    tensors = awq_tensors(directory) if is_awq(directory) else stored_tensors(directory)
    return directory, tensors
