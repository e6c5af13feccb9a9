"""Domain tasks as the agent loop plays them: scores and experts."""

from __future__ import annotations

import asyncio
import json
import random
import re

import pytest
from scripted import execute

from data_gen import main
from nanorchestra.agent.tool import Allowance
from nanorchestra.records import ToolCall
from worlds import preferences
from worlds.toolscale.dataset import load_world
from worlds.toolscale.offers import draw_experts
from worlds.toolscale.score import Scorer, attempt
from worlds.toolscale.words import communicated, mentions


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    options = ["--tasks", "40", "--seed", "5", "--domains", "railway"]
    assert main([*options, "--out", str(out)]) == 0
    return out


@pytest.fixture
def world(made):
    return load_world(made)


def environments(world, count):
    return [world.environment(world.task("train", index), 0) for index in range(count)]


def test_every_fifth_task_is_held_out_and_a_task_is_a_function_of_its_place(world, made):
    assert (world.size("train"), world.size("held_out")) == (32, 8)
    assert world.task("train", 3) == load_world(made).task("train", 3)


def test_unknown_and_unoffered_tools_are_refused(world):
    (env,) = environments(world, 1)
    hidden = env.offered.pop(0)
    for call in (ToolCall("nothing", {}), ToolCall(hidden, {}), ToolCall("x", {}, error="no JSON")):
        result = execute(env, call)
        assert result.refused and result.content.startswith("Error: ")
    assert env.kit == env.domain.start and env.trace == [("user", env.task.question)]


def test_calls_of_one_turn_are_made_in_their_order(world):
    for env in environments(world, 20):
        calls = [ToolCall(*call) for call in env.scorer.golden]
        runs = [env.prepare(call, Allowance()).run for call in calls]

        async def together(runs):
            return await asyncio.gather(*(run() for run in runs))

        results = asyncio.run(together(runs))
        assert not any(result.error for result in results) and env.kit == env.scorer.gold
        assert [step[1:3] for step in env.trace[1:]] == env.scorer.golden


def test_experts_of_full_skill_solve_and_of_none_do_not(world):
    for skill in (1.0, 0.0):
        for env in [env for env in environments(world, 20) if env.scorer.effects][:8]:
            for expert in env.experts.values():
                assert expert["model"] not in json.dumps(env.tools)
                expert["skill"] = skill
            done = []
            while not env.over and len(done) < 40:
                done.append(execute(env, ToolCall("call_expert", {"expert": "expert-1"})))
            assert env.score("") == skill
            for result in done:
                assert result.alias == "expert-1" and not result.error
                assert result.cost_usd > 0 and result.latency_s > 0
            for wrong in ("expert-9", []):
                assert execute(env, ToolCall("call_expert", {"expert": wrong})).error


# --- the score


def test_the_rules_of_the_policy_are_checked_on_the_trace(world):
    for env in environments(world, 12):
        scorer = env.scorer
        golden, infos = scorer.golden, scorer.communicate_info
        right = attempt(golden, infos)
        silent = [step for step in right if step[0] == "call" or step[1] in infos]
        stranger = attempt(golden[1:], infos)
        wrote = any(env.domain.kinds[golden[place][0]] == "write" for place in scorer.effects)
        assert scorer.score(right) == 1
        assert scorer.score(silent) == scorer.score(stranger) == (not wrote)
        (looks,) = [rule["args"] for rule in scorer.rules if rule["check"] == "made"] or [None]
        unseen = [call for call in golden if not looks or call[0] not in looks["tools"]]
        assert scorer.score(attempt(unseen, infos)) == (looks is None)


def test_a_dump_of_numbers_tells_nothing(world):
    (env,) = environments(world, 1)
    criteria = {"communicate_info": ["37"], "actions": [], "reward_basis": ["COMMUNICATE"]}
    scorer = Scorer(env.domain, {"evaluation_criteria": criteria})
    for messages, told in (
        (["You have 37 points, 5 more than in 2024, and pay $12.50."], 1),
        ([" ".join(map(str, range(100)))], 0),
        ([" ".join(map(str, range(n, n + 5))) for n in range(0, 100, 5)], 0),
    ):
        assert scorer.score(attempt([], messages)) == told


def test_what_is_communicated_and_mentioned():
    message = "It costs 1,000 dollars, or 12.50 each, 5% less on 2026-03-15. You are GOLD now."
    for info in ("1000", "$1,000.00", "12.5", "5", "Gold", "2026-03-15"):
        assert communicated(info, ["hello", message])
    for info in ("100", "2", "15", "golden"):
        assert not communicated(info, ["hello", message])
    assert mentions("a side effect, please", "side_effect") and not mentions("T1234", "T123")


def test_splits_share_no_phrasing_of_a_preference_and_no_expert():
    rng, wordings, models = random.Random(0), {}, {}
    for split in ("train", "held_out"):
        wordings[split], models[split] = set(), set()
        for _ in range(300):
            models[split].update(expert["model"] for expert in draw_experts(rng, split))
            preference = preferences.draw(rng, ["expert-1", "expert-2", "expert-3"], split)
            for sentence in preference.text.split(". "):
                wordings[split].add(re.sub(r"expert-\d", "X", sentence).rstrip("."))
    assert not (wordings["train"] & wordings["held_out"]) - {""} and len(wordings["train"]) > 30
    assert not models["train"] & models["held_out"]
