"""MCP servers as tools: a good one, and all that one can do wrong, each in bounded time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from scripted import ANSWER, call, echoing, play

from nanorchestra.errors import UserError
from nanorchestra.tools import mcp as served
from nanorchestra.tools.limits import Allowance, RefusedError, within
from nanorchestra.tools.replies import store_of
from nanorchestra.tools.spending import Spending
from tools import load_tools

SERVER = """
import asyncio, os, sys, time
import anyio
from mcp import types as t
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
fault = sys.argv[1] if len(sys.argv) > 1 else ""
SHAPE = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
LIST = {"echo": SHAPE}
if fault == "many":
    LIST = {f"tool{i}": SHAPE for i in range(5000)}
if fault == "names":
    LIST = dict.fromkeys(["a b", "a.b", "s_x", "x" * 100, "x" * 101], SHAPE)
if fault == "schemas":
    remote = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/x"}}}
    circle = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    LIST |= {"remote": remote, "circle": circle, "old": SHAPE | {"items": [{}, 1]}}
async def listing(ctx, params):
    return t.ListToolsResult(tools=[t.Tool(name=n, input_schema=s) for n, s in LIST.items()])
async def call(ctx, params):
    text = params.arguments["text"]
    if text == "die": os._exit(3)
    if text == "hang": time.sleep(100)
    if text == "slow": await asyncio.sleep(100)
    if text == "big": text = "x" * 100_000_000
    if text == "bad": return t.CallToolResult(content=[t.TextContent(text="no")], is_error=True)
    if text == "image":
        link = t.ResourceLink(name="n", uri="file:///a", description="d")
        file = t.EmbeddedResource(resource=t.TextResourceContents(uri="file:///b", text="in b"))
        image = t.ImageContent(data="QUFB", mime_type="image/png")
        return t.CallToolResult(content=[image, link, file])
    if text == "headers":
        text = ctx.request.headers.get("authorization") + " " + ctx.request.headers["x-mine"]
    if text == "env": text = " ".join(sorted(os.environ)) + " " + os.environ.get("MY_KEY", "")
    return t.CallToolResult(content=[t.TextContent(text=text)])
server = Server("s", on_list_tools=listing, on_call_tool=call)
async def main():
    async with stdio_server() as (r, w):
        await server.run(r, w, server.create_initialization_options())
if fault == "address":
    import uvicorn
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[2]), log_level="error")
else:
    anyio.run(main)
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(fault, **settings) -> the tools of a server with that fault."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    monkeypatch.setattr(served, "START_S", 20.0)
    monkeypatch.setattr(served, "PROBE_S", 1.0)
    monkeypatch.setattr(served, "STOP_S", 0.3)
    made = []

    def run(fault="", spending=None, **settings):
        command = [sys.executable, "server.py", *filter(None, [fault])]
        entry = {"kind": "mcp", "name": "s", "command": command} | settings
        entry = {name: value for name, value in entry.items() if value is not None}
        (tmp_path / "t.json").write_text(json.dumps([entry]))
        tools = load_tools("t.json", None, spending)
        made.extend(tools)
        return tools

    yield run
    for tool in made:
        tool.server.end()
    end = time.monotonic() + 10
    while served.PROCESSES and time.monotonic() < end:
        time.sleep(0.01)
    assert not served.PROCESSES


def test_a_server_is_offered_with_price_and_latency_and_its_secrets_stay(load, monkeypatch):
    monkeypatch.setenv("MY_KEY", "a-long-secret")
    monkeypatch.setenv("OTHER_KEY", "another")
    (tool,) = load(usd_per_call=0.25, latency_s=2.0, env=["MY_KEY"])
    result = tool.call({"text": "hello"})
    assert (tool.name, result.content) == ("s_echo", "hello")
    assert (result.cost_usd, result.latency_s, result.error) == (0.25, 2.0, False)
    told = tool.call({"text": "env"}).content
    assert "MY_KEY" in told and "OTHER_KEY" not in told and "a-long-secret" not in told
    assert tool.call({"text": "image"}).content.splitlines() == [
        "[image: image/png, 3 bytes]",
        "[resource file:///a: n, d]",
        "[resource file:///b]",
        "in b",
    ]
    result = tool.call({"text": "bad"})
    assert (result.content, result.error, result.infrastructure) == ("Error: no", True, False)
    with pytest.raises(RefusedError, match="forbids s"):
        within(tool, {"text": ""}, Allowance(never=["s"]))


