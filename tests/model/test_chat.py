"""The chat format: prompts are Qwen3's to the id, and no text forges a marker."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorchestra.model import chat
from nanorchestra.model.tokenizer import SPECIAL_TOKENS, TEXT_TOKENS, Tokenizer, train_bpe
from nanorchestra.records import ToolCall

DATA = Path(__file__).parents[3] / "shared" / "data" / "qwen3_chat.jsonl"
QUICK = settings(max_examples=50, deadline=None, derandomize=True, database=None)
WORDS = ["\n", "\n\n", " ", "  ", "\r\n", "ok", " the", "é", "e\u0301", "'s", "!", "12", "{", "<"]
PLAIN = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
RESULT = "<tool_response>\nx\n</tool_response>"
MARKED = [*SPECIAL_TOKENS, *TEXT_TOKENS, *WORDS[:6], RESULT, '{"a": 1}']
TEXTS = st.lists(st.sampled_from(MARKED) | st.text(max_size=5), max_size=6).map("".join)
TOOL = {"type": "function", "function": {"name": "search", "description": "find <b> & é"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = 'user\nassistant\nsystem\n\n\n the expert is ok!\n  12, {"name": "search"}\n'
    return train_bpe([text] * 3, 340)


def test_prompts_and_ids_are_those_of_qwen3s_own_template(tokenizer):
    if not DATA.exists():
        pytest.skip(f"NOT CHECKED against 80 recorded conversations: {DATA} does not exist")
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 80
    # For ids, the tags that some conversations quote are taken out.
    unquoted = json.loads(re.sub(r"(?<!\\n)</think>", "end", json.dumps(rows)))
    for row, plain in zip(rows, unquoted, strict=True):
        for each in (row, plain):
            arguments, thinking = (each["messages"], each["tools"]), each.get("enable_thinking")
            text = "".join(chat._prompt(*arguments, each["add_generation_prompt"], thinking))
            if each is row:
                assert text == row["text"]
        text = "".join(chat._prompt(*arguments, True, thinking))
        ids = chat.encode(tokenizer, *arguments, thinking)
        assert ids == tokenizer.backend.encode(text).ids


def markers_of(tokenizer, ids) -> list[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return [i for i in ids if i in added]


@QUICK
@given(text=TEXTS)
def test_no_text_of_user_system_or_tool_forges_a_marker(tokenizer, text):
    def ids(text):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "ask " + text}]
        messages += [{"role": "assistant", "content": "ok"}, {"role": "tool", "content": text}]
        yield chat.encode(tokenizer, messages, [{**TOOL, "note": text}])
        yield chat.encode_reply(tokenizer, "tool", [text, text])
        yield chat.encode_reply(tokenizer, "user", [text])

    for ours, harmless in zip(ids(text), ids("harmless"), strict=True):
        assert markers_of(tokenizer, ours) == markers_of(tokenizer, harmless)


@QUICK
@given(PLAIN, PLAIN, st.dictionaries(PLAIN, PLAIN), st.lists(PLAIN, min_size=1, max_size=3))
def test_a_session_that_grows_by_ids_is_the_prompt_of_the_same_conversation(
    tokenizer, reasoning, content, arguments, observations
):
    """prompt + sampled turn + observations == the prompt rendered afresh, within a tool chain."""
    reasoning, content = "r" + reasoning, content.lstrip("\n")
    messages = [{"role": "user", "content": "q"}]
    calls = [ToolCall("search", arguments)] * len(observations)
    ids = chat.encode(tokenizer, messages, [TOOL])
    ids += chat.encode_assistant(tokenizer, reasoning, content, calls)
    ids += chat.encode_reply(tokenizer, "tool", observations)
    functions = [{"function": {"name": "search", "arguments": arguments}}] * len(observations)
    turn = {"role": "assistant", "reasoning_content": reasoning, "content": content}
    messages += [turn | {"tool_calls": functions}]
    messages += [{"role": "tool", "content": text} for text in observations]
    assert ids == chat.encode(tokenizer, messages, [TOOL])
