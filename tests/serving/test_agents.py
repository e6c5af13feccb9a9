"""Agents that are not ours play attempts: same ids as our loop, and faults that harm no other."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.error
import urllib.request
from pathlib import Path
from unittest.mock import ANY

import agents
import openai
import pytest
from openai_server import openai_server, said

import train
from nanorchestra.config import RolloutSection
from nanorchestra.errors import UserError
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model.checkpoint import NANO_BASE
from nanorchestra.serving.agents import AgentFunction, load_agent, played_by
from nanorchestra.training.grpo import as_group, gave_answer
from nanorchestra.training.trajectories import from_row, to_row
from worlds.agent_tasks import AgentTasks
from worlds.desk import Desk
from worlds.metrics import rewritten_share

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent.py"
COUNT = 12
CLIENT = openai.OpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def ours():
    return load_rollout(
        NANO_BASE,
        RolloutSection(turns=10, turn_tokens=512, context_tokens=2048),
        {"temperature": 1.0},
        COUNT,
    )


@pytest.fixture
def world(sandbox):
    return Desk(0, sandbox)


def environments(world, count=COUNT):
    return [world.environment(world.task("train", i // 4), i) for i in range(count)]


def agent(ours, function, timeout_s=60.0):
    """Our rollout, played by a function of an attempt."""
    rollout = played_by(f"{EXAMPLE}:play", ours, timeout_s)
    rollout.agent = AgentFunction("test", function)
    return rollout


def ask(attempt, messages, **settings):
    client = CLIENT.with_options(base_url=attempt.base_url, api_key=attempt.api_key)
    settings = {"tools": attempt.task["tools"] or openai.NOT_GIVEN, "model": "any"} | settings
    return client.chat.completions.create(messages=messages, **settings).choices[0].message


def one(ours, world, function, timeout_s=60.0):
    """The trajectory of one attempt that a function plays."""
    (t,) = agent(ours, function, timeout_s).run(environments(world, 1), [7])
    assert from_row(json.loads(json.dumps(to_row(world.task("train", 0), t))))[1] == t
    return t


def test_a_loop_over_openais_client_plays_what_our_loop_plays_bit_for_bit(ours, world):
    seeds = [1000 + i for i in range(COUNT)]
    expected = ours.run(environments(world), seeds)
    played = played_by(f"{EXAMPLE}:play", ours, 60.0).run(environments(world), seeds)
    assert sum(len(t.turns) for t in expected) > COUNT
    for mine, theirs in zip(expected, played, strict=True):
        for name in ("ids", "sampled", "logprobs", "weight_versions", "status", "answer"):
            assert getattr(theirs, name) == getattr(mine, name)
        for name in ("cost_usd", "latency_s", "outcome", "calls", "well_formed"):
            assert getattr(theirs, name) == getattr(mine, name)
        assert len(theirs.contexts()) == 1
        assert [turn.calls for turn in theirs.turns] != [[] for _ in theirs.turns]
    assert rewritten_share(played) == 0


@pytest.mark.slow
def test_grpo_with_an_agent_is_the_run_of_our_loop(tmp_path, without_report):
    options = ["--grpo.steps", "2", "--grpo.prompts", "4", "--grpo.group_size", "4"]
    options += ["--rollout.lockstep", "true", "--evaluation.tasks", "4"]
    options += ["--warm_start.steps", "0", "--run.root", str(tmp_path), "--run.threads", "1"]
    rows = {}
    for name, more in {"ours": [], "theirs": ["--task.agent", f"{EXAMPLE}:play"]}.items():
        assert train.main([*options, "--run.name", name, *more]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    names = ("reward", "loss", "grad_norm", "cost_usd", "latency_s", "tokens", "kl")
    for mine, theirs in zip(rows["ours"], rows["theirs"], strict=True):
        assert {n: mine.get(n) for n in names} == {n: theirs.get(n) for n in names}
    assert any(row.get("loss") for row in rows["ours"])
    assert all(row["rewritten"] == 0 for row in rows["theirs"] if row["phase"] == "grpo")


def test_what_an_agent_rewrites_is_another_sample_of_the_same_trajectory(ours, world):
    def play(attempt):
        first = ask(attempt, attempt.task["messages"]).model_dump(exclude_none=True)
        again = [*attempt.task["messages"], first, {"role": "user", "content": "sure?"}]
        second = ask(attempt, again).model_dump(exclude_none=True)
        longer = [*again, second, {"role": "user", "content": "more"}]
        longer[0] = longer[0] | {"content": "another question"}  # what was said is now another
        ask(attempt, longer)
        ask(attempt, again)
        ask(attempt, again, tools=[])
        ask(attempt, [{"role": "user", "content": "hello"}])
        ask(attempt, [{"role": "user", "content": "hello"}])
        return 0.25

    t = one(ours, world, play)
    assert (t.status, t.outcome, len(t.turns)) == ("answered", 0.25, 7)
    places = t.contexts()
    assert len(places) == 6  # the first goes on once, then five times other prompts
    assert rewritten_share([t]) == 5 / 6
    group = as_group([t])
    assert [len(sample.ids) for sample in group.samples] == [end - b for b, _, end in places]
    *_, one_more, last = t.turns  # of the same prompt, with other noise
    assert t.ids[one_more.start : one_more.end] != t.ids[last.start : last.end]


def test_a_cut_turn_goes_on_and_a_stop_begins_anew(ours, world):
    digits = list("0123456789")

    def play(attempt):
        messages = list(attempt.task["messages"])
        said = ask(attempt, messages, max_tokens=3)
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
        ask(attempt, messages)
        messages = list(attempt.task["messages"])
        while (said := ask(attempt, messages, stop=digits)).tool_calls:
            messages.append(said.model_dump(exclude_none=True))
            calls = [{"name": c.function.name, "arguments": {}} for c in said.tool_calls]
            for call, result in zip(said.tool_calls, attempt.call(calls), strict=True):
                content = result["content"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
        ask(attempt, messages)
        return 1

    t = one(ours, world, play)
    cut, second, *_, stopped, last = t.turns
    end = ours.tokenizer.token_id("<|im_end|>")
    assert cut.end - cut.start == 3 and t.ids[cut.end] == end and not t.sampled[cut.end]
    assert second.context == 0 and stopped.context > 0
    assert last.context == stopped.end  # the agent has not seen all that was sampled


def test_a_stream_has_the_same_ids_and_usage(ours, world):
    seen = []

    def play(attempt):
        client = CLIENT.with_options(base_url=attempt.base_url, api_key=attempt.api_key)
        settings = {"messages": attempt.task["messages"], "model": "m"}
        settings["stream_options"] = {"include_usage": True}
        seen.extend(client.chat.completions.create(stream=True, **settings))
        return "x"

    t = one(ours, world, play)
    assert seen[-1].usage.completion_tokens == sum(t.sampled)
    assert seen[-1].usage.prompt_tokens == t.prompt_length


def test_a_reward_without_a_word_is_an_attempt_to_learn_from(ours, world):
    def play(attempt):
        assert not ask(attempt, attempt.task["messages"]).content  # a call
        return 1.0

    t = one(ours, world, play)
    assert gave_answer(t) and t.outcome == 1 and t.answer == "reward 1.0"


def broken(attempt):
    ask(attempt, attempt.task["messages"])
    raise KeyError("a bug")


def silent(attempt):
    return "42"


def endless(attempt):
    ask(attempt, attempt.task["messages"])
    time.sleep(60)


def flooding(attempt):
    for _ in range(10_000):
        ask(attempt, attempt.task["messages"])


def wrong(attempt):
    ask(attempt, attempt.task["messages"])
    return 7.0


@pytest.mark.parametrize(
    "function, status, failure",
    [
        (broken, "infrastructure", "test: KeyError: 'a bug'"),
        (silent, "infrastructure", "the agent asked the policy nothing"),
        (wrong, "infrastructure", "reward"),
        (endless, "time_limit", ""),
        (flooding, "turn_limit", ""),
    ],
)
def test_an_agent_that_fails_ends_its_own_attempt_alone(ours, world, function, status, failure):
    def play(attempt):
        if "-0/" in attempt.task["id"] or attempt.task["id"].endswith("-0"):
            return function(attempt)
        return ask(attempt, attempt.task["messages"]).content

    rollout = agent(ours, play, timeout_s=4.0 if function is endless else 60.0)
    envs = [world.environment(world.task("train", index), 0) for index in range(3)]
    bad, *good = rollout.run(envs, [1, 2, 3])
    assert bad.status == status and failure in bad.failure and bad.outcome == 0
    assert len(bad.turns) <= 11
    assert [t.status for t in good] == ["answered"] * 2
    assert not rollout.attempts


def test_requests_that_are_not_served_have_a_status_and_a_reason(ours, world):
    problems = {}

    def post(url, body, key=""):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            urllib.request.urlopen(urllib.request.Request(url, data, headers))
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]
        return 200, ""

    def play(attempt):
        chat, key = f"{attempt.base_url}/chat/completions", attempt.api_key
        body = {"messages": [{"role": "user", "content": "hello"}], "model": "any"}
        problems["key"] = post(chat, body, "another")
        problems["calls first"] = post(f"{attempt.url}/calls", {"calls": [{"name": "x"}]})
        problems["n"] = post(chat, body | {"n": 2}, key)
        problems["choice"] = post(chat, body | {"tool_choice": "required"}, key)
        problems["json"] = post(chat, b"{", key)
        problems["no messages"] = post(chat, {}, key)
        assert post(chat, body, key) == (200, "")
        problems["calls"] = post(f"{attempt.url}/calls", {"calls": []})
        problems["other"] = post(
            f"{attempt.base_url}/attempts/other/calls", {"calls": [{"name": "x"}]}
        )
        return {"reward": 0.5}

    t = one(ours, world, play)
    assert (t.status, t.outcome) == ("answered", 0.5), t.failure
    statuses = {name: status for name, (status, _) in problems.items()}
    assert statuses.pop("key") == statuses.pop("other") == 401
    assert set(statuses.values()) == {400}, problems
    assert all(message for _, message in problems.values())
    assert "a run samples one continuation, without a grammar" in problems["choice"][1]


def test_calls_are_billed_and_run_side_by_side(ours, world):
    def play(attempt):
        ask(attempt, attempt.task["messages"])
        row, code = {"table": "order", "id": 100}, {"code": "6 * 7"}
        calls = [{"name": "records", "arguments": row}, {"name": "python", "arguments": code}]
        results = attempt.call(calls)
        results += attempt.call([{"name": "none"}])
        return json.dumps(results)

    t = one(ours, world, play)
    results = json.loads(t.answer)
    assert len(results) == 3 and results[2]["error"]
    made = t.turns[0].results
    assert [r.content for r in made] == [result["content"] for result in results]
    assert sum(t.calls.values()) == sum(not result.refused for result in made) > 0
    calls_usd = sum(result["cost_usd"] for result in results)
    own_usd = ours.price.cost(t.sampled.count(False), t.sampled.count(True))
    assert t.cost_usd == pytest.approx(calls_usd + own_usd) and calls_usd > 0


async def with_the_agents_sdk(attempt):
    """OpenAI's Agents SDK, which knows tools by its own classes."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.api_key)
    create = client.chat.completions.create

    async def without_its_own_words(**body):
        for tool in body["tools"]:
            tool["function"].pop("strict", None)  # which would be another prompt
        return await create(**body)

    client.chat.completions.create = without_its_own_words

    def offered(tool):
        function = tool["function"]

        async def invoke(context, arguments):
            calls = [{"name": function["name"], "arguments": json.loads(arguments or "{}")}]
            (result,) = await asyncio.to_thread(attempt.call, calls)
            return result["content"]

        return agents.FunctionTool(
            name=function["name"],
            description=function["description"],
            params_json_schema=function["parameters"],
            on_invoke_tool=invoke,
            strict_json_schema=False,
        )

    solver = agents.Agent(
        name="solver",
        model=agents.OpenAIChatCompletionsModel("policy", openai_client=client),
        tools=[offered(tool) for tool in attempt.task["tools"]],
    )
    result = await agents.Runner.run(solver, attempt.task["messages"][0]["content"], max_turns=10)
    return str(result.final_output)


