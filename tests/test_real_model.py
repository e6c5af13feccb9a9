"""SmolLM2-135M-Instruct, from its GGUF file, answers in the terminal."""

from __future__ import annotations

import pytest
from smollm import smollm_file

import serve


@pytest.mark.slow
def test_a_chat_in_the_terminal(capsys):
    question = "What is the capital of France?"
    command = ["--model", str(smollm_file()), "--temperature", "0", "--ask", question]
    assert serve.main(command) == 0
    assert "The capital of France is Paris." in capsys.readouterr().out
