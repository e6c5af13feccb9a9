"""Models with a chat format of their own, served: Qwen2.5 with its tools, DeepSeek's."""

from __future__ import annotations

import chat_templates
import openai
import pytest
from foreign_tokenizers import make_foreign
from running_server import SCRIPT, Running, scripted

from nanorchestra.engine.engine import Engine
from nanorchestra.formats.load import with_chat
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "echo", "parameters": PARAMETERS}}
IDS = {"return_token_ids": True}


@pytest.fixture
def start(make_nano, tmp_path):
    """start(kind, template) -> the tokenizer of a served model that babbles, and a client."""
    started = []

    def run(kind, template):
        path = make_foreign(kind, tmp_path, template)
        tokenizer = with_chat(Tokenizer.from_dir(path), path)
        engine = Engine(make_nano(), tokenizer, num_pages=2000, page_size=4)
        started.append(running := Running(scripted(engine)))
        base_url = f"{running.base}/v1"
        return tokenizer, openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)

    yield run
    for running in started:
        running.assert_idle()
        running.stop()


def ask(client, text, **settings):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="nano", messages=messages, seed=3, **settings)


def test_a_chat_and_its_tools_follow_the_models_own_template(start):
    tokenizer, client = start("qwen2", chat_templates.QWEN25)
    answer = ask(client, "!say", extra_body=IDS)
    (choice,) = answer.choices
    assert answer.prompt_token_ids == chat.encode(tokenizer, [{"role": "user", "content": "!say"}])
    assert choice.message.content == "Answer: fourty-two, or so." and choice.finish_reason == "stop"
    assert choice.token_ids[-1] == tokenizer.end_of_turn
    assert [model.id for model in client.models.list()] == ["nano"], "the loop needs the markers"
    (choice,) = ask(client, "!call", tools=[TOOL]).choices
    functions = [call.function for call in choice.message.tool_calls]
    assert [(f.name, f.arguments) for f in functions] == [("echo", '{"text":"hi"}')] * 2


def test_reasoning_that_the_template_opens_is_no_content_and_bos_comes_once(start):
    tokenizer, client = start("deepseek", chat_templates.DEEPSEEK)
    answer = ask(client, "!open", extra_body=IDS)
    (choice,) = answer.choices
    assert tokenizer.decode(choice.token_ids) == SCRIPT["open"]
    assert choice.message.reasoning_content == "hmm" and choice.message.content == "Answer"
    assert answer.prompt_token_ids.count(*tokenizer.bos_ids) == 1
    text = client.completions.create(model="nano", prompt="user", max_tokens=3, extra_body=IDS)
    assert text.prompt_token_ids == [*tokenizer.bos_ids, *tokenizer.encode("user")]
    with pytest.raises(openai.BadRequestError, match="tools: the chat template of this model"):
        ask(client, "hi", tools=[TOOL])
