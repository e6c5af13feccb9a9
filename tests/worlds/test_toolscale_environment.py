"""Domain tasks as the agent loop plays them: scores, experts, preferences and task files."""

from __future__ import annotations

import asyncio
import json
import random
import re

import pytest
from scripted import ScriptedEngine, execute

from data_gen import main
from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.tool import Allowance
from nanorchestra.config import RolloutSection
from nanorchestra.errors import UserError
from nanorchestra.records import ToolCall
from worlds import preferences
from worlds.toolscale.dataset import load_tasks, load_world, teach
from worlds.toolscale.offers import draw_experts
from worlds.toolscale.score import Scorer, attempt
from worlds.toolscale.words import communicated, mentions


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    options = ["--tasks", "40", "--seed", "5", "--domains", "railway", "--workers", "1"]
    assert main([*options, "--out", str(out)]) == 0
    return out


@pytest.fixture
def world(made):
    return load_world(made)


def environments(world, count):
    return [world.environment(world.task("train", index), 0) for index in range(count)]


def test_tasks_are_functions_of_split_index_and_seed_and_splits_share_none(world, made):
    assert world.task("train", 3) == load_world(made).task("train", 3)
    assert load_world(f"{made}/").name == f"{made}/", "tasks name their world as task.world does"
    offered = world.task("train", 3).data["experts"]
    assert offered == load_tasks(made / "tasks.jsonl")[3]["experts"], "a row has its own"
    ids = {
        split: {world.task(split, index).data["task"]["id"] for index in range(40)}
        for split in ("train", "held_out")
    }
    assert not ids["train"] & ids["held_out"] and len(ids["held_out"]) == 8
    json.dumps(world.task("train", 0).data)


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
            schema = env.tools[-1]["function"]
            offered = schema["parameters"]["properties"]["expert"]["enum"]
            assert schema["name"] == "call_expert" and offered == list(env.experts)
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
                assert 60 <= result.output_tokens <= 600
            for wrong in ("expert-9", []):
                assert execute(env, ToolCall("call_expert", {"expert": wrong})).error


def test_the_agent_loop_plays_what_the_teacher_shows(world, nano_tokenizer):
    shown, env = (world.environment(world.task("train", 1), 0) for _ in range(2))
    assert shown.score("") == 0
    script = []
    for lesson in teach(shown):
        turn = lesson.content
        if lesson.call:
            made = {"name": lesson.call.name, "arguments": lesson.call.arguments}
            turn = f"<tool_call>\n{json.dumps(made)}\n</tool_call>"
        script.append(f"<think>\nt\n</think>\n\n{turn}<|im_end|>")
    assert shown.over and shown.score("") == 1
    engine = ScriptedEngine(nano_tokenizer, [script])
    limits = RolloutSection(turns=40, turn_tokens=512, context_tokens=10**6)
    (t,) = Rollout(engine, nano_tokenizer, lambda seed, budget: None, limits).run([env], [0])
    assert (t.status, t.outcome, t.answer) == ("answered", 1.0, lesson.content)
    assert len(t.turns) == len(script)
    assert f"<|im_start|>user\n{env.task.question}<|im_end|>" in nano_tokenizer.decode(t.ids)


# --- the score


def test_the_rules_of_the_policy_are_checked_on_the_trace(world):
    for env in environments(world, 12):
        scorer = env.scorer
        golden, infos = scorer.golden, scorer.communicate_info
        right = attempt(golden, infos)
        assert {rule["check"] for rule in scorer.rules} <= {"before", "confirmed", "made"}
        assert all(rule["text"] in env.domain.policy for rule in scorer.rules)
        silent = [step for step in right if step[0] == "call" or step[1] in infos]
        stranger = attempt(golden[1:], infos)
        wrote = any(env.domain.kinds[golden[place][0]] == "write" for place in scorer.effects)
        assert scorer.score(right) == 1
        assert scorer.score(silent) == scorer.score(stranger) == (not wrote)
        (looks,) = [rule["args"] for rule in scorer.rules if rule["check"] == "made"] or [None]
        unseen = [call for call in golden if not looks or call[0] not in looks["tools"]]
        assert scorer.score(attempt(unseen, infos)) == (looks is None)


