"""Guided tool calls: only valid calls of known tools can be drawn, each call that the chat renders can, and no state is a dead end."""

import itertools
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanorchestra.engine.guide import MAX_DEPTH, MAX_DIGITS, MAX_SPACES, State, ToolCallGrammar
from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer, train_bpe
from nanorchestra.records import ToolCall

QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)
NAMES = ("search", "search_web", "sea", "größe", "<tool_call>")
ODD_NAMES = (*NAMES, 'say "hi"\\', "Upper Case", "\n", "half a pair \ud83d")
CALL, OPENED = (
    '{"name": "sea", "arguments": {"k": ["é"]}}',
    '<tool_call>\n{"name": "search", "arguments": ',
)
PIECE = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|im_end|>", "}}", '"', "\\", "\n", "中", "😀"]
) | st.text(max_size=5)
TEXTS = st.lists(PIECE, max_size=4).map("".join)
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
        f"<tool_call>{CALL}",
        '<tool_call {"name": "search_web", "arguments": {"a": [1, 2.5e-3, {}], "b": "\\"\\\\\\u00e9"}}\n',
    ]
    return train_bpe(
        lines * 3
        + ['>{" >)', '>{" >)', ' 中 中文 "}} "}}\n 😀 😀😁 }\n\n }\n\n ":" ":" [{" [{" "] "],'] * 3,
        460,
    )


@pytest.fixture(scope="module")
def grammar(tokenizer) -> ToolCallGrammar:
    return ToolCallGrammar(tokenizer)


@pytest.fixture(scope="module")
def spell(tokenizer):
    """Text or bytes -> ids, one per byte."""
    single = {tokenizer.bytes_of(i): i for i in range(tokenizer.vocab_size)}
    return lambda text: [
        single[bytes([byte])] for byte in (text.encode() if isinstance(text, str) else text)
    ]


def follow(grammar: ToolCallGrammar, state: State, ids) -> State:
    """As an engine goes on: the mask must allow each id, and `advance` take it."""
    for i in ids:
        mask = grammar.allowed(state)
        assert mask is None or mask[i], f"id {i} is masked at {state}"
        state = grammar.advance(state, i)
    return state


def takes(grammar: ToolCallGrammar, state: State, ids) -> bool:
    try:
        for i in ids:
            state = grammar.advance(state, i)
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def accepts(grammar, tokenizer, spell):
    """Whether some text or bytes can be the arguments of a call."""
    opened = follow(grammar, grammar.start(NAMES), spell(OPENED))
    return lambda arguments: takes(
        grammar, opened, [*spell(arguments), *spell("}\n"), tokenizer.tool_call_end]
    )


# --- what is drawn is right -----------------------------------------------------------------------------------------------------------


@QUICK
@given(
    seed=st.integers(0, 10**6),
    at_ease=st.integers(0, 60),
    names=st.sets(st.sampled_from(ODD_NAMES), min_size=1),
    calls=st.integers(1, 2),
)
def test_a_policy_that_draws_at_random_writes_only_calls_that_can_be_run(
    grammar, tokenizer, spell, seed, at_ease, names, calls
):
    """Uniform draws from the mask; after `at_ease` ids those that close strings and containers, if allowed. No walk gets stuck."""
    rng, closers = random.Random(seed), [tokenizer.tool_call_end, *spell('"}]:')]
    ids, state = [], grammar.start(sorted(names), enable_thinking=False)
    for _ in range(calls):
        ids.append(tokenizer.tool_call_start)
        state, length = grammar.advance(state, ids[-1]), 0
        while state.in_call:
            mask = grammar.allowed(state)
            closing = [i for i in closers if mask[i]] if length >= at_ease else []
            ids.append(closing[0] if closing else rng.choice(np.flatnonzero(mask).tolist()))
            state, length = grammar.advance(state, ids[-1]), length + 1
            assert length < at_ease + 500
    turn = chat.parse(tokenizer, [*ids, tokenizer.im_end], enable_thinking=False)
    assert len(turn.calls) == calls and turn.well_formed and turn.content == ""
    for call in turn.calls:
        assert call.name in names and list(json.loads(call.raw)) == ["name", "arguments"]
        json.dumps(call.arguments, ensure_ascii=False).encode()  # no half of a surrogate pair


def is_an_object(text: str) -> bool:
    """json.loads as the oracle, without what is none of JSON's: NaN and the like, halves of surrogate pairs, text around the object."""
    try:
        value = json.loads(text, parse_constant=lambda constant: 1 / 0, object_pairs_hook=list)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, ZeroDivisionError):
        return False
    return text[0] + text[-1] == "{}"


PIECES = st.sampled_from(
    [
        *'{}[]",:\\u019eE+-.tfnd8 \n\t\x7f\x1f\0é',
        "\\ud83d",
        "\\ude00",
        "\\u0",
        "NaN",
        "-0",
        "01",
        "1.",
        "\\/",
    ]
)
EDITS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), PIECES), max_size=3)
SEPARATORS = st.sampled_from([(", ", ": "), (",", ":"), ("\n\t,  ", " \r:")])


