"""A user's dollars and bans hold over a whole tree of calls, whatever the policy writes.

A policy that writes anything plays attempts in every world, under published roles, behind an
endpoint, and with an orchestrator over HTTP that has another one as an expert. Its experts are
asked at a stand-in for a server that counts as many tokens as it honestly can.
`BUDGET_ATTEMPTS=10000` plays more.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import threading
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from scripted import ScriptedEngine

from data_gen import main as data_gen
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.tool import all_ban_names
from nanorchestra.config import RolloutSection, TaskSection
from nanorchestra.records import Price, Task, banned
from nanorchestra.serving.api import Server
from nanorchestra.serving.endpoint import EndpointRollout
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.http import Reply
from nanorchestra.tools.models import Expert, ExpertTool, ServedOrchestrator
from nanorchestra.tools.roles import ROLES, RoleTool
from nanorchestra.tools.spending import Spending
from tools import PythonTool, RecordsTool
from worlds.load import open_world
from worlds.toolscale.dataset import load_world
from worlds.toolscale.environment import Models

ATTEMPTS = int(os.environ.get("BUDGET_ATTEMPTS", 600))
SETTINGS = RolloutSection(turns=5, turn_tokens=150, context_tokens=2500, calls_per_turn=3)
PRICES = {"gpt-5": (1.25, 10.0), "claude": (15.0, 75.0), "Qwen/Qwen3-8B": (0.2, 0.2)}
POLICY = "babbler"  # of the orchestrators
PRICED = PRICES | {POLICY: (0.5, 2.0)}
WORDS = "tool text 42 the of law code answer hi ??? x" * 40


@dataclass(frozen=True)
class Greedy(Endpoint):
    """Counts as many tokens as a request can have, and fails now and then after it has worked.

    `ledger` holds (model, US dollars) of all that was asked.
    """

    rng: random.Random = None
    ledger: list = None

    def complete(self, body, timeout_s):
        most = body.get("max_tokens") or body["max_completion_tokens"]
        text, template = body["messages"][-1]["content"], 100
        if len(body["messages"]) > 1 or "tools" in body:
            text, template = json.dumps([body["messages"], body.get("tools", [])]), 200
        read = len(text.encode()) + self.rng.randint(0, template)
        tokens = read, self.rng.choice((1, most, most))
        self.ledger.append((body["model"], Price(*PRICED[body["model"]]).cost(*tokens)))
        if self.rng.random() < 0.1:
            return Reply(tokens=tokens, problem="the reply breaks off")
        content = self.rng.choice(("<query>a long query</query>", "```python\n1\n```", "42", ""))
        message = {"role": "assistant", "content": content, "finish_reason": "stop"}
        return Reply(message, tokens, seconds=self.rng.random())


class Babbler(ScriptedEngine):
    """An engine whose sessions write calls, answers and nonsense, to as many ids as are allowed."""

    def __init__(self, tokenizer, rng):
        super().__init__(tokenizer, itertools.repeat(iter(self.turn, None)))
        self.max_context, self.rng, self.env = SETTINGS.context_tokens, rng, None

    def turn(self):
        rng, tools = self.rng, self.env.tools
        calls = []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4)) if tools else 0):
            function = rng.choice(tools)["function"]
            arguments = {}
            for name, schema in function["parameters"].get("properties", {}).items():
                value = rng.choice(
                    schema.get("enum") or ["order", "gpt-5", WORDS[: rng.randint(1, 400)]]
                )
                if name == "model":
                    aliases = list(getattr(self.env.by_name[function["name"]], "experts", ["none"]))
                    value = rng.choice(aliases)
                arguments[name] = value
            call = json.dumps({"name": function["name"], "arguments": arguments})
            calls.append(f"<tool_call>\n{call}\n</tool_call>")
        thought = WORDS[: rng.choice((0, 5, 50, 700))]
        content = "" if calls else rng.choice(("42", WORDS[:300]))
        return f"<think>\n{thought}\n</think>\n\n{content}" + "\n".join(calls) + "<|im_end|>"


def endpoint_message(engine):
    """What the policy's own endpoint says: a turn of the babbler as a message."""
    text = engine.turn()
    calls = [
        {"type": "function", "function": json.loads(part.split("\n</tool_call>")[0])}
        for part in text.split("<tool_call>\n")[1:]
    ]
    return {"role": "assistant", "content": "42", "tool_calls": calls}


