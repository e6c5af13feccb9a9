"""Asks a language model behind an OpenAI-compatible endpoint for one chat completion.

A request has a time-out and bounded retries. The API key comes from an environment variable and
reaches no message.
"""

from __future__ import annotations

import os
import time
from typing import Any
from urllib.parse import urlsplit

import requests
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

RETRIED = (408, 409, 429)  # and every status from 500
_TEXT = {"type": ["string", "null"]}
_CALL = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        }
    },
    "required": ["function"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "content": _TEXT,
        "reasoning": _TEXT,
        "reasoning_content": _TEXT,
        "tool_calls": {"type": ["array", "null"], "items": _CALL},
    },
}
_COUNT = {"type": "integer", "minimum": 0}
_REPLY = Draft202012Validator(
    {
        "type": "object",
        "properties": {
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"message": _MESSAGE},
                    "required": ["message"],
                },
            },
            "usage": {
                "type": ["object", "null"],
                "properties": {"prompt_tokens": _COUNT, "completion_tokens": _COUNT},
            },
        },
        "required": ["choices"],
    }
)


class EndpointError(Exception):
    """An endpoint did not answer, or its answer is not a chat completion, after all attempts."""


def chat_completion(
    base_url: str,
    body: dict[str, Any],
    *,
    key_variable: str = "OPENAI_API_KEY",
    timeout_s: float = 120.0,
    attempts: int = 3,
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Returns an assistant's message, with its `finish_reason`, and (input, output) tokens.

    `body` is the request's JSON (model, messages, ...). The key is in the environment variable
    `key_variable`. A request has `timeout_s` seconds. A connection error, a time-out, and the
    status 408, 409, 429 or from 500 are tried again, `attempts` times in all. The message has the
    types of the OpenAI format. Raises EndpointError, which never holds the key.
    """
    key = "".join(os.environ.get(key_variable, "").split())
    url = f"{base_url.rstrip('/')}/chat/completions"
    headers = {"Authorization": f"Bearer {key}"}
    problem = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(min(2.0**attempt, 10.0))
        try:
            reply = requests.post(url, json=body, headers=headers, timeout=timeout_s)
            if reply.status_code < 400:
                return _read(reply.json())
            problem = f"HTTP {reply.status_code}: {' '.join(reply.text.split())}"
            if reply.status_code not in RETRIED and reply.status_code < 500:
                break
        except (requests.ConnectionError, requests.Timeout) as error:
            problem = type(error).__name__
        except (requests.RequestException, ValueError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            break
    raise EndpointError((problem.replace(key, "...") if key else problem)[:300])


def _read(reply: Any) -> tuple[dict[str, Any], tuple[int, int]]:
    """Returns (message, tokens) of a chat completion. ValueError if it is not one."""
    error = best_match(_REPLY.iter_errors(reply))
    if error is not None:
        raise ValueError(f"not a chat completion: {error.json_path}: {error.message}")
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    message = {**choice["message"], "finish_reason": choice.get("finish_reason")}
    return message, (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))


def is_base_url(url: str) -> bool:
    """Returns whether requests can be sent to `url`: http or https, a host, no key or query."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    extra = parts.username or parts.password or parts.query or parts.fragment
    usable = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return usable and not extra and url.isprintable() and " " not in url
