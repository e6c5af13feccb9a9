"""The real program in a pseudo-terminal: what a person types, and what the screen shows."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[1]
TOOLS = """
[[tools]]
kind = "code"
name = "python"
description = "Runs Python."
usd_per_call = 0.001
"""
PASTE = "one\ntwo  words\nthree\nfour\nfive\nsix"


@pytest.mark.slow
def test_a_session_at_a_terminal(tmp_path):
    """nano babbles at this temperature, so that there is time to stop it."""
    (tmp_path / "tools.toml").write_text(TOOLS)
    options = ["--tools", str(tmp_path / "tools.toml"), "--temperature", "3", "--seed", "3"]
    child = pexpect.spawn(
        sys.executable,
        ["serve.py", *options],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"},
        dimensions=(50, 100),
        encoding="utf-8",
        timeout=240,
    )
    child.expect("/help lists the commands")
    banner = child.before.replace("\r\n", " ")
    for word in ("assets/nano", "float32 on cpu", "context 2048", "any question", "tools: python"):
        assert word in banner
    child.expect("breaks the line(.|\\s)*> ")
    child.send("half typed\x03")
    child.send(f"\x1b[200~{PASTE}\x1b[201~\r")
    child.expect("  (think|answer) ")
    child.send("\x03")
    child.expect(r"answer none \(stopped\)")
    child.expect(r"cost   \$0\.0\d+, [\d.]+ s, \d+ turns, [1-9]\d* tokens at \d+/s")
    child.send("/trace\r")
    child.expect("one two words three four five six\r\n")
    child.expect("stopped: ")
    assert "half typed" not in child.before
    child.send("/too\t\r")
    child.expect(re.escape("python ($0.001 per call): Runs Python."))
    child.send("\x1b[A\r")  # the line before
    child.expect(re.escape("python ($0.001 per call): Runs Python."))
    child.send("half\x1b\rtyped\x03/frob\r")
    child.expect("serve.py: /frob: no such command")
    child.send("\x04")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
