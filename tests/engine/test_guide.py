"""Guided tool calls: only valid calls of known tools can be drawn, and no state is a dead end."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanorchestra.engine.guide import State, ToolCallGrammar
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer, train_bpe
from nanorchestra.records import ToolCall

QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)
NAMES = ("search", "search_web", "sea", "größe", "<tool_call>")
ODD_NAMES = (*NAMES, 'say "hi"\\', "Upper Case", "\n")
OPENED = '<tool_call>\n{"name": "search", "arguments": '
PIECES = ["<tool_call>", "</tool_call>", "<|im_end|>", "}}", '"', "\\", "\n", "中", "😀"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=4).map("".join)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers(-(10**60), 10**60) | FLOATS | TEXTS
JSON = st.recursive(
    LEAVES,
    lambda value: st.lists(value, max_size=3) | st.dictionaries(TEXTS, value, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXTS, JSON, max_size=3)
PROSE = st.text(max_size=20).map(lambda text: text.replace("<", ""))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Small, with ids that cross the borders of tags, strings and characters."""
    lines = [
        '<tool_call>{"name": "sea", "arguments": {"k": ["é"]}}',
        '<tool_call {"name": "search_web", "arguments": {"a": [1, 2.5e-3, {}], "b": "\\"\\u00e9"}}',
        '>{" >)>{" >) 中 中文 "}} "}}\n 😀 😀😁 }\n\n }\n\n ":" ":" [{" [{" "] "],',
    ]
    return train_bpe(lines * 3, 460)


@pytest.fixture(scope="module")
def grammar(tokenizer) -> ToolCallGrammar:
    return ToolCallGrammar(tokenizer)


@pytest.fixture(scope="module")
def spell(tokenizer):
    """Text -> ids, one per byte."""
    single = {tokenizer.bytes_of(i): i for i in range(tokenizer.vocab_size)}
    return lambda text: [single[bytes([byte])] for byte in text.encode()]


def follow(grammar: ToolCallGrammar, state: State, ids) -> State:
    """As an engine goes on: the mask must allow each id, and `advance` take it."""
    for i in ids:
        mask = grammar.allowed(state)
        assert mask is None or mask[i], f"id {i} is masked at {state}"
        state = grammar.advance(state, i)
    return state


def takes(grammar: ToolCallGrammar, state: State, ids) -> bool:
    for i in ids:
        state = state and grammar.advance(state, i)
    return state is not None


@QUICK
@given(
    seed=st.integers(0, 10**6),
    at_ease=st.integers(0, 60),
    names=st.sets(st.sampled_from(ODD_NAMES), min_size=1),
)
def test_a_policy_that_draws_at_random_writes_only_calls_that_can_be_run(
    grammar, tokenizer, spell, seed, at_ease, names
):
    """Uniform draws from the mask; after `at_ease` ids those that close strings and containers."""
    rng, closers = random.Random(seed), [tokenizer.tool_call_end, *spell('"}]:')]
    ids, state = [], grammar.start(sorted(names))
    for _ in range(2):
        ids.append(tokenizer.token_id("<tool_call>"))
        state, length = grammar.advance(state, ids[-1]), 0
        while state.in_call:
            mask = grammar.allowed(state)
            closing = [i for i in closers if mask[i]] if length >= at_ease else []
            ids.append(closing[0] if closing else rng.choice(np.flatnonzero(mask).tolist()))
            state, length = grammar.advance(state, ids[-1]), length + 1
            assert length < at_ease + 500
    turn = chat.parse(tokenizer, [*ids, tokenizer.im_end])
    assert len(turn.calls) == 2 and turn.well_formed and turn.content == ""
    for call in turn.calls:
        assert call.name in names and list(json.loads(call.raw)) == ["name", "arguments"]
        json.dumps(call.arguments, ensure_ascii=False).encode()  # no half of a surrogate pair


CALLS = st.lists(st.builds(ToolCall, st.sampled_from(NAMES), ARGUMENTS), max_size=3)


@QUICK
@given(PROSE, PROSE, CALLS)
def test_the_canonical_turn_is_accepted_id_by_id(grammar, tokenizer, reasoning, content, calls):
    """Whatever the arguments hold: braces, quotes, closing tags, markers."""
    ids = chat.encode_assistant(tokenizer, reasoning, content, calls)
    state = follow(grammar, grammar.start(NAMES), ids)
    assert not state.in_call and ids.count(tokenizer.tool_call_end) == len(calls)


TAGS = ["<tool_call>", "<tool_", "call>", "<", "<think>", "<thi", "nk>", "</think>", "</thi", "x"]


@settings(QUICK, max_examples=150)
@example(text="<th<think>a<tool_call>")
@example(text="<think>a<</think><<tool_<tool_call>")
@given(text=st.lists(st.sampled_from([*TAGS, "\n", " \t"]), max_size=8).map("".join))
def test_a_call_begins_where_the_parser_sees_one_and_nothing_is_forbidden_before(
    grammar, tokenizer, spell, text
):
    """Drafts in reasoning are no calls, and a tag that is spelled out is one."""
    state, ids = grammar.start(NAMES), spell(text)
    for count, i in enumerate(ids, 1):
        state = follow(grammar, state, [i])
        assert state.in_call == bool(chat.parse(tokenizer, ids[:count]).calls)
        if state.in_call:
            return


INSIDE = ["", "{", '{"', '{"k', '{"k"', '{"k":', '{"k": "', '{"k": "\\', '{"k": "\\ud', '{"k": -']
INSIDE += ['{"k": 1', '{"k": 1.', '{"k": 1e', '{"k": tr', '{"k": [', '{"k": [1', '{"k": [1,', "{}"]
INSIDE += ['{"k": "x"', '{"k": {"k": [' + "[" * 13, '{"k": {"k": [["', "{}}", "{}}\n"]
OUTSIDE = ["", "<thi", "<think>x</thin", "x<tool_call", "<think>a <tool_call> b"]
STATES = [*OUTSIDE, OPENED[:11], OPENED[:13], OPENED[:25], *(OPENED + text for text in INSIDE)]


@pytest.mark.parametrize("text", STATES)
def test_a_mask_holds_exactly_the_ids_that_advance_takes(grammar, tokenizer, spell, text):
    """Of the added ids, a call takes its closing tag alone, and only where its object has ended."""
    state = follow(grammar, grammar.start(NAMES), spell(text))
    mask = grammar.allowed(state)
    mask = np.ones(tokenizer.vocab_size, bool) if mask is None else mask
    assert mask.tolist() == [takes(grammar, state, [i]) for i in range(tokenizer.vocab_size)]
    if state.in_call:
        ends = {tokenizer.tool_call_end} if text.rstrip().endswith("}}") else set()
        assert {i for i in tokenizer.added_ids if mask[i]} == ends
