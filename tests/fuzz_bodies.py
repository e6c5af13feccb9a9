"""Bodies for the server: valid ones with values, fields and shapes changed at random."""

from __future__ import annotations

import copy
import json
import random

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "says it again",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
SHOUT = {"name": "shout", "strict": True, "schema": {"type": "object", "properties": {"a": {}}}}
FUNCTION = {"name": "echo", "arguments": '{"text": "hi"}'}
MESSAGES = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": [{"type": "text", "text": "say hi"}]},
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "1", "content": "hi"},
    {"role": "user", "content": "in hard law trial 372, what is the code?"},
]
COMMON = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "n": 2,
    "seed": 1,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "ignore_eos": False,
    "return_token_ids": True,
    "frequency_penalty": 0,
    "logit_bias": {},
    "user": "me",
}
CHAT_FIELDS = COMMON | {
    "messages": MESSAGES,
    "max_completion_tokens": 3,
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": SHOUT},
    "chat_template_kwargs": {"enable_thinking": False},
    "metadata": {"preference": "be cheap", "usd": "0.1", "seconds": "5", "never": "echo"},
    "functions": [],
}
TEXT_FIELDS = COMMON | {"prompt": ["a", "b"], "logprobs": 2, "echo": False, "best_of": 1}
NEEDED = "model", "messages", "prompt", "max_tokens"
ODD = (
    *(None, True, False, 0, 1, -1, 1.0, 2.0, 0.0, -0.0, 0.5, 1e18, 2**31, 2**63, 2**70, -(2**63)),
    *("", "a", "1", "null", "\x00", "\ud7ff", "é😀", "x" * 3000, "<|im_end|>", "auto", "required"),
    *([], [[]], [None], ["a"], [1], [1.0], [0, "a"], [[1], [2.0]], [[[]]], [{}] * 3),
    *({}, {"type": "json_object"}, {"type": "text"}, {"$ref": "#"}, {"a": {"b": [1]}}),
    *({"type": "function", "function": {"name": "echo"}}, {"schema": {"pattern": "(a*)*b"}}),
)


def bodies(count: int, seed: int):
    """Yields (path, body); the body is bytes, now and then no JSON."""
    rng = random.Random(seed)
    for _ in range(count):
        path, fields = rng.choice([(CHAT, CHAT_FIELDS), (TEXT, TEXT_FIELDS)])
        chosen = {k: v for k, v in fields.items() if k in NEEDED or rng.random() < 0.25}
        body = copy.deepcopy(chosen | {"model": rng.choice(["nano", "nano", "nano+tools"])})
        if rng.random() < 0.3:  # fields of the other form
            other = TEXT_FIELDS if path == CHAT else CHAT_FIELDS
            body |= copy.deepcopy(dict(rng.sample(list(other.items()), 3)))
        for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
            _change(body, rng)
        body["stream"] = body.get("stream", False) if rng.random() < 0.8 else True
        raw = json.dumps(body).encode()
        if rng.random() < 0.02:
            raw = raw[: rng.randrange(len(raw))]
        yield path, raw


def _change(body, rng):
    """Changes one value, or takes it out, anywhere in the body."""
    place, key = body, rng.choice(list(body))
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.6:
        place = place[key]
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    value, kind = place[key], rng.random()
    if kind < 0.15 and place is not body:
        del place[key]
    elif kind < 0.3 and isinstance(value, int) and not isinstance(value, bool):
        place[key] = float(value)
    elif kind < 0.33:
        place[key] = [value] * rng.choice([1, 2, 50])
    elif kind < 0.4 and isinstance(value, str):
        place[key] = value * 400
    elif kind < 0.7:
        alike = [odd for odd in ODD if isinstance(odd, type(value))] or [value]
        place[key] = copy.deepcopy(rng.choice(alike))
    else:
        place[key] = copy.deepcopy(rng.choice(ODD))