def test_openais_agents_sdk_plays_what_our_loop_plays(ours, world):
    seeds = [*range(5, 13)]
    expected = ours.run(environments(world, 8), seeds)
    played = agent(ours, with_the_agents_sdk).run(environments(world, 8), seeds)
    for mine, theirs in zip(expected, played, strict=True):
        assert (theirs.status, theirs.answer) == (mine.status, mine.answer) == ("answered", ANY)
        assert theirs.ids == mine.ids and len(theirs.contexts()) == 1
        assert theirs.calls == mine.calls and theirs.cost_usd == mine.cost_usd


def test_an_agent_with_tasks_of_its_own_reports_its_reward(ours):
    def play(attempt):
        ask(attempt, attempt.task["messages"])
        return 0.75 if attempt.task["seed"] % 2 else "an answer"

    world = AgentTasks("agent:x", 0)
    tasks = [world.task("train", index) for index in range(4)]
    environments = [world.environment(task, 0) for task in tasks]
    for task, t in zip(tasks, agent(ours, play).run(environments, [1, 2, 3, 4]), strict=True):
        if task.data["seed"] % 2:
            assert (t.status, t.outcome) == ("answered", 0.75)
        else:
            assert (t.status, t.failure) == (
                "infrastructure",
                "Error: the agent reported no reward",
            )
    assert {task.data["seed"] % 2 for task in tasks} == {0, 1}
    assert {task.id for task in tasks}.isdisjoint(world.task("held_out", i).id for i in range(4))
    seeds = {random.Random(f"0/train/{index}").getrandbits(32) for index in range(4)}
    assert {task.data["seed"] for task in tasks} == seeds


