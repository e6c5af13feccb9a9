"""The Responses API by clients that others wrote: openai and OpenAI's Agents SDK."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import os
import random
from typing import Literal

import agents
import fuzz_bodies
import httpx
import jsonschema
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from nanorchestra.serving.protocol import Choice, reasoning_tokens

PATH = "/v1/responses"
ANSWER = "Answer: fourty-two, or so."
PARAMETERS = {
    "type": "object",
    "properties": {"text": {"enum": ["hi", "ho"]}},
    "required": ["text"],
    "additionalProperties": False,
}
FUNCTION = {"name": "echo", "description": "says it again", "parameters": PARAMETERS}
TOOL = {"type": "function", **FUNCTION, "strict": True}
CHAT_TOOL = {"type": "function", "function": FUNCTION | {"strict": True}}
IDS = {"extra_body": {"return_token_ids": True, "seed": 7}}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(running):
    return openai.OpenAI(base_url=f"{running.base}/v1", api_key="none", max_retries=0, timeout=30)


def ask(client, asked, **settings):
    return client.responses.create(model="nano", input=asked, **settings)


def post(running, **body):
    return httpx.post(running.base + PATH, json={"model": "nano"} | body, timeout=30)


def events(running, **body):
    """The events of a stream, each of which has OpenAI's form."""
    parts = post(running, stream=True, **body).text.split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_names(value):
    """A Response without what is drawn anew each time."""
    if isinstance(value, dict):
        drawn = {"id", "call_id", "item_id", "created_at", "completed_at"}
        return {key: without_names(each) for key, each in value.items() if key not in drawn}
    return [without_names(each) for each in value] if isinstance(value, list) else value


def test_the_official_client_gets_an_answer(client, running):
    asked = {"instructions": "be short", "metadata": {"a": "b"}, "user": "me", "temperature": 0.5}
    answer = ask(client, "!say", max_output_tokens=100, top_p=0.9, store=None, **asked)
    Response.model_validate(answer.model_dump())
    assert answer.output_text == ANSWER and answer.status == "completed" and not answer.error
    assert answer.store is False and answer.metadata == {"a": "b"} and answer.top_p == 0.9
    assert answer.instructions == "be short" and answer.max_output_tokens == 100
    reasoning, message = answer.output
    assert [part.text for part in reasoning.content] == ["hmm"] and message.role == "assistant"
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "!say"}]
    chat = client.chat.completions.create(model="nano", messages=messages).usage
    used = answer.usage
    assert used.input_tokens == chat.prompt_tokens and used.output_tokens == chat.completion_tokens
    assert used.total_tokens == chat.total_tokens and used.input_tokens_details.cached_tokens >= 0
    ids = running.engine.tokenizer.backend.encode("<think>\nhmm\n</think>").ids
    assert used.output_tokens_details.reasoning_tokens == len(ids)
    assert chat.completion_tokens_details.reasoning_tokens == len(ids)
    assert reasoning_tokens(running.engine.tokenizer, ids[-1:]) == 0
    opaque = ask(client, "!say", include=["reasoning.encrypted_content"]).output[0]
    assert base64.b64decode(opaque.encrypted_content) == b"hmm"
    quiet = ask(client, "babble", reasoning={"effort": "none"}, max_output_tokens=5)
    assert quiet.usage.input_tokens > ask(client, "babble", max_output_tokens=5).usage.input_tokens


