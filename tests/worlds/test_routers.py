"""The fixed routers: billed like a policy, bounded by perfect play."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest

from nanorchestra.agent.attempts import play
from nanorchestra.config import TaskSection
from nanorchestra.model.checkpoint import NANO
from nanorchestra.records import Trajectory
from worlds.load import open_world
from worlds.metrics import interval, score, summarise
from worlds.miniature.offers import expected_cost, fits, is_expert, skill
from worlds.miniature.world import Miniature
from worlds.routers import (
    MINIATURE,
    by_table,
    expected_rewards,
    routers_of,
    unskilled,
    use_until_sure,
    vote,
)
from worlds.skill_table import skill_table


@pytest.fixture
def open_miniature(sandbox):
    return lambda seed: open_world(TaskSection(MINIATURE), seed, sandbox, None)


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


def test_the_fitting_tool_gives_the_right_answer(open_miniature):
    world = open_miniature(0)
    outcomes = {"arithmetic": [], "lookup": [], "chain": []}
    for split in ("train", "held_out"):
        for task in (world.task(split, index) for index in range(300)):
            if fitting := [offer for offer in task.data["tools"] if fits(offer, task)]:
                attempt = use_until_sure(fitting, world.environment(task, 0))
                outcomes[task.kind].append(attempt.outcome)
    assert fmean(outcomes["arithmetic"]) == fmean(outcomes["chain"]) == 1.0
    assert fmean(outcomes["lookup"]) > 0.9  # a search may find another passage


def test_an_attempt_is_billed_for_every_call(open_miniature):
    world = open_miniature(2)
    for task in (world.task("train", index) for index in range(40)):
        env, spent = world.environment(task, 0), []

        def recorded(call, spent=spent):
            return lambda arguments: spent.append(call(arguments)) or spent[-1]

        for tool in env.by_name.values():
            tool.call = recorded(tool.call)
        attempt = use_until_sure(task.data["tools"], env)
        assert attempt.cost_usd == pytest.approx(sum(result.cost_usd for result in spent))
        assert attempt.latency_s == pytest.approx(sum(result.latency_s for result in spent))
        assert sum(attempt.calls.values()) == len(spent) > 0


def test_the_expected_reward_of_a_plan_is_the_mean_over_many_attempts(open_miniature):
    """A second tool is used if the first is unsure; its cost counts only then."""
    world = open_miniature(0)
    task = world.task("train", 21)  # a user who minds cost and time; small is cheap and slow
    plan = [offer for offer in task.data["tools"] if is_expert(offer)][:2]
    assert task.preference.name == "balanced" and [o["what"] for o in plan] == ["small", "medium"]
    one, both = expected_rewards(task, [plan[:1], plan])
    rewards = []
    for seed in range(2000):
        attempt = use_until_sure(plan, world.environment(task, seed))
        rewards.append(score(task, attempt).reward)
    _, low, high = interval(rewards)
    assert one < low < both < high

    first, second = (skill(o["what"], task.data["subject"], task.data["difficulty"]) for o in plan)
    paid = [expected_cost(offer, task.data["difficulty"]) for offer in plan]
    waited = [float(offer["latency"]) for offer in plan]
    once = Trajectory(task.id, 0, outcome=1.0, calls_usd=paid[0], latency_s=waited[0])
    twice = replace(once, calls_usd=sum(paid), latency_s=sum(waited))
    unsure = first.right * first.unsure_if_right + (1 - first.right) * first.unsure_if_wrong
    by_hand = first.right * (1 - first.unsure_if_right) * score(task, once).reward
    by_hand += unsure * second.right * score(task, twice).reward
    assert both == pytest.approx(by_hand)


def test_what_each_router_knows_shows_in_its_reward(open_miniature):
    summaries = played(open_miniature(1), 500)
    without_skills, tables = ["strongest", "cascade", "vote"], ["table-50", "table-500"]
    assert list(summaries) == [*without_skills, *tables, "blind", "informed", "perfect"]
    reward = {name: summary["reward"] for name, summary in summaries.items()}
    assert reward["perfect"] > reward["informed"] > reward["blind"] + 0.01
    assert max(reward["strongest"], reward["cascade"]) + 0.05 < reward["vote"]
    assert reward["vote"] + 0.03 < reward["table-50"] < reward["table-500"]
    assert reward["table-500"] < reward["informed"] + 0.02
    assert not any(summary["avoided_rate"] for summary in summaries.values())
    assert summaries["cascade"]["cost_usd"] < summaries["strongest"]["cost_usd"]


def test_experts_vote_only_for_users_who_mind_neither_cost_nor_time(open_miniature):
    world = open_miniature(0)
    asked = {}
    for task in (world.task("train", index) for index in range(60)):
        if task.kind == "knowledge" and not task.preference.tools:
            attempt = vote(unskilled(task), world.environment(task, 0))
            experts = sum(is_expert(offer) for offer in task.data["tools"])
            asked.setdefault(task.preference.name, []).append((len(attempt.turns), experts))
    assert len(asked) == 4
    for name, counts in asked.items():
        for turns, experts in counts:
            assert turns == experts if name == "right" else turns <= 2


def test_what_a_limit_refuses_has_no_vote(open_miniature):
    """A refused expert is not asked: the answers that were paid for count."""
    world = open_miniature(0)
    answered = 0
    for task in (world.task("train", index) for index in range(400)):
        preference = task.preference
        if task.kind == "knowledge" and not (preference.cost or preference.latency):
            limited = replace(task, preference=replace(preference, usd=0.001))
            attempt = vote(unskilled(limited), world.environment(limited, 0))
            heard = [r for turn in attempt.turns for r in turn.results if not r.error]
            assert bool(attempt.answer) == bool(heard)
            answered += bool(heard) and len(heard) < len(attempt.turns)
    assert answered


def test_each_task_has_one_of_many_tables():
    assert skill_table(50, number=0) == skill_table(50) != skill_table(50, number=1)
    task = Miniature(0, None).task("held_out", 0)
    others = [replace(task, id=f"{task.id}/{number}") for number in range(40)]
    assert len({tuple(offer["name"] for offer in by_table(other, 50)) for other in others}) > 1


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

    mixture = f"miniature=0.5, {file}=0.5"
    world = open_world(TaskSection(mixture, str(catalogue), preference=""), 0, sandbox, None)
    assert len({world.task("held_out", index).world for index in range(40)}) == 2
    assert list(summaries := played(world, 40)) == ["strongest", "cascade"]
    assert summaries["strongest"]["turns"] < summaries["cascade"]["turns"]


def test_a_world_without_experts_has_controls_or_no_routers(sandbox):
    """The copier, told what is right, does plain writes alone: the rest needs a look-up."""
    name = "miniature=0.5, domains=0.5"
    assert routers_of(open_world(TaskSection(name), 0, sandbox, None)) == {}
    name = "domains:railway+clinic+university"
    summaries = played(open_world(TaskSection(name), 0, sandbox, None), 90)
    right = {kind: row["accuracy"] for kind, row in summaries["copier"]["by_kind"].items()}
    assert {"look-up, then write", "look-up, then refuse"} < {*right}
    assert {right.pop("write"), right.pop("hand over", 1.0)} == {1.0} and {*right.values()} == {0.0}
    assert summaries["nothing"]["accuracy"] == 0
    row = summaries["copier"]["right_by_kind"]["write"]
    assert row["low"] < row["right"] == row["high"] == 1 and row["tasks"] > 10
