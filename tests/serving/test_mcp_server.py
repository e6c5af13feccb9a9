"""The orchestrator as a tool of MCP: by pipes, and at an address with the official client."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import httpx
import pytest
from mcp import Client, types
from running_server import Running, wait
from scripted import EchoTool

from nanorchestra.records import Preference, ToolResult
from nanorchestra.serving import loop
from nanorchestra.serving import mcp as served
from nanorchestra.serving.loop import ServedConversation

ROOT = Path(__file__).parents[2]
# serve.py --mcp with a library that prints.
SERVE = """
import os, sys
import serve
from worlds.terminal import DeskQuestions
opened = DeskQuestions.open
def noisy_open(self, *args):
    print("noise", flush=True)
    os.system("echo noise of a child")
    return opened(self, *args)
DeskQuestions.open = noisy_open
sys.exit(serve.main(["--mcp", *sys.argv[1:]]))
"""


def message(number, method, **params):
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


HELLO = message(
    1,
    "initialize",
    protocolVersion="2025-11-25",
    capabilities={},
    clientInfo={"name": "test", "version": "1"},
)
QUESTION = {"question": "What is the code of order 512?", "usd": 2.0}
ASK = message(2, "tools/call", name="ask", arguments=QUESTION, _meta={"progressToken": "token"})


@pytest.fixture
def start(make_engine):
    """start(tool, **settings) -> a server with the tool of MCP at /mcp."""
    started = []

    def run(tool=None, **settings):
        started.append(Running(make_engine(), tool, has_mcp=True, **settings))
        return started[-1]

    yield run
    for running in started:
        running.assert_idle()
        running.stop()


async def ask(client, arguments, until=None):
    """The result of a call and the messages before it; it is cancelled at one with `until`."""
    result, messages = None, []

    async def told(progress, total, message):
        messages.append(message)
        if until and until in message:
            scope.cancel()

    with anyio.CancelScope() as scope:
        result = await client.call_tool("ask", arguments, progress_callback=told)
    return result, messages


@pytest.mark.slow
def test_by_pipes_a_question_is_answered_and_nothing_else_is_on_stdout(tmp_path):
    """The end of stdin ends the process."""
    pipe = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    command = [sys.executable, "-c", SERVE, "--trace", str(tmp_path / "trace")]
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipe)
    process.stdin.write(f"{json.dumps(HELLO)}\n{json.dumps(ASK)}\n")
    process.stdin.flush()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if '"id":2' in line:
            break
    out, errors = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, ""), errors
    for line in lines:
        types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    answer = json.loads(lines[-1])["result"]["structuredContent"]
    row = json.loads((tmp_path / "trace").read_text())
    assert answer["status"] == "answered" and answer["answer"] == row["answer"] != ""
    assert any('calls: {\\"name\\": \\"records\\"' in line for line in lines)
    assert "noise\n" in errors and "noise of a child" in errors and "Traceback" not in errors


@pytest.mark.parametrize("mode, version", [("auto", "2026-07-28"), ("legacy", "2025-11-25")])
def test_at_an_address(start, mode, version, monkeypatch):
    """An answer, wrong arguments, a limit, and a client that leaves, which ends the attempt."""
    release, closed = threading.Event(), threading.Event()

    class Slow(EchoTool):
        def call(self, arguments):
            release.wait(0.3)
            return ToolResult("seen", 0.25, 2.0)

    async def talk(client):
        assert client.protocol_version == version
        (tool,) = (await client.list_tools()).tools
        assert tool.name == "ask" and tool.input_schema["additionalProperties"] is False
        arguments = {"question": "!ask", "preference": "Be quick.", "usd": 0.5}
        result, told = await ask(client, arguments)
        assert running.preferences == [Preference("Be quick.", usd=0.5)]
        assert result.content[0].text == "Answer: fourty-two, or so."
        assert result.structured_content["calls"] == {"echo": 1}
        messages = [message for message in told if not message.startswith("at work: ")]
        assert len(messages) < len(told) and messages.pop(1).startswith('calls: {"name": "echo"')
        assert messages == ["thinks: hmm", "result ($0.25, 2.0 s): seen", "thinks: hmm"]
        for arguments, problem in (
            ({}, "ask: question is missing"),
            ({"question": "?", "usd": 0}, "ask: usd is 0; it should be greater than 0"),
            ({"question": "?", "never": ["x"]}, "metadata: there is no x to ban; there are echo"),
            ({"question": "?", "second": 1}, "ask: there is no second; did you mean seconds?"),
            ({"question": "!ask", "usd": 1e-9}, "no answer: user_limit"),
        ):
            result, told = await ask(client, arguments)
            assert result.is_error and result.content[0].text.startswith(problem) and not told
        monkeypatch.setattr(ServedConversation, "close", lambda self: closed.set())
        monkeypatch.setattr(Slow, "call", lambda *_: release.wait(30) and ToolResult(""))
        assert (await ask(client, {"question": "!ask"}, "calls"))[0] is None
        await anyio.to_thread.run_sync(wait, closed.is_set)
        release.set()

    async def connected():
        async with Client(f"{running.base}/mcp", mode=mode, read_timeout_seconds=30) as client:
            await talk(client)

    monkeypatch.setattr(served, "SILENCE_S", 0.1)
    monkeypatch.setattr(loop, "KEEP_S", 0.05)
    running = start(Slow(blocking=True))
    anyio.run(connected)


def test_the_address_asks_for_the_key(start):
    running = start(key="secret")
    url, key = f"{running.base}/mcp", {"authorization": "Bearer secret"}
    assert httpx.post(url, json={}).status_code == 401
    accept = {"accept": "application/json, text/event-stream"}
    right = httpx.post(url, json=HELLO, headers=key | accept)
    assert right.status_code == 200 and "2025-11-25" in right.text
