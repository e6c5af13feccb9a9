"""The routers: billed like a policy; other worlds have orders of experts, or controls."""

from __future__ import annotations

import json
import threading
import time

import pytest

from nanorchestra.agent.attempts import play
from nanorchestra.agent.threads import in_daemons
from nanorchestra.config import TaskSection
from nanorchestra.model.checkpoint import NANO
from worlds.desk import Desk
from worlds.desk_programs import PROGRAMS
from worlds.load import open_world
from worlds.metrics import score, summarise
from worlds.programs import play_program
from worlds.routers import routers_of


def played(world, count):
    """The summary of each router on the first held-out tasks."""
    tasks = [world.task("held_out", index) for index in range(count)]
    summaries = {}
    for name, router in routers_of(world).items():
        attempts, _ = play(router, lambda i: world.environment(tasks[i], 0), range(count))
        for task, attempt in zip(tasks, attempts, strict=True):
            score(task, attempt)
        summaries[name] = summarise(tasks, attempts)
    return summaries


def test_an_attempt_is_billed_for_every_call(sandbox):
    world = Desk(2, sandbox)
    for task in (world.task("train", index) for index in range(40)):
        env, spent = world.environment(task, 0), []

        def recorded(call, spent=spent):
            return lambda arguments: spent.append(call(arguments)) or spent[-1]

        for tool in env.by_name.values():
            tool.call = recorded(tool.call)
        attempt = play_program(PROGRAMS["program"](task), env)
        assert attempt.cost_usd == pytest.approx(sum(result.cost_usd for result in spent))
        assert attempt.latency_s == pytest.approx(sum(result.latency_s for result in spent))
        assert sum(attempt.calls.values()) == len(spent) > 0


def test_attempts_run_side_by_side_and_none_begins_when_results_are_not_asked_for():
    """As after Ctrl-C: the process does not wait for those that run, nor pays for more."""
    gate, begun = threading.Event(), []

    def call(number):
        begun.append(number)
        assert number < 1 or gate.wait(9)
        return number

    results = in_daemons(call, range(40), 3)
    assert next(results) == 0
    results.close()
    gate.set()
    time.sleep(0.1)
    assert len(begun) <= 4
    assert list(in_daemons(str, range(40), 3)) == [str(number) for number in range(40)]


def test_the_routers_of_any_world(tmp_path, sandbox):
    """The expensive expert is right more often; a cascade asks until two agree."""
    usd = {"strong": [1.0, 10.0], "middle": [0.5, 2.0], "quick": [0.1, 0.4]}
    experts, tools = {}, []
    for name, price in usd.items():
        experts[name] = {"endpoint": "here", "model": name, "usd": price, "max_tokens": 2000}
        tools.append({"name": name, "kind": "expert", "description": name, "expert": name})
    endpoints = {"here": {"base_url": "http://127.0.0.1:9/v1"}}
    catalogue = tmp_path / "tools.json"
    catalogue.write_text(json.dumps({"endpoints": endpoints, "experts": experts, "tools": tools}))
    rows = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = f"questions:{tmp_path}/rows.jsonl"
    world = open_world(TaskSection(file, str(catalogue), preference=""), 0, sandbox, None)
    summaries = played(world, world.size("held_out"))
    right = {name: summary["accuracy"] for name, summary in summaries.items()}
    assert right["strongest"] > right["cheapest"] and right["cascade"] > right["cheapest"]
    assert 3 > summaries["cascade"]["turns"] > 2 > summaries["cheapest"]["turns"] == 1
    assert summaries["cheapest"]["calls"] == {"quick": 1.0}

    roles = f"{catalogue},{NANO.with_name('toolorchestra.toml')}"
    world = open_world(TaskSection(file, roles, preference=""), 0, sandbox, None)
    env = world.environment(world.task("held_out", 0), 0)
    (attempt,) = routers_of(world)["strongest"].run([env], [0])
    assert attempt.turns[0].calls[0].name == "answer" and attempt.cost_usd > 0  # a published role


def test_a_world_without_experts_has_controls_or_no_routers(sandbox):
    """The copier, told what is right, does plain writes alone: the rest needs a look-up."""
    name = "desk=0.5, domains=0.5"
    assert routers_of(open_world(TaskSection(name), 0, sandbox, None)) == {}
    name = "domains:railway+clinic+university"
    summaries = played(open_world(TaskSection(name), 0, sandbox, None), 90)
    right = {kind: row["accuracy"] for kind, row in summaries["copier"]["by_kind"].items()}
    assert {"look-up, then write", "look-up, then refuse"} < {*right}
    assert {right.pop("write"), right.pop("hand over", 1.0)} == {1.0} and {*right.values()} == {0.0}
    assert summaries["nothing"]["accuracy"] == 0
    row = summaries["copier"]["right_by_kind"]["write"]
    assert row["low"] < row["right"] == row["high"] == 1 and row["tasks"] > 10
