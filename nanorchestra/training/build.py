"""Builds the parts of a run from its config: model, tokenizer, trainer, engine and rollout.

`publish` gives the engine the trained weights, as its model was built to take them.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nanorchestra.agent.loop import Rollout
from nanorchestra.config import Config
from nanorchestra.engine.engine import Engine
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.errors import require
from nanorchestra.model import lora
from nanorchestra.model.checkpoint import load_checkpoint, named_hf_tensors, stored_group
from nanorchestra.model.native import pack
from nanorchestra.model.quantise import FourBit, quantise_model
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Price
from nanorchestra.settings import is_dry_run
from nanorchestra.training.distributed import Ranks, shard_model
from nanorchestra.training.trainer import Trainer

SPARE_PAGES = 64


def device_and_dtype(config: Config) -> tuple[str, torch.dtype]:
    """Returns the device of training on this machine, and the dtype of computing on it.

    It is a GPU where there is one; a dry run is on CPUs.
    """
    cuda = torch.cuda.is_available() and not is_dry_run(config)
    dtype = config.run.dtype
    if dtype == "auto":
        dtype = "bfloat16" if cuda else "float32"
    return "cuda" if cuda else "cpu", getattr(torch, dtype)


def load_policy(
    config: Config,
    ranks: Ranks,
    dtype: torch.dtype,
    directory: Path,
    tensors: Iterable[tuple[str, Tensor | FourBit]] | None = None,
) -> tuple[Qwen3, Tokenizer]:
    """Returns the model to train and its tokenizer, of what load_checkpoint takes.

    It is sharded, and has adapters, as configured. UserError.
    """
    offload, in_4_bits = config.parallel.cpu_offload, config.lora.base == "int4"
    require(
        not in_4_bits or ranks.world_size == 1,
        f"lora.base is int4 on {ranks.world_size} processes; engine and trainer of one process "
        "share it: start one, or set lora.base to full",
    )
    phases = (config.warm_start, config.grpo) if config.warm_start.steps else (config.grpo,)
    by_muon = any(phase.optimizer == "muon" for phase in phases)
    rank, shards = config.lora.rank, ranks.mesh["shard"].size() if ranks.mesh else 1
    require(
        not by_muon or not rank or rank >= shards,
        f"lora.rank is {rank} and {shards} ranks shard the adapters; muon needs a row for each: "
        f"set it to at least {shards}, or the optimizer of both phases to adamw",
    )
    group = stored_group(directory) if in_4_bits else None

    def build(shape):
        if is_dry_run(config):  # prompts may be longer than any that nano has learnt from
            shape = replace(shape, max_position_embeddings=config.rollout.context_tokens)
        return as_configured(Qwen3(shape), config, ranks, dtype, group)

    device = "cpu" if offload else str(ranks.device)
    model, tokenizer = load_checkpoint(directory, device, dtype=None, build=build, tensors=tensors)
    lora.reset(model, config.run.seed)
    require(tokenizer, f"{directory}: no tokenizer.json; training needs it beside the weights")
    tokenizer.require_markers(config.model.path)
    return model, tokenizer


def as_configured(
    model: Qwen3,
    config: Config,
    ranks: Ranks,
    dtype: torch.dtype,
    stored_group: int | None = None,
) -> Qwen3:
    """Returns the model with adapters, its base in 4 bits, and sharded, where config says so.

    The weights may be missing yet. stored_group: as that of quantise_model.
    """
    if config.lora.rank:
        model.to(dtype)  # the base is frozen, so it needs no float32
        if config.lora.base == "int4":
            # Embeddings and output matrix stay: the log-probabilities need them whole.
            quantise_model(model.layers, "int4", stored_group)
        lora.add_adapters(model, config.lora.rank, config.lora.alpha, config.run.seed)
    return shard_model(model, ranks, dtype, cpu_offload=config.parallel.cpu_offload)


def build_trainer(
    config: Config, model: Qwen3, tokenizer: Tokenizer, ranks: Ranks, dtype: torch.dtype
) -> Trainer:
    """Returns the trainer of the warm start; GRPO replaces its optimizer."""
    return Trainer(
        model,
        vocab_limit=tokenizer.vocab_size,
        optimizer=config.warm_start.optimizer,
        ranks=ranks,
        token_budget=config.grpo.token_budget,
        parallel=config.parallel,
        dtype=dtype,
    )


def build_engine(
    config: Config, trained: Qwen3, tokenizer: Tokenizer, ranks: Ranks, dtype: torch.dtype
) -> Engine:
    """Returns this rank's engine; its model has no weights before the first `publish`.

    trained: the model in training, whose base the engine's model shares if it is in 4 bits.
    """
    limits, shape = config.rollout, trained.config
    if config.lora.base == "int4":
        model = lora.on_the_same_base(trained, dtype)
    else:
        with torch.device("meta"):
            model = Qwen3(shape).to(dtype)
            if limits.weights == "int8":
                quantise_model(model, "int8")
        model.to_empty(device=ranks.device)
        pack(model)
    require(
        limits.context_tokens <= shape.max_position_embeddings,
        f"rollout.context_tokens is {limits.context_tokens}; it must be at most "
        f"{shape.max_position_embeddings}, the max_position_embeddings of {config.model.path}",
    )
    rows = -(-config.grpo.prompts // ranks.world_size) * config.grpo.group_size
    pages_per_row = -(-limits.context_tokens // limits.page_size)
    return Engine(
        model,
        tokenizer,
        num_pages=limits.pages or rows * pages_per_row + SPARE_PAGES,
        page_size=limits.page_size,
        max_batch_tokens=limits.max_batch_tokens,
        max_running=rows,
        max_context=limits.context_tokens,
    )


def publish(config: Config, trained: Qwen3, engine: Engine, dtype: torch.dtype) -> float:
    """Copies the trained weights into the engine: adapters alone where both share the base.

    Weights go by their Hugging Face names, gathered one at a time; an engine in int8 rounds them
    in place. The engine counts a version more and forgets its KV. Returns the seconds that it took.
    """
    started = time.monotonic()
    if config.lora.base == "int4":
        lora.copy_adapters(trained, engine.model)
        engine.update_weights()
    else:
        engine.update_weights(named_hf_tensors(trained, dtype))
    return time.monotonic() - started


def build_rollout(config: Config, engine: Engine, price: Price, temperature: float) -> Rollout:
    """Returns what plays attempts on the engine, sampling at a temperature.

    price: of the policy's own tokens.
    """

    def params(seed, budget):
        return SamplingParams(budget, temperature, seed=seed)

    return Rollout(engine, engine.tokenizer, params, config.rollout, price)
