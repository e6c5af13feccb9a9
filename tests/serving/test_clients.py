"""Real clients against the running server: openai in all its features, litellm, curl."""

from __future__ import annotations

import json
import subprocess

import jsonschema
import litellm
import openai
import pytest

from nanorchestra.model import chat

PARAMETERS = {
    "type": "object",
    "properties": {"text": {"enum": ["hi", "ho"]}, "loud": {"type": "boolean"}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "echo", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "other"}}
SHOUT = {"name": "shout", "schema": PARAMETERS, "strict": True}


@pytest.fixture
def client(running):
    return openai.OpenAI(base_url=f"{running.base}/v1", api_key="none", max_retries=0, timeout=30)


def ask(client, text, **settings):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="nano", messages=messages, **settings)


def joined(stream):
    """(message, finish_reason, usage) of the chunks, put together as a client does it."""
    message, calls, reason, usage = {}, {}, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for call in delta.pop("tool_calls", ()):
                function = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                for key, value in call["function"].items():
                    function[key] += value or ""
            for key, value in delta.items():
                message[key] = message.get(key, "") + value
            reason = choice.finish_reason or reason
    return message, [calls[i] for i in sorted(calls)], reason, usage


def functions(message):
    calls = message.tool_calls or ()
    return [{"name": c.function.name, "arguments": c.function.arguments} for c in calls]


@pytest.mark.parametrize(
    "settings",
    [
        {"text": "!say"},
        {"text": "!say", "stop": [", or", "never"]},
        {"text": "!call", "tools": [TOOL]},
        {"text": "!call", "tools": [TOOL], "parallel_tool_calls": False},
        {"text": "!call"},
        {"text": "!call", "tools": [TOOL], "tool_choice": "none"},
        {"text": "babble", "max_completion_tokens": 30},
        {"text": "babble", "tools": [TOOL, OTHER], "tool_choice": "required"},
        {"text": "babble", "response_format": {"type": "json_object"}, "max_tokens": 8},
    ],
    ids=lambda settings: "-".join([settings["text"], *map(str, list(settings)[1:])]),
)
def test_a_stream_put_together_is_the_answer(client, settings):
    settings = {"seed": 5, **settings}
    (choice,) = (whole := ask(client, **settings)).choices
    options = {"stream": True, "stream_options": {"include_usage": True}}
    message, calls, reason, usage = joined(ask(client, **settings, **options))
    assert calls == functions(choice.message) and reason == choice.finish_reason
    assert message.get("content") == choice.message.content != ""
    assert message.get("reasoning_content") == getattr(choice.message, "reasoning_content", None)
    assert usage.completion_tokens == whole.usage.completion_tokens > 0
    expected = {
        "!say": "stop",
        "!call": "tool_calls" if "tools" in settings else "stop",
        "babble": "tool_calls" if "tools" in settings else "length",
    }
    if settings.get("tool_choice") != "none":
        assert reason == expected[settings["text"]]


def test_reasoning_content_and_calls_are_parts_of_their_own(client):
    message = ask(client, "!say").choices[0].message
    assert (message.reasoning_content, message.content) == ("hmm", "Answer: fourty-two, or so.")
    assert ask(client, "!say", stop=", or").choices[0].message.content == "Answer: fourty-two"
    message = ask(client, "!call", tools=[TOOL]).choices[0].message
    assert message.content is None and len(message.tool_calls) == 2
    assert message.tool_calls[0].id != message.tool_calls[1].id
    assert json.loads(message.tool_calls[0].function.arguments) == {"text": "hi"}
    one = ask(client, "!call", tools=[TOOL], parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
    plain = ask(client, "!call").choices[0]
    assert plain.message.content.startswith("<tool_call>") and not plain.message.tool_calls
    kwargs = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    short = ask(client, "x", max_tokens=1, **kwargs).usage.prompt_tokens
    assert short > ask(client, "x", max_tokens=1).usage.prompt_tokens  # the empty reasoning


def test_choices_have_seeds_of_their_own_and_a_seed_says_the_same_again(client):
    many = ask(client, "babble", n=3, seed=7, max_tokens=12).choices
    texts = [choice.message.content for choice in many]
    for i in (0, 2):
        alone = ask(client, "babble", seed=7 + i, max_tokens=12).choices[0]
        assert alone.message.content == texts[i]
    assert len(set(texts)) == 3 and [choice.index for choice in many] == [0, 1, 2]
    greedy = {ask(client, "babble", temperature=0, max_tokens=9).choices[0].message.content}
    assert greedy == {ask(client, "babble", top_p=1e-9, max_tokens=9).choices[0].message.content}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_ids_are_those_of_the_engine(client, running, stream):
    settings = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8, "seed": 1}
    body = {"return_token_ids": True}
    prompt = chat.encode(running.engine.tokenizer, [{"role": "user", "content": "babble"}])
    if stream:
        chunks = list(ask(client, "babble", stream=True, extra_body=body, **settings))
        prompt_ids = chunks[0].prompt_token_ids
        parts = [choice for chunk in chunks for choice in chunk.choices]
        ids = [i for part in parts for i in part.token_ids]
        logprobs = [one for part in parts for one in part.logprobs.content]
    else:
        whole = ask(client, "babble", extra_body=body, **settings)
        prompt_ids, ids = whole.prompt_token_ids, whole.choices[0].token_ids
        logprobs = whole.choices[0].logprobs.content
    assert prompt_ids == prompt and len(ids) == len(logprobs) == 8
    scores = running.engine.score([prompt + ids])[0][-8:]
    assert [one.logprob for one in logprobs] == pytest.approx(scores, abs=1e-4)
    for one in logprobs:
        values = [top.logprob for top in one.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) >= [one.logprob] * 0
        assert max(values) >= one.logprob - 1e-9


