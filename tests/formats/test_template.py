"""Other models' chat templates: transformers gives the same ids, no text forges a marker."""

import json
import re

import chat_templates
import pytest
from foreign_tokenizers import CHATML_TOKENS, LLAMA3_TOKENS, make_foreign
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorchestra.errors import UserError
from nanorchestra.formats.load import with_chat
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer

QUICK = settings(max_examples=30, deadline=None, derandomize=True, database=None)
TEMPLATES = {  # name: (kind of tokenizer, template)
    "smollm2": ("smollm2", chat_templates.SMOLLM2),
    "qwen2.5": ("qwen2", chat_templates.QWEN25),
    "llama3.1": ("llama3", chat_templates.LLAMA31),
    "mistral": ("mistral", chat_templates.MISTRAL),
    "deepseek": ("deepseek", chat_templates.DEEPSEEK),
}
TAKE_TOOLS = "qwen2.5", "llama3.1"
MARKERS = {*CHATML_TOKENS, *LLAMA3_TOKENS, "<tool_call>", "</tool_call>", "[INST]", "[/INST]"}
MARKERS |= {"<｜User｜>", "<｜Assistant｜>", "</think>", "<think>", "<repo_name>", "</s>"}
PLAIN = [" ", "\n\n", "ok", "é", "東", "<b>", "</", "|>", "<", "<|im_", "[", "{", '"', "12", "\\"]
TEXTS = st.lists(st.sampled_from(PLAIN) | st.text(max_size=5), max_size=6).map("".join)
FORGED = st.lists(st.sampled_from([*sorted(MARKERS), *PLAIN]), max_size=6).map("".join)
TOOL = {"name": "search", "description": "find <b> & é", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign")
    made = {}
    for name, (kind, template) in TEMPLATES.items():
        directory = make_foreign(kind, path / name, template)
        made[name] = with_chat(Tokenizer.from_dir(directory), directory)
    return made


def conversation(system, user, answer, calls=(), result=None):
    """Messages in turns, with a call and its result if there is any."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if calls:
        functions = [{"type": "function", "function": call} for call in calls]
        messages += [{"role": "assistant", "content": answer, "tool_calls": functions}]
        return [*messages, {"role": "tool", "content": result}]
    messages += [{"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": user + "again"}]


def added_ids(tokenizer, ids):
    added = tokenizer.backend.get_added_tokens_decoder()
    return [i for i in ids if i in added]


@pytest.mark.slow  # importing transformers takes seconds
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_gives_the_same_ids(tokenizers, name, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tokenizers[name]
    tokenizer.save(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert (reference.eos_token_id, reference.bos_token) == (
        tokenizer.end_of_turn,
        tokenizer.chat.bos,
    )

    @QUICK
    @given(TEXTS, TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS), st.booleans())
    def check(system, user, answer, arguments, with_tools):
        tools, calls = None, []
        if with_tools and name in TAKE_TOOLS:
            described = TOOL | {"description": user, "parameters": {"properties": arguments}}
            tools = [{"type": "function", "function": described}]
            calls = [{"name": "search", "arguments": arguments}]
        messages = conversation(system, user, answer, calls, "r" + user)
        text = reference.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert chat.encode(tokenizer, messages, tools) == ids
        if calls:  # as clients of OpenAI's API send them
            calls[0]["arguments"] = json.dumps(arguments)
            again = conversation(system, user, answer, calls, "r" + user)
            assert chat.encode(tokenizer, again, tools) == ids

    check()


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_forges_a_marker(tokenizers, name):
    tokenizer = tokenizers[name]

    @QUICK
    @given(FORGED)
    def check(text):
        def ids(text, key):
            described = TOOL | {"description": text, "parameters": {key: text, "enum": [text]}}
            calls = [{"name": "search" + text, "arguments": {key: text}}]
            tools = [{"type": "function", "function": described}]
            yield chat.encode(tokenizer, conversation(text, "a" + text, text + "b"))
            if name in TAKE_TOOLS:
                yield chat.encode(tokenizer, conversation(text, "a", "", calls, text), tools)

        for ours, harmless in zip(ids(text, text), ids("harmless", "key"), strict=True):
            assert added_ids(tokenizer, ours) == added_ids(tokenizer, harmless)

    check()


def test_a_template_runs_in_a_sandbox_and_fails_in_one_line_that_names_the_file(tmp_path):
    path = make_foreign("qwen2", tmp_path, "{{ ''.__class__.mro() }}")
    tokenizer = with_chat(Tokenizer.from_dir(path), path)
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}.*failed: .*unsafe") as caught:
        chat.encode(tokenizer, [{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)
