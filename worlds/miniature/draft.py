"""Writes an untrained checkpoint of the miniature's size, from which a warm start teaches a base.

    python -m worlds.miniature.draft DIRECTORY [--world miniature] [--seed 0]
    python train.py --config domains --model.path DIRECTORY

The tokenizer is a byte-level BPE trained on demonstrations of the world. The weights are random
with a draft of an induction circuit in them (induction.py). A directory is written once; the same
arguments write the same bytes.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from nanorchestra.agent.world import World, demonstrates
from nanorchestra.config import TaskSection
from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.model import chat
from nanorchestra.model.hf_config import PRESETS
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.tools.sandbox import Sandbox
from worlds.load import open_world
from worlds.miniature.induction import draft_induction
from worlds.miniature.offers import corpus

VOCAB_SIZE = 896  # of the tokenizer,
LESSONS = 600  # which is trained on so many demonstrations


def draft(world: World, seed: int, directory: Path) -> None:
    """Writes model and tokenizer to `directory`."""
    tokenizer = train_bpe(texts(world, LESSONS), VOCAB_SIZE)
    preset = PRESETS["nano"]
    shape = dataclasses.replace(
        preset,
        vocab_size=max(preset.vocab_size, -(-tokenizer.vocab_size // 64) * 64),
        eos_token_ids=tuple(tokenizer.eos_ids),
    )
    model = Qwen3(shape)
    draft_induction(model, model.init_weights(seed))
    save_checkpoint(model, tokenizer, directory, dtype=torch.float32)


def texts(world: World, count: int) -> Iterator[str]:
    """Yields the miniature's corpus and `count` demonstrations as text."""
    yield from (fact["text"] for fact in corpus()[0])
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


@command("draft.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog="draft.py", description=__doc__, formatter_class=formatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--world", default="miniature", help="miniature or domains")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tasks (default: 0)")
    options = parser.parse_args(arguments)
    require(not options.directory.exists(), f"{options.directory}: it exists; name another one")
    with Sandbox() as sandbox:
        world = open_world(TaskSection(options.world), options.seed, sandbox)
        require(demonstrates(world), f"--world {options.world}: nothing demonstrates its tasks")
        draft(world, options.seed, options.directory)
    print(f"{options.directory}: an untrained model of {options.world}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
