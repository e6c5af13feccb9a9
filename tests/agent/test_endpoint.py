"""A model behind an endpoint as the policy: a scripted server solves the miniature's tasks, and a warm start learns from what was recorded; or it misbehaves."""

from __future__ import annotations

import json
import threading
import time

import pytest
from conftest import Stop, steps_of
from openai_server import Server, said
from scripted import ANSWER, EchoTool
from test_agent import run as run_local

import nanorchestra.agent.policy as endpoint
import train as program
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Limits
from nanorchestra.config import RolloutSection
from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.records import Preference, Task, ToolCall, ToolResult
from nanorchestra.tools import experts
from nanorchestra.training.trajectories import contexts, load_kept
from worlds import evaluation
from worlds.miniature.teacher import Habits, teach
from worlds.miniature.world import environment

KEY = "sk-secret/key"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(experts.time, "sleep", lambda seconds: None)  # between the tries
    served = Server()
    yield served
    served.http.shutdown()
    served.http.server_close()


def turn_of(body):
    return sum(message["role"] == "assistant" for message in body["messages"])


def script(*replies):
    return lambda body: replies[turn_of(body)]


def run(server, tokenizer, *, limits=Limits(), attempts=1, env=ToolEnvironment, **section):
    """Attempts at a question with an echo tool."""
    envs = [
        env(
            Task(f"t{i}", "question?", Preference("be cheap"), {}),
            [EchoTool()],
            lambda a: float(a == "42"),
        )
        for i in range(attempts)
    ]
    section = RolloutSection(
        endpoint=server.url,
        model="big",
        only=1,
        input_usd_per_million=3.0,
        output_usd_per_million=5.0,
        **section,
    )
    return endpoint.EndpointRollout(section, tokenizer, limits).run(envs, list(range(attempts)))


HI = ("echo", '{"text":"hi"}')
LIVE = [
    "--grpo.prompts",
    "4",
    "--rollout.turn_tokens",
    "300",
    "--rollout.context_tokens",
    "2048",
    "--rollout.turns",
    "8",
]


@pytest.fixture
def solved(server, make_training, sandbox, monkeypatch):
    """A run of two steps of rollouts by an expert that solves the miniature's tasks as the teacher does, and knows the answers."""
    monkeypatch.setattr(program, "score", evaluation.score)  # the fixture draws rewards
    made = make_training(
        "big",
        *LIVE,
        "--rollout.endpoint",
        server.url,
        "--rollout.model",
        "big",
        "--rollout.only",
        "2",
    )
    lessons = {}
    for task in made.practice.prompts(8, 0):
        env = environment(task, 0, sandbox)
        lessons[env.messages[-1]["content"]] = (
            task,
            teach(env, 0, Habits(sensible=1.0, obeys=1.0, quits=0.0)),
        )

    def solve(body):
        task, turns = lessons[
            next(message["content"] for message in body["messages"] if message["role"] == "user")
        ]
        lesson = turns[turn_of(body)]
        if lesson.call is None:
            return said(task.data["answer"], reasoning_content=lesson.thought)
        return said(
            None,
            [(lesson.call.name, json.dumps(lesson.call.arguments))],
            "tool_calls",
            reasoning_content=lesson.thought,
        )

    server.answer = solve
    assert made.rollouts(Stop())
    return made


def test_a_warm_start_learns_from_an_expert(
    solved, server, make_training, nano_tokenizer, tmp_path
):
    rows = list(solved.run.rows("trajectories"))
    assert len(rows) == 16 and all(
        (row["status"], row["outcome"], row["phase"], row["well_formed"])
        == ("answered", 1.0, "rollouts", True)
        for row in rows
    )
    assert solved.run.summary()["rollouts"]["accuracy"] == 1.0 and {
        len(row["turns"]) for row in rows
    } > {2}
    kept, reasons = load_kept(
        [solved.run.path], nano_tokenizer, outcome=1.0, reward=0.0, best=0, longest=2048
    )
    assert sum(map(len, kept)) + reasons["the same again"] == 16 and len(kept) == 8
    student = make_training(
        "small",
        *LIVE,
        "--warm_start.trajectories",
        str(solved.run.path),
        "--warm_start.steps",
        "8",
        "--warm_start.prompts",
        "4",
        "--warm_start.warmup_steps",
        "1",
    )
    student.phase = "warm_start"
    assert student.warm_start(Stop())
    losses = [row["loss"] for row in steps_of(student)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]