@settings(QUICK, max_examples=80)
@given(value=ARGUMENTS, ascii=st.booleans(), separators=SEPARATORS, edits=EDITS)
def test_arguments_are_accepted_if_and_only_if_they_are_json(
    accepts, value, ascii, separators, edits
):
    """Everything json.dumps writes, and what a few edits make of it."""
    text = json.dumps(value, ensure_ascii=ascii, separators=separators)
    assert accepts(text)
    for at, cut, piece in edits:
        at %= len(text) + 1
        text = text[:at] + piece + text[at + cut :]
        assert accepts(text) == is_an_object(text), text


def test_every_short_text_is_judged_as_json_judges_it(accepts):
    """All numbers, structures and escapes of a few characters."""
    numbers = (
        "".join(text)
        for length in range(5)
        for text in itertools.product("017-+.eE", repeat=length)
    )
    structures = [
        "".join(text)
        for length in range(5)
        for text in itertools.product(["{", "}", "[", "]", ",", ":", '""', "1"], repeat=length)
    ]
    strings = (
        f'"{escape}{chr(code)}"'
        for escape in ("", "\\", "\\u000", "\\ud83", "\\ude0", "\\ud83d\\ude0")
        for code in range(0x80)
    )
    values = itertools.chain(
        numbers, structures, strings, ("true", "false", "null", "nul", "True", "NaN", "-Infinity")
    )
    for text in (
        *(f'{{"k":{value}}}' for value in values),
        *(f"{{{members}}}" for members in structures),
    ):
        assert accepts(text) == is_an_object(text), text


def test_strings_are_utf8(accepts):
    """All leading and second bytes at which the rules change, with zero to three bytes more."""
    edges = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")
    for first, second, rest in itertools.product(
        edges, edges, (b"", b"\x80", b"\xbf\x80", b"\x80\x80\xbf")
    ):
        text = bytes([first, second]) + rest
        assert accepts(b'{"k": "' + text + b'"}') == (
            text.decode(errors="replace").encode() == text
        ), text


def test_what_could_go_on_forever_is_bounded(accepts):
    """A model that loops on brackets, white space or digits is stopped; int() takes no more than some thousand digits either."""
    for depth, inside in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False)):
        assert (
            accepts('{"k": ' + "[" * depth + "]" * depth + "}")
            == accepts('{"k": ' * depth + "{}" + "}" * depth)
            == inside
        )
    for count, inside in ((MAX_SPACES, True), (MAX_SPACES + 1, False)):
        gap = " " * count
        assert all(
            accepts(text) == inside
            for text in (
                f"{{{gap}}}",
                f'{{"k"{gap}: 1}}',
                f'{{"k":{gap}[1]}}',
                f'{{"k": [1{gap},2]}}',
            )
        )
    for count, inside in ((MAX_DIGITS, True), (MAX_DIGITS + 1, False)):
        assert all(
            accepts(f'{{"k": {number}}}') == inside
            for number in ("9" * count, "0." + "0" * count, "-1." + "5" * count + "e-308")
        )


def test_only_whole_known_names_are_called(grammar, tokenizer, spell):
    for names in (NAMES, ODD_NAMES, ["search_web"], ["sea", "sea"]):
        start = follow(grammar, grammar.start(names), [tokenizer.tool_call_start])
        for name in (
            "",
            "s",
            "sea",
            "sear",
            "search",
            "search_",
            "search_web",
            "search_webs",
            "größe",
            "grö",
            "<tool_call>",
            "Upper Case",
        ):
            text = f'{{"name": "{name}", "arguments": {{}}}}'
            assert (
                takes(grammar, start, spell(text))
                == takes(grammar, start, spell("\n" + text))
                == (name in names)
            )


# --- what is right can be drawn -------------------------------------------------------------------------------------------------------


@QUICK
@given(
    PROSE,
    PROSE,
    st.lists(st.builds(ToolCall, st.sampled_from(NAMES), ARGUMENTS), max_size=3),
    st.booleans(),
)
def test_the_canonical_turn_is_accepted_id_by_id(
    grammar, tokenizer, reasoning, content, calls, thinking
):
    """Whatever the arguments hold: braces, quotes, closing tags, markers."""
    ids = chat.encode_assistant(tokenizer, reasoning, content, calls, thinking)
    state = follow(grammar, grammar.start(NAMES, thinking), ids)
    assert not state.in_call and sum(i == tokenizer.tool_call_end for i in ids) == len(calls)


OUTSIDE = st.sampled_from(
    [
        "<tool_call>",
        "<tool_",
        "call>",
        "<",
        "<think>",
        "<thi",
        "nk>",
        "</think>",
        "</thi",
        "</tool_call>",
        "<|im_end|>",
        "x",
    ]
)
BYTES = st.lists(
    OUTSIDE.map(str.encode)
    | st.sampled_from([b"\n", b" \t", "\u3000\x85".encode(), b"\xe3\x80", b"\xe2", b"\xff"]),
    max_size=8,
)


