"""Servers that misbehave: one line, in bounded time and memory; nothing leaks and nothing stays."""

from __future__ import annotations

import gzip
import json
import random
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager
from email.utils import formatdate
from itertools import repeat

import pytest
from openai_server import openai_server, said

from nanorchestra.records import Price
from nanorchestra.schemas import bounded_json
from nanorchestra.tools import http, models
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert, most_tokens
from nanorchestra.tools.spending import Spending

KEY = "sk-secret-key-of-mine"
LIMIT = 100  # tokens of a reply
UNIFORM = random.uniform
GOOD = json.dumps(said("42")).encode()


def reply(body=GOOD, status="200 OK", *headers, length=None):
    """Sends a reply as it is told to, right or wrong."""
    length = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}", *headers, "", ""]
    return lambda send: send("\r\n".join(lines).encode() + body)


def answers(content="42", **more):
    return reply(json.dumps(said(content, **more)).encode())


def uses(read, written):
    """A good reply with numbers that json.dumps would not write."""
    usage = b'"prompt_tokens": %s, "completion_tokens": %s'
    return reply(GOOD.replace(usage % (b"10", b"5"), usage % (read, written)))


def sent(*parts):
    """Sends parts of bytes; the last one a byte at a time for ever, if it is a string."""

    def send_all(send):
        for part in parts:
            for piece in repeat(part.encode()) if isinstance(part, str) else [part]:
                send(piece)
                time.sleep(0.02 if isinstance(part, str) else 0)

    return send_all


def held(head=b""):
    """Sends a head and then nothing more, for longer than the call may take."""

    def send_all(send):
        send(head)
        time.sleep(1)

    return send_all


