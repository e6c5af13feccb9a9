"""Streaming a turn: whatever the token boundaries, the deltas joined are the parsed turn, and nothing of a stop string is ever shown."""

from __future__ import annotations

import random

import pytest

from nanorchestra.engine.stream import TurnStream
from nanorchestra.model import chat
from nanorchestra.records import ToolCall

PIECES = (
    "naïve ",
    "日本語 ",
    "🙂🙂",
    "a",
    "ab",
    "STOP",
    "ST",
    "end",
    "\n\n",
    "</tool",
    '{"',
    " 12 ",
    "e\u0301",
)
CALL = ToolCall("search", {"query": '</tool_call> {"日": 1}'})


def split_ids(tokenizer, text: str, rng: random.Random) -> list[int]:
    """The ids of the text, cut at random places first, even within characters, so that boundaries fall anywhere."""
    single = {
        tokenizer.bytes_of(i): i
        for i in range(tokenizer.vocab_size)
        if len(tokenizer.bytes_of(i)) == 1
    }
    ids = []
    for piece in (text[i : i + 3] for i in range(0, len(text), 3)):
        ids += (
            [single[bytes([b])] for b in piece.encode()]
            if rng.random() < 0.5
            else tokenizer.encode(piece)
        )
    return ids


@pytest.mark.parametrize("seed", range(60))
def test_deltas_joined_are_the_turn_up_to_its_stop_string(nano_tokenizer, seed):
    rng = random.Random(seed)
    content = "".join(rng.choice(PIECES) for _ in range(rng.randrange(20)))
    reasoning = "".join(rng.choice(PIECES[:5]) for _ in range(rng.randrange(6)))
    ids = chat.encode_assistant(nano_tokenizer, reasoning, "", [])[:-2] + split_ids(
        nano_tokenizer, content, rng
    )
    stops = rng.sample(("STOP", "STEP", "end", "b日", "🙂🙂🙂", "nothing"), rng.randrange(4))
    text = nano_tokenizer.decode(ids)
    cut = min((at for at in map(text.find, stops) if at >= 0), default=len(text))
    expected = chat.parse(None, text[:cut])
    stream, shown = TurnStream(nano_tokenizer, stops), {"reasoning": "", "content": ""}
    for token in ids:
        for kind, delta in stream.feed(token):
            shown[kind] += delta
            assert "�" not in delta and not any(stop in shown[kind] for stop in stops)
    deltas, turn = stream.finish()
    for kind, delta in deltas:
        shown[kind] += delta
    assert turn == expected and shown == {
        "reasoning": expected.reasoning,
        "content": expected.content,
    }


def test_a_call_is_given_whole(nano_tokenizer):
    stream = TurnStream(nano_tokenizer)
    deltas = [
        delta
        for token in chat.encode_assistant(nano_tokenizer, "why", "", [CALL, CALL])
        for delta in stream.feed(token)
    ]
    kinds = [kind for kind, _ in deltas]
    assert (
        kinds.count("tool_call") == 2
        and [(c.name, c.arguments) for c in stream.calls] == [(CALL.name, CALL.arguments)] * 2
    )
    assert "".join(text for kind, text in deltas if kind == "reasoning") == "why"
