"""Whose fault a failure is: the infrastructure's, which excludes an attempt, or the policy's."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
import requests
import torch
from openai_server import openai_server, said
from scripted import ANSWER, EchoTool, call, echoing, execute, play

from nanorchestra.agent.evidence import Evidence
from nanorchestra.agent.failures import EndpointError, is_infrastructure
from nanorchestra.agent.numbering import in_attempt
from nanorchestra.config import GrpoSection
from nanorchestra.errors import UserError
from nanorchestra.records import Preference, Price, ToolCall, ToolResult
from nanorchestra.report.terminal import Console
from nanorchestra.tools import functions, http
from nanorchestra.tools import index as index_module
from nanorchestra.tools import spending as spending_module
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.functions import FunctionTool
from nanorchestra.tools.index import Index, Passage
from nanorchestra.tools.models import Expert
from nanorchestra.tools.replies import ReplyStore
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.trajectories import from_row, replay, to_row
from tools import LookupTool, PythonTool, load_tools
from train import group_in_loss, reward_group
from worlds.routers import OfferedExpert, ask_until_two_agree


def replied(status):
    """What requests, httpx, openai, aiohttp and urllib raise for a reply with an HTTP status."""
    request = httpx.Request("GET", "http://x")
    response = requests.Response()
    response.status_code = status
    theirs = httpx.Response(status, request=request)
    plain = RuntimeError("aiohttp's ClientResponseError")
    plain.status = status
    return (
        requests.HTTPError(str(status), response=response),
        httpx.HTTPStatusError(str(status), request=request, response=theirs),
        openai.APIStatusError(str(status), response=theirs, body=None),
        plain,
        urllib.error.HTTPError("http://x", status, "says no", {}, None),
    )


def wrapped(outer, inner):
    outer.__cause__ = inner  # raise outer from inner
    return outer


ITSELF = ValueError("round and round")  # raised from itself
INFRASTRUCTURE = (
    *replied(429),
    *replied(503),
    requests.ReadTimeout("read timed out"),
    httpx.ReadTimeout("read timed out"),
    httpx.RemoteProtocolError("the server has closed the connection"),
    openai.APIConnectionError(request=httpx.Request("GET", "http://x")),
    urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")),
    wrapped(RuntimeError("the weather service is down"), ConnectionResetError("reset")),
    wrapped(ValueError("no forecast"), replied(500)[0]),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    TimeoutError("timed out"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    UserError("index: not a whole index; build it: python tools.py index PATH --out DIR"),
    RuntimeError("Expected all tensors to be on the same device, but got cuda:3 and cuda:0"),
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
    *replied(400),
    *replied(404),
    wrapped(ValueError("no such city"), KeyError("Atlantis")),
    wrapped(ITSELF, ITSELF),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid start byte"),
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
        down.name = "llm"
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
    grpo = GrpoSection(min_std=0.0)
    reward_group(envs[0].task, group, grpo, None, Ranks())
    learnt, left_out = group_in_loss(group, grpo)
    assert [sample.ids for sample in learnt.samples] == [attempt.ids for attempt in group[:2]]
    assert left_out == ["infrastructure"]
    right, wrong, failed = (attempt.advantage for attempt in group)
    assert right > 0 > wrong and failed == 0.0


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


class Broken:
    """An index whose device fails."""

    blocking = True

    def __init__(self, error):
        self.error = error

    def search(self, query, k):
        raise self.error


def test_an_index_that_fails_on_its_device_is_not_the_fault_of_a_query():
    """It was an observation once, so that search was silently broken on all ranks but one."""
    for error in (
        ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"),
        RuntimeError("Error in faiss::gpu: StandardGpuResources: alloc fail"),
        KeyError("whatever it is"),
    ):
        result = LookupTool("docs", "d", Broken(error), usd_per_call=1.0).call({"query": "gold"})
        assert result.infrastructure and result.error and result.cost_usd == 0.0
        assert f"Error: docs failed: {type(error).__name__}: {error}" == result.content


def test_a_search_waits_for_others_only_so_long_and_says_how_long(monkeypatch):
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.1)
    index = Index.of([Passage("Gold is yellow.")])
    tool = LookupTool("docs", "d", index)
    assert "yellow" in tool.call({"query": "gold"}).content
    with index._lock:
        result = tool.call({"query": "gold"})
    assert result.infrastructure and "other searches have held the index" in result.content
    assert 0.1 <= result.latency_s < 1.0
    index._lock.acquire()
    threading.Timer(0.05, index._lock.release).start()
    result = tool.call({"query": "gold"})
    assert not result.error and 0.03 <= result.latency_s < 0.1, "the wait is part of it"
    virtual = LookupTool("docs", "d", index, latency_s=7.0).call({"query": "gold"})
    assert virtual.latency_s == 7.0


def test_an_expert_waits_for_a_place_only_so_long_and_says_how_long():
    """The wait came before the time-out, and was no part of the latency."""
    with openai_server() as server:
        busy = Endpoint(server.url, timeout_s=0.4, concurrency=1)
        expert = Expert("m", busy, "m", Price(1, 1), Spending())

        def ask_while_busy(seconds):
            assert busy.free.acquire(timeout=1.0)
            threading.Timer(seconds, busy.free.release).start()
            return expert.ask("hi", "m")

        waited = ask_while_busy(0.1)
        assert waited.content == "42" and 0.1 <= waited.latency_s < 0.4
        server.answer = lambda body: time.sleep(0.4) or said("42")
        late = ask_while_busy(0.2)
        assert late.infrastructure and "no whole reply" in late.content
        assert 0.4 <= late.latency_s < 0.55, "the wait and the call together have the time-out"
        with busy.free:
            refused = expert.ask("hi", "m")
    assert "calls open: 1, and none ended in 0.4 s" in refused.content
    assert refused.infrastructure and refused.latency_s == 0.4 and len(server.bodies) == 2


def test_a_reply_that_is_asked_for_already_is_waited_for_only_so_long(tmp_path):
    with openai_server() as server:
        server.answer = lambda body: time.sleep(0.4) or said("42")
        spending = Spending(replies=ReplyStore(tmp_path / "replies"))
        endpoint = Endpoint(server.url, timeout_s=2.0)

        def ask(text, name, endpoint=endpoint):
            with in_attempt(7):  # of one attempt, which is repeated while its first call is open
                return Expert("m", endpoint, "m", Price(1, 1), spending).ask(text, name)

        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(ask, "hi", "m")
            time.sleep(0.1)
            result = ask("hi", "m", replace(endpoint, timeout_s=0.1))
            assert result.infrastructure and "had no reply within 0.1 s" in result.content
            assert first.result().content == "42"
        stored = ask("hi", "m")
        assert stored.latency_s == first.result().latency_s and len(server.bodies) == 1


def test_a_full_disk_is_not_the_fault_of_a_question_to_an_expert(tmp_path, monkeypatch):
    def full(*_):
        raise UserError("spent/0.json: cannot be written (No space left on device)")

    monkeypatch.setattr(spending_module, "write_whole", full)
    with openai_server() as server:
        spending = Spending(file=tmp_path / "spent.json")
        expert = Expert("m", Endpoint(server.url), "m", Price(1, 1), spending)
        result = expert.ask("hi", "m")
    assert result.infrastructure and "m failed: UserError: spent/0.json" in result.content


@pytest.mark.parametrize(
    "error", [ConnectionError("reset"), EndpointError("HTTP 400", bad_request=True)]
)
def test_a_judge_that_fails_is_never_the_policys_fault_and_the_attempt_can_be_read_again(
    nano_tokenizer, error
):
    """A judge has not been chosen by the policy. A reward function may ask a server, too."""
    env = echoing()

    def grade(answer):
        raise error

    env._grade = grade
    (t,), _ = play(nano_tokenizer, [call(), ANSWER], envs=[env])
    assert t.status == "infrastructure" and str(error) in t.failure and t.outcome == 0.0
    row = json.loads(json.dumps(to_row(env.task, t)))
    assert from_row(row)[1] == t
    shown = io.StringIO()
    replay(t, nano_tokenizer, Console(shown).on_event)


def test_a_reward_that_is_broken_ends_the_run(nano_tokenizer):
    env = echoing()

    def grade(answer):
        raise KeyError("a bug")

    env._grade = grade
    with pytest.raises(KeyError, match="a bug"):
        play(nano_tokenizer, [ANSWER], envs=[env])


def test_a_limit_of_the_user_is_not_a_failure_of_the_infrastructure(nano_tokenizer):
    """A call that is refused, and one that is given up; one that failed says so, however late."""

    def attempt(tool, **limits):
        env = echoing(tool)
        env.task = replace(env.task, preference=Preference(**limits))
        (t,), _ = play(nano_tokenizer, [call(), ANSWER], envs=[env])
        return t

    refused = attempt(EchoTool(), never=["echo"])
    assert refused.status == "answered" and refused.turns[0].results[0].refused
    late = attempt(EchoTool(result=ToolResult("late", 0.0, 99.0)), seconds=9.0)
    assert late.status != "infrastructure" and "was given up" in late.turns[0].results[0].content
    down = replace(DOWN.result, latency_s=99.0)
    failed = attempt(EchoTool(result=down), seconds=9.0)
    assert failed.failure == "Error: echo is down" and failed.latency_s < 9.5


def test_a_process_ends_though_a_function_that_was_given_up_still_runs(tmp_path):
    """It aborted: the thread was inside of pydantic's call in Rust, which cannot be unwound."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from tools import tool\n"
        "@tool(timeout_s=0.2)\n"
        "def spin(text: str) -> str:\n"
        "    'Spins.'\n"
        "    while True: time.sleep(0.001)\n"
        "print(spin.call({'text': 'a'}).content)\n"
    )
    command = [sys.executable, str(script)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "took more than 0.2 s" in done.stdout, done.stderr
