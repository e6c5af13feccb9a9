"""Whose fault a failure is: the infrastructure's, which excludes an attempt, or the policy's."""

from __future__ import annotations

import errno
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
from scripted import ANSWER, EchoTool, echoing, execute, play

from nanorchestra.agent.failures import EndpointError
from nanorchestra.errors import UserError
from nanorchestra.records import ToolCall
from nanorchestra.tools import functions
from nanorchestra.tools.functions import FunctionTool


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
    httpx.RemoteProtocolError("the server has closed the connection"),
    urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")),
    CancelledError("closed"),
    wrapped(ValueError("no forecast"), replied(500)[0]),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    OSError(errno.ENOSPC, "No space left on device"),
    UserError("index: not a whole index; build it: python tools.py index PATH --out DIR"),
    EndpointError("no connection"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
)
ORDINARY = (
    *replied(400),
    wrapped(ValueError("no such city"), KeyError("Atlantis")),
    wrapped(ITSELF, ITSELF),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid start byte"),
    EndpointError("HTTP 400: too long", bad_request=True),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    SystemExit(1),
    KeyboardInterrupt("of a tool"),
    PanicException("index out of bounds"),
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


def test_no_more_functions_are_begun_where_too_many_hang(monkeypatch):
    """A thread cannot be ended."""
    monkeypatch.setattr(functions, "GIVEN_UP", [])
    monkeypatch.setattr(functions, "MOST_GIVEN_UP", 2)
    begun, end = [], threading.Event()
    slow = FunctionTool("f", "", {}, lambda: begun.append(0) or end.wait(10), timeout_s=0.1)
    assert [slow.call({}).infrastructure for _ in range(4)] == [False, False, True, True]
    assert len(begun) == 2
    end.set()
    time.sleep(0.1)
    assert not slow.call({}).error


def judged_by(error):
    def grade(answer):
        raise error

    env = echoing()
    env._grade = grade
    return env


def test_a_judge_that_fails_is_never_the_policys_fault_and_a_bug_ends_the_run(nano_tokenizer):
    for error in (ConnectionError("reset"), EndpointError("HTTP 400", bad_request=True)):
        (attempt,), _ = play(nano_tokenizer, [ANSWER], envs=[judged_by(error)])
        assert attempt.status == "infrastructure" and attempt.outcome == 0.0
    with pytest.raises(KeyError, match="a bug"):
        play(nano_tokenizer, [ANSWER], envs=[judged_by(KeyError("a bug"))])
