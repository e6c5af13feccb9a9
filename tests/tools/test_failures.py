"""Whose fault a failure is: the infrastructure's, which excludes an attempt, or the policy's."""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest
import requests
import torch
from openai_server import openai_server, said
from scripted import ANSWER, EchoTool, call, echoing, execute, play

from nanorchestra.evidence import Evidence
from nanorchestra.records import ToolCall, ToolResult
from nanorchestra.settings import load_config
from nanorchestra.tools import functions, http
from nanorchestra.tools.failures import is_infrastructure
from nanorchestra.tools.functions import FunctionTool
from nanorchestra.tools.http import EndpointError
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.objectives import group_advantages, objective_of
from reward import group_rewards
from tools import PythonTool, load_tools
from worlds.routers import OfferedExpert, ask_until_two_agree

INFRASTRUCTURE = (
    EndpointError("no connection"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("NCCL error: unhandled system error"),
    ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    requests.ConnectionError("refused"),
    httpx.ConnectError("refused"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
)
ORDINARY = (
    EndpointError("HTTP 400: too long", bad_request=True),
    ValueError("negative"),
    ZeroDivisionError("division by zero"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    RuntimeError("broken tool"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    SystemExit(1),
)


class Raising(EchoTool):
    """Raises `error`."""

    error = None

    def call(self, arguments):
        raise self.error


@pytest.mark.parametrize("error", [*INFRASTRUCTURE, *ORDINARY], ids=repr)
def test_an_exception_of_a_tool_is_an_observation_and_says_whose_fault_it_is(error):
    """Of a class, and of a function of the user's."""
    blamed = error not in INFRASTRUCTURE
    assert is_infrastructure(error) != blamed

    def function():
        raise error

    result = FunctionTool("f", "", {}, function).call({})
    assert (
        result.error and result.infrastructure != blamed and result.content.startswith("Error: f")
    )
    if not isinstance(error, SystemExit):
        tool = Raising(blocking=True)
        tool.error = error
        result = execute(echoing(tool), ToolCall("echo", {"text": "hi"}))
        assert result.error and result.infrastructure != blamed


DOWN = EchoTool(result=ToolResult("Error: echo is down", error=True, infrastructure=True))


def test_an_attempt_ends_where_the_infrastructure_fails_unless_it_survives(nano_tokenizer):
    """Training and evaluation leave it out; to a person the policy answers without that tool."""
    (t,), _ = play(nano_tokenizer, [call(), ANSWER], envs=[echoing(DOWN)])
    assert (t.status, t.answer, t.failure) == ("infrastructure", "", "Error: echo is down")
    (t,), _ = play(nano_tokenizer, [call(), ANSWER], envs=[echoing(DOWN)], survives_failures=True)
    assert (t.status, t.answer, t.failure, t.outcome) == ("answered", "42", "", 1.0)
    assert t.turns[0].results[0].infrastructure and "echo is down" in nano_tokenizer.decode(t.ids)


def test_an_attempt_that_survives_ends_all_the_same_without_its_policy_or_user(nano_tokenizer):
    (t,), _ = play(nano_tokenizer, [ANSWER], finish="error", survives_failures=True)
    assert t.status == "infrastructure"
    env = echoing()

    async def reply(content):
        return ToolResult("Error: the user did not answer", error=True, infrastructure=True)

    env.reply = reply
    (t,), _ = play(nano_tokenizer, [ANSWER], envs=[env], survives_failures=True)
    assert (t.status, t.failure) == ("infrastructure", "Error: the user did not answer")


def test_an_expert_that_is_down_costs_its_group_an_attempt_and_no_reward(
    nano_tokenizer, tmp_path, sandbox, monkeypatch
):
    """From a catalogue through the loop to the advantages of GRPO."""
    monkeypatch.setattr(http.random, "uniform", lambda *_: 0.0)
    asks = call(name="llm").replace('"text"', '"task"')
    with openai_server() as server:
        (tmp_path / "t.json").write_text(json.dumps({
            "endpoints": {"up": {"base_url": server.url}, "down": {"base_url": "http://127.0.0.1:9"}},
            "experts": {n: {"endpoint": n, "model": n, "usd": [1, 2]} for n in ("up", "down")},
            "tools": [{"name": "llm", "kind": "expert", "description": "d", "expert": "up"},
                      {"name": "gone", "kind": "expert", "description": "d", "expert": "down"}],
        }))  # fmt: skip
        up, down = load_tools(tmp_path / "t.json", sandbox)
        down.name, down.experts = "llm", {"llm": down.expert}
        scripts = [[asks, ANSWER], [asks, ANSWER.replace("42", "41")], [asks, ANSWER]]
        envs = [echoing(up, 0), echoing(up, 1), echoing(down, 2)]
        group, _ = play(nano_tokenizer, *scripts, envs=envs)
        server.status, server.answer = 400, lambda body: b"too long"
        (caused,), _ = play(nano_tokenizer, [asks, ANSWER], envs=[echoing(up)])
    assert [t.status for t in group] == ["answered", "answered", "infrastructure"]
    assert "llm did not answer: no connection (Connection refused)" in group[2].failure
    assert (
        caused.status == "answered" and "HTTP 400: too long" in caused.turns[0].results[0].content
    )
    rewards = [*group_rewards(group[:2], envs[0].task.preference), 0.0]
    valid = [t.status != "infrastructure" for t in group]
    objective = objective_of(load_config("nano").grpo)
    advantages, why = group_advantages(rewards, valid, [True] * 3, objective, 0.0)
    assert why == [None, None, "infrastructure"] and advantages[0] > 0 > advantages[1]
    assert advantages[2] == 0.0


def test_a_router_fails_with_its_expert(nano_tokenizer):
    env = echoing(DOWN)
    attempt = ask_until_two_agree([OfferedExpert("echo", 1.0, {"text": "hi"})], env)
    assert (attempt.status, attempt.failure) == ("infrastructure", "Error: echo is down")


def test_a_role_fails_with_its_expert_or_helper(tmp_path, sandbox, nano_tokenizer, monkeypatch):
    """A search that is down is forgiven where another one finds something."""
    monkeypatch.setattr(http.random, "uniform", lambda *_: 0.0)
    with openai_server() as server:
        corpus = str(tmp_path / "c.jsonl")
        (tmp_path / "c.jsonl").write_text('{"text": "Gold has the atomic number 79."}\n')
        (tmp_path / "t.json").write_text(json.dumps({
            "endpoints": {"here": {"base_url": server.url}},
            "experts": {"mine": {"endpoint": "here", "model": "m", "usd": [1, 2]}},
            "tools": [
                {"name": "search", "kind": "role", "description": "d", "models": ["mine"]},
                {"name": "wiki", "kind": "search", "description": "d", "corpus": corpus},
            ],
        }))  # fmt: skip
        (role,) = load_tools(tmp_path / "t.json", sandbox)
        (wiki,) = role.helpers
        role = replace(role, evidence=Evidence("Gold?", tokenizer=nano_tokenizer))
        server.answer = lambda body: said(f"<query>{query}</query>")
        for helpers, query, failed, error in (
            ([DOWN, wiki], "atomic number of gold", False, False),
            ([wiki, DOWN], "atomic number of gold", False, False),
            ([DOWN, wiki], "zzzzzzzzzzzzzzzz", True, False),
            ([DOWN], "atomic number of gold", True, True),
        ):
            role.helpers = [replace(h) if h is wiki else Helper() for h in helpers]
            result = role.call({"model": "mine"})
            assert (result.infrastructure, result.error) == (failed, error), (helpers, query)
        server.status = 500
        assert role.call({"model": "mine"}).infrastructure


class Helper(EchoTool):
    def call(self, arguments):
        return DOWN.result


def test_a_dead_worker_of_the_sandbox_is_not_the_fault_of_the_code():
    with Sandbox(workers=1) as one:
        tool = PythonTool("python", "", one)
        one._idle.queue[0].process.kill()
        result = tool.call({"code": "print(1)"})
        assert result.infrastructure and "the sandbox process died" in result.content
        result = tool.call({"code": "1/0"})
        assert result.error and not result.infrastructure


def test_a_function_that_hangs_or_exits_ends_its_call_alone(monkeypatch):
    """A thread cannot be ended, so no more are begun where too many hang."""
    monkeypatch.setattr(functions, "GIVEN_UP", [])
    monkeypatch.setattr(functions, "MOST_GIVEN_UP", 2)
    before = threading.active_count()
    slow = FunctionTool("f", "", {}, lambda: time.sleep(0.5), timeout_s=0.01)
    for _ in range(2):
        result = slow.call({})
        assert "took more than 0.01 s" in result.content and not result.infrastructure
    for _ in range(3):
        result = slow.call({})
        assert "2 calls that were given up still run" in result.content and result.infrastructure
    assert threading.active_count() == before + 2
    time.sleep(0.6)
    assert "took more than" in slow.call({}).content

    def impatient():
        raise TimeoutError("the database is slow")

    result = FunctionTool("h", "", {}, impatient).call({})
    assert result.content == "Error: h: TimeoutError: the database is slow" and result.error
    result = FunctionTool("g", "", {}, lambda: sys.exit("no")).call({})
    assert result.content == "Error: g: SystemExit: no" and result.error
