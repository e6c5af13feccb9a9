"""OpenAI's client against the running server, in all its features."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

from nanorchestra.model import chat

PARAMETERS = {
    "type": "object",
    "properties": {"text": {"enum": ["hi", "ho"]}, "loud": {"type": "boolean"}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "echo", "parameters": PARAMETERS, "strict": True}}
SHOUT = {"name": "shout", "schema": PARAMETERS, "strict": True}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
ONE_CALL = {"tools": [TOOL], "parallel_tool_calls": False}
SAID = "Answer: fourty-two, or so."
CALL = ("echo", '{"text":"hi"}')


@pytest.fixture
def client(running):
    return openai.OpenAI(base_url=f"{running.base}/v1", api_key="none", max_retries=0, timeout=30)


def ask(client, text, **settings):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="nano", messages=messages, **settings)


def parts(completion):
    """(content, reasoning, calls, finish_reason, number of tokens) of an answer."""
    (choice,) = completion.choices
    message = choice.message
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None)
    return (
        message.content,
        reasoning,
        calls,
        choice.finish_reason,
        completion.usage.completion_tokens,
    )


@pytest.mark.parametrize(
    "text, settings, reason, content, calls",
    [
        ("!say", {}, "stop", SAID, []),
        ("!say", {"stop": [", or", "never"]}, "stop", "Answer: fourty-two", []),
        ("!call", {"tools": [TOOL]}, "tool_calls", None, [CALL] * 2),
        ("!call", ONE_CALL, "tool_calls", None, [CALL]),
        ("!call", {}, "stop", ..., []),  # without tools a call is text
    ],
)
def test_a_stream_put_together_is_the_answer(client, text, settings, reason, content, calls):
    answer = parts(ask(client, text, **settings))
    assert answer[2:4] == (calls, reason) and content in (..., answer[0])
    assert answer[1] == "hmm"
    messages = [{"role": "user", "content": text}]
    settings = settings | {"model": "nano", "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(messages=messages, **settings) as stream:
        assert parts(stream.get_final_completion()) == answer


def test_choices_have_seeds_of_their_own_and_a_seed_says_the_same_again(client):
    many = ask(client, "babble", n=3, seed=7, max_tokens=12).choices
    texts = [choice.message.content for choice in many]
    for i in (0, 2):
        alone = ask(client, "babble", seed=7 + i, max_tokens=12).choices[0]
        assert alone.message.content == texts[i]
    assert len(set(texts)) == 3 and [choice.index for choice in many] == [0, 1, 2]
    assert {choice.finish_reason for choice in many} == {"length"}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_ids_are_those_of_the_engine(client, running, stream):
    settings = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8, "seed": 1, "stream": stream}
    prompt = chat.encode(running.engine.tokenizer, [{"role": "user", "content": "babble"}])
    answer = ask(client, "babble", extra_body={"return_token_ids": True}, **settings)
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    ids = [i for choice in choices for i in choice.token_ids]
    logprobs = [one for choice in choices for one in choice.logprobs.content]
    assert chunks[0].prompt_token_ids == prompt and len(ids) == len(logprobs) == 8
    scores = running.engine.score([prompt + ids])[0][-8:]
    assert [one.logprob for one in logprobs] == pytest.approx(scores, abs=1e-4)
    for one in logprobs:
        first, _, third = [top.logprob for top in one.top_logprobs]
        assert first >= third and first >= one.logprob - 1e-9


def test_completions_go_on_from_text_and_from_ids(client, running):
    prompt = running.engine.tokenizer.encode("law case")
    create = client.completions.create
    settings = {"model": "nano", "max_tokens": 6, "seed": 3, "logprobs": 2}
    text, ids = (create(prompt=p, **settings).choices[0] for p in ("law case", prompt))
    assert text.text == ids.text == "".join(ids.logprobs.tokens)
    both = create(prompt=[prompt, prompt[:1]], **settings, n=2)
    assert both.choices[0].text == ids.text and len(both.choices) == 4
    assert both.usage.prompt_tokens == len(prompt) + 1
    stream = create(prompt=prompt, stream=True, **settings)
    assert "".join(chunk.choices[0].text for chunk in stream) == ids.text


@pytest.mark.parametrize(
    "held, calls",
    [
        ({"tools": [TOOL], "tool_choice": "required"}, 1),
        ({"response_format": {"type": "json_schema", "json_schema": SHOUT}}, 0),
    ],
)
def test_calls_and_answers_keep_their_schema(client, held, calls):
    for seed in range(2):
        answer = ask(client, "babble", extra_body=QUIET, seed=seed, **held)
        content, _, called, reason, _ = parts(answer)
        texts = [arguments for _, arguments in called] or [content]
        jsonschema.validate(json.loads(texts[0]), PARAMETERS)
        assert len(called) == calls and (content is None) == bool(calls)
        assert reason == ("tool_calls" if calls else "stop")
