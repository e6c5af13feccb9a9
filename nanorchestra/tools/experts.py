"""Asks a language model behind an OpenAI-compatible endpoint for one chat completion.

A request has a time-out that bounds all of it, and bounded retries. The API key comes from an
environment variable and reaches no message.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import requests
import urllib3
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from nanorchestra.files import read_json

RETRIED = (408, 409, 429)  # and every status from 500
MOST_BYTES = 32 << 20  # of a reply
BYTES_PER_TOKEN = 3  # of text whose tokens are not known; rather too many tokens than too few
Tokens = tuple[int, int]  # input, output
T = TypeVar("T")
_COMPLETION = Draft202012Validator(read_json(Path(__file__).with_name("completion.json")))


class EndpointError(Exception):
    """An endpoint did not answer, or its answer is not a chat completion, after all attempts.

    `tokens` are those that it has worked for all the same, `retries` the requests that were
    repeated. A request may be repeated after `wait` seconds; None: it is no use.
    """

    retries = 0

    def __init__(self, problem: str, tokens: Tokens = (0, 0), wait: float | None = None):
        super().__init__(problem)
        self.tokens, self.wait = tokens, wait


def chat_completion(
    base_url: str,
    body: dict[str, Any],
    *,
    key_variable: str = "OPENAI_API_KEY",
    timeout_s: float = 120.0,
    attempts: int = 3,
) -> tuple[dict[str, Any], Tokens]:
    """Returns an assistant's message, with `finish_reason` and `retries`, and its tokens.

    `body` is the request's JSON (model, messages, ...). The key is in the environment variable
    `key_variable`. All of it takes `timeout_s` seconds at most. A connection error and the status
    408, 409, 429 or from 500 are tried again, `attempts` times in all, after a random wait or as
    long as the server's Retry-After says. Content in parts is joined to text. Tokens are estimated
    where the reply does not state them. Raises EndpointError, which never holds the key.
    """
    key = "".join(os.environ.get(key_variable, "").split())
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url, end = f"{base_url.rstrip('/')}/chat/completions", time.monotonic() + timeout_s
    for attempt in range(attempts):
        left = end - time.monotonic()
        try:
            message, tokens = within(left, partial(_ask, url, body, headers, end))
            return message | {"retries": attempt}, tokens
        except TimeoutError:
            error = EndpointError(f"no whole reply within {timeout_s:g} s", (_count(body), 0))
        except EndpointError as refused:
            error = refused
        wait = max(error.wait or 0.0, min(2.0 ** (attempt + 1), 10.0) * random.uniform(0.5, 1.0))
        late = time.monotonic() + wait >= end
        if error.wait is None or late or attempt == attempts - 1:
            break
        time.sleep(wait)
    problem = " ".join(str(error).split())
    problem = problem.replace(key, "...") if key else problem
    if "HTTP 401" in problem and not key:
        problem = f"the environment variable {key_variable} is not set; {problem}"
    final = EndpointError(problem[:300], error.tokens)
    final.retries = attempt
    raise final


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns `call()` from a daemon thread. TimeoutError after `seconds`; the thread is left."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result(timeout=max(seconds, 0.0))


def is_base_url(url: str) -> bool:
    """Returns whether `url` is http or https with a host, and without a key or query."""
    return re.fullmatch(r"https?://[^\s@?#]+", url) is not None


def count_tokens(text: str) -> int:
    """Returns an estimate of the tokens of a text, from its bytes."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def _ask(url: str, body: dict[str, Any], headers: dict[str, str], end: float):
    """Returns (message, tokens) of one request. EndpointError; TimeoutError at the time `end`."""
    data, left = bytearray(), max(end - time.monotonic(), 0.001)
    try:
        with requests.post(url, json=body, headers=headers, timeout=left, stream=True) as reply:
            while chunk := reply.raw.read1(1 << 16, decode_content=True):
                data += chunk
                if time.monotonic() > end or len(data) > MOST_BYTES:
                    raise TimeoutError
    except (requests.Timeout, urllib3.exceptions.TimeoutError):
        raise TimeoutError from None
    except requests.ConnectionError:
        raise EndpointError("ConnectionError", wait=0.0) from None
    except urllib3.exceptions.HTTPError:
        raise EndpointError("the reply breaks off", (_count(body), len(data) // 4)) from None
    except (requests.RequestException, ValueError) as error:
        raise EndpointError(f"{type(error).__name__}: {error}") from None
    text = data.decode("utf-8", "replace")
    if (status := reply.status_code) >= 400:
        again = status in RETRIED or status >= 500
        raise EndpointError(
            f"HTTP {status}: {text}", wait=_retry_after(reply.headers) if again else None
        )
    return _read(text, body)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Returns the seconds of a Retry-After header, which may be a date; 0 without one."""
    value = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    return 0.0


def _read(text: str, body: dict[str, Any]) -> tuple[dict[str, Any], Tokens]:
    """Returns (message, tokens) of a chat completion. EndpointError if it is not one.

    What was begun as JSON is billed: an answer was written, even if it cannot be read.
    """
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        begun = text.lstrip().startswith("{")
        tokens = (_count(body), count_tokens(text)) if begun else (0, 0)
        raise EndpointError(f"not JSON: {text.strip()[:80] or 'an empty reply'}", tokens) from None
    if isinstance(reply, dict) and (error := reply.get("error")):
        said = error.get("message") if isinstance(error, dict) else error
        raise EndpointError(f"the endpoint says: {said}")
    problem = best_match(_COMPLETION.iter_errors(reply))
    if problem:
        tokens = (_count(body), count_tokens(text)) if isinstance(reply, dict) else (0, 0)
        raise EndpointError(
            f"not a chat completion: {problem.json_path}: {problem.message}", tokens
        )
    choice = reply["choices"][0]
    message = choice["message"] | {"finish_reason": choice.get("finish_reason")}
    message["content"] = _text(message.get("content"))
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    stated = usage.get("prompt_tokens"), usage.get("completion_tokens")
    counted = _count(body), count_tokens(json.dumps(choice["message"], ensure_ascii=False))
    known = (isinstance(n, int) and n > 0 for n in stated)
    return message, tuple(s if k else c for s, k, c in zip(stated, known, counted, strict=True))


def _text(content: Any) -> str:
    """Returns content as text: a string, null, a number, or a list of parts."""
    if isinstance(content, list):
        return "".join(map(_text, content))
    if isinstance(content, dict):
        return _text(content.get("text"))
    text = "" if content is None else str(content)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(body: dict[str, Any]) -> int:
    """Returns an estimate of the tokens of a request's messages and tools."""
    texts = body.get("messages", []), body.get("tools") or ""
    return count_tokens(json.dumps(texts, ensure_ascii=False))
