"""Guided tool calls: only calls that can be run are drawn, and nothing is forbidden outside."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanorchestra.engine.guide import Form, Guide
from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.schemas import argument_error

QUICK = settings(max_examples=20, deadline=None, derandomize=True, database=None)
NAMES = ("search", "search_web", "sea", "größe", "<tool_call>")
ODD_NAMES = (*NAMES, 'say "hi"\\', "Upper Case", "\n")
PARAMETERS = {
    "type": "object",
    "properties": {"k": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    """Small, with ids that cross the borders of tags, strings and characters."""
    lines = [
        '<tool_call>{"name": "sea", "arguments": {"k": ["é"]}}',
        '<tool_call {"name": "search_web", "arguments": {"a": [1, 2.5e-3, {}], "b": "\\"\\u00e9"}}',
        '>{" >)>{" >) 中 中文 "}} "}}\n 😀 😀😁 }\n\n }\n\n ":" ":" [{" [{" "] "],',
    ]
    return train_bpe(lines * 3, 460)


@pytest.fixture(scope="module")
def guide(tokenizer):
    def make(names, parameters=None):
        shape = {"parameters": parameters} if parameters else {}
        tools = [{"type": "function", "function": {"name": name} | shape} for name in sorted(names)]
        return Guide(tokenizer, Form(tools)).copy()

    return make


@pytest.fixture(scope="module")
def spell(tokenizer):
    """Text -> ids, one per byte."""
    single = {tokenizer.bytes_of(i): i for i in range(tokenizer.vocab_size)}
    return lambda text: [single[bytes([byte])] for byte in text.encode()]


def follow(guide, ids):
    """As an engine goes on: the mask must allow each id."""
    for i in ids:
        mask = guide.allowed()
        assert mask is None or mask[i], f"id {i} is masked"
        guide.advance(i)


@QUICK
@given(
    seed=st.integers(0, 10**6),
    at_ease=st.integers(0, 60),
    names=st.sets(st.sampled_from(ODD_NAMES), min_size=1),
    parameters=st.sampled_from([None, PARAMETERS]),
)
def test_a_policy_that_draws_at_random_writes_only_calls_that_can_be_run(
    guide, tokenizer, spell, seed, at_ease, names, parameters
):
    """Uniform draws from the mask; after `at_ease` ids those that close strings and containers."""
    rng, closers = random.Random(seed), [tokenizer.token_id("</tool_call>"), *spell('"}]:')]
    added = tokenizer.backend.get_added_tokens_decoder().keys()
    ids, held = [], guide(names, parameters)
    for _ in range(2):
        ids.append(tokenizer.token_id("<tool_call>"))
        held.advance(ids[-1])
        length = 0
        while (mask := held.allowed()) is not None:
            assert added & set(np.flatnonzero(mask)) <= {tokenizer.token_id("</tool_call>")}
            closing = [i for i in closers if mask[i]] if length >= at_ease else []
            ids.append(closing[0] if closing else rng.choice(np.flatnonzero(mask).tolist()))
            held.advance(ids[-1])
            length += 1
            assert length < at_ease + 500
    turn = chat.parse(tokenizer, [*ids, tokenizer.end_of_turn])
    assert len(turn.calls) == 2 and turn.well_formed and turn.content == ""
    for call in turn.calls:
        assert call.name in names and list(json.loads(call.raw)) == ["name", "arguments"]
        assert not parameters or argument_error(call.arguments, parameters) is None
        json.dumps(call.arguments, ensure_ascii=False).encode()  # no half of a surrogate pair


TAGS = ["<tool_call>", "<tool_", "call>", "<", "<think>", "<thi", "nk>", "</think>", "</thi", "x"]


@settings(QUICK, max_examples=100)
@example(text="<th<think>a<tool_call>")
@example(text="<think>a<</think><<tool_<tool_call>")
@given(text=st.lists(st.sampled_from([*TAGS, "\n", " \t"]), max_size=8).map("".join))
def test_a_call_begins_where_the_parser_sees_one_and_nothing_is_forbidden_before(
    guide, tokenizer, spell, text
):
    """Drafts in reasoning are no calls, and a tag that is spelled out is one."""
    held, ids = guide(NAMES), spell(text)
    for count, i in enumerate(ids, 1):
        held.advance(i)
        inside = held.allowed() is not None
        assert inside == bool(chat.parse(tokenizer, ids[:count]).calls)
        if inside:
            return


def test_an_id_that_ends_a_tag_and_begins_the_call_counts_for_both(guide, tokenizer, spell):
    held, crossing = guide(["sea"]), tokenizer.encode('>{"')
    assert len(crossing) == 1
    follow(held, [*spell("<tool_call"), *crossing])
    (only,) = np.flatnonzero(held.allowed()[: tokenizer.vocab_size])[:1]
    assert tokenizer.bytes_of(only).startswith(b"n")


def test_a_strict_function_refuses_what_no_grammar_enforces(tokenizer):
    listed = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": listed}}
    function = {"name": "f", "parameters": schema}
    Guide(tokenizer, Form([{"function": function}]))
    with pytest.raises(UserError, match="uniqueItems"):
        Guide(tokenizer, Form([{"function": function | {"strict": True}}]))
