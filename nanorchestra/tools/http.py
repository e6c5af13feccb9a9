"""Posts JSON to a server and reads its JSON reply, in bounded time and with bounded retries.

The API key and the values of headers come from environment variables and reach no message.
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import requests
import urllib3
from urllib3.util import Retry

from nanorchestra.schemas import Json, schema_error

ATTEMPTS = 3
RETRIED = (408, 409, 429)  # and every status from 500
MOST_BYTES = 32 << 20  # of a reply
BYTES_PER_TOKEN = 3  # of text whose tokens are not known; rather too many tokens than too few
T = TypeVar("T")


class EndpointError(Exception):
    """A server has not answered as it should, after all attempts; the message never has the key.

    `received` is the text of a reply that was begun, None if there is nothing to bill; `tokens` are
    those of a language model that has worked for it. `spent` are the requests that were repeated
    and the seconds of all. A request may be repeated after `wait` seconds; None: it is no use.
    """

    tokens, spent = (0, 0), (0, 0.0)

    def __init__(self, problem: str, received: str | None = None, wait: float | None = None):
        super().__init__(problem)
        self.received, self.wait = received, wait


def post(
    url: str,
    body: Json,
    schema: Json,
    key_variable: str,
    timeout_s: float,
    header_variables: Mapping[str, str] = {},
) -> tuple[Json, tuple[int, float]]:
    """Returns a JSON reply that fits `schema`, and (requests that were repeated, seconds).

    All of it takes `timeout_s` seconds at most. A connection error and the status 408, 409, 429 or
    from 500 are tried again, after a random wait or as long as the server's Retry-After says. The
    key is in the environment variable `key_variable`, the value of each header in that of
    `header_variables`; one that is not set is not sent. Raises EndpointError.
    """
    key = "".join(os.environ.get(key_variable, "").split())
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    values = {name: secret(variable) for name, variable in header_variables.items()}
    headers |= {name: value for name, value in values.items() if value}
    start = time.monotonic()
    end = start + timeout_s
    for attempt in range(ATTEMPTS):
        try:
            text = within(end - time.monotonic(), lambda: _send(url, body, headers, end))
            return _read(text, schema), (attempt, time.monotonic() - start)
        except TimeoutError:
            error = EndpointError(f"no whole reply within {timeout_s:g} s", "")
        except EndpointError as refused:
            error = refused
        wait = max(error.wait or 0.0, 2.0 ** (attempt + 1) * random.uniform(0.5, 1.0))
        late = time.monotonic() + wait >= end
        if error.wait is None or late or attempt == ATTEMPTS - 1:
            break
        time.sleep(wait)
    problem = " ".join(str(error).split())
    for value in sorted(filter(None, [key, *values.values()]), key=len, reverse=True):
        problem = problem.replace(value, "...")
    if key_variable and not key and "HTTP 401" in problem:
        problem = f"the environment variable {key_variable} is not set; {problem}"
    error.args, error.spent = (problem[:300],), (attempt, time.monotonic() - start)
    if error.received is not None:
        error.tokens = count_tokens(json.dumps(body)), count_tokens(error.received)
    raise error


def secret(variable: str) -> str:
    """Returns the value of an environment variable as a header can hold it; "" if it is not set."""
    return " ".join(os.environ.get(variable, "").split())


def count_tokens(text: str) -> int:
    """Returns an estimate of the tokens of a text, from its bytes."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns `call()` from a daemon thread. TimeoutError after `seconds`; the thread is left."""
    return in_daemon(call).result(timeout=max(seconds, 0.0))


def in_daemon(call: Callable[[], T]) -> Future[T]:
    """Runs `call` in a daemon thread, for which neither Ctrl-C nor the exit waits."""
    future = Future()
    future.set_running_or_notify_cancel()  # so that a cancelled attempt leaves it alone

    def work():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _send(url, body, headers, end) -> str:
    """Returns the reply to one request. EndpointError; TimeoutError after the time `end`."""
    data, left = bytearray(), end - time.monotonic() + 1  # `within` ends it first
    try:
        with requests.post(url, json=body, headers=headers, timeout=left, stream=True) as reply:
            while chunk := reply.raw.read1(1 << 16, decode_content=True):
                data += chunk
                if time.monotonic() > end or len(data) > MOST_BYTES:
                    raise TimeoutError
    except requests.ConnectionError:
        raise EndpointError("ConnectionError", wait=0.0) from None
    except urllib3.exceptions.HTTPError:
        raise EndpointError("the reply breaks off", data.decode("utf-8", "replace")) from None
    except (requests.RequestException, ValueError) as error:
        raise EndpointError(f"{type(error).__name__}: {error}") from None
    text, status, wait = data.decode("utf-8", "replace"), reply.status_code, None
    if status < 400:
        return text
    if status in RETRIED or status >= 500:
        with suppress(urllib3.exceptions.InvalidHeader):
            wait = Retry().get_retry_after(reply.raw)
        wait = wait or 0.0
    raise EndpointError(f"HTTP {status}: {text}", wait=wait)


def _read(text, schema) -> Json:
    """Returns the JSON of a reply. EndpointError if it is another; what was begun as JSON is kept.

    A gateway's page is no reply that was begun, nor is an error object.
    """
    begun = text if text.lstrip().startswith("{") else None
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        problem = f"not JSON: {text.strip()[:80] or 'an empty reply'}"
        raise EndpointError(problem, begun) from None
    if isinstance(reply, dict) and (error := reply.get("error")):
        raise EndpointError(f"the endpoint says: {json.dumps(error)}")
    if problem := schema_error(reply, schema):
        raise EndpointError(f"not the reply that was asked for: {problem}", begun)
    return reply
