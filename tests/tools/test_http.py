"""Servers that misbehave: one line, in bounded time and memory; nothing leaks and nothing stays."""

from __future__ import annotations

import gzip
import json
import random
import socket
import threading
import time
import tracemalloc

import pytest
from openai_server import openai_server, said

from nanorchestra.records import Price
from nanorchestra.tools import http
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert, most_tokens
from nanorchestra.tools.spending import Spending

KEY = "sk-secret-key-of-mine"
LIMIT = 100  # tokens of a reply
UNIFORM = random.uniform
GOOD = json.dumps(said("42")).encode()
OK = b"HTTP/1.1 200 OK\r\n"
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n"
DEEP = b'{"choices": [{"message": {"content": %s}}]}' % (b"[" * 10**6 + b"]" * 10**6)
GZIP = "Content-Encoding: gzip"
FLOOD = [b"x" * (1 << 20)] * 1500  # 1.5 GB


def reply(body=GOOD, status="200 OK", *headers, length=None):
    """Sends a reply as it is told to, right or wrong."""
    length = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}", *headers, "", ""]
    return sends("\r\n".join(lines).encode() + body)


def sends(*parts, pause=0.0):
    """Sends bytes, with a pause of so many seconds after each part."""

    def send_all(send):
        for part in parts:
            send(part)
            time.sleep(pause)

    return send_all


BILLED, FREE = True, False
INFRASTRUCTURE, ORDINARY, ANSWERED = "infrastructure", "ordinary", "answered"
FAULTS = {  # name: (what is sent, how the call ends, what it says, whether the model is paid)
    "usage of 10^400": (
        reply(GOOD.replace(b": 10,", b": 1" + b"0" * 400 + b",")), ANSWERED, "42", BILLED,
    ),
    "content nested 10^6 deep": (reply(DEEP), INFRASTRUCTURE, "nested deeper", BILLED),
    "1.5 GB": (sends(OK + b"\r\n{", *FLOOD), INFRASTRUCTURE, "more than 8 MiB", BILLED),
    "a redirect of 1.5 GB": (
        sends(REDIRECT, *FLOOD), INFRASTRUCTURE,
        "HTTP 302: redirected to file:///etc/passwd, which is not followed", FREE,
    ),
    "a bomb": (
        reply(gzip.compress(b" " * 10**8), "200 OK", GZIP),
        INFRASTRUCTURE, "more than 8 MiB", BILLED,
    ),
    "a body that drips": (
        sends(OK + b"\r\n", *[b" "] * 50, pause=0.02), INFRASTRUCTURE, "no whole reply", BILLED,
    ),
    "a header that drips": (
        sends(OK, *[b"x"] * 50, pause=0.02), INFRASTRUCTURE, "no whole reply", BILLED,
    ),
    "silence": (sends(b"", pause=1.0), INFRASTRUCTURE, "no whole reply", BILLED),
    "a connection that closes": (sends(), INFRASTRUCTURE, "no connection", FREE),
    "half a reply": (reply(GOOD, length=10**6), INFRASTRUCTURE, "breaks off", BILLED),
    "a page": (reply(b"<html>\n<title>502"), INFRASTRUCTURE, "not JSON: <html> <title>502", FREE),
    "no message": (reply(b'{"choices": [{}]}'), INFRASTRUCTURE, "message is missing", BILLED),
    "an error in a reply": (
        reply(b'{"error": {"code": 503, "message": "busy"}}'), INFRASTRUCTURE, "busy", FREE,
    ),
    "a missing key": (reply(b"who?", "401 No"), INFRASTRUCTURE, "HTTP 401: who?", FREE),
    "the key in an error": (
        reply(f"no {KEY}, no {json.dumps(KEY)}".encode(), "400 Bad"), ORDINARY, "no ..., no", FREE,
    ),
    "the key in an answer, escaped": (
        reply(json.dumps(said(KEY)).replace("-", "\\u002d").encode()), ANSWERED, "...", BILLED,
    ),
    "reasoning alone": (
        reply(json.dumps(said(None, reasoning="r")).encode()), ORDINARY, "reasoning alone", BILLED,
    ),
}  # fmt: skip


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(http.random, "uniform", lambda *_: 0.0)  # no wait between the tries
    with openai_server() as served:
        yield served