class Wasteful:
    """A sandbox in which code runs on after its time, and prints much."""

    def __init__(self, rng):
        self.rng = rng

    def run(self, code, timeout_s):
        seconds = timeout_s * self.rng.uniform(0, 1.2)
        return SimpleNamespace(
            stdout="1 " * self.rng.randint(0, 4000),
            error="",
            seconds=seconds,
            died=False,
            waited_s=0.0,
        )


@pytest.fixture
def play(nano_tokenizer, tmp_path_factory):
    """play(kind, seed) plays an attempt of a kind; returns it with its limits and the ledger."""
    folder = tmp_path_factory.mktemp("budget")
    (folder / "config.json").write_text("{}")
    rows = [{"question": f"What is {n} plus {n}?", "answer": 2 * n} for n in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = ["--tasks", "12", "--seed", "5", "--domains", "railway", "--workers", "1"]
    assert data_gen([*made, "--out", str(folder / "made")]) == 0
    rng, ledger = random.Random(0), []
    endpoint = Greedy("", rng=rng, ledger=ledger)
    experts = {
        name: Expert(
            name,
            endpoint,
            name,
            Price(*usd),
            Spending(),
            reasoning=name == "gpt-5",
            owner="openai" if name == "gpt-5" else "",
            open_weights="/" in name,
        )
        for name, usd in PRICES.items()
    }
    python = PythonTool("python", "runs it", Wasteful(rng), 0.0, None, 60.0, 0.0000083)
    records = RecordsTool("records", "reads", {"order": {"1": {"a": 1}}}, usd_per_call=0.003)

    def roles():
        helpers = {"code": [python], "search": [replace(records, name="web")], "answer": []}
        return [
            RoleTool(
                name, "d", {f"{name}-{n}": e for n, e in enumerate(experts.values())}, helpers[kind]
            )
            for name, (kind, *_) in ROLES.items()
        ]

    def plain():
        return [
            *(ExpertTool(e.model.split("/")[-1], "d", e) for e in experts.values()),
            python,
            records,
        ]

    def behind_endpoint(engine, model):
        """The rollout of a model whose turns a babbler writes."""

        class Answering(Endpoint):
            def complete(self, body, timeout_s, on_part=None):
                tokens = endpoint.complete(body, timeout_s).tokens
                message = endpoint_message(engine) | {"finish_reason": "stop"}
                return Reply(message, tokens, seconds=0.1)

        price = Price(*PRICED[model])
        name = f"{model}@http://x/v1"
        rollout = EndpointRollout(name, price, nano_tokenizer, SETTINGS, Spending())
        rollout.server = Answering("")
        return rollout

    servers = []

    def orchestrator(name, tools):
        """A babbler with tools of its own at a server, as an expert."""
        engine = Babbler(nano_tokenizer, rng)
        engine.env = ToolEnvironment(Task("served", "What is it?"), tools)

        def make(question, preference, seed):
            return ToolEnvironment(Task("served", question, preference), tools)

        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        server = Server(behind_endpoint(engine, POLICY), POLICY, make, defaults)
        listening = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        servers.append((server, thread))
        there = Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", most_requests=1)
        price, spending = Price(1, 1), Spending()
        expert = ServedOrchestrator(name, there, f"{POLICY}+tools", price, spending)
        return ExpertTool(name, "d", expert)

    inner = orchestrator("inner", plain())
    deputy = orchestrator("deputy", [*roles(), inner])
    named = {
        "desk": "desk",
        "questions": f"questions:{folder / 'rows.jsonl'}",
        "published": f"questions:{folder / 'rows.jsonl'}",
    }
    published = os.path.join(os.path.dirname(__file__), "../../assets/toolorchestra.toml")
    worlds = {}
    for kind, name in named.items():
        tools = {"desk": "", "published": published}.get(kind)
        if kind == "questions":
            listed = [
                {"name": n, "kind": "expert", "description": "d", "expert": n}
                for n in ("gpt-5", "o3-mini")
            ]
            (folder / "tools.json").write_text(json.dumps({"tools": listed}))
            tools = str(folder / "tools.json")
        worlds[kind] = open_world(TaskSection(name, tools=tools), 0, Wasteful(rng))
    domains = {
        "domain": load_world(folder / "made"),
        "domain of models": load_world(
            folder / "made", 0, Models(experts=Everything(experts["gpt-5"]))
        ),
    }

    def environment(kind, seed):
        if kind in worlds:
            task = worlds[kind].task("train", seed % 50)
            return worlds[kind].environment(task, seed)
        if kind in domains:
            return domains[kind].environment(domains[kind].task("train", seed % 8), seed)
        tools = {
            "roles": roles,
            "experts": plain,
            "endpoint": plain,
            "orchestrator": lambda: [*roles()[:2], deputy],
        }
        return ToolEnvironment(Task("t", "What is it?"), tools[kind]())

    def attempt(kind, seed):
        rng.seed(f"{kind}/{seed}")
        ledger.clear()
        env = environment(kind, seed)
        tools = list(getattr(env, "by_name", {}).values())
        labels = [*all_ban_names(tools), *getattr(env, "experts", ())]
        preference = replace(
            env.task.preference,
            usd=10 ** rng.uniform(-6, 0.5),
            seconds=rng.choice((None, None, 10 ** rng.uniform(-1, 2))),
            never=rng.sample(labels, rng.choice((0, 0, 1, 2)) if len(labels) > 1 else 0),
        )
        env.task = replace(env.task, preference=preference)
        engine = Babbler(nano_tokenizer, rng)
        engine.env = env
        rollout = Rollout(engine, nano_tokenizer, lambda *p: p, SETTINGS, Price(0.2, 0.2))
        if kind == "endpoint":
            rollout = behind_endpoint(engine, "gpt-5")
        (t,) = rollout.run([env], [seed])
        while any(server.service.attempts for server, _ in servers):
            time.sleep(0.001)  # a task that was given up still goes on
        return t, preference, [*ledger]

    yield attempt
    for server, thread in servers:
        server.should_exit = True
        thread.join()


class Everything(dict):
    """Has the same expert under every name."""

    def __init__(self, expert):
        super().__init__()
        self.expert = expert

    def __missing__(self, name):
        return self.expert


KINDS = (
    "desk",
    "questions",
    "published",
    "domain",
    "domain of models",
    "roles",
    "experts",
    "endpoint",
    "orchestrator",
)


@pytest.mark.slow
def test_no_attempt_spends_a_cent_more_than_its_user_allows(play):
    spent, called, refused, cut = 0.0, 0, 0, 0
    for seed in range(ATTEMPTS):
        kind = KINDS[seed % len(KINDS)]
        t, preference, ledger = play(kind, seed)
        where = f"{kind}, seed {seed}: ${t.cost_usd:g} of ${preference.usd:g}"
        tolerance = 1e-9 * preference.usd
        assert t.cost_usd <= preference.usd + tolerance, where
        asked = sum(usd for _, usd in ledger)
        assert asked <= preference.usd + tolerance, f"{where}: experts charged ${asked:g}"
        if preference.seconds is None:  # a call that is given up is billed at its most
            assert asked <= t.cost_usd + tolerance, where
        results = [result for turn in t.turns for result in turn.results]
        refused += sum(result.refused for result in results)
        called += sum(not result.refused for result in results)
        cut += t.status == "user_limit"
        spent += t.cost_usd
        if kind != "endpoint":  # which is itself one of the models
            for model in {model for model, _ in ledger} - {POLICY}:
                names = {
                    model,
                    "openai" if model == "gpt-5" else "-",
                    "open" if "/" in model else "proprietary",
                }
                assert not banned(names, preference.never), f"{where}: {model} was asked"
    print(f"{ATTEMPTS} attempts: {called} calls, {refused} refused, {cut} cut, ${spent:.2f} spent")
    assert called > ATTEMPTS / 4 and refused > ATTEMPTS / 20
