"""The chat format: the prompt is Qwen3's to the id, no text forges a marker, and every sampled turn is taken apart, however broken."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.model.parser import _ObjectScan
from nanorchestra.model.tokenizer import SPECIAL_TOKENS, TEXT_TOKENS, Tokenizer, train_bpe
from nanorchestra.records import ParsedTurn, ToolCall

DATA = Path(__file__).parents[3] / "shared" / "data" / "qwen3_chat.jsonl"
ADDED = (*SPECIAL_TOKENS, *TEXT_TOKENS)
QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
PIECES = st.sampled_from(
    [
        *ADDED,
        "\n",
        "\n\n",
        " ",
        "  ",
        "ok",
        "é",
        "'s",
        "<tool_response>\nx\n</tool_response>",
        '{"a": 1}',
        "12",
    ]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=6).map("".join)
PLAIN_PIECES = st.sampled_from(
    ["\n", "\n\n", " ", "  ", "\r\n", "ok", " the", "é", "e\u0301", "'s", "!", "12", "{", "<", "|"]
)
PLAIN = st.lists(PLAIN_PIECES, max_size=8).map("".join)
THINKING = st.sampled_from([None, True, False])
NAMES = st.sampled_from(["search", "expert_1", "run"])
LEAVES = st.none() | st.booleans() | st.integers() | TEXTS
JSON = st.recursive(
    LEAVES,
    lambda value: st.lists(value, max_size=2) | st.dictionaries(TEXTS, value, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(TEXTS, JSON, max_size=3)
TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "find <b> & é", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(
        [
            'user\nassistant\nsystem\n\n\n the expert is ok!\n  12, {"name": "search", "arguments": {}}\n'
        ]
        * 3,
        340,
    )


def messages_of(texts) -> st.SearchStrategy:
    """Conversations of any shape, with `texts` as their text."""
    function = st.fixed_dictionaries(
        {"name": NAMES, "arguments": st.dictionaries(texts, texts, max_size=2)}
    )
    call = st.fixed_dictionaries({"function": function})
    assistant = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": texts},
        optional={"reasoning_content": texts, "tool_calls": st.lists(call, max_size=2)},
    )
    other = st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "tool"]),
        texts,
    )
    return st.lists(st.one_of(assistant, other), min_size=1, max_size=6)


# --- rendering and encoding -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversations() -> list[dict]:
    if not DATA.exists():
        pytest.skip(
            f"NOT CHECKED: that prompts are Qwen3's own on 80 recorded conversations; they are not part of the repository, and {DATA} does not exist"
        )
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def test_prompts_are_those_of_qwen3s_own_template(conversations):
    assert len(conversations) == 80
    for row in conversations:
        assert (
            chat.render(
                row["messages"],
                row["tools"],
                row["add_generation_prompt"],
                row.get("enable_thinking"),
            )
            == row["text"]
        )


def test_ids_are_those_of_the_rendered_text(conversations, tokenizer):
    """On the recorded conversations, with the literal tags that some of them quote taken out."""
    for row in json.loads(re.sub(r"(?<!\\n)</think>", "end", json.dumps(conversations))):
        arguments = (
            row["messages"],
            row["tools"],
            row["add_generation_prompt"],
            row.get("enable_thinking"),
        )
        assert chat.encode(tokenizer, *arguments) == tokenizer.encode(
            chat.render(*arguments), special=True
        )


@QUICK
@given(
    messages=messages_of(PLAIN),
    tools=st.sampled_from([None, [TOOL]]),
    prompt=st.booleans(),
    thinking=THINKING,
)
def test_ids_are_those_of_the_rendered_text_for_any_text_without_markers(
    tokenizer, messages, tools, prompt, thinking
):
    """Text and template meet inside one BPE word ("\\n" + "\\n ok"), so they must be encoded together."""
    ids = chat.encode(tokenizer, messages, tools, prompt, thinking)
    assert ids == tokenizer.encode(chat.render(messages, tools, prompt, thinking), special=True)


def markers_of(tokenizer, ids) -> list[int]:
    return [i for i in ids if i in tokenizer.added_ids]


@QUICK
@given(text=TEXTS)
def test_no_text_of_user_system_or_tool_forges_a_marker(tokenizer, text):
    """The markers of a prompt are the template's, in number and place, whatever stands between them."""

    def ids(text):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "ask " + text}]
        messages += [{"role": "assistant", "content": "ok"}, {"role": "tool", "content": text}]
        return chat.encode(tokenizer, messages, [{**TOOL, "note": text}])

    assert markers_of(tokenizer, ids(text)) == markers_of(tokenizer, ids("harmless"))
    observation = chat.encode_observations(tokenizer, [text, text])
    assert markers_of(tokenizer, observation) == markers_of(
        tokenizer, chat.encode_observations(tokenizer, ["x", "x"])
    )
    assert markers_of(tokenizer, chat.encode_user(tokenizer, text)) == markers_of(
        tokenizer, chat.encode_user(tokenizer, "x")
    )


