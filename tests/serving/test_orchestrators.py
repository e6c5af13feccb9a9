"""A served orchestrator as the model of serve.py, and as an expert."""

from __future__ import annotations

import serve
from nanorchestra.tools.sandbox import Sandbox
from tools import load_tools

LOOKING = """
from tools import tool

@tool
def look(at: str) -> str:
    \"\"\"Looks.\"\"\"
    return f"seen {at}"
"""
ORCHESTRATOR = """
[[tools]]
kind = "expert"
name = "orchestra"
description = "d"
expert = "nano"
[experts.nano]
endpoint = "here"
model = "nano+tools"
usd = [1, 1]
[endpoints.here]
base_url = "{}"
"""


def test_an_orchestrator_is_asked_by_another_one(running, tmp_path, capsys):
    """It has tools of its own, calls ours by its own ids, and says that it is slow."""
    (tmp_path / "looking.py").write_text(LOOKING)
    (tmp_path / "orchestra.toml").write_text(ORCHESTRATOR.format(f"{running.base}/v1"))
    model = "--model", f"nano+tools@{running.base}/v1"
    assert serve.main([*model, "--ask", "!ask"]) == 0
    out, err = capsys.readouterr()
    assert "answer Answer: fourty-two" in out and err.count("\n") == 1
    assert "shows nothing before its answer, which may take minutes, 600 s at most" in err
    tools = "--tools", str(tmp_path / "looking.py")
    assert serve.main([*model, *tools, "--ask", "!look"]) == 0
    out, _ = capsys.readouterr()
    assert "result seen left" in out and "result seen right" in out
    assert "answer Answer: fourty-two" in out and out.count("  answer ") == 1
    (tmp_path / "looking.py").write_text(LOOKING.replace("look(", "echo("))
    assert serve.main([*model, *tools, "--ask", "!ask"]) == 1
    out, _ = capsys.readouterr()
    assert "the server has echo already; give other names; " in out and "rename yours" in out
    with Sandbox() as sandbox:
        (orchestra,) = load_tools(tmp_path / "orchestra.toml", sandbox)
    assert "orchestra: nano+tools plays a whole loop" in capsys.readouterr().err
    assert orchestra.call({"task": "!ask"}).content == "Answer: fourty-two, or so."
