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
    out, err = capsys.readouterr()
    assert "The capital of France is Paris." in out
    assert "; tools: none (this tokenizer has no <tool_call>; see docs/serve.md)\n" in err
    assert serve.main([*command, "--tools", "python"]) == 2
    refused = capsys.readouterr().err
    assert f"serve.py: {smollm_file()}: its tokenizer lacks <tool_call>, " in refused
    assert f"formats.adopt {smollm_file()} --out DIR, in the project's directory, " in refused