@QUICK
@given(messages=messages_of(TEXTS), thinking=st.sampled_from([None, False]))
def test_ids_spell_the_rendered_prompt(tokenizer, messages, thinking):
    ids = chat.encode(tokenizer, messages, [TOOL], True, thinking)
    text = chat.render(messages, [TOOL], True, thinking)
    pieces = [tokenizer.decode(tokenizer.encode(text))]  # NFC may change text, the same way in both
    assert [tokenizer.decode(tokenizer.encode(tokenizer.decode(ids)))] == pieces


def test_history_tags_written_by_the_template_are_ids_and_quoted_ones_are_text(tokenizer):
    call = {"name": "search", "arguments": {"q": "what does </tool_call> mean"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm <think> hm\n</think>\n\nsee"},
    ]
    messages[-1]["tool_calls"] = [call]
    ids = chat.encode(tokenizer, messages, add_generation_prompt=False)
    start, end, think, close, call, call_end = (
        tokenizer.token_id(t) for t in ADDED[1:3] + TEXT_TOKENS[-2:] + TEXT_TOKENS[:2]
    )
    assert markers_of(tokenizer, ids) == [start, end, start, think, close, call, call_end, end]


def test_reasoning_before_the_last_real_query_is_dropped_and_a_wrapped_tool_answer_is_no_query():
    think = {"role": "assistant", "reasoning_content": "old", "content": "a"}
    wrapped = {"role": "user", "content": "<tool_response>\nx\n</tool_response>"}
    assert "old" not in chat.render(
        [{"role": "user", "content": "q"}, think, {"role": "user", "content": "q2"}]
    )
    assert "old" in chat.render([{"role": "user", "content": "q"}, think, wrapped])


def test_line_breaks_around_reasoning_and_content_are_the_templates():
    """Qwen3 strips them where it shows reasoning, and leaves content of older turns as it is."""
    query, answer = (
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "\n\nhm\n", "content": "\n\nok\n"},
    )
    assert chat.render([query, answer], None, False).endswith(
        "assistant\n<think>\nhm\n</think>\n\nok\n<|im_end|>\n"
    )
    assert "assistant\n\n\nok\n<|im_end|>\n" in chat.render([query, answer, query])
    assert (
        chat.render([answer], None, False) == "<|im_start|>assistant\n\n\nok\n<|im_end|>\n"
    )  # no query, no active chain


def test_an_ideal_turn_is_written_as_the_template_would(tokenizer):
    ids = chat.encode_assistant(tokenizer, "\nhm\n", "\n", [ToolCall("f", {"q": 1})])
    assert tokenizer.decode(ids) == f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>"


def test_content_may_be_text_parts_or_none_and_arguments_json_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.render([{"role": "user", "content": parts}]) == chat.render(
        [{"role": "user", "content": "ab"}]
    )
    as_text, as_object = (
        chat.render(
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
                }
            ]
        )
        for arguments in ('{"é": "<"}', {"é": "<"})
    )
    assert as_text == as_object and '{"name": "f", "arguments": {"é": "<"}}' in as_text
    assert (
        chat.render([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]}]).count(
            '"arguments": {}}'
        )
        == 1
    )


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages: empty"),
        (["hi"], r"messages\[0\].role: None"),
        (
            [{"role": "robot", "content": ""}],
            r"messages\[0\].role: 'robot'; one of system, user, assistant, tool",
        ),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            r"messages\[0\].tool_calls\[0\]: no name",
        ),
    ],
)
def test_bad_messages_name_the_field(messages, message):
    with pytest.raises(UserError, match=message):
        chat.render(messages)