@pytest.mark.parametrize(
    "text, problem",
    [
        ("none.py:play", "none.py: no such file"),
        (f"{EXAMPLE}:other", "it has no function 'other'"),
        ("python agent.py", "is 'python agent.py'; it must be FILE.py:FUNCTION"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_one_line(text, problem):
    with pytest.raises(UserError, match=problem):
        load_agent(text)


def test_tau2_benchs_own_agent_plays_its_mock_domain(ours):
    """Its LLMAgent, by litellm; a user who ends the conversation after a reply."""
    pytest.importorskip("tau2")
    with openai_server() as users, pytest.MonkeyPatch.context() as environment:
        users.answer = lambda body: (
            said("Add a task." if len(body["messages"]) < 6 else "###STOP###") | {"model": "user"}
        )
        arguments = {"api_base": users.url, "api_key": "none"}
        environment.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        environment.setenv("TAU2_USER", "openai/user")
        environment.setenv("TAU2_USER_ARGS", json.dumps(arguments))
        world = AgentTasks("agent:x", 0)
        tasks = [world.task("train", index) for index in range(4)]
        file = EXAMPLE.with_name("tau2_agent.py")
        rollout = played_by(f"{file}:play", ours, 120.0)
        played = rollout.run([world.environment(task, 0) for task in tasks], [1, 2, 3, 4])
    assert [t.status for t in played] == ["answered"] * 4, [t.failure for t in played]
    assert all(0 <= t.outcome <= 1 and len(t.contexts()) == 1 for t in played)
    assert max(len(t.turns) for t in played) > 1
