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
from nanorchestra.records import ToolCall
from nanorchestra.schemas import argument_error

QUICK = settings(max_examples=20, deadline=None, derandomize=True, database=None)
NAMES = ("search", "search_web", "sea", "größe", "<tool_call>")
ODD_NAMES = (*NAMES, 'say "hi"\\', "Upper Case", "\n")
PIECES = ["<tool_call>", "</tool_call>", "<|im_end|>", "}}", '"', "\\", "\n", "中", "😀"]
WORDS = st.text(
    st.characters(exclude_characters="\x7f", codec="utf-8"), max_size=5
)  # DEL is escaped
TEXTS = st.lists(st.sampled_from(PIECES) | WORDS, max_size=4).map("".join)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers(-(10**60), 10**60) | FLOATS | TEXTS
JSON = st.recursive(
    LEAVES,
    lambda value: st.lists(value, max_size=3) | st.dictionaries(TEXTS, value, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXTS, JSON, max_size=3)
PROSE = st.text(max_size=20).map(lambda text: text.replace("<", ""))
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
    def make(names, parameters=None, **settings):
        shape = {"parameters": parameters} if parameters else {}
        tools = [{"type": "function", "function": {"name": name} | shape} for name in sorted(names)]
        return Guide(tokenizer, Form(tools, **settings)).copy()

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


CALLS = st.lists(st.builds(ToolCall, st.sampled_from(NAMES), ARGUMENTS), max_size=3)


@QUICK
@given(PROSE, PROSE, CALLS)
def test_the_canonical_turn_is_accepted_id_by_id(guide, tokenizer, reasoning, content, calls):
    """Whatever the arguments hold: braces, quotes, closing tags, markers."""
    ids, held = chat.encode_assistant(tokenizer, reasoning, content, calls), guide(NAMES)
    follow(held, ids)
    assert held.allowed() is None and ids.count(tokenizer.token_id("</tool_call>")) == len(calls)


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


def test_copies_stand_apart_and_a_wrong_schema_is_named(guide, tokenizer):
    first = guide(["sea"])
    second = first.copy()
    ids = [tokenizer.token_id("<tool_call>"), *tokenizer.encode('{"name')]
    follow(first, ids)
    mask = first.allowed()
    assert second.allowed() is None
    follow(second, ids[:1])
    assert second.allowed().tolist() != mask.tolist() == first.allowed().tolist()
    with pytest.raises(UserError, match="schema: .*nothing"):
        guide(["sea"], {"type": "nothing"})


def test_a_limit_of_the_grammar_is_an_error_and_no_end_of_the_text(tokenizer):
    """700 optional properties are more items than a row may have; before, only the end was left."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
    held = Guide(tokenizer, Form([], many, thinks=False)).copy()
    with pytest.raises(UserError, match="schema: .*2807 items; max is 2000"):
        for i in tokenizer.encode('{"p1": 1}'):
            assert held.allowed()[i]
            held.advance(i)


def test_references_of_a_tools_parameters_begin_at_their_root(guide, tokenizer):
    """As pydantic writes nested models; a $ref that leads to itself has a message of its own."""
    point = {"type": "object", "properties": {"x": {"enum": [5, 6]}}, "required": ["x"]}
    nested = {"$defs": {"p": point}, "properties": {"a": {"$ref": "#/$defs/p"}}, "type": "object"}
    call = '{"name": "sea", "arguments": {"a": {"x": %d}}}'
    begin = tokenizer.token_id("<tool_call>")
    follow(guide(["sea"], nested), [begin, *tokenizer.encode(call % 6)])
    with pytest.raises(AssertionError, match="masked"):
        follow(guide(["sea"], nested), [begin, *tokenizer.encode(call % 7)])
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    with pytest.raises(UserError, match="schema: no JSON fits it; a .ref may lead back to itself"):
        Guide(tokenizer, Form([], loop, thinks=False))


def test_a_strict_function_refuses_what_no_grammar_enforces_as_a_strict_format_does(tokenizer):
    listed = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    either = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    for keyword, shape in (("uniqueItems", listed), ("oneOf", either)):
        schema = {"type": "object", "properties": {"a": shape}}
        function = {"name": "f", "parameters": schema}
        for strict in (False, None):
            Guide(tokenizer, Form([{"function": function | {"strict": strict}}]))
        with pytest.raises(UserError, match=keyword):
            Guide(tokenizer, Form([{"function": function | {"strict": True}}]))
        with pytest.raises(UserError, match=keyword):
            Guide(tokenizer, Form([], schema, strict=True))
