"""Whose fault a failure is: the infrastructure's, which excludes an attempt, or the policy's."""

from __future__ import annotations

import errno
import io
import json
import socket
import threading
import time
import urllib.error
from asyncio import CancelledError

import httpx
import openai
import pytest
import requests
import torch
from scripted import ANSWER, EchoTool, call, echoing, execute, play

from nanorchestra.agent.failures import EndpointError
from nanorchestra.errors import UserError
from nanorchestra.records import ToolCall, ToolResult
from nanorchestra.report.terminal import Console
from nanorchestra.tools import functions
from nanorchestra.tools.functions import FunctionTool
from nanorchestra.training.trajectories import from_row, replay, to_row
from tools import tool
from worlds.routers import OfferedExpert, ask_until_two_agree


def replied(status):
    """What requests, httpx, openai, aiohttp and urllib raise for a reply with an HTTP status."""
    request = httpx.Request("GET", "http://x")
    response = requests.Response()
    response.status_code = status
    theirs = httpx.Response(status, request=request)
    plain = RuntimeError("aiohttp's ClientResponseError")
    plain.status = status
    return (
        requests.HTTPError(str(status), response=response),
        httpx.HTTPStatusError(str(status), request=request, response=theirs),
        openai.APIStatusError(str(status), response=theirs, body=None),
        plain,
        urllib.error.HTTPError("http://x", status, "says no", {}, None),
    )


def wrapped(outer, inner):
    outer.__cause__ = inner  # raise outer from inner
    return outer


class PanicException(BaseException):  # noqa: N818
    """As pyo3 names the panic of a library in Rust."""


