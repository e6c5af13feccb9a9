"""Every sampled turn is taken apart, however broken it is and however it arrives."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanorchestra.engine.stream import TurnStream
from nanorchestra.model import chat
from nanorchestra.model.parser import StreamParser, parse
from nanorchestra.model.tokenizer import Tokenizer, train_bpe
from nanorchestra.records import ParsedTurn, ToolCall

QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</tool", "_call>", "<thi"]
OBJECTS = ['{"name": "f", "arguments": {"q": "', '"}}', '{"name": "g"}', "{", "}", '"', "["]
OTHERS = ["\n", "\n\n", "\\", "\\\\", '\\"', "text", " ", "é", "<|im_end|>x"]
BROKEN = st.lists(st.sampled_from([*TAGS, *OBJECTS, *OTHERS]), max_size=14).map("".join)
TEXTS = st.lists(st.sampled_from([*TAGS, *OTHERS]) | st.text(max_size=5), max_size=6).map("".join)
LEAVES = st.none() | st.booleans() | st.integers() | TEXTS
JSON = st.recursive(
    LEAVES,
    lambda value: st.lists(value, max_size=2) | st.dictionaries(TEXTS, value, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(TEXTS, JSON, max_size=3)
CALL = '<tool_call>\n{"name": "f", "arguments": {"q": 1}}\n</tool_call>'
READ = ToolCall("f", {"q": 1}, '{"name": "f", "arguments": {"q": 1}}')


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(['the expert is ok!\n  12, {"name": "search", "arguments": {}}\n'] * 3, 320)


def turn(text: str) -> ParsedTurn:
    parser = StreamParser()
    parser.feed(text)
    return parser.finish()


@QUICK
@given(TEXTS, TEXTS, st.lists(ARGUMENTS, max_size=3))
def test_what_an_ideal_policy_writes_is_read_back(tokenizer, content, reasoning, arguments):
    """Arguments may hold braces, quotes, closing tags and markers."""
    content = content.replace("<tool_call>", "").replace("<think>", "")
    reasoning = reasoning.replace("</think>", "")
    if "<tool_call>" in content or "</think>" in reasoning or content.lstrip()[:1] == "<":
        return
    calls = [ToolCall("search", each) for each in arguments]
    ids = chat.encode_assistant(tokenizer, reasoning, content, calls)
    parsed = parse(tokenizer, ids)
    text = tokenizer.decode(tokenizer.encode(json.dumps(arguments, ensure_ascii=False)))
    assert [call.arguments for call in parsed.calls] == json.loads(text) and parsed.well_formed
    assert parsed.content == tokenizer.decode(tokenizer.encode(content.lstrip("\n")))
    assert parsed.reasoning == tokenizer.decode(tokenizer.encode(reasoning.strip("\n")))
    stream, parts = TurnStream(tokenizer), {"reasoning": "", "content": "", "tool_call": ""}
    for kind, text in [delta for i in ids for delta in stream.feed(i)] + stream.finish():
        parts[kind] += text  # an id may end within a character
    assert (parts["reasoning"], parts["content"]) == (parsed.reasoning, parsed.content)
    assert parts["tool_call"] == "".join(call.raw for call in parsed.calls)


@QUICK
@example(CALL.replace('"q"', '"</tool_call>\\u001f<tool_call>"'), [])
@given(BROKEN, st.lists(st.integers(0, 200), max_size=6))
def test_every_split_of_any_text_gives_the_same_turn_and_deltas_that_add_up(text, cuts):
    whole = turn(text)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for pieces in ([text[a:b] for a, b in pairwise(edges)], list(text)):
        parser = StreamParser()
        deltas = [delta for piece in pieces for delta in parser.feed(piece)]
        assert parser.finish() == whole
        deltas += parser.last_deltas
        for kind in ("reasoning", "content"):
            assert "".join(t for k, t in deltas if k == kind) == getattr(whole, kind)
        raws = [text for kind, text in deltas if kind == "tool_call"]
        assert raws == [call.raw for call in whole.calls]
        assert all(text for kind, text in deltas if kind != "tool_call")


@pytest.mark.parametrize(
    "text, name, arguments, error",
    [
        ('{"name": "f"}', "f", {}, None),
        ('{"name": "f", "arguments": "{\\"a\\": [1]}"}', "f", {"a": [1]}, None),
        ('{"name": "f", "arguments": "{\\"a\\": }"}', "f", {}, "call is not valid JSON: E"),
        ('{"name": "f", "arguments": [1]}', "f", {}, "name must be a string and arguments a JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "", {}, "call is not valid JSON: NaN is not a"),
        ("[]", "", {}, "call must be a JSON object with name and arguments"),
        ('{"name": "f"}}', "f", {}, "</tool_call> must follow the JSON object, not '}'"),
        ('{"name":' * 99999 + "1" + "}" * 99999, "", {}, "call is not valid JSON: maximum rec"),
    ],
)  # fmt: skip
def test_a_bad_call_says_what_is_wrong_and_spoils_nothing_after_it(text, name, arguments, error):
    parser = StreamParser()
    kinds = [kind for kind, _ in parser.feed(f"<tool_call>\n{text}\n</tool_call>\n{CALL}\nend")]
    assert kinds == ["tool_call", "tool_call", "content"], "a broken call holds nothing up"
    parsed = parser.finish()
    first, second = parsed.calls
    assert (first.name, first.arguments) == (name, arguments)
    assert first.error.startswith(error) if error else first.error is None
    assert (second, parsed.content, parsed.truncated) == (READ, "end", False)
    assert parsed.well_formed == (error is None)


def test_a_call_without_its_closing_tag():
    cut = turn('<tool_call>\n{"name": "f", "arguments": {"q": "a')
    assert cut.truncated and cut.calls[0].error == "cut off before the end of its JSON object"
    assert turn(CALL[:-5]) == ParsedTurn("", "", (READ,), truncated=True)
    tagged = turn('<tool_call>{"name": "f", "arguments": {"q": "</tool_call>"}}')
    assert tagged.truncated and tagged.calls[0].arguments == {"q": "</tool_call>"}
    again = turn(CALL.removesuffix("</tool_call>") + CALL)
    assert "</tool_call> must follow" in again.calls[0].error and not again.truncated


def test_parsing_stays_linear_in_what_a_broken_policy_writes():
    """Early training samples loops; each of these has some 60,000 characters."""
    loops = ["<tool_call>" + text + "</tool_call>" for text in ("{", '{"', '{\\"', "")]
    for text in (*loops, "<", "<tool_call>", "\n", '{"', "<think>"):
        began = time.process_time()
        turn("text" + text * (60000 // len(text)))
        assert time.process_time() - began < 2, text