def test_what_is_recorded_is_the_conversation(solved, server, nano_tokenizer):
    """The ids of an attempt are those of the conversation that the endpoint had, as the template renders it; sampled is what it wrote."""
    tools_of = {json.dumps(body["messages"]): body["tools"] for body in server.bodies}
    rendered = set()
    for body in server.bodies:
        answer = server.answer(body)["choices"][0]["message"]
        if not answer["tool_calls"]:
            rendered.add(
                chat.render(
                    [*body["messages"], answer],
                    tools_of[json.dumps(body["messages"])],
                    add_generation_prompt=False,
                )
            )
    for row in solved.run.rows("trajectories"):
        assert nano_tokenizer.decode(row["ids"]) + "\n" in rendered
        wrote = [token for token, sampled in zip(row["ids"], row["sampled"]) if sampled]
        assert wrote == [
            token for turn in row["turns"] for token in row["ids"][turn["start"] : turn["end"]]
        ]
        assert (
            nano_tokenizer.decode(wrote).count("<|im_end|>")
            == nano_tokenizer.decode(wrote).count("<think>")
            == len(row["turns"])
        )
        assert all(
            (logprob is None) == sampled
            for logprob, sampled in zip(row["logprobs"], row["sampled"])
        )
    for body in server.bodies:
        asked = [
            call["id"] for message in body["messages"] for call in message.get("tool_calls", ())
        ]
        assert asked == [
            message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"
        ] and len(set(asked)) == len(asked)
        assert (
            body["model"] == "big"
            and body["temperature"] == 1.0
            and body["max_completion_tokens"] <= 300
            and 0 <= body["seed"] < 2**31
        )
    assert len({body["seed"] for body in server.bodies}) == 16


def test_grpo_does_not_learn_from_it(solved, make_training, capsys):
    with pytest.raises(
        UserError, match="log-probability None; GRPO needs .*warm_start.trajectories"
    ) as caught:
        make_training("again", *LIVE, "--rollout.replay", str(solved.run.path))
    assert "\n" not in str(caught.value)
    assert program.main(["--replay", str(solved.run.path)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert (
        "no log-probabilities for GRPO" in error[-1]
        and "--warm_start.trajectories" in error[-1]
        and not any("Traceback" in line for line in error)
    )


@pytest.mark.parametrize(
    "reply, text",
    [
        (
            said(None, [("echo", '{"text": "hi"')]),
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}\n</tool_call><|im_end|>',
        ),
        (
            said(None, [("echo", "hello")]),
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "echo", "arguments": hello}\n</tool_call><|im_end|>',
        ),
        (
            said(None, [("echo", "[1]")]),
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "echo", "arguments": [1]}\n</tool_call><|im_end|>',
        ),
        (
            said("", [("shout", "")]),
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "shout", "arguments": {}}\n</tool_call><|im_end|>',
        ),
        (
            said("", [("echo", {"text": "hi"})], reasoning="Hm."),
            '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call><|im_end|>',
        ),
        (
            said("<think>\nHm.\n</think>\n\nSo.", [HI]),
            '<think>\nHm.\n</think>\n\nSo.\n<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call><|im_end|>',
        ),
        (
            said("Hm.\n</think>\n\n", [HI, HI]),
            "<think>\nHm.\n</think>\n\n"
            + "\n".join(
                ['<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>'] * 2
            )
            + "<|im_end|>",
        ),
        (
            said('So.\n<tool_call>\n{"name": "echo"}\n</tool_call>'),
            '<think>\n\n</think>\n\nSo.\n<tool_call>\n{"name": "echo"}\n</tool_call><|im_end|>',
        ),
    ],
)
def test_a_turn_is_what_our_policy_would_have_said(server, nano_tokenizer, reply, text):
    """Also one with a bad call: the same error is observed, and the endpoint is sent nothing that is no JSON."""
    server.answer = script(reply, said("42", reasoning_content="t"))
    (theirs,), ((ours,), _) = run(server, nano_tokenizer), run_local(nano_tokenizer, [text, ANSWER])
    assert (
        nano_tokenizer.decode(theirs.ids) == nano_tokenizer.decode(ours.ids) and theirs.sampled[-1]
    )
    assert [turn.results for turn in theirs.turns] == [
        turn.results for turn in ours.turns
    ] and theirs.turns[0].results
    assert (
        (theirs.status, theirs.answer, theirs.well_formed, theirs.outcome)
        == (ours.status, ours.answer, ours.well_formed, ours.outcome)
        == ("answered", "42", ours.well_formed, 1.0)
    )
    history = server.bodies[-1]["messages"][-1 - len(theirs.turns[0].results) :]
    assert all(
        isinstance(json.loads(call["function"]["arguments"]), dict)
        for call in history[0]["tool_calls"]
    )
    assert [message["content"] for message in history[1:]] == [
        result.content for result in theirs.turns[0].results
    ]
    for field in ("reasoning", "reasoning_content"):
        assert history[0].get(field) == reply["choices"][0]["message"].get(field)
    assert ("</think>" in history[0]["content"]) == (
        "</think>" in reply["choices"][0]["message"]["content"]
        if reply["choices"][0]["message"]["content"]
        else False
    )


