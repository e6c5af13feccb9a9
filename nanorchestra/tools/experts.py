"""Asks a language model behind an OpenAI-compatible endpoint for one chat completion."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nanorchestra.files import read_json
from nanorchestra.tools.http import EndpointError, post

BYTES_PER_TOKEN = 3  # of text whose tokens are not known; rather too many tokens than too few
_COMPLETION = read_json(Path(__file__).with_name("completion.json"))


def chat_completion(
    base_url: str,
    body: dict[str, Any],
    *,
    key_variable: str = "OPENAI_API_KEY",
    timeout_s: float = 120.0,
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Returns an assistant's message, with `finish_reason` and `retries`, and its tokens.

    `body` is the request's JSON (model, messages, ...). Content in parts is joined to text. Tokens,
    input and output, are estimated where the reply does not state them. Raises EndpointError, as
    `post` does; its `tokens` are those of a reply that was begun.
    """
    asked = json.dumps([body.get("messages", []), body.get("tools") or ""], ensure_ascii=False)
    url = f"{base_url.rstrip('/')}/chat/completions"
    try:
        reply, retries = post(url, body, _COMPLETION, key_variable, timeout_s)
    except EndpointError as error:
        if error.received is not None:
            error.tokens = count_tokens(asked), count_tokens(error.received)
        raise
    choice, usage = reply["choices"][0], reply.get("usage")
    written = json.dumps(choice["message"], ensure_ascii=False)
    stated, counted = usage if isinstance(usage, dict) else {}, {}
    for name, text in (("prompt_tokens", asked), ("completion_tokens", written)):
        known = isinstance(stated.get(name), int) and stated[name] > 0
        counted[name] = stated[name] if known else count_tokens(text)
    message = choice["message"] | {
        "content": _text(choice["message"].get("content")),
        "finish_reason": choice.get("finish_reason"),
        "retries": retries,
    }
    return message, tuple(counted.values())


def is_base_url(url: str) -> bool:
    """Returns whether `url` is http or https with a host, and without a key or query."""
    return re.fullmatch(r"https?://[^\s@?#]+", url) is not None


def count_tokens(text: str) -> int:
    """Returns an estimate of the tokens of a text, from its bytes."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def _text(content: Any) -> str:
    """Returns content as text: a string, null, a number, or a list of parts."""
    if isinstance(content, list):
        return "".join(map(_text, content))
    if isinstance(content, dict):
        return _text(content.get("text"))
    text = "" if content is None else str(content)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
