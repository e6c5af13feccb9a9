"""A user's dollars and bans hold over a whole tree of calls, whatever the policy writes.

A policy that writes anything plays attempts in seven settings: worlds, published roles, experts,
and behind an endpoint. Its experts are asked at a stand-in for a server that counts as many tokens
as it honestly can. `BUDGET_ATTEMPTS=10000` plays more.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted import ScriptedEngine

from data_gen import main as data_gen
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.tool import all_ban_names
from nanorchestra.config import RolloutSection, TaskSection
from nanorchestra.records import Price, Task, banned
from nanorchestra.serving.endpoint import EndpointRollout
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.http import Reply
from nanorchestra.tools.models import Expert, ExpertTool
from nanorchestra.tools.roles import ROLES, RoleTool
from nanorchestra.tools.spending import Spending
from tools import PythonTool, RecordsTool
from worlds.load import open_world
from worlds.toolscale.dataset import load_world
from worlds.toolscale.environment import Models
from worlds.toolscale.offers import EXPERTS

ATTEMPTS = int(os.environ.get("BUDGET_ATTEMPTS", 210))
SETTINGS = RolloutSection(turns=5, turn_tokens=150, context_tokens=2500, calls_per_turn=3)
PRICES = {"gpt-5": Price(1.25, 10.0), "claude": Price(15, 75), "Qwen/Qwen3-8B": Price(0.2, 0.2)}
OWNERS = {"gpt-5": "openai"}
WORDS = "tool text 42 the of law code answer hi ??? x" * 40
PUBLISHED = Path(__file__).parents[2] / "assets/toolorchestra.toml"
KINDS = "desk", "published", "domain", "domain of models", "roles", "experts", "endpoint"


@dataclass(frozen=True)
class Greedy(Endpoint):
    """Counts as many tokens as a request can have, and fails now and then after it has worked.

    `ledger` holds (model, US dollars) of all that was asked.
    """

    rng: random.Random = None
    ledger: list = None

    def complete(self, body, timeout_s, on_part=None):
        most = body.get("max_tokens") or body["max_completion_tokens"]
        text, template = body["messages"][-1]["content"], 100
        if len(body["messages"]) > 1 or "tools" in body:
            text, template = json.dumps([body["messages"], body.get("tools", [])]), 200
        read = len(text.encode()) + self.rng.randint(0, template)
        tokens = read, self.rng.choice((1, most, most))
        self.ledger.append((body["model"], PRICES[body["model"]].cost(*tokens)))
        if self.rng.random() < 0.1:
            return Reply(tokens=tokens, problem="the reply breaks off")
        content = self.rng.choice(("<query>a long query</query>", "```python\n1\n```", "42", ""))
        message = {"role": "assistant", "content": content, "finish_reason": "stop"}
        return Reply(message, tokens, seconds=self.rng.random())


@dataclass(frozen=True)
class GreedyPolicy(Greedy):
    """A greedy server of the policy itself, whose messages have the calls of a babbler."""

    babbler: Babbler = None

    def complete(self, body, timeout_s, on_part=None):
        reply = super().complete(body, timeout_s)
        parts = self.babbler.turn().split("<tool_call>\n")[1:]
        functions = [json.loads(part.split("\n</tool_call>")[0]) for part in parts]
        calls = [{"type": "function", "function": function} for function in functions]
        message = {"role": "assistant", "content": "42", "tool_calls": calls}
        return Reply(message | {"finish_reason": "stop"}, reply.tokens, seconds=0.1)


class Babbler(ScriptedEngine):
    """An engine whose sessions write calls, answers and nonsense, to as many ids as are allowed."""

    def __init__(self, tokenizer, rng, env):
        super().__init__(tokenizer, itertools.repeat(iter(self.turn, None)))
        self.max_context, self.rng, self.env = SETTINGS.context_tokens, rng, env

    def turn(self):
        rng, calls = self.rng, []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4)) if self.env.tools else 0):
            function = rng.choice(self.env.tools)["function"]
            arguments = {}
            for name, schema in function["parameters"].get("properties", {}).items():
                texts = ["order", "gpt-5", WORDS[: rng.randint(1, 400)]]
                arguments[name] = rng.choice(schema.get("enum") or texts)
                if name == "model":
                    experts = getattr(self.env.by_name[function["name"]], "experts", ["none"])
                    arguments[name] = rng.choice(list(experts))
            call = json.dumps({"name": function["name"], "arguments": arguments})
            calls.append(f"<tool_call>\n{call}\n</tool_call>")
        thought = WORDS[: rng.choice((0, 5, 50, 700))]
        content = "" if calls else rng.choice(("42", WORDS[:300]))
        return f"<think>\n{thought}\n</think>\n\n{content}" + "\n".join(calls) + "<|im_end|>"


class Wasteful:
    """A sandbox in which code runs on after its time, and prints much."""

    def __init__(self, rng):
        self.rng = rng

    def run(self, code, timeout_s):
        ran = {"seconds": timeout_s * self.rng.uniform(0, 1.2), "died": False, "waited_s": 0.0}
        return SimpleNamespace(stdout="1 " * self.rng.randint(0, 4000), error="", **ran)


@pytest.fixture
def play(nano_tokenizer, tmp_path):
    """play(kind, seed) plays an attempt of a kind; returns it with its limits and the ledger."""
    rng, ledger = random.Random(0), []
    rows = [{"question": f"What is {n} plus {n}?", "answer": 2 * n} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = ["--tasks", "12", "--seed", "5", "--domains", "railway"]
    assert data_gen([*made, "--out", str(tmp_path / "made")]) == 0

    endpoint = Greedy("", rng=rng, ledger=ledger)
    experts = {}
    for name, price in PRICES.items():
        about = {"owner": OWNERS.get(name, ""), "open_weights": "/" in name}
        about["reasoning"] = name == "gpt-5"
        experts[name] = Expert(name, endpoint, name, price, Spending(), **about)
    python = PythonTool("python", "runs it", Wasteful(rng), 0.0, None, 60.0, 0.0000083)
    records = RecordsTool("records", "reads", {"order": {"1": {"a": 1}}}, usd_per_call=0.003)
    helpers = {"code": [python], "search": [replace(records, name="web")], "answer": []}
    roles = []
    for name, (kind, *_) in ROLES.items():
        aliases = {f"{name}-{n}": expert for n, expert in enumerate(experts.values())}
        roles.append(RoleTool(name, "d", aliases, helpers[kind]))
    plain = [ExpertTool(e.model.split("/")[-1], "d", e) for e in experts.values()]
    tools = {"roles": roles} | dict.fromkeys(("experts", "endpoint"), [*plain, python, records])

    questions = f"questions:{tmp_path / 'rows.jsonl'}"
    offered = [*EXPERTS["train"], *EXPERTS["held_out"]]
    everyone = dict.fromkeys(offered, experts["gpt-5"])
    worlds = {
        "desk": open_world(TaskSection("desk"), 0, Wasteful(rng)),
        "published": open_world(TaskSection(questions, tools=str(PUBLISHED)), 0, Wasteful(rng)),
        "domain": load_world(tmp_path / "made"),
        "domain of models": load_world(tmp_path / "made", 0, Models(experts=everyone)),
    }

    def environment(kind, seed):
        if kind in tools:
            return ToolEnvironment(Task("t", "What is it?"), tools[kind])
        task = worlds[kind].task("train", seed % 8)
        return worlds[kind].environment(task, seed)

    def attempt(kind, seed):
        rng.seed(f"{kind}/{seed}")
        ledger.clear()
        env = environment(kind, seed)
        labels = all_ban_names(getattr(env, "by_name", {}).values())
        labels = [*labels, *getattr(env, "experts", ())]
        preference = replace(
            env.task.preference,
            usd=10 ** rng.uniform(-6, 0.5),
            seconds=rng.choice((None, None, 10 ** rng.uniform(-1, 2))),
            never=rng.sample(labels, rng.choice((0, 0, 1, 2)) if len(labels) > 1 else 0),
        )
        env.task = replace(env.task, preference=preference)
        babbler = Babbler(nano_tokenizer, rng, env)
        rollout = Rollout(babbler, nano_tokenizer, lambda *p: p, SETTINGS, Price(0.2, 0.2))
        if kind == "endpoint":
            about = "gpt-5@http://x/v1", PRICES["gpt-5"], nano_tokenizer, SETTINGS, Spending()
            rollout = EndpointRollout(*about)
            rollout.server = GreedyPolicy("", rng=rng, ledger=ledger, babbler=babbler)
        (t,) = rollout.run([env], [seed])
        return t, preference, [*ledger]

    return attempt


@pytest.mark.slow
def test_no_attempt_spends_a_cent_more_than_its_user_allows(play):
    called, refused = 0, 0
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
        if kind != "endpoint":  # which is itself one of the models
            for model in {model for model, _ in ledger}:
                weights = "open" if "/" in model else "proprietary"
                names = {model, OWNERS.get(model, "-"), weights}
                assert not banned(names, preference.never), f"{where}: {model} was asked"
    assert called > ATTEMPTS / 4 and refused > ATTEMPTS / 20