def test_limits_are_those_of_our_policy(server, nano_tokenizer):
    server.answer = lambda body: said(None, [HI])
    (trajectory,) = run(server, nano_tokenizer, limits=Limits(turns=3))
    assert trajectory.status == "turn_limit" and len(trajectory.turns) == 3 == len(server.bodies)
    prompt = trajectory.prompt_length
    (trajectory,) = run(server, nano_tokenizer, limits=Limits(context_tokens=prompt + 60))
    assert trajectory.status == "token_limit" and len(trajectory.turns) >= 1
    del server.bodies[:]
    (trajectory,) = run(server, nano_tokenizer, limits=Limits(context_tokens=prompt))
    assert trajectory.status == "token_limit" and not trajectory.turns and not server.bodies
    server.answer = lambda body: said("word " * 99)
    (trajectory,) = run(server, nano_tokenizer, limits=Limits(turn_tokens=20))
    assert (
        trajectory.status == "token_limit"
        and sum(trajectory.sampled) == 20
        and trajectory.turns[0].finish_reason == "length"
        and server.bodies[-1]["max_completion_tokens"] == 20
    )
    server.answer = lambda body: said("42", finish="length")
    (trajectory,) = run(server, nano_tokenizer)
    assert (
        trajectory.status == "token_limit"
        and nano_tokenizer.decode(trajectory.ids).endswith("</think>\n\n42")
        and trajectory.outcome == 0
    )
    server.answer = script(said(None, [HI] * 5), said("42"))
    (trajectory,) = run(server, nano_tokenizer)
    assert [result.error for result in trajectory.turns[0].results] == [False] * 4 + [
        True
    ] and trajectory.outcome == 1


def test_costs_are_what_the_server_counts(server, nano_tokenizer):
    server.answer = script(said(None, [HI], usage=(100, 10)), said("42", usage=(200, 20)))
    for trajectory in run(server, nano_tokenizer, attempts=3):
        assert trajectory.cost_usd == pytest.approx(
            0.25 + (300 * 3 + 30 * 5) / 1e6
        ) and trajectory.calls == {"echo": 1}
        assert trajectory.latency_s == pytest.approx(2.0 + 0.01 * sum(trajectory.sampled))


