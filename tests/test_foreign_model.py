"""Commands with a model whose tokenizer lacks Qwen3's markers: it chats, and no more."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import chat_templates
import pytest
import torch
from foreign_tokenizers import make_foreign

import serve
from nanorchestra.config import RolloutSection
from nanorchestra.errors import UserError
from nanorchestra.formats.load import with_chat
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model import chat
from nanorchestra.model.checkpoint import save_checkpoint
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.settings import load_config
from nanorchestra.training.build import load_policy
from nanorchestra.training.distributed import Ranks


@pytest.fixture
def checkpoint(make_nano, tmp_path) -> Path:
    """A model that babbles, with a tokenizer and a template as SmolLM2 has them."""
    directory = make_foreign("smollm2", tmp_path / "tokenizer", chat_templates.SMOLLM2)
    tokenizer = with_chat(Tokenizer.from_dir(directory), directory)
    model = Qwen3(replace(make_nano().config, eos_token_ids=tokenizer.eos_ids))
    model.init_weights(0)
    save_checkpoint(model, tokenizer, tmp_path / "model", dtype=torch.float32)
    return tmp_path / "model"


@pytest.fixture
def command_line(monkeypatch, capsys):
    """command_line(*arguments, typed) -> (status, stdout, stderr) of serve.main."""

    def run(*arguments, typed=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = serve.main(list(map(str, arguments)))
        return status, *capsys.readouterr()

    return run


def test_the_terminal_chats_and_each_prompt_is_the_templates(checkpoint, command_line):
    """The second prompt holds the first question with its answer, as the template writes them."""
    tokenizer = with_chat(Tokenizer.from_dir(checkpoint), checkpoint)
    arguments = ("--model", checkpoint, "--json", "--temperature", "0.5")
    _, out, err = command_line(*arguments, typed="hi\nwhy\n")
    first, second = map(json.loads, out.splitlines())
    assert "Traceback" not in err and first["calls"] == {}
    messages = [{"role": "user", "content": "hi"}]
    prompt = chat.encode(tokenizer, messages)
    assert first["ids"][: len(prompt)] == prompt and not any(first["sampled"][: len(prompt)])
    messages += [{"role": "assistant", "content": first["answer"]}]
    messages += [{"role": "user", "content": "why"}]
    prompt = chat.encode(tokenizer, messages)
    assert second["ids"][: len(prompt)] == prompt


def test_tools_training_and_evaluation_need_the_markers(checkpoint, command_line, tmp_path):
    line = f"{checkpoint}: its tokenizer lacks <tool_call>, </tool_call>, "
    catalogue = tmp_path / "mine.toml"
    catalogue.write_text('[[tools]]\nkind = "code"\nname = "python"\ndescription = "x"\n')
    status, _, err = command_line("--model", checkpoint, "--tools", catalogue, "--ask", "hi")
    assert status == 2 and err.count("\n") == 1
    assert line in err and f"nanorchestra.formats.adopt {checkpoint} --out DIR" in err
    with pytest.raises(UserError, match=re.escape(line)):
        load_rollout(checkpoint, RolloutSection(turns=1, turn_tokens=8, context_tokens=64), {}, 1)
    config = load_config(None, {"model.path": str(checkpoint)})
    with pytest.raises(UserError, match=re.escape(line)):
        load_policy(config, Ranks(), torch.float32, checkpoint)
