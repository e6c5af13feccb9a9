"""MCP servers as tools: what they are given, and how they begin and end.

What a call promises whatever its server does is in test_every_tool.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nanorchestra.agent.threads import in_thread
from nanorchestra.errors import UserError
from nanorchestra.tools import mcp as served
from tools import load_tools

SERVER = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import EmbeddedResource, ImageContent, TextResourceContents
how, *port = sys.argv[1:]
server = MCPServer("s", log_level="CRITICAL")
@server.tool()
async def echo(context: Context, text: str) -> list:
    if text == "slow":
        try:
            await asyncio.sleep(100)
        finally:
            Path("cancelled").touch()
    if text == "parts":
        file = EmbeddedResource(resource=TextResourceContents(uri="file:///b", text="in b"))
        return [ImageContent(data="QUFB", mime_type="image/png"), file]
    if text == "headers":
        headers = context.request_context.request.headers
        text = headers.get("authorization")[::-1] + " " + headers["x-mine"]
    if text == "env":
        key = os.environ.get("MY_KEY", "")
        text = " ".join([*sorted(os.environ), key, key[::-1]])
    return [text]
@server.tool()
def other() -> str:
    return "other"
print("a line that is no message", flush=True)
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "100"], stdin=subprocess.DEVNULL)
    Path("pids").write_text(f"{os.getpid()} {child.pid}")
if how == "address":
    server.run("streamable-http", port=int(port[0]))
else:
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


def is_running(pid):
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def wait(condition, seconds=15):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


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
    assert echo.call({"text": "parts"}).content == "[image]\nin b"
    (chosen,) = echo.server.tools(only=["other"])
    assert (chosen.name, chosen.prices["call"]) == ("s_other", 0.0)
    with pytest.raises(UserError, match="only names nope; the server lists echo, other$"):
        echo.server.tools(only=["echo", "nope"])

    async def give_up():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await in_thread(echo.call, {"text": "slow"})

    asyncio.run(give_up())
    wait(lambda: os.path.exists("cancelled"))  # at the server


def test_an_address_is_a_server_and_gets_its_key_and_headers(load, monkeypatch):
    monkeypatch.setenv("MY_KEY", "a-long-secret")
    monkeypatch.setenv("MINE", "mine")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def begin():
        process = subprocess.Popen([sys.executable, "server.py", "address", str(port)])
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return process
            time.sleep(0.05)

    settings = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Mine": "$MINE"}}
    process = begin()
    echo, _ = load(command=None, key_variable="MY_KEY", timeout_s=5, **settings)
    assert echo.call({"text": "headers"}).content == "terces-gnol-a reraeB mine"
    process.kill()
    process.wait()
    result = echo.call({"text": "hello"})
    assert result.infrastructure and not result.cost_usd
    process = begin()
    wait(lambda: echo.call({"text": "hello"}).content == "hello")
    process.kill()
    process.wait()


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
    pids = (tmp_path / "pids").read_text().split()
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"command": ["no-such-program"]}, "s: the server does not start: .*no-such-program"),
        (
            {"command": [sys.executable, "-c", "1/0"]},
            "closed ZeroDivisionError: division by zero$",
        ),
        ({"command": ["sleep", "100"]}, "the server does not start: TimeoutError"),
        ({"command": None, "url": "http://127.0.0.1:9/mcp"}, "attempts failed"),
        ({"command": None, "url": "http://127.0.0.1:9", "key_variable": "NO"}, "NO is not set"),
        ({"command": None}, "either a command or a url"),
        ({"headers": {"A": "$B"}}, "there is no headers"),
        ({"env": ["sk-secret"]}, "must be a list of names of environment variables"),
    ],
)
def test_what_is_wrong_at_the_start_is_one_line(load, monkeypatch, settings, says):
    if settings.get("command") == ["sleep", "100"]:
        monkeypatch.setattr(served, "START_S", 0.5)
    with pytest.raises(UserError, match=says) as error:
        load(**settings)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)


def test_a_missing_package_is_one_line(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"s: .* needs the package mcp: pip install mcp==2\.3\.0"):
        load()
