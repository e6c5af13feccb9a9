"""What every kind of tool promises: price, limits, and an observation whatever is behind it.

A kind is a class here, with the entry of a catalogue that makes the tool, and with the arguments of
a call behind which something is "good", "hangs", "raises", is "huge" (50 MB, of an MCP server 5),
"nonsense" or "down".
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace

import pytest
from openai_server import openai_server, said
from scripted import echoing, execute

from nanorchestra.agent.limits import UserLimits
from nanorchestra.agent.numbering import in_attempt
from nanorchestra.agent.tool import Allowance, all_ban_names
from nanorchestra.agent.truncation import RESULT_CHARS
from nanorchestra.records import RESULT_WORDS, Preference, Price, ToolCall, Trajectory
from nanorchestra.tools import http
from nanorchestra.tools import index as index_module
from nanorchestra.tools import mcp as mcp_module
from nanorchestra.tools.index import Passage
from nanorchestra.tools.replies import ReplyStore
from nanorchestra.tools.spending import Spending
from tools import RecordsTool, load_tools

HUGE = f"{'w' * 99} " * 500_000
# How a call ends: its error, whether the infrastructure is blamed, and whether it is billed.
ANSWERED = (False, False, True)
POLICYS = (True, False, True)
FAILED = (True, True, False)
FAILED_BILLED = (True, True, True)


class Kind:
    """A kind of tool. `ends` says how the calls end that are not good."""

    name = "tool"
    entry: dict = {}
    ends: dict = {}
    says = "42"  # of a good call
    helpers = ()  # more entries of the catalogue
    times_out = False  # whether the entry has a time-out of its own

    def open(self, bench, timeout_s=10.0):
        """Returns the tool, as the catalogue makes it, with its calls' time-out."""
        entry = {"description": "d", "name": self.name} | self.entry_of(bench)
        if self.times_out:
            entry["timeout_s"] = timeout_s
        return bench.load(timeout_s, entry, *self.helpers)

    def entry_of(self, bench):
        return self.entry

    def arguments(self, bench, how="good"):
        """Returns the arguments of a call behind which something is `how`."""
        raise NotImplementedError


class Code(Kind):
    name, entry = "py", {"kind": "code", "usd_per_call": 0.01, "usd_per_second": 0.001}
    times_out = True
    ends = {"hangs": POLICYS, "raises": POLICYS, "huge": POLICYS, "nonsense": ANSWERED}
    ends["down"] = FAILED

    def arguments(self, bench, how="good"):
        if how == "down":
            bench.sandbox._idle.queue[-1].process.kill()
        programs = {
            "hangs": "while True: pass",
            "raises": "raise KeyboardInterrupt",
            "huge": "print('w' * 50_000_000)",
            "nonsense": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
        }
        return {"code": programs.get(how, "print(42)")}


class Corpus(Kind):
    name, entry = "docs", {"kind": "search", "corpus": "corpus.jsonl", "usd_per_call": 0.01}
    ends = {"hangs": FAILED, "raises": FAILED, "huge": ANSWERED, "nonsense": ANSWERED}

    def arguments(self, bench, how="good"):
        index = bench.tool.index
        if how == "hangs":
            bench.patch.setattr(index_module, "TIMEOUT_S", 0.3)
            index._lock.acquire()  # another thread's search
        if how == "raises":
            bench.patch.setattr(index, "_rank_all", lambda *_: 1 / 0)
        if how == "huge":
            bench.patch.setattr(index, "_passages", lambda _: [Passage(HUGE)])
        return {"query": '"*^:(){} \ud800' if how == "nonsense" else "answer"}