def flood(head, block=b"x" * (1 << 20), blocks=1500):
    """Sends 1.5 GB, as fast as it is read."""

    def send_all(send):
        send(head)
        for _ in range(blocks):
            send(block)

    return send_all


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
INSIDE = b'{"choices": [{"message": {"content": %s}}]}'
BILLED, FREE = True, False
INFRASTRUCTURE, ORDINARY, ANSWERED = "infrastructure", "ordinary", "answered"
FAULTS = {  # name: (what is sent, how the call ends, what it says, whether the model is paid)
    "retry after 10^400 s": (
        reply(b"busy", "503 Busy", "Retry-After: 1" + "0" * 400),
        INFRASTRUCTURE, "HTTP 503: busy", FREE,
    ),
    "usage of 10^400": (uses(b"1" + b"0" * 400, b"5"), ANSWERED, "42", BILLED),
    "usage of NaN": (uses(b"NaN", b"-Infinity"), ANSWERED, "42", BILLED),
    "negative usage": (uses(b"-7", b"-1e300"), ANSWERED, "42", BILLED),
    "content nested 10^6 deep": (
        reply(INSIDE % (b"[" * 10**6 + b"]" * 10**6)), INFRASTRUCTURE, "nested deeper", BILLED,
    ),
    "1.5 GB": (flood(OK + b"\r\n{"), INFRASTRUCTURE, "more than 8 MiB", BILLED),
    "an error of 1.5 GB": (
        flood(b"HTTP/1.1 500 No\r\n\r\n"), INFRASTRUCTURE, "HTTP 500: xxx", FREE,
    ),
    "a redirect of 1.5 GB": (
        flood(b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n"),
        INFRASTRUCTURE, "HTTP 302: redirected to file:///etc/passwd, which is not followed", FREE,
    ),
    "a body that drips": (sent(OK + b"\r\n", " "), INFRASTRUCTURE, "no whole reply", BILLED),
    "silence": (held(), INFRASTRUCTURE, "no whole reply", BILLED),
    "half a reply, then silence": (held(OK + b"\r\n{"), INFRASTRUCTURE, "no whole reply", BILLED),
    "another protocol": (sent(b"SSH-2.0-OpenSSH_9.6\r\n"), INFRASTRUCTURE, "(SSH-2.0-", FREE),
    "a connection that closes": (sent(), INFRASTRUCTURE, "no connection", FREE),
    "half a reply": (reply(GOOD, length=10**6), INFRASTRUCTURE, "breaks off", BILLED),
    "half a chunk": (sent(CHUNKED + b"ff\r\n{"), INFRASTRUCTURE, "breaks off", BILLED),
    "a compressed reply": (
        reply(gzip.compress(GOOD), "200 OK", "Content-Encoding: gzip"), ANSWERED, "42", BILLED,
    ),
    "a bomb": (
        reply(gzip.compress(b" " * 10**8), "200 OK", "Content-Encoding: gzip"),
        INFRASTRUCTURE, "more than 8 MiB", BILLED,
    ),
    "a page": (reply(b"<html>\n<title>502"), INFRASTRUCTURE, "not JSON: <html> <title>502", FREE),
    "the key in an error": (
        reply(f"no {KEY}, no {json.dumps(KEY)}".encode(), "400 Bad"), ORDINARY, "no ..., no", FREE,
    ),
    "the key in an error object": (
        reply(json.dumps({"error": {"message": f"no {KEY}", "code": 400}}).encode(), "400 Bad"),
        ORDINARY, "HTTP 400: no ...", FREE,
    ),
    "the key in an answer": (answers(f"your key: {KEY}"), ANSWERED, "your key: ...", BILLED),
    "the key in an answer, escaped": (
        reply(json.dumps(said(KEY)).replace("-", "\\u002d").encode()), ANSWERED, "...", BILLED,
    ),
    "half a surrogate pair": (answers("a\ud800b"), ANSWERED, "a\ufffdb", BILLED),
    "a missing key": (reply(b"who?", "401 No"), INFRASTRUCTURE, "HTTP 401: who?", FREE),
    "too long": (reply(b"8192 tokens at most", "400 Bad"), ORDINARY, "8192 tokens at most", FREE),
    "an error in a reply": (
        reply(b'{"error": {"code": 503, "message": "busy"}}'), INFRASTRUCTURE, "busy", FREE,
    ),
    "a list": (reply(b"[]"), INFRASTRUCTURE, "not the reply that was asked for", BILLED),
    "no choice": (reply(b'{"choices": []}'), INFRASTRUCTURE, "choices", BILLED),
    "no message": (reply(b'{"choices": [{}]}'), INFRASTRUCTURE, "message is missing", BILLED),
    "a call without a name": (
        answers(tool_calls=[{"function": {}}]), INFRASTRUCTURE, "name is missing", BILLED,
    ),
    "content in parts": (
        answers([{"type": "text", "text": "a"}, "b", {"type": "image"}]), ANSWERED, "ab", BILLED,
    ),
    "a number": (answers(7), ANSWERED, "7", BILLED),
    "reasoning alone": (answers(None, reasoning="r"), ORDINARY, "reasoning alone", BILLED),
    "a thought before": (answers("<think>of</think>\nParis"), ANSWERED, "Paris", BILLED),
    "no usage": (reply(GOOD.replace(b"usage", b"x")), ANSWERED, "42", BILLED),
    "usage that is a number": (reply(GOOD.replace(b'"usage": {', b'"usage": 3, "x": {')), ANSWERED,
        "42", BILLED),
    "nothing said": (answers(""), ORDINARY, "gave no answer: nothing", BILLED),
    "a refusal": (answers("", refusal="I\nwill not"), ORDINARY, "refused: I will not", BILLED),
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


def reading():
    """The threads of calls."""
    return [thread for thread in threading.enumerate() if "(work)" in thread.name]


@contextmanager
def nothing_stays():
    """Threads of calls end within a second after their call."""
    before = set(reading())
    yield
    end = time.monotonic() + 1
    while left := set(reading()) - before:
        assert time.monotonic() < end, left
        time.sleep(0.01)


@contextmanager
def memory():
    """Yields a function that returns the bytes that were allocated at most, by the end."""
    tracemalloc.start()
    try:
        yield lambda: peak
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_a_server_does_is_one_line_in_bounded_time_and_memory(server, name):
    server.raw, ends, says, billed = FAULTS[name]
    spending = Spending(max_usd=1.0)
    asked = expert(server.url, spending, 0.3 if "no whole reply" in says else 5.0)
    text, start = "What is 6 times 7?", time.monotonic()
    with nothing_stays(), memory() as most_bytes:
        result = asked.ask(text, "e")
        assert time.monotonic() - start < 5.0
    assert most_bytes() < 200 << 20
    assert (result.error, result.infrastructure) == (ends != ANSWERED, ends == INFRASTRUCTURE)
    assert says in result.content and len(result.content) < 400, result.content
    assert "\n" not in result.content and KEY not in result.content
    most = asked.price.cost(most_tokens(text), LIMIT)
    assert (0 < result.cost_usd <= most) if billed else result.cost_usd == 0
    assert spending.spent == pytest.approx(result.cost_usd, abs=1e-12)
    assert 0 <= result.latency_s < 5.0 and 0 <= result.output_tokens <= LIMIT
    server.raw = None
    assert asked.ask(text, "e").content == "42"  # the next call finds nothing amiss


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


def test_what_never_becomes_a_connection_ends_too(server):
    """A host that is not there, a server that reads nothing, TLS that is none."""
    with socket.create_server(("127.0.0.1", 0)) as listener, nothing_stays():
        deaf = listener.getsockname()[1]
        for address, timeout_s, says, text in (
            ("http://127.0.0.1:9/v1", 10.0, "no connection (Connection refused)", "hi"),
            ("http://nowhere.invalid/v1", 10.0, "no connection (", "hi"),
            (server.url.replace("http", "https"), 10.0, "no connection (", "hi"),
            (f"https://127.0.0.1:{deaf}/v1", 0.3, "no whole reply within 0.3 s", "hi"),
            (f"http://127.0.0.1:{deaf}/v1", 0.3, "no whole reply within 0.3 s", "x" * 10**7),
            ("http://127.0.0.1:99999/v1", 10.0, "no connection (Failed to parse", "hi"),
        ):
            start, spending = time.monotonic(), Spending(max_usd=1000.0)
            result = expert(address, spending, timeout_s).ask(text, "e")
            assert time.monotonic() - start < timeout_s + 1.2, address
            assert result.infrastructure and says in result.content, result.content
            assert "\n" not in result.content and spending.spent == result.cost_usd == 0


def test_a_key_that_is_missing_or_cannot_be_sent_is_an_error_without_the_key(
    server, monkeypatch, capsys
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\u20ac")
    result = expert(server.url, Spending(), 1.0).ask("hi", "e")
    assert result.infrastructure and "sk-secret" not in result.content
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setattr(models, "TOLD", set())
    server.status = 401
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        for _ in range(2):
            result = expert(server.url, Spending(), 1.0).ask("hi", "e")
            assert "the environment variable OPENAI_API_KEY is not set" in result.content
    assert capsys.readouterr().err == "model-1 needs OPENAI_API_KEY, which is not set\n"
    assert "Authorization" not in server.headers[-1]


@pytest.fixture
def waits(monkeypatch):
    """The seconds between the tries, which pass at once."""
    waited = []
    monkeypatch.setattr(http.time, "sleep", waited.append)
    monkeypatch.setattr(http.random, "uniform", UNIFORM)
    return waited


@pytest.mark.parametrize(
    "status, headers, most_requests, waited",
    [
        (500, {}, 3, [(1, 2), (2, 4)]),
        (429, {}, 3, [(1, 2), (2, 4)]),
        (429, {}, 1, []),
        (401, {}, 3, []),
        (429, {"Retry-After": "7"}, 3, [(7, 7)] * 2),
        (429, {"Retry-After": "DATE"}, 3, [(25, 30)] * 2),  # 30 seconds from now
        (429, {"Retry-After": "86400"}, 3, []),  # longer than the call may take
        (None, {}, 3, [(1, 2), (2, 4)]),  # nothing listens
    ],
)
def test_what_may_pass_is_tried_again_as_often_and_as_late_as_was_said(
    server, waits, status, headers, most_requests, waited
):
    date = formatdate(time.time() + 30, usegmt=True)
    server.status = status
    server.reply_headers = {name: value.replace("DATE", date) for name, value in headers.items()}
    url = server.url if status else "http://127.0.0.1:9/v1"
    endpoint = Endpoint(url, timeout_s=120.0, most_requests=most_requests)
    reply = endpoint.complete({}, 120.0)
    assert reply.problem and reply.retries == len(waits) == len(waited)
    assert all(low <= each <= high for each, (low, high) in zip(waits, waited, strict=True))
    assert len(server.bodies) == (1 + len(waited) if status else 0)
    assert (reply.waited > 0) == bool(waited) and reply.waited < reply.seconds


@pytest.mark.parametrize(
    "model, says, told",
    [
        ("r", "r redirected", "r redirected"),
        ("big.1", "big.1 redirected, big.1x.", "c redirected, big.1x."),
        ("m", "x" * 999, "x" * 290),
    ],
)
def test_the_models_name_is_hidden_and_no_other_word_is_changed(server, model, says, told):
    server.status, server.answer = 400, lambda body: says.encode()
    asked = Expert("c", Endpoint(server.url), model, Price(1, 1), Spending())
    assert asked.ask("hi", "c").content == f"Error: c did not answer: HTTP 400: {told}"


def test_json_from_outside_is_plain():
    assert bounded_json('[1, 1e999, NaN, "\\ud83d\\ude00 \\ud83d", true, 9223372036854775808]') == [
        1, None, None, "\U0001f600 \ufffd", True, None,
    ]  # fmt: skip
    bounded_json("[" * 64 + "]" * 64)
    for text in ("[" * 65 + "]" * 65, "[" * 10**5, "", "{]"):
        with pytest.raises(ValueError):
            bounded_json(text)
