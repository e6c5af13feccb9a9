"""Streaming a turn: whatever the token boundaries, the deltas joined are the parsed turn."""

from __future__ import annotations

import random

import pytest

from nanorchestra.engine.stream import TurnStream
from nanorchestra.model import chat
from nanorchestra.records import ToolCall

PIECES = ("naïve ", "日本語 ", "🙂🙂", "a", "ab", "end", "\n\n", "</tool", '{"', " 12 ", "e\u0301")
CALL = ToolCall("search", {"query": '</tool_call> {"日": 1}'})


@pytest.mark.parametrize("seed", range(30))
def test_deltas_joined_are_the_turn_and_calls_are_given_whole(nano_tokenizer, seed):
    """Some pieces come byte by byte, so that ids end within characters."""
    rng, ids = random.Random(seed), []
    single = {nano_tokenizer.bytes_of(i): i for i in range(nano_tokenizer.vocab_size)}
    reasoning = "".join(rng.choices(PIECES[:5], k=rng.randrange(6)))
    calls = [CALL] * rng.randrange(3)
    ids = chat.encode_assistant(nano_tokenizer, reasoning, "", calls)[:-2]
    for piece in rng.choices(PIECES, k=rng.randrange(20)):
        spelled = [single[bytes([byte])] for byte in piece.encode()]
        ids += spelled if rng.random() < 0.5 else nano_tokenizer.encode(piece)
        if rng.random() < 0.2:  # a special token, which is no text
            ids.append(nano_tokenizer.token_id("<|im_start|>"))
    expected, stream = chat.parse(nano_tokenizer, ids), TurnStream(nano_tokenizer)
    deltas = [delta for token in ids for delta in stream.feed(token)]
    assert not any("�" in text for _, text in deltas), "half a character"
    last = stream.finish()
    parts = {"reasoning": "", "content": "", "tool_call": ""}
    for kind, text in deltas + last:
        parts[kind] += text
    assert tuple(stream.parser.calls) == expected.calls
    assert (parts["reasoning"], parts["content"]) == (expected.reasoning, expected.content)
    assert parts["tool_call"] == "".join(call.raw for call in expected.calls)
    at_once, plain = TurnStream(nano_tokenizer), TurnStream(nano_tokenizer, calls=False)
    joined = "".join(text for _, text in at_once.feed(*ids) + at_once.finish())
    assert joined == "".join(text for _, text in deltas + last)
    deltas = plain.feed(*ids) + plain.finish()
    content = "".join(text for kind, text in deltas if kind == "content")
    assert content.count("<tool_call>") == len(calls) and not plain.parser.calls