def test_an_address_is_a_server(load, monkeypatch):
    monkeypatch.setenv("MY_KEY", "a-long-secret")
    monkeypatch.setenv("MINE", "my header")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = [sys.executable, "server.py", "address", str(port)]
    settings = {
        "command": None,
        "url": f"http://127.0.0.1:{port}/mcp",
        "key_variable": "MY_KEY",
        "headers": {"X-Mine": "$MINE"},
    }
    with subprocess.Popen(start) as process:
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        (tool,) = load(usd_per_call=0.25, **settings)
        result = tool.call({"text": "hello"})
        assert (result.content, result.cost_usd, result.error) == ("hello", 0.25, False)
        told = tool.call({"text": "headers"}).content
        assert (
            told.startswith("Bearer ") and "a-long-secret" not in told and "my header" not in told
        )
        process.kill()
    result = tool.call({"text": "hello"})
    assert result.infrastructure and not result.cost_usd


def test_a_policy_calls_a_server_in_an_attempt_that_is_recorded_and_replayed(
    load, nano_tokenizer, tmp_path
):
    script = [call("hi", "s_echo"), ANSWER]
    bad = [call("bad", "s_echo"), ANSWER]
    attempts = []
    for word in ("record", "replay"):
        spending = Spending(replies=store_of(f"{word}:{tmp_path / 'kept'}", "--experts"))
        (tool,) = load(spending=spending, usd_per_call=0.25)
        if word == "replay":
            tool.server.call = None  # nobody is asked
        envs = [echoing(tool, number) for number in range(2)]
        attempts.append(play(nano_tokenizer, script, bad, envs=envs)[0])
        assert not spending.broken and not spending.spent
    recorded, replayed = attempts
    assert recorded == replayed
    good, wrong = recorded
    assert good.calls == {"s_echo": 1} and good.status == wrong.status == "answered"
    assert good.turns[0].results[0].content == "hi" and good.turns[0].results[0].latency_s > 0
    assert good.cost_usd > 0.25 and good.answer == "42"
    assert wrong.turns[0].results[0].content == "Error: no"


def test_names_are_unique_and_valid(load):
    names = [tool.name for tool in load("names")]
    assert names[:3] == ["s_a_b", "s_a_b_2", "s_x"] and len({*names}) == 5
    assert all(len(name) <= 64 for name in names)


def test_a_server_that_dies_or_sends_too_much_is_started_again(load):
    (tool,) = load(usd_per_call=0.25)
    for text, says in (("die", "ended with status 3"), ("big", "exceed the limit")):
        start = time.monotonic()
        result = tool.call({"text": text})
        assert says in result.content and result.infrastructure and not result.cost_usd
        assert time.monotonic() - start < 8
        assert tool.call({"text": "again"}).content == "again"


def test_a_call_that_takes_too_long_is_the_policys_unless_the_server_hangs(load):
    (tool,) = load(timeout_s=0.5)
    for text, hangs in (("slow", False), ("hang", True)):
        start = time.monotonic()
        result = tool.call({"text": text})
        assert result.error and result.infrastructure == hangs, result.content
        assert time.monotonic() - start < 5
        assert tool.call({"text": "again"}).content == "again"


def test_a_schema_that_is_not_served_is_left_out_or_refused(load, capsys):
    served.TOLD.clear()
    assert [tool.name for tool in load("schemas")] == ["s_echo"]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3 and all("is not served" in line for line in told)
    with pytest.raises(UserError, match="remote is not served: .ref is 'http"):
        load("schemas", only=["remote"])


@pytest.mark.parametrize(
    ("fault", "settings", "says"),
    [
        ("many", {}, "lists 5,000 tools; 128 at most"),
        ("", {"only": ["echo", "nope"]}, "only names nope; the server lists echo"),
        ("", {"command": ["no-such-program"]}, "cannot start 'no-such-program': No such file"),
        ("", {"command": [sys.executable, "-c", "1/0"]}, "ended with status 1; .*ZeroDivision"),
        ("", {"command": ["sleep", "100"]}, "not ready within 2 s"),
        ("", {"command": None, "url": "http://127.0.0.1:9/mcp"}, "attempts failed"),
        ("", {"env": ["sk-secret"]}, "must be the name of an environment variable"),
    ],
)
def test_what_is_wrong_at_the_start_is_one_line(load, monkeypatch, fault, settings, says):
    if settings.get("command") == ["sleep", "100"]:
        monkeypatch.setattr(served, "START_S", 2.0)
    start = time.monotonic()
    with pytest.raises(UserError, match=says) as error:
        load(fault, **settings)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)
    assert time.monotonic() - start < 10


def test_many_tools_are_served_where_only_chooses(load):
    assert [tool.name for tool in load("many", only=["tool4999"])] == ["s_tool4999"]


def test_no_process_is_left(load):
    (tool,) = load()
    (pid,) = served.PROCESSES
    tool.server.end()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")