@QUICK
@given(
    PLAIN, PLAIN, st.dictionaries(PLAIN, PLAIN, max_size=2), st.lists(PLAIN, min_size=1, max_size=3)
)
def test_a_session_that_grows_by_ids_is_the_prompt_of_the_same_conversation(
    tokenizer, reasoning, content, arguments, observations
):
    """prompt + what was sampled + observations == the prompt rendered afresh, inside one tool chain with its reasoning kept."""
    reasoning, content = "r" + reasoning, content.lstrip("\n")
    calls = [ToolCall("search", arguments)] * len(observations)
    messages = [{"role": "user", "content": "q"}]
    ids = chat.encode(tokenizer, messages, [TOOL]) + chat.encode_assistant(
        tokenizer, reasoning, content, calls
    )
    ids += chat.encode_observations(tokenizer, observations)
    messages.append({"role": "assistant", "reasoning_content": reasoning, "content": content})
    messages[-1]["tool_calls"] = [{"function": {"name": "search", "arguments": arguments}}] * len(
        observations
    )
    messages += [{"role": "tool", "content": text} for text in observations]
    assert ids == chat.encode(tokenizer, messages, [TOOL])


def test_without_thinking_the_empty_block_is_in_every_generation_prompt_and_not_sampled(tokenizer):
    """Every way to open a turn ends alike, so that a policy sees one and the same prompt."""
    prompt = "<|im_start|>assistant\n"
    for thinking, end in (
        (False, prompt + "<think>\n\n</think>\n\n"),
        (None, prompt),
        (True, prompt),
    ):
        openings = [
            chat.encode(tokenizer, [{"role": "user", "content": "q"}], enable_thinking=thinking)
        ]
        openings += [
            chat.encode_user(tokenizer, "q", thinking),
            chat.encode_observations(tokenizer, ["o"], thinking),
        ]
        assert all(tokenizer.decode(ids).endswith("<|im_end|>\n" + end) for ids in openings)
    assert (
        tokenizer.decode(chat.encode_assistant(tokenizer, "unused", "hi", [], thinking=False))
        == "hi<|im_end|>"
    )
    assert (
        tokenizer.decode(chat.encode_user(tokenizer, "hi"))
        == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


# --- parsing --------------------------------------------------------------------------------------------------------------------------


@QUICK
@given(
    content=PLAIN,
    reasoning=PLAIN,
    arguments=st.lists(ARGUMENTS, max_size=3),
    thinking=st.booleans(),
)
def test_what_an_ideal_policy_writes_is_read_back(
    tokenizer, content, reasoning, arguments, thinking
):
    """Whatever the arguments hold: braces, quotes, closing tags, markers."""
    calls = [ToolCall("search", each) for each in arguments]
    ids = chat.encode_assistant(tokenizer, reasoning, content, calls, thinking)
    turn = chat.parse(tokenizer, ids, enable_thinking=thinking)
    nfc = [
        json.loads(tokenizer.decode(tokenizer.encode(json.dumps(each, ensure_ascii=False))))
        for each in arguments
    ]
    assert [call.arguments for call in turn.calls] == nfc and turn.well_formed
    assert turn.content == tokenizer.decode(tokenizer.encode(content.lstrip("\n")))
    assert turn.reasoning == (
        tokenizer.decode(tokenizer.encode(reasoning.strip("\n"))) if thinking else ""
    )


TAGS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|im_end|>",
    "<",
    "</tool",
    "_call>",
    "<thi",
]
OBJECTS = [
    '{"name": "f", "arguments": {"q": "',
    '"}}',
    '{"name": "g"}',
    '{"name": "g", "arguments": "{}"}',
    "{",
    "}",
    '"',
    "[",
]
OTHERS = ["\n", "\n\n", "\\", "\\\\", '\\"', "text", " ", "é"]
BROKEN = st.lists(st.sampled_from([*TAGS, *OBJECTS, *OTHERS]), max_size=14).map("".join)


def joined(deltas, kind) -> str:
    return "".join(text for k, text in deltas if k == kind)


@settings(QUICK, max_examples=500)
@given(text=BROKEN, cuts=st.lists(st.integers(0, 200), max_size=6), thinking=THINKING)
def test_every_split_of_any_text_gives_the_same_turn_and_deltas_that_add_up(text, cuts, thinking):
    whole = chat.parse(None, text, thinking)
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    for pieces in ([text[a:b] for a, b in zip(edges, edges[1:])], list(text)):
        parser = chat.StreamParser(thinking)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)]
        assert parser.finish() == whole
        deltas += parser.last_deltas
        assert (
            joined(deltas, "reasoning") == whole.reasoning
            and joined(deltas, "content") == whole.content
        )
        assert [text for kind, text in deltas if kind == "tool_call"] == [
            call.raw for call in whole.calls
        ]
        assert all(text for kind, text in deltas if kind != "tool_call")


def turn(text: str, thinking: bool | None = None) -> ParsedTurn:
    return chat.parse(None, text, thinking)


