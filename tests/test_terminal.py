"""The real program in a pseudo-terminal: what a person types, and what the screen shows."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
import torch

from nanorchestra.model.checkpoint import NANO, PRESETS, save_checkpoint
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TOOLS = """
[[tools]]
kind = "code"
name = "python"
description = "Runs Python."
usd_per_call = 0.001
"""
PASTE = "one\ntwo  words\nthree\nfour\nfive\nsix"


ESCAPES = re.compile(r"\x1b(\[[\d;?]*[A-Za-z]|[78])")


class Screen:
    """A program in a pseudo-terminal, whose output is read without escape sequences."""

    def __init__(self, state, *arguments):
        env = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": state}
        env = os.environ | env
        self.child = pexpect.spawn(
            sys.executable, list(arguments), cwd=ROOT, env=env, dimensions=(50, 100), timeout=240
        )

    def until(self, pattern):
        """Returns what is shown up to `pattern`, on one line."""
        shown = b""
        while not (match := re.search(pattern, text := self.plain(shown))):
            try:
                shown += self.child.read_nonblocking(4096, 240)
            except pexpect.EOF:
                raise AssertionError(f"{pattern} is not in {text!r}") from None
        return text[: match.end()]

    @staticmethod
    def plain(shown):
        return " ".join(ESCAPES.sub("", shown.decode("utf-8", "replace")).split())


@pytest.mark.slow
def test_a_session_at_a_terminal(tmp_path):
    """A large model of random weights babbles, so that there is time to stop it."""
    tokenizer = Tokenizer.from_dir(NANO)
    shape = replace(PRESETS["nano"], hidden_size=768, intermediate_size=3072, num_hidden_layers=8)
    ids = {"vocab_size": tokenizer.vocab_size, "eos_token_ids": tuple(tokenizer.eos_ids)}
    model = Qwen3(replace(shape, **ids))
    model.init_weights(0)
    save_checkpoint(model, tokenizer, tmp_path / "model", dtype=torch.float32)
    (tmp_path / "tools.toml").write_text(TOOLS)
    places = "--model", str(tmp_path / "model"), "--tools", str(tmp_path / "tools.toml")
    screen = Screen(str(tmp_path), "serve.py", *places, "--temperature", "1", "--seed", "3")
    banner = screen.until("breaks the line .*>")
    for word in ("/model", "float32 on cpu", "context 2048", "any question", "tools: python"):
        assert word in banner
    send = screen.child.send
    send("half typed\x03")
    screen.until("half typed.*>")
    send(f"\x1b[200~{PASTE}\x1b[201~\r")
    screen.until("(think|answer) ")
    send("\x03")
    screen.until(r"answer none \(stopped\).* cost \$0\.0\d+, .* [1-9]\d* tokens")
    send("/trace\r")
    assert "half typed" not in screen.until("one two words three four five six .*stopped:")
    send("/too\t")
    screen.until("too.*ls")
    send("\r")
    screen.until(r"python \(\$0\.001 per call\): Runs Python\.")
    send("\x1b[A\r")  # the line before
    screen.until(r"python \(\$0\.001 per call\): Runs Python\.")
    send("/frob\r")
    screen.until("serve.py: /frob: no such command")
    send("\x04")
    screen.child.expect(pexpect.EOF)
    screen.child.close()
    assert screen.child.exitstatus == 0
