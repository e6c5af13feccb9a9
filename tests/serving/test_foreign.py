"""Models with a chat format of their own, served: Qwen2.5 with its tools, Llama 3, Mistral."""

from __future__ import annotations

import json

import chat_templates
import httpx
import openai
import pytest
from foreign_tokenizers import make_foreign
from running_server import SCRIPT, Running, scripted

from nanorchestra.engine.engine import Engine
from nanorchestra.formats.load import with_chat
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"text": {"enum": ["hi", "ho"]}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "echo", "parameters": PARAMETERS}}
SCHEMA = {"name": "x", "schema": PARAMETERS}


@pytest.fixture(scope="module")
def start(make_nano, tmp_path_factory):
    """start(kind, template) returns a server of a small model that babbles, and a client."""
    started = {}

    def run(kind, template):
        if (kind, template) not in started:
            path = make_foreign(kind, tmp_path_factory.mktemp(kind), template)
            pages = {"num_pages": 2000, "page_size": 4}
            engine = Engine(make_nano(), with_chat(Tokenizer.from_dir(path), path), **pages)
            running = started[kind, template] = Running(scripted(engine))
            running.client = openai.OpenAI(
                base_url=f"{running.base}/v1", api_key="none", max_retries=0, timeout=30
            )
        return started[kind, template]

    yield run
    for running in started.values():
        running.assert_idle()
        running.stop()


def ask(running, *messages, model="nano", **settings):
    if isinstance(messages[0], str):
        messages = [{"role": "user", "content": messages[0]}]
    create = running.client.chat.completions.create
    return create(model=model, messages=list(messages), seed=3, **settings)


def test_a_chat_follows_the_models_own_template_and_ends_at_its_eos(start):
    running = start("qwen2", chat_templates.QWEN25)
    tokenizer = running.engine.tokenizer
    extra = {"return_token_ids": True}
    answer = ask(running, "!say", logprobs=True, top_logprobs=2, extra_body=extra)
    (choice,) = answer.choices
    assert answer.prompt_token_ids == chat.encode(tokenizer, [{"role": "user", "content": "!say"}])
    assert choice.message.content == "Answer: fourty-two, or so." and choice.finish_reason == "stop"
    assert choice.token_ids[-1] == tokenizer.end_of_turn
    assert len(choice.logprobs.content) == len(choice.token_ids) == answer.usage.completion_tokens
    chunks = [chunk.choices[0] for chunk in ask(running, "!say", stream=True)]
    assert "".join(c.delta.content or "" for c in chunks) == choice.message.content
    assert chunks[-1].finish_reason == "stop"
    assert [model.id for model in running.client.models.list()] == ["nano"]
    with pytest.raises(openai.NotFoundError, match="model: it must be nano"):
        ask(running, "hi", model="nano+tools")


def test_tools_in_qwens_form_are_rendered_parsed_and_held_to_their_schema(start):
    running = start("qwen2", chat_templates.QWEN25)
    (choice,) = ask(running, "!call", tools=[TOOL]).choices
    functions = [call.function for call in choice.message.tool_calls]
    assert [(f.name, f.arguments) for f in functions] == [("echo", '{"text":"hi"}')] * 2
    assert choice.finish_reason == "tool_calls"
    answer = choice.message.model_dump(exclude_none=True)
    call, *_ = answer["tool_calls"]
    answer["tool_calls"] = [call]
    results = [{"role": "tool", "content": "hi", "tool_call_id": call["id"]}]
    question = {"role": "user", "content": "!call"}
    again = ask(
        running, question, answer, *results, tools=[TOOL], extra_body={"return_token_ids": True}
    )
    prompt = running.engine.tokenizer.decode(again.prompt_token_ids)
    assert '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>' in prompt
    assert "<tool_response>\nhi\n</tool_response>" in prompt
    (choice,) = ask(running, "babble", tools=[TOOL], tool_choice="required").choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["text"] in ("hi", "ho")
    (choice,) = ask(running, "!call").choices  # without tools a call is text
    assert choice.message.content.count("<tool_call>") == 2 and not choice.message.tool_calls


@pytest.mark.parametrize("kind", ["qwen2", "smollm2", "llama3"])
def test_an_answer_is_held_to_a_schema(start, kind):
    running = start(kind, chat_templates.QWEN25 if kind == "qwen2" else chat_templates.SMOLLM2)
    form = {"type": "json_schema", "json_schema": SCHEMA}
    (choice,) = ask(running, "babble", response_format=form).choices
    assert json.loads(choice.message.content)["text"] in ("hi", "ho")
    assert choice.finish_reason == "stop"


def test_reasoning_that_the_template_opens_is_no_content(start):
    running = start("deepseek", chat_templates.DEEPSEEK)
    tokenizer = running.engine.tokenizer
    (choice,) = ask(running, "!open", extra_body={"return_token_ids": True}).choices
    assert tokenizer.decode(choice.token_ids) == SCRIPT["open"]
    assert choice.message.reasoning_content == "hmm" and choice.message.content == "Answer"
    message = choice.message.model_dump(include={"role", "content"})
    users = [{"role": "user", "content": text} for text in ("!open", "why <think>\n")]
    whole = message | {"content": f"<think>\nhmm\n</think>\n\n{message['content']}"}
    prompts = [chat.encode(tokenizer, [users[0], each, users[1]]) for each in (message, whole)]
    assert prompts[0] == prompts[1], "the template leaves out earlier reasoning"


def test_a_prompt_begins_with_bos_once(start):
    running = start("llama3", chat_templates.LLAMA31)
    tokenizer = running.engine.tokenizer
    extra = {"return_token_ids": True}
    create = running.client.completions.create
    answer = create(model="nano", prompt="user", max_tokens=3, extra_body=extra)
    assert answer.prompt_token_ids == [*tokenizer.bos_ids, *tokenizer.encode("user")]
    answer = ask(running, "hi <|begin_of_text|>", max_tokens=3, extra_body=extra)
    assert answer.prompt_token_ids[:1] == tokenizer.bos_ids
    assert answer.prompt_token_ids.count(*tokenizer.bos_ids) == 1


def test_what_a_template_refuses_is_status_400_and_the_server_goes_on(start):
    running = start("mistral", chat_templates.MISTRAL)
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    with pytest.raises(openai.BadRequestError, match="roles must alternate user/assistant"):
        ask(running, user, user)
    with pytest.raises(openai.BadRequestError, match="tools: the chat template of this model"):
        ask(running, user, tools=[TOOL])
    body = {"model": "nano", "messages": [user], "tools": [TOOL]}
    refused = httpx.post(f"{running.base}/v1/chat/completions", json=body).json()
    assert refused["error"]["param"] == "tools"
    assert ask(running, user, answer, user, max_tokens=3, tools=[TOOL], tool_choice="none").usage
