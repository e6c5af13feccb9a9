"""Posts JSON to a server and reads its JSON reply, whatever the server does.

Time, tries, bytes of a reply and its nesting are bounded; each failure is one line. The
API key and the values of headers come from environment variables, go to the address that was named,
and reach no message. No redirect is followed and ~/.netrc is not read. An https:// address is
reached through the proxy of the variable HTTPS_PROXY, unless NO_PROXY excepts it: a tunnel, which
sees neither key nor text. An http:// address is reached directly.
"""

import ast
import base64
import json
import os
import random
import re
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi

from nanorchestra.schemas import Json, bounded_json, schema_error
from nanorchestra.tools.threads import in_daemon

REQUESTS = 3
RETRIED = (408, 409, 429)  # and every status from 500
BAD_REQUEST = (400, 413, 422)  # the request is at fault: too long, or not accepted
CONNECT_S = 10.0  # for each address of a host, its TLS handshake included
MOST_BYTES = 8 << 20  # of a reply
MOST_ERROR_BYTES = 4096  # of a reply that is an HTTP error or a redirect
MOST_CHARS = 300  # of a message
SECRET_CHARS = 8  # a shorter key, like "EMPTY", may be a word of a reply
# The text of an error object, in JSON or as Python prints it, also of one that is cut or in a text.
MESSAGE = re.compile(
    r"""["'](?:message|detail|error)["']\s*:\s*"""
    r"""("(?:[^"\\]|\\.)+"?|'(?:[^'\\]|\\.)+'?)"""
)
BYTES_PER_TOKEN = 3  # of text whose tokens are not known; rather too many tokens than too few


class EndpointError(Exception):
    """A server has not answered as it should, after all attempts; the message never has the key.

    `bad_request` says that the server refuses this request itself, so that its text is at
    fault; else the infrastructure is. `received` is the text of a reply that was begun, None
    if there is nothing to bill; `tokens` are those of a language model that has worked for it.
    `spent` are the requests that were repeated, the seconds of all, and how many of these passed
    before the last request. A request may be repeated after `wait` seconds; None: it is no use.
    """

    tokens, spent = (0, 0), (0, 0.0, 0.0)

    def __init__(
        self,
        problem: str,
        received: str | None = None,
        wait: float | None = None,
        bad_request: bool = False,
    ):
        super().__init__(problem)
        self.received, self.wait, self.bad_request = received, wait, bad_request