def expert(url, spending, timeout_s):
    endpoint = Endpoint(url, "OPENAI_API_KEY", timeout_s)
    return Expert("e", endpoint, "model-1", Price(1.0, 10.0), spending, max_tokens=LIMIT)


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_a_server_does_is_one_line_in_bounded_time_and_memory(server, name):
    server.raw, ends, says, billed = FAULTS[name]
    spending = Spending(max_usd=1.0)
    asked = expert(server.url, spending, 0.3 if "no whole reply" in says else 5.0)
    text, start, before = "What is 6 times 7?", time.monotonic(), set(threading.enumerate())
    tracemalloc.start()
    result = asked.ask(text, "e")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.monotonic() - start < 5.0 and most_bytes < 200 << 20
    assert (result.error, result.infrastructure) == (ends != ANSWERED, ends == INFRASTRUCTURE)
    assert says in result.content and len(result.content) < 400, result.content
    assert "\n" not in result.content and KEY not in result.content
    most = asked.price.cost(most_tokens(text), LIMIT)
    assert (0 < result.cost_usd <= most) if billed else result.cost_usd == 0
    assert spending.spent == pytest.approx(result.cost_usd, abs=1e-12)
    assert 0 <= result.latency_s < 5.0 and 0 <= result.output_tokens <= LIMIT
    server.raw = None
    assert asked.ask(text, "e").content == "42"  # the next call finds nothing amiss
    end = time.monotonic() + 1.5
    while any("(work)" in thread.name for thread in set(threading.enumerate()) - before):
        assert time.monotonic() < end, "a thread of the call stays"
        time.sleep(0.01)


def test_no_redirect_takes_a_prompt_or_a_key_to_another_host(server):
    with openai_server() as other:
        for status in (301, 302, 303, 307, 308):
            server.status = status
            server.reply_headers = {"Location": f"{other.url}/chat/completions"}
            result = expert(server.url, Spending(), 5.0).ask("a secret", "e")
            assert result.infrastructure and f"HTTP {status}: redirected to" in result.content
        assert not other.bodies and len(server.bodies) == 5


def test_the_key_alone_speaks_for_the_user_and_proxies_see_neither_key_nor_text(
    server, monkeypatch, tmp_path
):
    """Whatever ~/.netrc and the variables of proxies say."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password else\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    told = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(variable, f"http://me:word@127.0.0.1:{port}")
        monkeypatch.setenv("NO_PROXY", "excepted.invalid")
        monkeypatch.delenv("no_proxy", raising=False)
        assert expert(server.url, Spending(), 5.0).ask("hi", "e").content == "42"
        assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"

        def tunnel():
            for _ in range(3):
                connection, _ = proxy.accept()
                with connection:
                    told.append(connection.recv(4096).decode())
                    connection.sendall(b"HTTP/1.1 403 Not from here\r\n\r\n")

        thread = threading.Thread(target=tunnel, daemon=True)
        thread.start()
        result = expert("https://api.invalid/v1", Spending(), 1.0).ask("hi", "e")
        thread.join(2)
    assert "no connection (Tunnel connection failed: 403 Not from here)" in result.content
    assert told[0].startswith("CONNECT api.invalid:443") and "Basic bWU6d29yZA==" in told[0]
    assert len(told) == 3 and "sk-secret" not in told[0] and "Bearer" not in told[0]
    direct = expert("https://excepted.invalid/v1", Spending(), 1.0).ask("hi", "e")
    assert "Tunnel" not in direct.content and direct.infrastructure


def test_a_key_that_is_missing_or_cannot_be_sent_is_an_error_without_the_key(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\u20ac")
    result = expert(server.url, Spending(), 1.0).ask("hi", "e")
    assert result.infrastructure and "sk-secret" not in result.content
    monkeypatch.delenv("OPENAI_API_KEY")
    server.status = 401
    result = expert(server.url, Spending(), 1.0).ask("hi", "e")
    assert "the environment variable OPENAI_API_KEY is not set" in result.content
    assert "Authorization" not in server.headers[-1]


@pytest.mark.parametrize(
    "status, headers, most_requests, waited",
    [
        (500, {}, 3, [(1, 2), (2, 4)]),
        (429, {}, 1, []),
        (401, {}, 3, []),
        (429, {"Retry-After": "7"}, 3, [(7, 7)] * 2),
        (429, {"Retry-After": "86400"}, 3, []),  # longer than the call may take
        (None, {}, 3, [(1, 2), (2, 4)]),  # nothing listens
    ],
)
def test_what_may_pass_is_tried_again_as_often_and_as_late_as_was_said(
    server, monkeypatch, status, headers, most_requests, waited
):
    waits = []
    monkeypatch.setattr(http.time, "sleep", waits.append)
    monkeypatch.setattr(http.random, "uniform", UNIFORM)
    server.status, server.reply_headers = status, headers
    url = server.url if status else "http://127.0.0.1:9/v1"
    endpoint = Endpoint(url, timeout_s=120.0, most_requests=most_requests)
    reply = endpoint.complete({}, 120.0)
    assert reply.problem and reply.retries == len(waits) == len(waited)
    assert all(low <= each <= high for each, (low, high) in zip(waits, waited, strict=True))
    assert len(server.bodies) == (1 + len(waited) if status else 0)
    assert (reply.waited > 0) == bool(waited) and reply.waited < reply.seconds