CALL = '<tool_call>\n{"name": "f", "arguments": {"q": 1}}\n</tool_call>'


def test_a_plain_turn():
    assert turn(f"<think>\nhm\n</think>\n\nLook:\n{CALL}\n{CALL}<|im_end|>") == ParsedTurn(
        "hm", "Look:", (call("f", q=1),) * 2
    )
    assert turn("Paris.<|im_end|>") == ParsedTurn("", "Paris.", ())
    assert turn("") == ParsedTurn("", "", ())
    assert turn(" \n<think>hm</think>ok") == ParsedTurn("hm", "ok", ())
    assert turn("a <thi") == ParsedTurn("", "a <thi", ()) and turn("<thi") == ParsedTurn(
        "", "<thi", ()
    )
    assert turn("a<|im_end|><|im_end|>").content == "a<|im_end|>"


def test_the_stop_id_of_a_turn_is_dropped(tokenizer):
    for stop in ([], [tokenizer.im_end], [tokenizer.endoftext]):
        assert chat.parse(tokenizer, tokenizer.encode("ok") + stop) == ParsedTurn("", "ok", ())
    assert chat.parse(tokenizer, []) == ParsedTurn("", "", ())


def call(name: str, **arguments) -> ToolCall:
    return ToolCall(name, arguments, raw=json.dumps({"name": name, "arguments": arguments}))


def test_reasoning_that_is_cut_off_is_reasoning_and_its_draft_calls_are_no_calls():
    assert turn(f"<think>\nlet me try {CALL}\nor") == ParsedTurn(
        f"let me try {CALL}\nor", "", (), truncated=True
    )
    assert turn(f"<think>draft {CALL}</think>done") == ParsedTurn(f"draft {CALL}", "done", ())


def test_with_thinking_off_everything_is_content_but_calls_are_calls():
    assert turn(f"<think>\nhm\n</think>\n\n{CALL}", thinking=False) == ParsedTurn(
        "", "<think>\nhm\n</think>\n", (call("f", q=1),)
    )


def test_the_json_object_decides_where_a_call_ends():
    arguments = {"q": 'say "</tool_call>" }}', "r": "a\\", "s": {"t": ["{"]}}
    text = json.dumps({"name": "f", "arguments": arguments})
    parsed = turn(f"<tool_call>\n{text}\n</tool_call>\nThat is all.")
    assert parsed.calls == (ToolCall("f", arguments, text),) and parsed.content == "That is all."


def test_prose_around_calls_is_content_on_lines_of_its_own():
    assert (
        turn(f"\n\nFirst.\n{CALL}\n\n{CALL}\nThen.\n{CALL}\nLast.\n").content
        == "First.\nThen.\nLast.\n"
    )


@pytest.mark.parametrize(
    "text, name, arguments, error",
    [
        ('{"name": "f"}', "f", {}, None),
        ('{"name": "f", "arguments": null}', "f", {}, None),
        ('{"name": "f", "arguments": ""}', "f", {}, None),
        ('{"name": "f", "arguments": "{\\"a\\": [1]}"}', "f", {"a": [1]}, None),
        (
            '{"name": "f", "arguments": "{\\"a\\": 1, \\"b\\": }"}',
            "f",
            {},
            "arguments is not valid JSON: Expecting value at column 15",
        ),
        ('{"name": "f", "arguments": [1]}', "f", {}, "arguments is an array, not a JSON object"),
        (
            '{"name": "f", "arguments": "\\"x\\""}',
            "f",
            {},
            "arguments is a string, not a JSON object",
        ),
        (
            '{"name": "f", "arguments": {"a": 01}}',
            "",
            {},
            "call is not valid JSON: Expecting ',' delimiter at column 35",
        ),
        (
            '{"name": "f",\n "arguments": {"a"}}',
            "",
            {},
            "call is not valid JSON: Expecting ':' delimiter at line 2 column 19",
        ),
        (
            '{"name": "f", "arguments": {"a": NaN}}',
            "",
            {},
            "call is not valid JSON: NaN is not a JSON number",
        ),
        (
            '{"name": "f", "arguments": {"a": "line\nbreak"}}',
            "",
            {},
            "call is not valid JSON: Invalid control character at column 39",
        ),
        (
            '{"name": "f, "arguments": {}}',
            "",
            {},
            "call is not valid JSON: Expecting ',' delimiter at column 15",
        ),
        ('{"arguments": {}}', "", {}, "call has no name"),
        ('{"name": 3}', "", {}, "name is not a non-empty string"),
        ("[]", "", {}, "call is an array, not a JSON object with name and arguments"),
        ("", "", {}, "call is not valid JSON: Expecting value at column 1"),
        ('{"name": "f"}}', "f", {}, "unexpected '}' between the JSON object and </tool_call>"),
        (
            '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
            "",
            {},
            "call is not valid JSON: Exceeds the limit",
        ),
        (
            '{"name":' * 99999 + "1" + "}" * 99999,
            "",
            {},
            "call is not valid JSON: maximum recursion depth",
        ),
    ],
)
def test_a_bad_call_says_what_is_wrong_and_spoils_nothing_after_it(text, name, arguments, error):
    parsed = turn(f"<tool_call>\n{text}\n</tool_call>\n{CALL}\nend")
    first, second = parsed.calls
    assert (first.name, first.arguments) == (name, arguments)
    assert first.error.startswith(error) if error else first.error is None
    assert (
        second == call("f", q=1)
        and parsed.content == "end"
        and not parsed.truncated
        and parsed.well_formed == (error is None)
    )


