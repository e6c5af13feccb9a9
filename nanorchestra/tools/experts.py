"""Asks a language model behind an OpenAI-compatible endpoint for one chat completion.

A request has a time-out and bounded retries. The API key comes from an environment variable and
reaches no message.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import requests
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from nanorchestra.files import read_json

RETRIED = (408, 409, 429)  # and every status from 500
_COMPLETION = Draft202012Validator(read_json(Path(__file__).with_name("completion.json")))


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
    url, headers = f"{base_url.rstrip('/')}/chat/completions", {"Authorization": f"Bearer {key}"}
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
    if error := best_match(_COMPLETION.iter_errors(reply)):
        raise ValueError(f"not a chat completion: {error.json_path}: {error.message}")
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    message = choice["message"] | {"finish_reason": choice.get("finish_reason")}
    return message, (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))


def is_base_url(url: str) -> bool:
    """Returns whether `url` is http or https with a host, and without a key or query."""
    return re.fullmatch(r"https?://[^\s@?#]+", url) is not None