CALL = {"type": "function_call", "call_id": "c1", "name": "echo", "arguments": '{"text": "hi"}'}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "echo"}}
CHAT_CALL["function"]["arguments"] = CALL["arguments"]
HMM = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]}
USER, ASSISTANT = {"role": "user", "content": "babble"}, {"role": "assistant", "content": "ho"}
PARTS = [{"type": "output_text", "text": "h"}, {"type": "output_text", "text": "o"}]
CONVERSATIONS = {
    "a text": ("babble", [USER]),
    "parts and roles": (
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "be short"}]},
            USER,
            {"type": "message", "id": "msg_1", "role": "assistant", "content": PARTS},
            ASSISTANT,
            USER,
        ],
        [{"role": "system", "content": "be short"}, USER, ASSISTANT, ASSISTANT, USER],
    ),
    "two calls at once and one after them": (
        [
            *(USER, HMM, ASSISTANT, CALL, CALL | {"call_id": "c2"}),
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": PARTS},
            HMM | {"content": None},
            CALL | {"call_id": "c3", "id": "fc_3", "status": "completed"},
            {"type": "function_call_output", "call_id": "c3", "output": ""},
        ],
        [
            USER,
            ASSISTANT
            | {"reasoning_content": "hmm", "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "tool", "tool_call_id": "c2", "content": "ho"},
            {"role": "assistant", "tool_calls": [CHAT_CALL | {"id": "c3"}]},
            {"role": "tool", "tool_call_id": "c3", "content": ""},
        ],
    ),
    "reasoning that its client does not read": (
        [USER, {"type": "reasoning", "summary": [], "encrypted_content": "aG1t"}, CALL],
        [USER, {"role": "assistant", "reasoning_content": "hmm", "tool_calls": [CHAT_CALL]}],
    ),
    "reasoning that is referred to": (
        [USER, {"type": "item_reference", "id": "rs_1"}, CALL],
        [USER, {"role": "assistant", "tool_calls": [CHAT_CALL]}],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_chat_and_a_response_are_the_same_ids_and_text(client, running, name):
    items, messages = CONVERSATIONS[name]
    common = {"model": "nano", **IDS}
    chat = client.chat.completions.create(messages=messages, tools=[CHAT_TOOL], **common)
    answer = client.responses.create(input=items, tools=[TOOL], **common)
    assert answer.prompt_token_ids == chat.prompt_token_ids
    (choice,) = chat.choices
    assert answer.token_ids == choice.token_ids
    assert answer.output_text == (choice.message.content or "")
    last = events(running, input=items, tools=[TOOL], **IDS["extra_body"])[-1]
    assert last["response"]["token_ids"] == choice.token_ids
    usage = {"input_tokens_details": None}  # what is cached changes
    streamed, whole = (without_names(r) for r in (last["response"], answer.to_dict()))
    streamed["usage"] |= usage
    assert streamed == whole | {"usage": whole["usage"] | usage}


BEGIN, END = "response.created response.in_progress", "response.completed"
TEXT = "output_item.added content_part.added {0}.delta {0}.done content_part.done output_item.done"
CALLED = "output_item.added {0}.delta {0}.done output_item.done"


def kinds(events):
    """The types of events, deltas in a row as one."""
    return [kind for kind, _ in itertools.groupby(event["type"] for event in events)]


def expected(*items):
    inside = " ".join(form.format(name) for form, name in items).split()
    return [*BEGIN.split(), *(f"response.{kind}" for kind in inside), END]


def test_the_events_of_a_stream_tell_the_response(running):
    said = events(running, input="!say")
    items = (TEXT, "reasoning_text"), (TEXT, "output_text")
    assert kinds(said) == expected(*items)
    called = events(running, input="!call", tools=[TOOL])
    items = (TEXT, "reasoning_text"), *2 * [(CALLED, "function_call_arguments")]
    assert kinds(called) == expected(*items)
    for stream in (said, called):
        response = stream[-1]["response"]
        done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
        assert done == response["output"]
        for index, item in enumerate(done):
            mine = [e for e in stream if e.get("output_index") == index and "delta" in e]
            assert {event["item_id"] for event in mine} == {item["id"]}
            text = item.get("arguments") or item["content"][0]["text"]
            assert "".join(event["delta"] for event in mine) == text
        assert stream[0]["response"]["output"] == [] and not stream[0]["response"]["usage"]


def test_a_stream_of_the_official_client_is_put_together(client):
    with client.responses.stream(model="nano", input="!call", tools=[TOOL]) as stream:
        seen = {event.type for event in stream}
        answer = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.reasoning_text.delta"} <= seen
    assert [item.type for item in answer.output] == ["reasoning", *["function_call"] * 2]
    assert answer.output[1].parsed_arguments == {"text": "hi"}
    with client.responses.stream(model="nano", input="!say") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == ANSWER


def test_calls_are_answered_in_the_next_request(client):
    items = [{"role": "user", "content": "!ask"}]
    first = ask(client, items, tools=[TOOL])
    items += [item.model_dump() for item in first.output]
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("echo", {"text": "hi"})
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "hi"})
    assert ask(client, items, tools=[TOOL]).output_text == ANSWER
    one = ask(client, "!call", tools=[TOOL], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["reasoning", "function_call"]
    named = {"type": "function", "name": "echo"}
    quiet = {"reasoning": {"effort": "none"}, "extra_body": {"seed": 1}}
    for choice in ("required", named):
        (call,) = ask(client, "babble", tools=[TOOL], tool_choice=choice, **quiet).output
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    plain = ask(client, "!call", tools=[TOOL], tool_choice="none")
    assert plain.output_text.startswith("<tool_call>")


class Shout(pydantic.BaseModel):
    text: Literal["hi", "ho"]
    loud: bool


def test_an_answer_is_held_to_a_schema(client):
    quiet = {"reasoning": {"effort": "none"}, "extra_body": {"seed": 2}}
    answer = client.responses.parse(model="nano", input="babble", text_format=Shout, **quiet)
    assert isinstance(answer.output_parsed, Shout) and answer.text.format.type == "json_schema"
    form = {"format": {"type": "json_object"}, "verbosity": "low"}
    answer = ask(client, "babble", text=form, max_output_tokens=200, **quiet)
    assert answer.output_text.lstrip().startswith("{")


def test_an_answer_that_is_cut_off_is_incomplete(client, running):
    answer = ask(client, "babble", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete" and answer.completed_at is None
    assert answer.usage.output_tokens == 5
    last = events(running, input="babble", max_output_tokens=5)[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"


def form(schema):
    return {"format": {"type": "json_schema", "name": "x", "schema": schema}}


OUTPUT = {"type": "function_call_output", "call_id": "c9", "output": "hi"}
REFUSED = {
    "store": ({"store": True}, "store", "nothing is stored here: it must be false"),
    "an earlier response": (
        {"previous_response_id": "resp_1"},
        "previous_response_id",
        "send the earlier items in input",
    ),
    "a conversation": ({"conversation": {"id": "conv_1"}}, "conversation", "nothing is stored"),
    "background": ({"background": True}, "background", "an answer comes with its request"),
    "a stored prompt": ({"prompt": {"id": "p"}}, "prompt", "no prompts are stored"),
    "log-probabilities": ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions gives"),
    "included ones": (
        {"include": ["message.output_text.logprobs"]},
        "include",
        "/v1/chat/completions gives",
    ),
    "truncation": ({"truncation": "auto"}, "truncation", "'auto' is not one of ['disabled']"),
    "a tool of OpenAI's": (
        {"tools": [TOOL, {"type": "web_search"}]},
        "tools[1].type",
        "'web_search' is not served: only functions are",
    ),
    "a chat's tool": ({"tools": [CHAT_TOOL]}, "tools[0]", "'name' is a required property"),
    "a picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "'input_image' is not one of",
    ),
    "an item": ({"input": [{"type": "web_search_call"}]}, "input[0].type", "is not one of"),
    "a message without a role": ({"input": [{"content": "a"}]}, "input[0]", "'role' is a required"),
    "a tool's role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'tool'"),
    "no input": ({"input": []}, "input", "[] should be non-empty"),
    "no messages": (
        {"input": [{"type": "item_reference", "id": "rs_1"}]},
        "input",
        "it has no message",
    ),
    "a stored message": (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input[0]",
        "send the item itself",
    ),
    "reasoning of another server": (
        {"input": [{"type": "reasoning", "encrypted_content": "gAAAAA=="}]},
        "input[0].encrypted_content",
        "is not what this server gave",
    ),
    "an output without its call": ({"input": [OUTPUT]}, "input[0].call_id", "no function_call"),
    "no such function": ({"tool_choice": "required"}, "tool_choice", "tools has no such function"),
    "a choice": ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "'function' was"),
    "a schema": ({"text": form({"type": "nonsense"})}, "schema", "nonsense"),
    "a form without a schema": (
        {"text": {"format": {"type": "json_schema"}}},
        "text.format",
        "'name' is a required property",
    ),
    "a temperature": ({"temperature": 9}, "temperature", "9 is greater than the maximum"),
    "tools of the loop's client": (
        {"model": "nano+tools", "tools": [TOOL], "tool_choice": "required"},
        None,
        "+tools: tool_choice: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_in_openais_form(client, name):
    body, field, reason = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "nano", "input": "!say"} | body)
    error = refused.value
    assert reason in error.message and error.type == "invalid_request_error"
    assert error.param == field and len(error.message) < 600