def post(
    url: str,
    body: Json,
    schema: Json,
    key_variable: str,
    timeout_s: float,
    header_variables: Mapping[str, str] = MappingProxyType({}),
    requests: int = REQUESTS,
) -> tuple[Json, tuple[int, float, float]]:
    """Returns a JSON reply that fits `schema`, and (repeated requests, seconds, those waited).

    All of it takes `timeout_s` seconds at most; those waited passed before the last request. A
    connection error and the status 408, 409, 429 or from 500 are tried again, after a random wait
    or as long as the server's Retry-After says, until `requests` were made. The
    key is in the environment variable `key_variable`, the value of each header in that of
    `header_variables`; one that is not set is not sent. The reply is as `bounded_json` reads it.
    Raises EndpointError.
    """
    key = secret(key_variable).replace(" ", "")
    values = {name: secret(variable) for name, variable in header_variables.items()}
    secrets = [key, *values.values()]
    headers = {"Content-Type": "application/json", "User-Agent": "nanorchestra"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    headers |= {name: value for name, value in values.items() if value}
    sent = json.dumps(body)
    start = time.monotonic()
    end, limit = start + timeout_s, f"{round(timeout_s, 3):g}"
    waited = 0.0
    for attempt in range(requests):
        exchange = _Exchange(url, sent.encode(), headers, secrets, end)
        try:
            reading = in_daemon(partial(_reply_of, exchange, schema, secrets))
            reply = reading.result(timeout=max(end - time.monotonic(), 0.0))
            return reply, (attempt, time.monotonic() - start, waited)
        except TimeoutError:
            exchange.stop()
            error = EndpointError(f"no whole reply within {limit} s", exchange.begun())
        except EndpointError as refused:
            error = refused
        wait = max(error.wait or 0.0, 2.0 ** (attempt + 1) * random.uniform(0.5, 1.0))
        late = time.monotonic() + wait >= end
        if error.wait is None or late or attempt == requests - 1:
            break
        time.sleep(wait)
        waited = time.monotonic() - start
    problem = " ".join(masked(str(error), secrets).split())
    if key_variable and not key and "HTTP 401" in problem:
        problem = f"the environment variable {key_variable} is not set; {problem}"
    error.args = (problem[:MOST_CHARS],)
    error.spent = attempt, time.monotonic() - start, waited
    if error.received is not None:
        error.tokens = count_tokens(sent), count_tokens(error.received)
    raise error


def error_message(body: str) -> str:
    """Returns what the body of an error says, in one line: the message of its error object, if any.

    '{"error": {"message": "too long", "code": 7}}' says "too long". An object within the message
    counts, too, also as Python prints it; one that is cut is read as far as it goes.
    """
    said = body[:MOST_ERROR_BYTES]
    while match := MESSAGE.search(said):
        begin = re.search(r"[\[{]", said[: match.start()])
        head, (quote, *_) = said[: begin.start()] if begin else "", match[1]
        text = match[1] if match[1][1:].endswith(quote) else match[1] + quote
        try:
            inner = json.loads(text, strict=False) if quote == '"' else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            inner = text[1:-1]
        said = head + inner
    return " ".join(said.split())


def is_temporary(status: int) -> bool:
    """Returns whether an HTTP status says that the same request may be accepted later."""
    return status in RETRIED or status >= 500


def secret(variable: str) -> str:
    """Returns the value of an environment variable as a header can hold it; "" if it is not set."""
    return " ".join(os.environ.get(variable, "").split())


def count_tokens(text: str) -> int:
    """Returns an estimate of the tokens of a text, from its bytes."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


class _Exchange:
    """One request and its reply, which `run` reads in a thread and `stop` ends from another.

    A thread that waits for a server cannot be ended. Its socket can be shut down, and then each of
    its reads returns: of a header as of the body, however slowly they come.
    """

    def __init__(
        self, url: str, body: bytes, headers: dict[str, str], secrets: list[str], end: float
    ):
        self.url, self.body, self.headers, self.end = url, body, headers, end
        self.secrets = secrets
        self.data, self.status = bytearray(), 0
        self.connection, self.socket = None, None
        self.sent = self.stopped = False

    def run(self) -> str:
        """Returns the text of the reply. EndpointError."""
        try:
            self._connect()
            return self._ask()
        except ssl.SSLCertVerificationError as error:
            raise EndpointError(f"no trusted connection ({error.verify_message})") from None
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise self._failure(f"no connection ({reason})", wait=0.0) from None
        except HTTPException as error:
            raise self._failure(f"not HTTP ({type(error).__name__}: {error})") from None
        except ValueError as error:  # an address or a key that cannot be sent, a size that is none
            raise self._failure(f"{type(error).__name__}: {error}") from None
        finally:
            if self.connection:
                self.connection.close()

    def stop(self) -> None:
        """Ends the reads of `run`."""
        self.stopped = True
        open_one = self.socket or (self.connection and self.connection.sock)
        if open_one:
            with suppress(OSError):  # it has ended by itself
                socket.socket.shutdown(open_one, socket.SHUT_RDWR)

    def begun(self) -> str | None:
        """Returns what has come of a reply that is to be billed; None if there is none."""
        if not self.sent or self.status >= 300:
            return None
        return bytes(self.data).decode("utf-8", "replace")

    def _failure(self, problem, wait=None):
        """Returns the error of a step; a reply that has begun breaks off with it."""
        if self.status:
            return EndpointError("the reply breaks off", self.begun())
        return EndpointError(problem, wait=wait)

    def _connect(self):
        left = max(self.end - time.monotonic(), 0.001)
        self.connection = _connection(self.url, min(left, CONNECT_S))
        self.connection.connect()
        self.socket = self.connection.sock
        if self.stopped:
            raise TimeoutError
        self.socket.settimeout(max(self.end - time.monotonic(), 0.0) + 1)  # `stop` ends it first

    def _ask(self) -> str:
        parts = urlsplit(self.url)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        self.connection.request("POST", path or "/", self.body, self.headers)
        self.sent = True
        reply = self.connection.getresponse()
        self.status = reply.status
        most = MOST_BYTES if self.status < 300 else MOST_ERROR_BYTES
        with reply:
            while len(self.data) <= most and (chunk := reply.read1(1 << 16)):
                self.data += chunk
            whole = not reply.length  # None where the server has not said how long it is
        text = bytes(self.data).decode("utf-8", "replace")
        if self.status >= 400:
            again = is_temporary(self.status)
            wait = _seconds(reply.getheader("Retry-After", "")) if again else None
            bad = self.status in BAD_REQUEST
            said = error_message(masked(text, self.secrets))  # which may cut a key
            problem = f"HTTP {self.status}: {said}"
            raise EndpointError(problem, wait=wait, bad_request=bad)
        if self.status >= 300:
            where = reply.getheader("Location", "nowhere")
            raise EndpointError(f"HTTP {self.status}: redirected to {where}, which is not followed")
        if len(self.data) > most:
            raise EndpointError(f"the reply has more than {most >> 20} MiB", text)
        if not whole:
            raise EndpointError("the reply breaks off", text)
        return text


def _reply_of(exchange, schema, secrets) -> Json:
    """Returns the JSON of a reply, once it has come. EndpointError."""
    return _read(exchange.run(), schema, secrets)


def _connection(url, timeout_s) -> HTTPConnection:
    """Returns a connection to the host of `url`, not yet open. ValueError."""
    parts = urlsplit(url)
    known = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
    if not known:
        raise ValueError("an address must be http:// or https:// and a host, without a key")
    if parts.scheme == "http":
        return HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    proxy = getproxies().get("https", "")
    if not proxy or proxy_bypass(parts.hostname):
        context = trusted()
        return HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
    via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if via.scheme != "http" or not via.hostname:
        raise ValueError("HTTPS_PROXY must be http:// and a host")
    headers = {}
    if via.username:
        login = f"{unquote(via.username)}:{unquote(via.password or '')}".encode()
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(login).decode()}"
    tunnel = HTTPSConnection(via.hostname, via.port or 80, timeout=timeout_s, context=trusted())
    tunnel.set_tunnel(parts.hostname, parts.port or 443, headers)
    return tunnel


@cache
def trusted() -> ssl.SSLContext:
    """Returns what checks a server: the system's authorities (SSL_CERT_FILE) and certifi's."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _seconds(retry_after: str) -> float:
    """Returns the seconds that a Retry-After asks to wait; 0 if it cannot be read."""
    text = retry_after.strip()
    if re.fullmatch(r"[0-9]+", text):
        return float(text)
    with suppress(ValueError, OverflowError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


def masked(text, secrets, least=1) -> str:
    """Returns a text without the values of headers; those of fewer characters than `least` stay."""
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= least:
            text = text.replace(value, "...")
    return text


def _without(value, secrets) -> Any:
    """Returns JSON whose texts are masked."""
    if isinstance(value, dict):
        return {_without(name, secrets): _without(inner, secrets) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without(inner, secrets) for inner in value]
    return masked(value, secrets, SECRET_CHARS) if isinstance(value, str) else value


def _read(text, schema, secrets) -> Json:
    """Returns the JSON of a reply. EndpointError if it is another; what was begun as JSON is kept.

    A gateway's page is no reply that was begun, nor is an error object.
    """
    begun = text if text.lstrip().startswith("{") else None
    try:
        reply = _without(bounded_json(text), secrets)
    except json.JSONDecodeError:
        problem = f"not JSON: {text.strip()[:80] or 'an empty reply'}"
        raise EndpointError(problem, begun) from None
    except ValueError as error:
        raise EndpointError(f"not the reply that was asked for: {error}", begun) from None
    if isinstance(reply, dict) and (error := reply.get("error")):
        code = error.get("code") if isinstance(error, dict) else None
        said = error if isinstance(error, str) else error_message(json.dumps(error))
        problem = f"the endpoint says: {said}"
        raise EndpointError(problem, bad_request=code in BAD_REQUEST)
    if problem := schema_error(reply, schema):
        raise EndpointError(f"not the reply that was asked for: {problem}", text)
    return reply
