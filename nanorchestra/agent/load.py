"""Loads the checkpoint that serve.py and evaluate.py run."""

from __future__ import annotations

from pathlib import Path

import torch

from nanorchestra.errors import UserError
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.model.weights import load_model

NANO = Path(__file__).resolve().parents[2] / "assets" / "nano"  # the bundled checkpoint


def load_policy(path: Path, quantise: str | None = None) -> tuple[Qwen3, Tokenizer]:
    """Returns the model and the tokenizer of a checkpoint: bfloat16 on a GPU, float32 on a CPU.

    quantise: "int8" or "int4" rounds the linear layers. UserError if the checkpoint is not whole.
    """
    if path.resolve() == NANO and not (path / "config.json").exists():
        raise UserError(
            f"{path}: no checkpoint here yet; make one with `python train.py` and give "
            "--model runs/nano/model, or copy that model's files here"
        )
    on_gpu = {"device": "cuda", "dtype": "bfloat16"} if torch.cuda.is_available() else {}
    model, tokenizer = load_model(path, quantise=quantise, **on_gpu)
    if tokenizer is None:
        raise UserError(
            f"{path}: no tokenizer.json; the checkpoint's tokenizer must lie beside its weights"
        )
    return model, tokenizer
