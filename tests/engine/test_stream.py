"""Streaming a turn: whatever the token boundaries, the deltas joined are the parsed turn."""

from __future__ import annotations

import random

import pytest

from nanorchestra.engine.stream import TurnStream
from nanorchestra.model import chat
from nanorchestra.records import ToolCall

PIECES = ("naïve ", "日本語 ", "🙂🙂", "a", "ab", "end", "\n\n", "</tool", '{"', " 12 ", "e\u0301")
CALL = ToolCall("search", {"query": '</tool_call> {"日": 1}'})


def split_ids(tokenizer, text: str, rng: random.Random) -> list[int]:
    """The ids of the text, cut at random places first, even within characters."""
    texts = {tokenizer.bytes_of(i): i for i in range(tokenizer.vocab_size)}
    ids = []
    for piece in (text[i : i + 3] for i in range(0, len(text), 3)):
        single = [texts[bytes([byte])] for byte in piece.encode()]
        ids += single if rng.random() < 0.5 else tokenizer.encode(piece)
    return ids


@pytest.mark.parametrize("seed", range(30))
def test_deltas_joined_are_the_turn(nano_tokenizer, seed):
    rng = random.Random(seed)
    content = "".join(rng.choice(PIECES) for _ in range(rng.randrange(20)))
    reasoning = "".join(rng.choice(PIECES[:5]) for _ in range(rng.randrange(6)))
    ids = chat.encode_assistant(nano_tokenizer, reasoning, "", [])[:-2]
    ids += split_ids(nano_tokenizer, content, rng)
    expected = chat.parse(nano_tokenizer, ids)
    stream, shown = TurnStream(nano_tokenizer), {"reasoning": "", "content": ""}
    deltas = [delta for token in ids for delta in stream.feed(token)]
    assert not any("�" in text for _, text in deltas), "half a character"
    last, turn = stream.finish()
    for kind, text in deltas + last:
        shown[kind] += text
    assert turn == expected
    assert shown == {"reasoning": expected.reasoning, "content": expected.content}


def test_a_call_is_given_whole(nano_tokenizer):
    stream = TurnStream(nano_tokenizer)
    ids = chat.encode_assistant(nano_tokenizer, "why", "", [CALL, CALL])
    kinds = [kind for token in ids for kind, _ in stream.feed(token)]
    assert kinds.count("tool_call") == 2
    assert [(call.name, call.arguments) for call in stream.calls] == [
        ("search", CALL.arguments)
    ] * 2