ITSELF = ValueError("round and round")  # raised from itself
INFRASTRUCTURE = (
    *replied(429),
    *replied(503),
    requests.ReadTimeout("read timed out"),
    httpx.ReadTimeout("read timed out"),
    httpx.RemoteProtocolError("the server has closed the connection"),
    openai.APIConnectionError(request=httpx.Request("GET", "http://x")),
    urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")),
    CancelledError("closed"),
    wrapped(RuntimeError("the weather service is down"), ConnectionResetError("reset")),
    wrapped(ValueError("no forecast"), replied(500)[0]),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    TimeoutError("timed out"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    UserError("index: not a whole index; build it: python tools.py index PATH --out DIR"),
    RuntimeError("Expected all tensors to be on the same device, but got cuda:3 and cuda:0"),
    EndpointError("no connection"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("NCCL error: unhandled system error"),
    ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    requests.ConnectionError("refused"),
    httpx.ConnectError("refused"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
)
ORDINARY = (
    *replied(400),
    *replied(404),
    wrapped(ValueError("no such city"), KeyError("Atlantis")),
    wrapped(ITSELF, ITSELF),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid start byte"),
    EndpointError("HTTP 400: too long", bad_request=True),
    ValueError("negative"),
    ZeroDivisionError("division by zero"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    RuntimeError("broken tool"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    SystemExit(1),
    KeyboardInterrupt("of a tool"),
    PanicException("index out of bounds"),
    GeneratorExit(),
    StopIteration(),
)


@pytest.mark.parametrize("error", [*INFRASTRUCTURE, *ORDINARY], ids=repr)
def test_whatever_a_tool_raises_is_an_observation_and_says_whose_fault_it_is(error):
    """Of a class, in its thread or in the loop's, and of a function of the user's."""

    def function(text):
        raise error

    class Raising(EchoTool):
        def call(self, arguments):
            raise error

    raising = [Raising(blocking=True), FunctionTool("echo", "", EchoTool.parameters, function)]
    if isinstance(error, Exception):
        raising.append(Raising())
    for each in raising:
        result = execute(echoing(each), ToolCall("echo", {"text": "hi"}))
        assert result.error and result.infrastructure == (error in INFRASTRUCTURE)
        assert result.content.startswith("Error: echo") and type(error).__name__ in result.content


@pytest.mark.parametrize("error", [CancelledError("closed"), KeyboardInterrupt("of a tool")])
def test_whatever_a_tool_raises_the_other_attempts_go_on(nano_tokenizer, error):
    @tool
    def echo(text: str) -> str:
        """Says it again."""
        raise error

    envs = [echoing(echo), echoing(EchoTool(blocking=True, seconds=0.05))]
    bad, good = play(nano_tokenizer, [call(), ANSWER], [call(), ANSWER], envs=envs)[0]
    assert bad.status in ("answered", "infrastructure") and bad.turns[0].results[0].error
    assert good.outcome == 1.0 and not good.turns[0].results[0].error


def test_no_more_functions_are_begun_where_too_many_hang(monkeypatch):
    """A thread cannot be ended."""
    monkeypatch.setattr(functions, "GIVEN_UP", [])
    monkeypatch.setattr(functions, "MOST_GIVEN_UP", 2)
    before, end = threading.active_count(), threading.Event()
    slow = FunctionTool("f", "", {}, lambda: end.wait(10), timeout_s=0.2)
    late, refused = ("took more than 0.2 s", False), ("2 calls that were given up", True)
    for says, blamed in (late, late, refused, refused):
        result = slow.call({})
        assert says in result.content and result.infrastructure == blamed
    assert threading.active_count() == before + 2
    end.set()
    time.sleep(0.1)
    assert not slow.call({}).error


DOWN = EchoTool(result=ToolResult("Error: echo is down", error=True, infrastructure=True))


def failing(env, **methods):
    """An environment whose methods are others."""
    for name, method in methods.items():
        setattr(env, name, method)
    return env


async def nobody(content):
    return ToolResult("Error: the user did not answer", error=True, infrastructure=True)


def raises(error):
    def grade(answer):
        raise error

    return grade


@pytest.mark.parametrize(
    "env, more, status, says",
    [
        (lambda: echoing(DOWN), {}, "infrastructure", "echo is down"),
        (lambda: echoing(DOWN), {"survives_failures": True}, "answered", ""),
        (echoing, {"survives_failures": True, "finish": "error"}, "infrastructure", ""),
        (
            lambda: failing(echoing(), reply=nobody),
            {"survives_failures": True},
            "infrastructure",
            "the user did not answer",
        ),
        (
            lambda: failing(echoing(), _grade=raises(ConnectionError("reset"))),
            {},
            "infrastructure",
            "the judge did not answer (reset)",
        ),
        (
            lambda: failing(echoing(), _grade=raises(EndpointError("HTTP 400", bad_request=True))),
            {},
            "infrastructure",
            "the judge did not answer (HTTP 400)",
        ),
    ],
    ids=["tool", "tool that is survived", "policy", "user", "judge", "judge that refuses"],
)
def test_an_attempt_ends_where_the_infrastructure_fails_unless_the_policy_can_go_on(
    nano_tokenizer, env, more, status, says
):
    """To a person the policy answers without a tool. The attempt can be recorded and shown."""
    (t,), _ = play(nano_tokenizer, [call(), ANSWER], envs=[env := env()], **more)
    assert t.status == status and says in t.failure
    assert t.outcome == (status == "answered")
    row = json.loads(json.dumps(to_row(env.task, t)))
    assert from_row(row)[1] == t
    replay(t, nano_tokenizer, Console(io.StringIO()).on_event)


def test_a_router_fails_with_its_expert_and_a_broken_reward_ends_the_run(nano_tokenizer):
    attempt = ask_until_two_agree([OfferedExpert("echo", 1.0, {"text": "hi"})], echoing(DOWN))
    assert (attempt.status, attempt.failure) == ("infrastructure", "Error: echo is down")
    broken = failing(echoing(), _grade=raises(KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        play(nano_tokenizer, [ANSWER], envs=[broken])
