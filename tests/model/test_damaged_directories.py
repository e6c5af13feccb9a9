"""Whatever a model directory holds, loading ends soon, in bounded memory, in one line."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from damaged_directories import DAMAGES

from nanorchestra.agent.load import load_rollout
from nanorchestra.agent.loop import AttemptLimits
from nanorchestra.errors import UserError
from nanorchestra.files import SUMS
from nanorchestra.model import saving
from nanorchestra.model.hf_config import read_config, read_sampling
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.tokenizer import train_bpe

SECONDS = 10  # of a load; a whole directory takes a tenth of one
MEMORY = 1 << 30  # bytes that it may take beside what the process has


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    tokenizer = train_bpe(["The cheapest expert answers.\n" * 3], 300)
    shape = ModelConfig(
        vocab_size=304, hidden_size=24, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, eos_token_ids=(7, 5),
    )  # fmt: skip
    model = Qwen3(shape)
    model.init_weights(0)
    path = tmp_path_factory.mktemp("whole") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "SHARD_BYTES", 20_000)
        save_checkpoint(model, tokenizer, path)
    (path / SUMS).unlink()
    return path


def load(path):
    """As serve.py and evaluate.py load it."""
    sampling = read_sampling(path)
    context = read_config(path).max_position_embeddings
    load_rollout(path, AttemptLimits(turn_tokens=context // 2, context_tokens=context), sampling, 1)


def in_a_fork(function) -> str:
    """What a call ends with, in a process of its own with limits of time and memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        outcome = "loaded"
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            function()
        except UserError as error:
            outcome = f"UserError {error}"
        except BaseException as error:
            outcome = f"a traceback, {type(error).__name__}: {error}"
        os.write(writing, outcome.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return text or f"killed by signal {os.waitstatus_to_exitcode(status)}"


def test_the_directory_loads_before_it_is_damaged(whole):
    torch.set_num_threads(1)
    assert in_a_fork(lambda: load(whole)) == "loaded"


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_directory_is_refused_in_one_line_that_names_it(name, whole, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(whole, path)
    DAMAGES[name](path)
    outcome = in_a_fork(lambda: load(path))
    assert outcome.startswith(f"UserError {path}") and "\n" not in outcome, outcome
