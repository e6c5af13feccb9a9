"""Writes an untrained checkpoint for a world that demonstrates its tasks: model.path = "draft".

The tokenizer is a byte-level BPE trained on demonstrations of the world. The weights are random
with a draft of an induction circuit in them (induction.py).
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from nanorchestra.agent.world import World
from nanorchestra.model import chat
from nanorchestra.model.checkpoint import PRESETS, save_checkpoint
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.training.induction import draft_induction

VOCAB_SIZE = 1024  # of the tokenizer,
LESSONS = 4800  # which is trained on so many demonstrations


def draft(world: World, seed: int, directory: Path) -> None:
    """Writes model and tokenizer to `directory`, whole; it is replaced if it is there.

    The same world and seed write the same bytes. UserError if `directory` cannot be written.
    """
    tokenizer = train_bpe(texts(world, LESSONS), VOCAB_SIZE)
    preset = shape_for(world.name)
    shape = dataclasses.replace(
        preset,
        vocab_size=max(preset.vocab_size, -(-tokenizer.vocab_size // 64) * 64),
        eos_token_ids=tuple(tokenizer.eos_ids),
    )
    model = Qwen3(shape)
    draft_induction(model, model.init_weights(seed))
    save_checkpoint(model, tokenizer, directory, dtype=torch.float32)


def shape_for(world: str) -> ModelConfig:
    """Returns the shape of a draft for a world: nano's, or a larger one for longer texts."""
    return PRESETS["nano" if world == "desk" else "domains"]


def texts(world: World, count: int) -> Iterator[str]:
    """Yields `count` demonstrations as text."""
    for index in range(count):
        env, turns = world.lesson(index)
        messages = list(env.messages)
        for turn in turns:
            message = {"role": "assistant", "content": turn.content}
            message["reasoning_content"] = turn.thought
            message["tool_calls"] = [vars(turn.call)] if turn.call else []
            messages.append(message)
            if turn.result:
                role = "tool" if turn.call else "user"
                messages.append({"role": role, "content": turn.result.content})
        yield chat.render(messages, env.tools, add_generation_prompt=False)
