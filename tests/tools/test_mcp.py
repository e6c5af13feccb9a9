"""MCP servers as tools: what they are given, and how they begin and end.

What a call promises whatever its server does is in test_every_tool.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from running_server import wait

from nanorchestra.agent.threads import in_thread
from nanorchestra.errors import UserError
from nanorchestra.tools import mcp as served
from tools import load_tools

SERVER = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
from mcp.server.mcpserver import MCPServer
how = sys.argv[1]
server = MCPServer("s", log_level="CRITICAL")
@server.tool()
async def echo(text: str) -> list:
    if text == "slow":
        try:
            await asyncio.sleep(100)
        finally:
            Path("cancelled").touch()
    if text == "env":
        key = os.environ.get("MY_KEY", "")
        text = " ".join([*sorted(os.environ), key, key[::-1]])
    return [text]
@server.tool()
def other() -> str:
    return "other"
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "100"], stdin=subprocess.DEVNULL)
    Path("pids").write_text(f"{os.getpid()} {child.pid}")
server.run()
time.sleep(100 * (how == "stubborn"))
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(how, **settings) -> the tools of a server; `made` are all that were loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    made = []

    def run(how="good", **settings):
        entry = {"kind": "mcp", "name": "s", "command": [sys.executable, "server.py", how]}
        entry = {k: v for k, v in (entry | settings).items() if v is not None}
        (tmp_path / "t.json").write_text(json.dumps([entry]))
        made.extend(load_tools("t.json", None))
        return made[-2:]

    yield run
    for tool in made:
        tool.server.life.cancel()


def test_a_server_is_offered_with_schemas_and_its_secrets_are_its_own(load, monkeypatch):
    monkeypatch.setenv("MY_KEY", "a-long-secret")
    monkeypatch.setenv("OTHER_KEY", "another")
    echo, other = load(usd_per_call=0.25, env=["MY_KEY"])
    assert (echo.name, other.name) == ("s_echo", "s_other")
    assert echo.parameters["required"] == ["text"]
    result = echo.call({"text": "hello"})
    assert (result.content, result.cost_usd) == ("hello", 0.25)
    told = echo.call({"text": "env"}).content
    assert "terces-gnol-a" in told, "it has the key"
    assert "a-long-secret" not in told and "OTHER_KEY" not in told
    assert [chosen.name for chosen in echo.server.tools(only=["other"])] == ["s_other"]

    async def give_up():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await in_thread(echo.call, {"text": "slow"})

    asyncio.run(give_up())
    wait(lambda: os.path.exists("cancelled"))  # at the server


def test_servers_with_their_children_and_calls_that_were_given_up_end_with_the_process(tmp_path):
    """A function that is inside of pydantic's call in Rust would abort it."""
    (tmp_path / "server.py").write_text(SERVER)
    entry = {"kind": "mcp", "name": "s", "command": [sys.executable, "server.py", "stubborn"]}
    (tmp_path / "t.json").write_text(json.dumps([entry]))
    run = """
import time
import mcp.client.stdio as sdk
from tools import load_tools, tool
sdk.PROCESS_TERMINATION_TIMEOUT = sdk.FORCE_KILL_TIMEOUT = 0.2
echo, _ = load_tools("t.json", None)
assert echo.call({"text": "hi"}).content == "hi"

@tool(timeout_s=0.2)
def spin(text: str) -> str:
    "Spins."
    while True:
        time.sleep(0.001)

assert "took more than 0.2 s" in spin.call({"text": "a"}).content
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", run], cwd=tmp_path, env=env, check=True)
    for pid in (tmp_path / "pids").read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_is_wrong_at_the_start_is_one_line(load, monkeypatch):
    with pytest.raises(UserError, match="closed ZeroDivisionError: division by zero$"):
        load(command=[sys.executable, "-c", "1/0"])
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    monkeypatch.setattr(served, "START_S", 0.3)
    with pytest.raises(UserError, match="the server does not start: TimeoutError"):
        load(command=["sleep", "100"])
    with pytest.raises(UserError, match="env.* must be a list of names") as error:
        load(env=["sk-secret"])
    assert "secret" not in str(error.value)