def test_a_call_without_its_closing_tag():
    cut = turn('<tool_call>\n{"name": "f", "arguments": {"q": "a')
    assert (
        cut.truncated
        and cut.calls[0].error == "cut off before the end of its JSON object"
        and cut.calls[0].raw.endswith('"a')
    )
    assert turn(CALL[:-5]) == ParsedTurn("", "", (call("f", q=1),), truncated=True)
    again = turn(CALL.removesuffix("</tool_call>") + CALL)
    assert (
        "</tool_call> is missing" in again.calls[0].error
        and again.calls[1] == call("f", q=1)
        and not again.truncated
    )
    quote = turn('<tool_call>{"name": "f}</tool_call>')
    assert "Unterminated string" in quote.calls[0].error and not quote.truncated
    prose = turn(CALL.removesuffix("</tool_call>") + "So I called it.")
    assert "</tool_call> is missing" in prose.calls[0].error and prose.content == "So I called it."


def test_deltas_arrive_as_early_as_they_are_certain():
    parser = chat.StreamParser()
    assert parser.feed("<think>\nI ") == [("reasoning", "I ")]
    assert parser.feed("see\n</thi") == [("reasoning", "see")]
    assert parser.feed("nk>\n\nWell <b") == [("content", "Well <b")]
    assert parser.feed("\n<tool_call>\n" + '{"name": "f"') == []
    assert (
        parser.feed("}\n</tool_call>") == [("tool_call", '{"name": "f"}')]
        and parser.calls[0].name == "f"
    )
    assert parser.feed("\nbye\n<|im_") == [("content", "\nbye")]
    assert parser.finish().content == "Well <b\nbye\n<|im_" and parser.last_deltas == [
        ("content", "\n<|im_")
    ]


@pytest.mark.parametrize("text", ["no object", '{"name": "f,\n', '{"name": \\"f\\"}', '{"name": {'])
def test_what_is_no_json_does_not_hold_up_the_stream(text):
    """A broken call ends at its closing tag, not with the turn."""
    parser = chat.StreamParser()
    assert [kind for kind, _ in parser.feed(f"<tool_call>{text}</tool_call>ok")] == [
        "tool_call",
        "content",
    ]
    assert parser.calls[0].error and parser.calls[0].raw == text.strip()


@QUICK
@given(
    value=st.dictionaries(
        st.text('a"\\{}', max_size=4), st.text('a"\\{}', max_size=4) | JSON, max_size=3
    ),
    tail=TEXTS,
)
def test_the_object_scan_agrees_with_json_at_once_and_letter_by_letter(value, tail):
    text = " " + json.dumps(value, ensure_ascii=False)
    at_once, by_letter = _ObjectScan(), _ObjectScan()
    at_once.advance(text + tail)
    for end in range(len(text + tail) + 1):
        by_letter.advance((text + tail)[:end])
    assert at_once.end == by_letter.end == len(text)


def test_parsing_stays_linear_in_what_a_broken_policy_writes():
    """Degenerate loops are what early training samples; each of these is some 60,000 characters."""
    loops = ["<tool_call>" + text + "</tool_call>" for text in ("{", '{"', '{\\"', "")]
    for text in (*loops, "<", "<tool_call>", "\n", '{"', "<think>"):
        began = time.process_time()
        turn(text * (60000 // len(text)), thinking=False)
        assert time.process_time() - began < 2, (
            text
        )  # of this process alone; growing with the square it would take minutes