def test_other_mistakes_have_their_status(client, running):
    with pytest.raises(openai.NotFoundError, match="model: it must be"):
        client.responses.create(model="gpt", input="a")
    with pytest.raises(openai.InternalServerError, match="not finite"):
        ask(client, "!poison")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    assert post(running, input="!poison", stream=True).status_code == 500


def test_an_error_in_a_stream_is_its_last_event(running, client, monkeypatch):
    feed = Choice.feed

    def broken(self, request, ended):
        if self.count > 3:
            raise RuntimeError
        return feed(self, request, ended)

    monkeypatch.setattr(Choice, "feed", broken)
    last = events(running, input="babble", ignore_eos=True)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "internal error"}
    assert last["response"]["output"] == []
    with pytest.raises(openai.InternalServerError, match="internal error"):
        ask(client, "babble", extra_body={"ignore_eos": True})


@pytest.mark.parametrize("model", ["nano", "nano+tools"])
def test_a_client_that_leaves_a_stream_ends_it(running, model):
    body = {"model": model, "input": "babble", "stream": True, "ignore_eos": True}
    with httpx.stream("POST", running.base + PATH, json=body, timeout=30) as answer:
        assert next(answer.iter_lines()) == "event: response.created"
    running.assert_idle()


def test_the_loop_of_the_server_is_a_response(client, running):
    before = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]
    asked = {"input": [*before, {"role": "user", "content": "!ask"}]}
    asked |= {"metadata": {"preference": "Be quick.", "usd": "0.5"}}
    answer = client.responses.create(model="nano+tools", **asked)
    assert answer.output_text == ANSWER and answer.status == "completed"
    reasoning, _ = answer.output
    text = '{"name": "echo", "arguments": {"text": "hi"}}'
    assert reasoning.content[0].text == f"hmm\ncall {text}\nresult hi\nhmm"
    assert answer.nanorchestra["calls"] == {"echo": 1} and answer.nanorchestra["cost_usd"] > 0.25
    assert running.preferences[-1] == ("Be quick.", {"usd": 0.5})
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    stream = events(running, **asked | {"model": "nano+tools"})
    steps = [event["nanorchestra"] for event in stream if "nanorchestra" in event]
    assert [list(step) for step in steps] == [["call"], ["result"]]
    streamed = stream[-1]["response"]
    assert streamed["nanorchestra"]["turns"] == answer.nanorchestra["turns"]
    assert without_names(streamed["output"]) == without_names(answer.to_dict()["output"])


