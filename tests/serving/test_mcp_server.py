"""The orchestrator as a tool of MCP, asked by the official client: by pipes and at an address."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from mcp import Client, MCPError, types
from mcp.client.stdio import StdioServerParameters, stdio_client
from running_server import Running, wait
from scripted import EchoTool

import serve
from nanorchestra.records import Preference, ToolResult
from nanorchestra.serving import mcp as served
from nanorchestra.serving.loop import ServedConversation
from worlds.desk import asked, named
from worlds.desk_ask import as_task

ROOT = Path(__file__).parents[2]
# serve.py --mcp with a library that prints, and an engine that is slow while a file is there.
SERVE = """
import asyncio, os, sys, time
import serve
from nanorchestra.agent.loop import Attempt
from nanorchestra.serving import loop, mcp
from worlds.terminal import DeskQuestions
mcp.THOUGHT_S = 0.1
opened, run, step = DeskQuestions.open, Attempt.run, loop.Service._step
def noisy_open(self, *args):
    print("noise", flush=True)
    os.system("echo noise of a child")
    return opened(self, *args)
async def told_run(self):
    try:
        return await run(self)
    except asyncio.CancelledError:
        print("cancelled", file=sys.stderr, flush=True)
        raise
def slow_step(self):
    time.sleep(0.03 * os.path.exists(sys.argv[1]))
    return step(self)