NONSENSE = {
    "no JSON": b"hello",
    "half": b'{"choices": [',
    "a list": [],
    "no choice": {"choices": []},
    "no message": {"choices": [{}]},
    "a text": {"choices": [{"message": "hi"}]},
    "a number": said(7),
    "calls in a text": said(tool_calls="echo"),
    "a call without a name": said(tool_calls=[{"function": {}}]),
    "a call of nothing": said(None, [(None, "{}")]),
    "reasons that are none": said("42", reasoning_content=["hm"]),
    "no count": said("42", usage=("many", 1)),
    "less than nothing": said("42", usage=(-1, 1)),
    "no end": json.dumps(said("42")).replace(": 10,", ": 1e999,").encode(),
    "deep": said(None, [("echo", {"text": []})]),
}
deep = NONSENSE["deep"]["choices"][0]["message"]["tool_calls"][0]["function"]
for _ in range(400):
    deep["arguments"] = {"text": deep["arguments"]}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_no_fault_of_the_policy(server, nano_tokenizer, what):
    server.answer = lambda body: NONSENSE[what]
    (trajectory,) = run(
        server, nano_tokenizer, limits=Limits(turns=2, context_tokens=9999, turn_tokens=9000)
    )
    if what == "deep":  # JSON all the same
        assert trajectory.turns[0].results[0].content.startswith("Error: echo: text: {")
    else:
        assert (
            trajectory.status == "infrastructure"
            and not any(trajectory.sampled)
            and len(server.bodies) == 1
        )
        ((result,),) = (turn.results for turn in trajectory.turns)
        assert (
            result.infrastructure
            and f"big at {server.url} did not answer as it should (" in result.content
            and "\n" not in result.content
        )


@pytest.mark.parametrize("status, tries", [(500, 3), (429, 3), (400, 1), (401, 1), (404, 1)])
def test_a_refusal_is_tried_again_if_it_may_pass_and_its_words_are_kept_without_the_key(
    server, nano_tokenizer, status, tries
):
    server.status, server.answer = (
        status,
        lambda body: f"the model\n`big` and the key {KEY} {'x' * 999}".encode(),
    )
    (trajectory,) = run(server, nano_tokenizer)
    assert trajectory.status == "infrastructure" and len(server.bodies) == tries
    content = trajectory.turns[0].results[0].content
    assert (
        f"HTTP {status}" in content
        and KEY not in content
        and len(content) < 500
        and (tries > 1 or "the model `big` and the key ... x" in content)
    )