class Served(Kind):
    """A kind that asks a server, which answers as it is told."""

    ends = {"hangs": FAILED_BILLED, "raises": FAILED, "huge": FAILED_BILLED}
    ends |= {"nonsense": FAILED_BILLED, "down": FAILED}
    good: dict = {}
    asked: dict = {}

    def arguments(self, bench, how="good"):
        bench.server.status = 500 if how == "raises" else 200
        answers = {
            "hangs": lambda body: time.sleep(6.0) or self.good,
            "huge": lambda body: json.dumps(said(HUGE)).encode(),
            "nonsense": lambda body: [{"choices": 3}, None],
        }
        bench.server.answer = answers.get(how, lambda body: self.good)
        if how == "down":
            bench.server.http.shutdown()
            bench.server.http.server_close()
        return self.asked


class Web(Served):
    name, asked, times_out = "web", {"query": "answer"}, True
    good = {"results": [{"url": "http://a", "content": "42"}]}

    def entry_of(self, bench):
        return {"kind": "web", "usd_per_call": 0.01, "base_url": bench.server.url}


class OneExpert(Served):
    name, entry, asked = "llm", {"kind": "expert", "expert": "mine"}, {"task": "6 * 7?"}
    good = said("42", usage=(10**6, 10**6))  # more than it was asked for


class Answer(OneExpert):
    name, entry, asked = "answer", {"kind": "role", "models": ["mine"]}, {"model": "mine"}


class Query(Answer):
    name = "search"
    good = said("<query>the answer to all</query>", usage=(10**6, 10**6))
    helpers = ({"name": "docs", "description": "d"} | Corpus.entry,)


class Reasoning(Answer):
    name = "enhance_reasoning"
    good = said("```python\n6 * 7\n```", usage=(10**6, 10**6))


class Function(Kind):
    name, entry = "act", None
    ends = {"hangs": POLICYS, "raises": POLICYS, "huge": ANSWERED, "nonsense": ANSWERED}
    ends["down"] = FAILED_BILLED

    def open(self, bench, timeout_s=10.0):
        (bench.folder / "mine.py").write_text(FUNCTION.format(timeout_s))
        return load_tools(bench.folder / "mine.py", None, bench.spending)[0]

    def arguments(self, bench, how="good"):
        return {"how": how}


FUNCTION = """
import time
from tools import tool

@tool(usd_per_call=0.01, timeout_s={})
def act(how: str):
    "Does as it is told."
    if how == "hangs":
        time.sleep(6.0)
    if how == "raises":
        raise KeyboardInterrupt
    if how == "down":
        raise ConnectionRefusedError("the database is gone")
    if how == "nonsense":
        return {{"half": "\\ud800", "set": {{1}}, "number": float("nan")}}
    return ("w" * 99 + " ") * 500_000 if how == "huge" else "42"
"""


class Mcp(Kind):
    name = "act"
    ends = {"hangs": POLICYS, "raises": POLICYS, "huge": ANSWERED, "nonsense": ANSWERED}
    ends |= {"stuck": FAILED, "down": FAILED}

    def open(self, bench, timeout_s=10.0):
        bench.patch.setattr(mcp_module, "PROBE_S", 0.3)
        return replace(bench.served(), timeout_s=timeout_s, replies=bench.spending.replies)

    def arguments(self, bench, how="good"):
        return {"how": how}


MCP_SERVER = """
import asyncio, os, time
from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent

server = MCPServer("s", log_level="CRITICAL")

@server.tool()
async def act(how: str) -> list:
    if how == "hangs":
        await asyncio.sleep(100)
    if how == "stuck":
        time.sleep(100)
    if how == "raises":
        raise KeyError("no")
    if how == "down":
        os._exit(3)
    if how == "nonsense":
        return [ImageContent(data="QUFB", mime_type="image/png")]
    return [("w" * 99 + " ") * 50_000 if how == "huge" else "42"]

server.run()
"""


class Rows(Kind):
    name, says = "rows", '{"a": 42}'

    def open(self, bench, timeout_s=10.0):
        return RecordsTool("rows", "d", {"order": {"1": {"a": 42}}}, usd_per_call=0.01)

    def arguments(self, bench, how="good"):
        return {"table": "order", "id": 1}