def test_without_db_the_golden_writes_must_be_made(world):
    env = next(env for env in environments(world, 20) if env.scorer.effects)
    golden, infos = env.scorer.golden, env.scorer.communicate_info
    env.scorer.basis = ["ACTION"]
    assert env.scorer.score(attempt(golden, infos)) == 1
    skipped = env.scorer.effects[-1]
    assert env.scorer.score(attempt([*golden[:skipped], *golden[skipped + 1 :]], infos)) == 0


def test_a_dump_of_numbers_tells_nothing(world):
    (env,) = environments(world, 1)
    criteria = {"communicate_info": ["37"], "actions": [], "reward_basis": ["COMMUNICATE"]}
    scorer = Scorer(env.domain, {"evaluation_criteria": criteria})

    def told(*messages):
        return scorer.score(attempt([], messages)) == 1

    assert told("You have 37 points, 5 more than in 2024, and pay $12.50.")
    assert told(*(f"Of these {n} is one." for n in range(5)), "It is 37.")
    assert not told(" ".join(map(str, range(100))))
    assert not told(*(" ".join(map(str, range(n, n + 5))) for n in range(0, 100, 5)))


def test_what_is_communicated_and_mentioned():
    message = (
        "It costs 1,000 dollars, or 12.50 each, 5% less on 2026-03-15 at 15:30. You are GOLD now."
    )
    for info in ("1000", "$1,000.00", "12.5", "5", "Gold", "2026-03-15", "each"):
        assert communicated(info, ["hello", message])
    for info in ("100", "10000", "2", "15", "3", "golden", "go", "26", "2026-03-1"):
        assert not communicated(info, ["hello", message])
    assert mentions(message, 12.5) and mentions("a side effect, please", "side_effect")
    assert not mentions("train T155", 155) and not mentions("T1234", "T123")


# --- preferences and catalogues


def test_words_say_what_is_preferred_and_splits_share_no_phrasing_expert_or_price():
    rng, wordings, models, behind = random.Random(0), {}, {}, set()
    for split in ("train", "held_out"):
        wordings[split], models[split] = set(), set()
        for _ in range(300):
            for expert in draw_experts(rng, split):
                models[split].add(expert["model"])
                behind.add((expert["alias"], expert["model"]))
                assert str(expert["usd"][0]) in expert["description"]
                assert expert["model"] not in expert["description"]
            preference = preferences.draw(rng, ["expert-1", "expert-2", "expert-3"], split)
            sentences = preference.text.split(". ")
            changed = [getattr(preference, name) != usual for name, usual in preferences.DEFAULTS]
            least = sum(changed) + len(preference.tools)
            assert (
                least <= sum(map(bool, sentences)) <= least + 1
            )  # being right may be stated anyway
            assert all(tool in preference.text for tool in preference.tools)
            wordings[split].update(
                re.sub(r"expert-\d", "X", each).rstrip(".") for each in sentences
            )
    assert not (wordings["train"] & wordings["held_out"]) - {""} and len(wordings["train"]) > 30
    assert not models["train"] & models["held_out"]
    assert len(behind) == 3 * len(models["train"] | models["held_out"]), "each behind every alias"


# --- files


def test_a_damaged_task_file_is_refused_and_the_line_named(made, tmp_path):
    text = (made / "tasks.jsonl").read_text()
    first = text.splitlines()[0]
    for content, says in (
        (text[:-30], "line 40: not JSON"),
        (first + "\n" + first, "line 2: id 'railway-5-0' stands twice"),
        (first.replace('"made"', '"never"'), "check is 'never'; it should be 'before'"),
    ):
        (tmp_path / "tasks.jsonl").write_text(content)
        with pytest.raises(UserError, match=says):
            load_world(tmp_path / "tasks.jsonl")
    (tmp_path / "tasks.jsonl").write_text(text)
    assert len(load_tasks(tmp_path / "tasks.jsonl")) == 40
    with pytest.raises(UserError, match="worlds/railway: the code of its tools cannot be used"):
        load_world(tmp_path)