@agents.function_tool
def echo(text: Literal["hi", "ho"]) -> str:
    """Says it again."""
    return text


def test_the_agents_sdk_runs_with_its_default_model(running):
    """By the Responses API, which is its default, with a tool, a stream and an output type."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{running.base}/v1", api_key="none", max_retries=0)
    provider = agents.OpenAIProvider(openai_client=client)
    config = agents.RunConfig(model_provider=provider)
    agent = agents.Agent(name="a", instructions="be short", model="nano", tools=[echo])
    assert isinstance(provider.get_model("nano"), agents.OpenAIResponsesModel)

    async def main():
        done = await agents.Runner.run(agent, "!ask", run_config=config)
        streamed = agents.Runner.run_streamed(agent, "!ask", run_config=config)
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        settings = agents.ModelSettings(
            reasoning={"effort": "none"}, max_tokens=100, extra_body={"seed": 2}
        )
        shouting = agents.Agent(name="b", model="nano", output_type=Shout, model_settings=settings)
        shout = await agents.Runner.run(shouting, "babble", run_config=config)
        again = done.to_input_list() + [{"role": "user", "content": "!say"}]
        last = await agents.Runner.run(agent, again, run_config=config)
        await client.close()
        return done, streamed, "".join(deltas), shout, last

    done, streamed, text, shout, last = asyncio.run(main())
    kinds = ["reasoning_item", "tool_call_item", "tool_call_output_item", "reasoning_item"]
    for run in (done, streamed):
        assert run.final_output == ANSWER and len(run.raw_responses) == 2
        assert [item.type for item in run.new_items] == [*kinds, "message_output_item"]
    assert text == last.final_output == ANSWER and isinstance(shout.final_output, Shout)
    assert done.context_wrapper.usage.output_tokens > 0


FIELDS = {
    "model": "nano",
    "input": CONVERSATIONS["two calls at once and one after them"][0],
    "instructions": "be short",
    "max_output_tokens": 3,
    "temperature": 0.5,
    "seed": 1,
    "stream": False,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "echo"},
    "text": form(PARAMETERS),
    "reasoning": {"effort": "low", "summary": None},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"preference": "be cheap", "usd": "0.1"},
    "store": False,
    "return_token_ids": True,
}


def test_changed_bodies_are_answered_or_refused(running):
    """No body gives an error of the server."""
    rng = random.Random(0)
    for i in range(int(os.environ.get("FUZZ_BODIES", 60))):
        needed = "model", "input", "max_output_tokens"
        body = {k: v for k, v in FIELDS.items() if k in needed or rng.random() < 0.4}
        body = copy.deepcopy(body | {"model": "nano+tools" if i % 5 == 0 else "nano"})
        for _ in range(rng.choice([1, 1, 2, 3])):
            fuzz_bodies._change(body, rng)
        answer = httpx.post(running.base + PATH, json=body, timeout=30)
        assert answer.status_code < 500 and "server_error" not in answer.text, (body, answer.text)
    running.assert_idle()
