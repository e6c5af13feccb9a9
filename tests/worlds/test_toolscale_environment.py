"""Domain tasks as the agent loop plays them, the user, experts, preferences and task files."""

from __future__ import annotations

import json
import random
import re

import pytest
from scripted import ScriptedEngine, execute

from data_gen import main
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import RolloutSection
from nanorchestra.errors import UserError
from nanorchestra.records import ToolCall
from worlds import preferences
from worlds.toolscale.dataset import load_tasks, load_world, teach
from worlds.toolscale.offers import draw_experts


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    options = ["--tasks", "40", "--seed", "5", "--domains", "railway", "--workers", "1"]
    assert main([*options, "--out", str(out)]) == 0
    return out


@pytest.fixture
def world(made):
    return load_world(made)


def call(env, name, /, **arguments):
    return execute(env, ToolCall(name, arguments))


def environments(world, count):
    return [world.environment(world.task("train", index), 0) for index in range(count)]


def test_golden_play_scores_1_and_silence_0(world):
    for env in environments(world, 12):
        assert env.score("") == (not env.scorer.effects and not env.scorer.communicate_info)
        assert not any(lesson.call and lesson.result.error for lesson in teach(env))
        assert env.over and env.score("") == 1


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


def test_an_error_changes_nothing_and_unknown_or_unoffered_tools_are_refused(world):
    (env,) = environments(world, 1)
    hidden = env.offered.pop(0)
    wrong = (("nothing", {}), (hidden, {}), ("calculate", {}), ("calculate", {"expression": "x"}))
    for bad in [ToolCall(*pair) for pair in wrong] + [ToolCall("calculate", {}, error="not JSON")]:
        result = execute(env, bad)
        assert result.error and result.content.startswith("Error: ")
    assert env.tables == env.domain.tables


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
                done.append(call(env, "call_expert", expert="expert-1"))
            assert env.score("") == skill
            for result in done:
                assert result.alias == "expert-1" and not result.error
                assert result.cost_usd > 0 and result.latency_s > 0
                assert 60 <= result.output_tokens <= 600
            assert call(env, "call_expert", expert="expert-9").error
            assert call(env, "call_expert", expert=[]).error


def test_the_agent_loop_plays_a_world_with_a_user(world, nano_tokenizer):
    shown, env = (world.environment(world.task("train", 1), 0) for _ in range(2))
    thought, end = "<think>\nt\n</think>\n\n", "<|im_end|>"
    script = []
    for lesson in teach(shown):
        made = lesson.call and json.dumps(
            {"name": lesson.call.name, "arguments": lesson.call.arguments}
        )
        turn = f"<tool_call>\n{made}\n</tool_call>" if made else lesson.content
        script.append(f"{thought}{turn}{end}")
    engine, limits = (
        ScriptedEngine(nano_tokenizer, [script]),
        RolloutSection(turns=40, turn_tokens=512, context_tokens=10**6),
    )
    (t,) = Rollout(engine, nano_tokenizer, lambda seed, budget: None, limits).run([env], [0])
    assert (t.status, t.outcome, t.answer) == ("answered", 1.0, lesson.content)
    assert len(t.turns) == len(script)
    text = nano_tokenizer.decode(t.ids)
    for wish in env.user.wishes:
        assert f"<|im_start|>user\n{wish.say}<|im_end|>" in text


# --- preferences and catalogues


def test_words_say_what_is_preferred_and_splits_share_no_phrasing_expert_or_price():
    rng, wordings, offered = random.Random(0), {}, {}
    for split in ("train", "held_out"):
        wordings[split], offered[split] = set(), []
        for _ in range(300):
            offered[split] += draw_experts(rng, split)
            preference = preferences.draw(rng, ["expert-1", "expert-2", "expert-3"], split)
            sentences = preference.text.split(". ")
            changed = [getattr(preference, name) != usual for name, usual in preferences.DEFAULTS]
            least = sum(changed) + len(preference.tools)
            stated = sum(map(bool, sentences))
            assert least <= stated <= least + 1  # being right may be stated anyway
            assert all(tool in preference.text for tool in preference.tools)
            wordings[split].update(
                re.sub(r"expert-\d", "X", text).rstrip(".") for text in sentences
            )
    assert not (wordings["train"] & wordings["held_out"]) - {""} and len(wordings["train"]) > 30
    assert not {e["model"] for e in offered["train"]} & {e["model"] for e in offered["held_out"]}
    # Every model has stood behind every alias.
    assert len({(e["alias"], e["model"]) for e in offered["train"]}) == 18
    for expert in offered["train"]:
        assert str(expert["usd"][0]) in expert["description"]
        assert expert["model"] not in expert["description"]


# --- files


def test_a_damaged_task_file_is_refused_and_the_line_named(made, tmp_path):
    text = (made / "tasks.jsonl").read_text()
    first = text.splitlines()[0]
    for content, says in (
        (text[:-30], "line 40: not JSON"),
        (first + "\n" + first, "line 2: id 'railway-5-0' stands twice"),
    ):
        (tmp_path / "tasks.jsonl").write_text(content)
        with pytest.raises(UserError, match=says):
            load_world(tmp_path / "tasks.jsonl")
    (tmp_path / "tasks.jsonl").write_text(text)
    assert len(load_tasks(tmp_path / "tasks.jsonl")) == 40
    with pytest.raises(UserError, match="worlds/railway: is missing; data_gen.py writes it"):
        load_world(tmp_path)