def test_completions_go_on_from_text_and_from_ids(client, running):
    prompt = running.engine.tokenizer.encode("law case")
    create = client.completions.create
    settings = {"model": "nano", "max_tokens": 6, "seed": 3, "logprobs": 2}
    text, ids = (create(prompt=p, **settings).choices[0] for p in ("law case", prompt))
    assert text.text == ids.text and len(ids.logprobs.tokens) == 6
    assert "".join(ids.logprobs.tokens) == ids.text
    own = create(prompt=prompt, **settings | {"logprobs": 0}).choices[0].logprobs
    assert own.token_logprobs == ids.logprobs.token_logprobs and not any(own.top_logprobs)
    assert create(prompt=prompt, model="nano", max_tokens=2).choices[0].logprobs is None
    both = create(prompt=[prompt, prompt[:1]], **settings, n=2)
    assert both.choices[0].text == ids.text and len(both.choices) == 4
    assert both.usage.prompt_tokens == len(prompt) + 1
    stream = create(prompt=prompt, stream=True, **settings)
    assert "".join(chunk.choices[0].text for chunk in stream) == ids.text
    assert create(model="nano", prompt="a", stop=["zzz"]).usage.completion_tokens <= 16


@pytest.mark.parametrize(
    "held, names",
    [
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, {"echo", "other"}),
        ({"tools": [TOOL, OTHER], "tool_choice": NAMED}, {"other"}),
        ({"response_format": {"type": "json_schema", "json_schema": SHOUT}}, set()),
    ],
)
def test_calls_and_answers_keep_their_schema(client, held, names):
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    for seed in range(4):
        (choice,) = ask(client, "babble", extra_body=quiet, seed=seed, **held).choices
        calls = choice.message.tool_calls or []
        assert {call.function.name for call in calls} <= names and len(calls) == bool(names)
        texts = [call.function.arguments for call in calls] or [choice.message.content]
        jsonschema.validate(json.loads(texts[0]), PARAMETERS)
        assert choice.finish_reason == ("tool_calls" if names else "stop")
        assert (choice.message.content is None) == bool(names)


@pytest.mark.slow
def test_litellm_calls_tools(running):
    messages = [{"role": "user", "content": "!call"}]
    settings = {"api_base": f"{running.base}/v1", "api_key": "none", "tools": [TOOL]}
    first = litellm.completion("openai/nano", messages, **settings).choices[0]
    assert first.finish_reason == "tool_calls"
    messages.append(first.message.model_dump(exclude_none=True))
    for call in first.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "heard"})
    last = litellm.completion("openai/nano", messages, **settings).choices[0]
    assert last.message.content == "Answer: fourty-two, or so."


def test_the_wire_format_is_openais(running):
    body = {"model": "nano", "messages": [{"role": "user", "content": "!say"}], "stream": True}
    command = ["curl", "-sN", "-i", f"{running.base}/v1/chat/completions", "-m", "10"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    head, _, events = text.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200") and "content-type: text/event-stream" in head
    *chunks, done, end = events.split("\n\n")
    assert done == "data: [DONE]" and not end
    chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