@settings(QUICK, max_examples=150)
@example(" \u3000\x85\x1c<think>a<tool_call>".encode(), None)
@example("\u3001<think>a<tool_call>".encode(), None)
@example(b"<th<think>a<tool_call>", None)
@example(b"<think>a<</think><<tool_<tool_call>", None)
@example(b"<tool_call>", None)
@given(text=BYTES.map(b"".join), thinking=st.sampled_from([None, True, False]))
def test_a_call_begins_where_the_parser_sees_one_and_nothing_is_forbidden_before(
    grammar, tokenizer, spell, text, thinking
):
    """Drafts in reasoning are no calls, and a tag that is spelled out is one."""
    state, ids = grammar.start(NAMES, thinking), spell(text)
    for count, i in enumerate(ids, 1):
        state = follow(grammar, state, [i])
        assert state.in_call == bool(chat.parse(tokenizer, ids[:count], thinking).calls)
        if state.in_call:
            return


@pytest.mark.parametrize(
    "thinking, text",
    [
        (None, f"<think>a <tool_call> {CALL} b"),
        (None, "so </tool_call>"),
        (False, "<think>"),
        (None, ""),
    ],
)
def test_outside_of_calls_everything_is_allowed(grammar, spell, thinking, text):
    assert grammar.allowed(follow(grammar, grammar.start(NAMES, thinking), spell(text))) is None


# --- masks ----------------------------------------------------------------------------------------------------------------------------

PLACES = [
    "",
    "{",
    '{"',
    '{"k',
    '{"k"',
    '{"k":',
    '{"k": "',
    '{"k": "\\',
    '{"k": "\\u',
    '{"k": "\\ud8',
    '{"k": "\\ud83d',
    '{"k": -',
    '{"k": 1',
    '{"k": 1.',
]
PLACES += [
    '{"k": 1e',
    '{"k": tr',
    '{"k": [',
    '{"k": [1',
    '{"k": [1,',
    '{"k": "x"',
    '{"k": {"k": [' + "[" * 13,
    '{"k": {"k": [["',
    "{}",
]
STARTS = [
    b"",
    b"\xe3\x80",
    b"<thi",
    b"<think>x</thin",
    b"x<tool_call",
    b"<tool_call>",
    b"<tool_call>\n{",
    b'<tool_call>{"name": "sea',
]
STATES = [
    *STARTS,
    *((OPENED + place).encode() for place in PLACES),
    OPENED.encode() + b'{"k": "\xf0\x9f',
    b"%s{}}" % OPENED.encode(),
]


@pytest.mark.parametrize("text", [*STATES, b"%s{}}\n" % OPENED.encode()])
def test_a_mask_holds_exactly_the_ids_that_advance_takes(grammar, tokenizer, spell, text):
    """Whatever borders an id crosses. Of the added ids, a call takes its closing tag alone, and that only where its object has ended."""
    state = follow(grammar, grammar.start(NAMES), spell(text))
    mask = grammar.allowed(state)
    mask = np.ones(tokenizer.vocab_size, bool) if mask is None else mask
    assert mask.tolist() == [takes(grammar, state, [i]) for i in range(tokenizer.vocab_size)]
    if state.in_call:
        ends = {tokenizer.tool_call_end} if text.rstrip().endswith(b"}}") else set()
        assert {i for i in tokenizer.added_ids if mask[i]} == ends


def test_a_spelled_tag_and_its_call_may_share_an_id_but_not_with_anything_else(
    grammar, tokenizer, spell
):
    texts = {tokenizer.bytes_of(i): i for i in range(tokenizer.vocab_size)}
    mask = grammar.allowed(follow(grammar, grammar.start(NAMES), spell("ok <tool_call")))
    assert (
        mask[texts[b'>{"']]
        and not mask[texts[b">)"]]
        and mask[tokenizer.im_end]
        and mask[texts[b'"}}']]
    )


def test_masks_are_computed_once_and_shared_by_all_tools(grammar, spell):
    text = OPENED.replace("search", "sea") + '{"query": "'
    first, second = (
        follow(grammar, grammar.start(names), spell(text)) for names in (NAMES, ["sea"])
    )
    assert hash(first) != hash(second) and grammar.allowed(first) is grammar.allowed(second)
    assert not grammar.allowed(first).flags.writeable


# --- mistakes -------------------------------------------------------------------------------------------------------------------------


def test_mistakes_are_told(grammar, tokenizer, spell):
    for names in ([], ["search", ""]):
        with pytest.raises(UserError, match="at least one name, and none that is empty"):
            grammar.start(names)
    with pytest.raises(
        ValueError, match=r"token id \d+ \(b'<\|im_end\|>'\) is not allowed after arguments"
    ):
        grammar.advance(follow(grammar, grammar.start(NAMES), spell(OPENED)), tokenizer.im_end)
    without = SimpleNamespace(
        vocab_size=255, bytes_of=lambda i: bytes([i]), added_ids=frozenset(), tool_call_end=0
    )
    with pytest.raises(UserError, match=r"no id for the single byte b'\\xff'"):
        ToolCallGrammar(without)