@pytest.mark.parametrize("key", [f"{KEY}\n", "a b\nc", "“quoted”"])
def test_a_key_that_is_none_is_not_told(server, nano_tokenizer, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    (trajectory,) = run(server, nano_tokenizer)
    assert not any(
        part in result.content
        for turn in trajectory.turns
        for result in turn.results
        for part in (key, repr(key)[1:-1], KEY)
    )
    assert trajectory.status == ("infrastructure" if key.startswith("“") else "answered")


def test_a_failure_on_the_way_keeps_what_was_before(server, nano_tokenizer):
    server.answer = script(said(None, [HI]), [])
    (trajectory,) = run(server, nano_tokenizer)
    assert (
        trajectory.status == "infrastructure"
        and len(trajectory.turns) == 2
        and trajectory.calls == {"echo": 1}
        and trajectory.outcome == 0
    )


def test_nothing_hangs(server, nano_tokenizer, monkeypatch):
    monkeypatch.setattr(endpoint, "PATIENCE", 0.2)
    late = threading.Event()
    server.answer = lambda body: late.wait(20) and said("42")
    start = time.monotonic()
    (trajectory,) = run(server, nano_tokenizer)
    assert (
        trajectory.status == "infrastructure"
        and "(in time)" in trajectory.turns[0].results[0].content
        and time.monotonic() - start < 10
    )
    late.set()


def test_attempts_go_side_by_side_but_not_all_at_once(server, nano_tokenizer, monkeypatch):
    monkeypatch.setattr(endpoint, "PARALLEL", 3)
    three, lock, now, most = threading.Barrier(3), threading.Lock(), [0], [0]

    def answer(body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        three.wait(10)  # a BrokenBarrierError, and no answer, if fewer come
        with lock:
            now[0] -= 1
        return said("42")

    server.answer = answer
    assert {trajectory.answer for trajectory in run(server, nano_tokenizer, attempts=6)} == {
        "42"
    } and most[0] == 3


class Talkative(ToolEnvironment):
    async def reply(self, content):
        return None if content == "42" else ToolResult(f"no, not {content}")


def test_a_user_may_answer(server, nano_tokenizer):
    server.answer = script(said("41", reasoning_content="t"), said(None, [HI]), said("42"))
    (trajectory,) = run(server, nano_tokenizer, env=Talkative)
    assert (trajectory.status, trajectory.answer, trajectory.outcome) == ("answered", "42", 1.0)
    assert [message["role"] for message in server.bodies[-1]["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert server.bodies[-1]["messages"][2][
        "content"
    ] == "no, not 41" and "<|im_start|>user\nno, not 41<|im_end|>" in nano_tokenizer.decode(
        trajectory.ids
    )


def test_a_prompt_composed_afresh(server, nano_tokenizer):
    server.answer = lambda body: (
        said("42") if "Doc 1" in body["messages"][-1]["content"] else said(None, [HI])
    )
    (trajectory,) = run(server, nano_tokenizer, context="rebuild")
    assert (
        trajectory.status == "answered"
        and trajectory.outcome == 1
        and len(contexts(trajectory)) == 2
    )
    for (begin, start, _), body in zip(contexts(trajectory), server.bodies, strict=True):
        assert trajectory.ids[begin:start] == chat.encode(
            nano_tokenizer, body["messages"], body["tools"]
        )


def test_steps_whose_attempts_fail_end_the_run_in_one_line(server, make_training):
    made = make_training(
        "fails",
        *LIVE,
        "--rollout.endpoint",
        server.url,
        "--rollout.model",
        "big",
        "--rollout.only",
        "1",
    )
    server.status, server.answer = 404, lambda body: b'{"error": "no model big"}'
    with pytest.raises(
        UserError,
        match=r"8 of 8 attempts failed for reasons of the infrastructure.*HTTP 404: .*no model big",
    ):
        made.rollouts(Stop())
    assert len(server.bodies) == 16  # each once again
    once = iter(range(3))
    server.status, server.answer = (
        200,
        lambda body: [] if next(once, None) is not None else said("7"),
    )
    assert made.rollouts(Stop()) and next(iter(made.run.rows("metrics")))["retried"] == 3


HERE = ["--rollout.endpoint", "http://127.0.0.1:9/v1", "--rollout.model", "big"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--rollouts", "1", *HERE[:2]], "rollout.model ''; both are needed"),
        (
            ["--rollouts", "1", *HERE[2:]],
            "rollout.endpoint is '' and rollout.model 'big'; both are needed",
        ),
        (["--rollouts", "1", *HERE], "nobody answers at http://127.0.0.1:9/v1 (ConnectionError)"),
        (HERE, "record them with --rollouts N"),
        *(
            (
                ["--rollouts", "1", *HERE, f"--rollout.endpoint={url}"],
                "it must be a base URL such as http",
            )
            for url in (
                "localhost:8000/v1",
                "ftp://host/v1",
                "http://",
                "http://host:port/v1",
                "http://[::1/v1",
                "https://user:pass@host/v1",
                "http://host/v1?key=1",
            )
        ),
        (["--rollouts", "1", *HERE, "--rollout.endpoint=http://a..b/v1"], "nobody answers at"),
        (["--rollouts", "1", *HERE, "--rollout.input_usd_per_million", "-1"], "0 or more"),
    ],
)
def test_a_bad_option_gets_one_line_and_leaves_nothing(arguments, words, capsys, tmp_path):
    assert program.main([*arguments, "--run.root", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0] and not list(tmp_path.iterdir())


def test_arguments_that_are_text_are_written_as_they_are(nano_tokenizer):
    same = [
        chat.encode_assistant(nano_tokenizer, "t", "", [ToolCall("echo", arguments)])
        for arguments in ({"text": "hi"}, '{"text": "hi"}')
    ]
    assert same[0] == same[1]