ALL = [Code, Corpus, Web, OneExpert, Answer, Query, Reasoning, Function, Mcp, Rows]
ALL = [kind() for kind in ALL]
WAITING = [kind for kind in ALL if "hangs" in kind.ends and not isinstance(kind, Corpus)]
RECORDED = [kind for kind in ALL if not isinstance(kind, Rows)]
every_kind = pytest.mark.parametrize("kind", ALL, ids=lambda kind: type(kind).__name__)


class Bench:
    """What is behind the tools of a test, and the tool under test as `tool`."""

    def __init__(self, folder, server, sandbox, served, tokenizer, patch):
        self.folder, self.server, self.sandbox, self.served = folder, server, sandbox, served
        self.tokenizer, self.patch, self.spending = tokenizer, patch, Spending()
        self.tool = None

    def load(self, timeout_s, *entries):
        """Returns the first tool of a catalogue with experts at the server."""
        mine = {"endpoint": "here", "model": "m", "usd": [1, 10], "max_tokens": 1000}
        tables = {
            "endpoints": {"here": {"base_url": self.server.url, "timeout_s": timeout_s}},
            "experts": {"mine": mine},
            "tools": list(entries),
        }
        (self.folder / "t.json").write_text(json.dumps(tables))
        return load_tools(self.folder / "t.json", self.sandbox, self.spending)[0]

    def open(self, kind, **settings):
        self.tool = kind.open(self, **settings)
        return self.tool

    def env(self, **limits):
        """The environment of an attempt that has the tool, and a user's limits."""
        env = echoing(self.tool)
        env.evidence.tokenizer = self.tokenizer
        env.task = replace(env.task, preference=Preference(**limits))
        return env

    def most_usd(self, arguments):
        """The US dollars that a call can cost, as is said before it."""
        return self.env().prepare(ToolCall(self.tool.name, arguments), Allowance()).most_usd

    def call(self, arguments, **limits):
        """The result of a call, as the policy reads it; with the limits of a user."""
        made = ToolCall(self.tool.name, arguments)
        if not limits:
            return execute(self.env(), made)
        calls = UserLimits(self.env(**limits), Trajectory("t", 0), Price(0, 0))
        return asyncio.run(calls.execute([made], 1))[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """served() returns the tool of an MCP server, which the module has one of."""
    folder, made = tmp_path_factory.mktemp("mcp"), []
    (folder / "server.py").write_text(MCP_SERVER)
    command = [sys.executable, str(folder / "server.py")]
    entry = {"kind": "mcp", "name": "s", "command": command, "usd_per_call": 0.01}
    (folder / "t.json").write_text(json.dumps([entry]))

    def open_once():
        made.extend([] if made else load_tools(folder / "t.json", None))
        return made[0]

    yield open_once
    for tool in made:
        tool.server.life.cancel()


@pytest.fixture
def bench(tmp_path, sandbox, served, nano_tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAVILY_API_KEY", "tvly")
    monkeypatch.setattr(http.random, "uniform", lambda *_: 0.0)  # no wait between the tries
    (tmp_path / "corpus.jsonl").write_text('{"text": "The answer is 42."}\n')
    with openai_server() as server:
        yield Bench(tmp_path, server, sandbox, served, nano_tokenizer, monkeypatch)


@every_kind
def test_a_good_call_costs_what_was_said_before_at_most_and_never_more_than_is_left(bench, kind):
    """Whatever the server counts. An expert is asked for as many tokens as are paid for."""
    tool, arguments = bench.open(kind), kind.arguments(bench)
    result = bench.call(arguments)
    assert kind.says in result.content and not result.error and not result.infrastructure
    most = bench.most_usd(arguments)
    assert 0 < result.cost_usd <= most and result.latency_s >= 0
    function = tool.schema["function"]
    assert (function["name"], function["description"]) == (tool.name, tool.description)
    for share in (0.4, 0.7, 1.0):
        usd = share * most * (1 + 1e-9)
        result = bench.call(arguments, usd=usd / 0.9)  # a tenth is left for the answer
        assert result.cost_usd <= usd and not (share == 1.0 and result.error), share
        assert result.refused or not result.error


@every_kind
def test_what_is_not_allowed_is_refused_and_nothing_is_asked(bench, kind):
    """Arguments against the schema, each name that can be banned, and dollars that are not left."""
    tool, arguments = bench.open(kind), kind.arguments(bench)
    asked = len(bench.server.bodies)
    refused = [bench.call(wrong) for wrong in (arguments | {"more": 1}, "text", [arguments])]
    for result in refused:
        assert result.content.startswith(f"Error: {tool.name}: ") and len(result.content) < 600
    names = tool.ban_names(arguments)
    assert {tool.name, tool.kind} <= names <= set(all_ban_names([tool]))
    for name in names:
        refused.append(bench.call(arguments, never=[name.upper()]))
        assert refused[-1].content == f"Error: the user forbids {name.upper()}"
    refused.append(bench.call(arguments, usd=1e-9))
    assert refused[-1].content.startswith(f"Error: refused {tool.name}: up to $")
    for result in refused:
        assert result.refused and result.error and result.cost_usd == 0.0
    assert len(bench.server.bodies) == asked
    assert not bench.call(arguments, never=["something else"]).error


@pytest.mark.parametrize("kind", WAITING, ids=lambda kind: type(kind).__name__)
def test_a_call_is_given_up_after_the_users_seconds_and_billed_at_its_most(bench, kind):
    """It is the policy's. Afterwards the tool answers again."""
    bench.open(kind, timeout_s=20.0)
    arguments = kind.arguments(bench, "hangs")
    start = time.monotonic()
    result = bench.call(arguments, seconds=0.2)
    assert 0.15 < time.monotonic() - start < 4.0 and result.latency_s == pytest.approx(0.18)
    assert "was given up after 0.2 s, the user's limit" in result.content
    assert result.error and result.given_up and not result.infrastructure
    assert result.cost_usd == bench.most_usd(arguments) > 0
    assert kind.says in bench.call(kind.arguments(bench)).content


CASES = [(kind, how) for kind in ALL for how in kind.ends]


@pytest.mark.parametrize("kind, how", CASES, ids=lambda each: getattr(each, "name", each))
def test_whatever_is_behind_a_tool_its_call_ends_in_a_bounded_observation(bench, kind, how):
    bench.open(kind, timeout_s=2.0 if how in ("hangs", "stuck") else 10.0)
    most_usd = bench.most_usd(kind.arguments(bench))
    arguments = kind.arguments(bench, how)
    start = time.monotonic()
    result = bench.call(arguments)
    assert time.monotonic() - start < 9.0
    billed = result.cost_usd > 0
    assert (result.error, result.infrastructure, billed) == kind.ends[how], result
    assert result.cost_usd <= most_usd
    result.content.encode()
    assert len(result.content) < RESULT_CHARS + 100
    assert len(result.content.split()) <= RESULT_WORDS + 5
    if how != "huge":
        assert result.content.startswith("Error: ") == result.error
        assert "\n" not in result.content or not result.error


@pytest.mark.parametrize("kind", RECORDED, ids=lambda kind: type(kind).__name__)
def test_a_replay_has_the_result_of_the_recording_and_asks_nothing(bench, kind):
    results, asked = [], []
    for asks in (True, False):
        bench.spending = Spending(replies=ReplyStore(bench.folder / "kept", asks=asks))
        bench.open(kind)
        arguments = kind.arguments(bench)
        before = len(bench.server.bodies)
        with in_attempt(5):
            results.append(bench.call(arguments))
        asked.append(len(bench.server.bodies) - before)
    assert results[0] == results[1] and not results[0].error and not asked[1]
    with in_attempt(6):
        missed = bench.call(arguments)
    is_web = kind.name == "web"  # nothing is sampled there: all attempts share a page
    assert missed.infrastructure != is_web and bool(bench.spending.replies.missing) != is_web