DeskQuestions.open, Attempt.run, loop.Service._step = noisy_open, told_run, slow_step
sys.exit(serve.main(["--mcp", *sys.argv[2:]]))
"""
ORDER = "What is the code of order 512?"
LAW = "What is the rank of trial 372?"


class Asking:
    """A client, whose calls run on an event loop of their own. `slow` is the file that slows."""

    def __init__(self, portal, client, slow=None, files=()):
        self.portal, self.client, self.slow, self.files = portal, client, slow, files

    def ask(self, *several, tool="ask", until=None):
        """[(result or None, messages)] of calls side by side; cancelled at a message with until."""
        return self.portal.call(self._ask, several, tool, until)

    async def _ask(self, several, tool, until):
        answers = [[None, []] for _ in several]
        self.order = []  # (number of the call, message or None for its end)

        async def one(number, arguments, scope):
            async def told(progress, total, message):
                answers[number][1].append((progress, message))
                self.order.append((number, message))
                if until and until in message:
                    scope.cancel()

            with scope:
                answers[number][0] = await self.client.call_tool(
                    tool, arguments, progress_callback=told
                )
                self.order.append((number, None))

        async with anyio.create_task_group() as group:
            for number, arguments in enumerate(several):
                group.start_soon(one, number, arguments, anyio.CancelScope())
        return answers


@pytest.fixture(scope="module")
def pipes(tmp_path_factory):
    """A client of serve.py --mcp with nano."""
    folder = tmp_path_factory.mktemp("mcp")
    slow, wire, errors = folder / "slow", folder / "wire", folder / "errors"
    command = '"$0" -c "$1" "$2" --trace "$4" | tee "$3"'
    server = StdioServerParameters(
        command="bash",
        args=["-c", command, sys.executable, SERVE, *map(str, (slow, wire, folder / "trace"))],
        env={"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    with start_blocking_portal() as portal, errors.open("w") as errlog:
        client = Client(stdio_client(server, errlog=errlog), read_timeout_seconds=60)
        with portal.wrap_async_context_manager(client):
            yield Asking(portal, client, slow, (wire, errors))


@pytest.fixture
def start(make_engine):
    """start(tool, mode, **settings) -> a server over HTTP, and its client."""
    running, portals = [], []

    def run(tool=None, mode="auto", **settings):
        def more(server, check):
            tool = served.tool_server(
                server.service,
                server.rollout,
                server.make_environment,
                {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
                "nano",
                "",
            )
            return served.http_route(tool, check)

        running.append(Running(make_engine(), tool, more=more, **settings))
        portal = start_blocking_portal()
        portals.append((portal, portal.__enter__()))
        client = Client(f"{running[-1].base}/mcp", mode=mode, read_timeout_seconds=30)
        if settings:
            return running[-1], None
        opened = portals[-1][1].wrap_async_context_manager(client)
        opened.__enter__()
        portals.append((opened, None))
        return running[-1], Asking(portals[-2][1], client)

    yield run
    for opened, _ in reversed(portals):
        opened.__exit__(None, None, None)
    for each in running:
        each.assert_idle()
        each.stop()


def trail_of(question):
    """The messages about the records of a question, read to where there is no row; the answer."""
    data, messages = as_task(question, Preference()).data, []
    word, number = asked(question)
    while True:
        call = {"name": "records", "arguments": {"table": word, "id": int(number)}}
        messages.append(f"calls: {json.dumps(call)}")
        row = data["notes"].get(word, {}).get(number)
        if row is None:
            return [*messages, f"error ($0.01, 1.0 s): Error: no row {number}"], data["answer"]
        messages.append(f"result ($0.01, 1.0 s): {json.dumps(row)}")
        word, number = named(row["note"])


def test_a_question_is_answered_with_progress_and_nothing_else_is_on_stdout(pipes):
    """nano reads the records of this one to their end, where the answer is."""
    ((result, told),) = pipes.ask({"question": ORDER, "preference": "be quick", "usd": 2.0})
    trail, answer = trail_of(ORDER)
    count = len(trail) // 2
    report = result.structured_content
    assert not result.is_error and result.content[0].text == report["answer"] == answer
    assert (report["status"], report["calls"]) == ("answered", {"records": count})
    assert report["cost_usd"] == pytest.approx(0.01 * count, rel=0.1)
    assert count < report["latency_s"] < count + 3
    *_, row = map(json.loads, pipes.slow.with_name("trace").read_text().splitlines())
    assert row["answer"] == answer and row["task"]["question"] == ORDER
    assert [progress for progress, _ in told] == [*range(1, len(told) + 1)]
    messages = [message for _, message in told]
    assert messages[0].startswith("thinks: ") and messages[-1].startswith("thinks: ")
    assert [message for message in messages if not message.startswith("thinks: ")] == trail
    wire, errors = pipes.files
    for line in wire.read_bytes().splitlines():
        types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    assert "noise\n" in errors.read_text() and "noise of a child" in errors.read_text()
    (tool,) = pipes.portal.call(pipes.client.list_tools).tools
    assert "records" in tool.description and tool.input_schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "ask: question is missing"),
        ({"question": " \n"}, "ask: question is ' \\n'; string should match pattern"),
        ({"question": "a" * 100_001}, "string should have at most 100000 characters"),
        ({"question": "who?"}, "outside the world of the desk: 'who?'; ask like "),
        ({"question": "1" * 100_000}, "outside the world of the desk: '1111"),  # at once
        (
            {"question": LAW, "preference": "banana=3"},
            "preference: banana has a weight; the desk has none",
        ),
        ({"question": LAW, "usd": 0}, "ask: usd is 0; it should be greater than 0"),
        (
            {"question": LAW, "never": ["x"]},
            "preference: there is no x to ban; there are records, ",
        ),
        ({"question": LAW, "usd": "1"}, "ask: usd is '1'; it should be a valid number"),
        ({"question": LAW, "second": 1}, "ask: there is no second; did you mean seconds?"),
    ],
)
def test_wrong_arguments_are_one_line(pipes, arguments, problem):
    ((result, told),) = pipes.ask(arguments)
    (text,) = result.content
    assert result.is_error and problem in text.text and "\n" not in text.text
    assert len(text.text) < 500 and not told


def test_limits_hold_and_an_unknown_tool_is_refused(pipes):
    limits = {"usd": 1e-6, "never": ["ant"]}
    ((result, _),) = pipes.ask({"question": LAW} | limits)
    assert result.is_error and result.content[0].text == "no answer: user_limit"
    assert result.structured_content["cost_usd"] <= 1e-6
    with pytest.raises(ExceptionGroup) as error:
        pipes.ask({}, tool="nope")
    (problem,) = error.value.exceptions
    assert isinstance(problem, MCPError) and "'nope' is not a tool; ask is one" in str(problem)


def test_calls_run_side_by_side_and_a_cancelled_one_ends(pipes):
    pipes.slow.touch()
    try:
        answers = pipes.ask({"question": ORDER}, {"question": LAW})
        assert all(result.structured_content["answer"] for result, _ in answers)
        ends = [place for place, (_, message) in enumerate(pipes.order) if message is None]
        begun = {number for number, _ in pipes.order[: ends[0]]}
        assert begun == {0, 1}, "each told of its progress before the other had ended"
        errors = pipes.files[1]
        assert "cancelled" not in errors.read_text()
        ((result, told),) = pipes.ask({"question": ORDER}, until="thinks")
        assert result is None and told
        wait(lambda: "cancelled" in errors.read_text())
    finally:
        pipes.slow.unlink()
    ((result, _),) = pipes.ask({"question": ORDER})
    assert result.content[0].text == trail_of(ORDER)[1]


def message(method, number=None, **params):
    body = {"jsonrpc": "2.0", "method": method, "params": params}
    return json.dumps(body if number is None else body | {"id": number})


HELLO = [
    "hello",
    message(
        "initialize",
        1,
        protocolVersion="2025-11-25",
        capabilities={},
        clientInfo={"name": "test", "version": "1"},
    ),
    message("notifications/initialized"),
    message(
        "tools/call",
        2,
        name="ask",
        arguments={"question": ORDER},
        _meta={"progressToken": "token"},
    ),
]


@pytest.mark.parametrize(
    ("how", "status"),
    [("end of stdin", 0), (signal.SIGTERM, 0), (signal.SIGINT, 130)],
)
def test_the_process_ends_while_a_call_runs(tmp_path, how, status):
    slow = tmp_path / "slow"
    slow.touch()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(slow)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write("\n".join(HELLO) + "\n")
    process.stdin.flush()
    lines = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert lines[0]["result"]["protocolVersion"] == "2025-11-25"
    assert lines[1]["params"]["progressToken"] == "token"
    start = time.monotonic()
    if how == "end of stdin":
        process.stdin.close()
        process.stdin = None
    else:
        process.send_signal(how)
    out, errors = process.communicate(timeout=20)
    assert process.returncode == status, errors
    assert time.monotonic() - start < 10
    rest = [json.loads(line) for line in out.splitlines()]
    assert "result" not in rest[-1] and rest[-1].get("error", {}).get("message")
    assert "cancelled" in errors
    assert "Traceback" not in errors
    assert ("interrupted" in errors) == (status == 130)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_at_an_address(start, mode, monkeypatch):
    class Slow(EchoTool):
        def call(self, arguments):
            time.sleep(0.5)
            return ToolResult("seen", 0.25, 2.0)

    monkeypatch.setattr(served, "SILENCE_S", 0.1)
    running, client = start(Slow(blocking=True), mode)
    assert client.client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
    arguments = {"question": "!ask", "preference": "Be quick.", "usd": 0.5}
    (result, told), (other, _) = client.ask(arguments, {"question": "!say"})
    assert running.preferences[0] == Preference("Be quick.", usd=0.5) or running.preferences[1].text
    assert result.content[0].text == other.content[0].text == "Answer: fourty-two, or so."
    assert result.structured_content["calls"] == {"echo": 1}
    messages = [message for _, message in told if not message.startswith("at work: ")]
    assert len(messages) < len(told) and messages[1].startswith('calls: {"name": "echo"')
    del messages[1]
    assert messages == ["thinks: hmm", "result ($0.25, 2.0 s): seen", "thinks: hmm"]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_at_an_address_that_leaves_ends_its_attempt(start, mode, monkeypatch):
    release, closed = threading.Event(), threading.Event()
    monkeypatch.setattr(ServedConversation, "close", lambda self: closed.set())

    class Hanging(EchoTool):
        def call(self, arguments):
            release.wait(30)
            return ToolResult("late")

    _, client = start(Hanging(blocking=True), mode)
    ((result, _),) = client.ask({"question": "!ask"}, until="calls")
    assert result is None
    wait(closed.is_set)
    assert not release.is_set()
    release.set()


def test_failures_are_errors_of_the_tool(start, monkeypatch):
    class Down(EchoTool):
        def call(self, arguments):
            return ToolResult("it is down", error=True, infrastructure=True)

    logged = []
    monkeypatch.setattr(logging, "error", lambda text, exc_info: logged.append(exc_info))
    _, client = start(Down())
    for says in ("it is down", "internal error"):
        ((result, _),) = client.ask({"question": "!ask"})
        assert result.is_error and result.content[0].text == says
        monkeypatch.setattr(ServedConversation, "prices", None)
    assert [type(error) for error in logged] == [TypeError]


def test_the_address_asks_for_the_key_and_takes_small_json_alone(start):
    running, _ = start(key="secret")
    url, key = f"{running.base}/mcp", {"authorization": "Bearer secret"}
    assert httpx.get(url).status_code == 405
    assert httpx.post(url, json={}).status_code == 401
    assert httpx.post(url, content="{}", headers=key).status_code == 400
    big = httpx.post(url, content=b" " * 10**6, headers=key | {"content-type": "application/json"})
    assert big.status_code == 413
    accept = {"accept": "application/json, text/event-stream"}
    body = json.loads(HELLO[1])
    right = httpx.post(url, json=body, headers=key | accept)
    assert right.status_code == 200 and "2025-11-25" in right.text
    other = httpx.post(url, json=body, headers=key | accept | {"host": "evil.example"})
    assert other.status_code == 400


def test_what_is_wrong_at_the_start_is_one_line(monkeypatch, capsys):
    assert serve.main(["--mcp", "--ask", "a"]) == 2
    assert "leave out --ask, --json and --replay" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "nanorchestra.serving.mcp")
    assert serve.main(["--mcp"]) == 2
    assert "--mcp needs the package mcp: pip install mcp==2.3.0" in capsys.readouterr().err
