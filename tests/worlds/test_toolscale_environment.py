"""Domain tasks as the agent loop plays them, users, preferences, and files in and out."""

from __future__ import annotations

import asyncio
import copy
import datetime
import json
import random
import re
from pathlib import Path

import pytest
from scripted import ScriptedEngine

from data_gen import main
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.errors import UserError
from nanorchestra.records import Price, ToolCall
from nanorchestra.tools.experts import EndpointError
from worlds.toolscale import preferences, user
from worlds.toolscale.dataset import load_world
from worlds.toolscale.environment import Action, SimulatedExpert
from worlds.toolscale.formats import export_tau2, import_tau2, load_rows, load_tasks, repaired
from worlds.toolscale.user import (
    STOP,
    TRANSFER,
    LanguageModelUser,
    ScriptedUser,
    ended,
    first_person,
)

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    options = ["--tasks", "40", "--seed", "5", "--domains", "railway", "--workers", "1"]
    assert main([*options, "--out", str(out)]) == 0
    return out


@pytest.fixture
def world(made):
    return load_world(made)


def run(coroutine):
    return asyncio.run(coroutine)


def call(env, name, /, **arguments):
    return run(env.execute(ToolCall(name, arguments)))


def test_golden_play_scores_1_and_silence_0(world):
    for index in range(12):
        env = world.environment(world.task("train", index), 0)
        assert env.score("") == 0
        for name, arguments in env.scorer.golden_calls():
            assert not call(env, name, **arguments).error
        while run(env.reply(env.last_word())) is not None:
            pass
        assert env.over and env.score("") == 1


def test_tasks_are_functions_of_split_index_and_seed_and_splits_share_none(world, made):
    assert world.task("train", 3) == load_world(made).task("train", 3)
    assert world.task("train", 3) != load_world(made, seed=1).task("train", 3)
    ids = {
        split: {task.data["task"]["id"] for task in world.tasks(split, 40)}
        for split in ("train", "held_out")
    }
    assert not ids["train"] & ids["held_out"] and len(ids["held_out"]) == 8
    json.dumps(world.task("train", 0).data)


def test_an_error_changes_nothing_and_unknown_or_unoffered_tools_are_refused(world):
    env = next(
        env
        for task in world.tasks("train", 32)
        if len((env := world.environment(task, 0)).offered) < len(env.world.tools)
    )
    hidden = next(name for name in env.world.by_name if name not in env.offered)
    for bad in (
        ToolCall("nothing", {}),
        ToolCall(hidden, {}),
        ToolCall("calculate", {"expression": "x"}),
        ToolCall("calculate", {}),
        ToolCall("calculate", {}, error="not JSON"),
    ):
        result = run(env.execute(bad))
        assert result.error and result.content.startswith("Error: ")
    assert env.tables == env.world.tables


class Does:
    """An expert that does what it was made with."""

    blocking = False

    def __init__(self, content="", *calls):
        self.action = Action(content, tuple(calls), 0.5, 3.0, (10, 20))

    def act(self, env):
        if self.action is None:
            raise EndpointError("HTTP 500")
        return self.action


def test_an_expert_takes_over_a_turn(world):
    product = ToolCall("calculate", {"expression": "2 * 3"})
    made = {"expert-1": Does("Shall I go on?"), "expert-2": Does("", product)}
    task = world.task("train", 0)
    env = world.environment(task, 0, experts=lambda offered: made.get(offered["alias"]))
    schema = env.tools[-1]["function"]
    offered = schema["parameters"]["properties"]["expert"]["enum"]
    assert schema["name"] == "call_expert" and offered == ["expert-1", "expert-2", "expert-3"]
    assert "gpt" not in json.dumps(env.tools).casefold()  # which model it is stays hidden
    called = call(env, "call_expert", expert="expert-2")
    assert "expert-2 called calculate" in called.content and '"value": 6}' in called.content
    assert (called.cost_usd, called.latency_s, called.output_tokens) == (0.5, 3.0, 20)
    spoke = call(env, "call_expert", expert="expert-1")
    assert "The user: Yes, please." in spoke.content and env.said == ["Shall I go on?"]
    assert env.calls == [("calculate", {"expression": "2 * 3"})]
    assert called.alias == "expert-2" and call(env, "call_expert", expert="expert-9").error
    made["expert-1"].action = None
    assert call(env, "call_expert", expert="expert-1").infrastructure


def test_a_simulated_expert_of_full_skill_solves_and_one_of_none_does_not(world):
    for skill in (1.0, 0.0):
        expert = SimulatedExpert(skill, Price(1, 1), 1.0, "s")
        for task in world.tasks("train", 8):
            env = world.environment(task, 0, experts=lambda offered, expert=expert: expert)
            for _ in range(40):
                if not env.over:
                    call(env, "call_expert", expert="expert-1")
            assert env.score("") == skill


def rollout(tokenizer, script):
    engine = ScriptedEngine(tokenizer, [script])
    limits = Limits(turns=40, context_tokens=10**6)
    return Rollout(engine, tokenizer, lambda seed, budget: None, limits)


def test_the_agent_loop_plays_a_world_with_a_user(world, nano_tokenizer):
    env = next(
        env
        for task in world.tasks("train", 32)
        if not (env := world.environment(task, 0)).scorer.criteria["communicate_info"]
    )
    thought, end = "<think>\nt\n</think>\n\n", "<|im_end|>"
    calls = [
        json.dumps({"name": name, "arguments": arguments})
        for name, arguments in env.scorer.golden_calls()
    ]
    script = [f"{thought}<tool_call>\n{text}\n</tool_call>{end}" for text in calls]
    script += [f"{thought}That is done.{end}"] * len(env.user.wishes)
    (t,) = rollout(nano_tokenizer, script).run([env], [0])
    assert (t.status, t.outcome, t.answer) == ("answered", 1.0, "That is done.")
    assert len(t.turns) == len(script)
    text = nano_tokenizer.decode(t.ids)
    for wish in env.user.wishes:  # each after the first answers "That is done."
        assert f"<|im_start|>user\n{wish}<|im_end|>" in text


def test_a_user_that_cannot_be_reached_is_infrastructure(world, nano_tokenizer):
    class Gone:
        def reply(self, message):
            raise EndpointError("Timeout")

    env = world.environment(world.task("train", 0), 0, user=Gone())
    script = ["<think>\nt\n</think>\n\nHello?<|im_end|>"]
    assert rollout(nano_tokenizer, script).run([env], [0])[0].status == "infrastructure"


# --- users

SCENARIO = {
    "persona": None,
    "instructions": {
        "reason_for_call": "You want to book 2 seats on the Silver Arrow. If there are not enough "
        "left, you want the Red Star instead. Then you need to learn what your miles are.",
        "known_info": "You are Mei Rossi and your zip code is 12345.",
        "unknown_info": "You do not know your passenger number.",
        "task_instructions": "You are brief.",
    },
}


def test_the_scripted_user_tells_what_it_knows_when_asked_confirms_and_ends():
    talk = ScriptedUser(SCENARIO)
    condition = "If there are not enough left, I want the Red Star instead."
    assert talk.opening == f"I want to book 2 seats on the Silver Arrow. {condition}"
    known = "I am Mei Rossi and my zip code is 12345."
    for said, answer in (
        ("What is your name and zip code?", known),
        ("And your passenger number?", f"I do not know my passenger number. {known}"),
        ("I will book 2 seats. Do you confirm?", "Yes, please."),
        ("Which colour do you like?", talk.opening),  # it invents nothing
        ("Booked.", "Then I need to learn what my miles are."),
        ("You have 300. Anything else?", f"No, thank you. {STOP}"),
    ):
        assert talk.reply(said) == answer


def test_the_scripted_user_leaves_when_handed_over_or_out_of_patience(monkeypatch):
    talk = ScriptedUser(SCENARIO)
    assert TRANSFER in talk.reply("You are being transferred to a human agent.")
    monkeypatch.setattr(user, "PATIENCE", 3)
    talk = ScriptedUser(SCENARIO)
    assert [ended(talk.reply("Who are you?")) for _ in range(4)] == [False, False, False, True]


def test_the_scripted_user_says_only_what_is_in_the_scenario(world):
    lines = ["What is your name?", "Please confirm.", "Done.", "Anything else?", "Why?", ""]
    for task in world.tasks("train", 20):
        scenario = task.data["task"]["user_scenario"]
        facts = first_person(" ".join(map(str, scenario["instructions"].values())))
        allowed = f"{facts} Yes, please. No, thank you. Thank you, that is all. {STOP}"
        talk = ScriptedUser(scenario)
        said = " ".join([talk.opening, *map(talk.reply, lines * 2)])
        assert all(word in allowed for word in said.split())


def test_the_language_model_user_sees_the_scenario_and_ends_by_the_same_signals(monkeypatch):
    bodies, answers = [], iter(["I want seats.", f"Thanks {STOP}"])

    def answer(url, body):
        bodies.append(copy.deepcopy(body))
        return {"content": next(answers)}, (1, 1)

    monkeypatch.setattr(user, "chat_completion", answer)
    talk = LanguageModelUser(SCENARIO, "http://x", "m")
    assert talk.reply(user.GREETING) == "I want seats." and ended(talk.reply("Done."))
    system = bodies[0]["messages"][0]["content"]
    assert all(words in system for words in ("Mei Rossi", "Silver Arrow", *user.SIGNALS))
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


# --- preferences and catalogues


def test_words_say_what_is_preferred_and_splits_share_no_phrasing_expert_or_price():
    rng, said = random.Random(0), {split: set() for split in preferences.SPLITS}
    for _ in range(300):
        wish = preferences.draw(rng, ["expert-1", "expert-2", "expert-3"])
        for split in preferences.SPLITS:
            sentences = preferences.write(wish, rng, split).split(". ")
            changed = [getattr(wish, what) != usual for what, usual in preferences.DEFAULTS.items()]
            least = sum(changed) + len(wish.tools)
            assert least <= sum(map(bool, sentences)) <= least + 1  # being right may be said anyway
            assert all(tool in " ".join(sentences) for tool in wish.tools)
            said[split].update(re.sub(r"expert-\d", "X", text).rstrip(".") for text in sentences)
    assert not (said["train"] & said["held_out"]) - {""} and len(said["train"]) > 30
    offered = {
        split: [expert for _ in range(300) for expert in preferences.catalogue(rng, split)]
        for split in preferences.SPLITS
    }
    for field in ("model", "schedule"):
        assert not {e[field] for e in offered["train"]} & {e[field] for e in offered["held_out"]}
    # Every model has stood behind every alias.
    assert len({(e["alias"], e["model"]) for e in offered["train"]}) == 18
    for expert in offered["train"]:
        assert str(expert["input_per_million"]) in expert["description"]
        assert expert["model"] not in expert["description"]


# --- formats


def test_a_damaged_task_file_is_refused_and_the_line_named(made, tmp_path):
    text = (made / "tasks.jsonl").read_text()
    first, *_ = text.splitlines()
    for content, says in (
        (text[:-30], "line 40: not JSON"),
        (first + "\n" + first, "'railway-5-0' stands 2 times"),
        ("[]\n", "line 1: task: "),
        ("", "holds no task"),
        (first.replace('"name"', '"title"'), r"line 1: .*actions\[0\].name: None is not"),
    ):
        (tmp_path / "tasks.jsonl").write_text(content)
        with pytest.raises(UserError, match=says):
            load_tasks(tmp_path / "tasks.jsonl")
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(UserError, match="no .*worlds/railway"):
        load_world(tmp_path)


def test_tau2_directories_go_out_and_come_back(world, tmp_path):
    home, tasks = world.worlds["railway"], world.splits["train"]
    export_tau2(home, tasks, tmp_path / "railway")
    assert import_tau2(tmp_path / "railway")[0] == home
    back = import_tau2(tmp_path / "railway")[1]
    for field in ("id", "user_scenario", "evaluation_criteria"):
        assert [task[field] for task in back] == [task[field] for task in tasks]
    plain = json.loads((tmp_path / "railway" / "tasks.json").read_text())[0]
    assert "ticket" in plain and "tools" not in plain


@pytest.mark.parametrize("name, count", [("retail", 114), ("mock", 10)])
def test_real_tau2_domains_load(name, count):
    if not (DATA / "tau2" / name).exists():
        pytest.skip("no shared data")
    world, tasks = import_tau2(DATA / "tau2" / name)
    assert len(tasks) == count and world.tables and world.policy
    assert all(task["evaluation_criteria"]["reward_basis"] for task in tasks)


def test_rows_of_the_dataset_are_repaired(tmp_path):
    arguments = {
        "date": datetime.datetime(2025, 9, 3),
        "seat": None,
        "at": "2025-09-03T00:00:00.000Z",
        "time": datetime.datetime(2025, 9, 3, 7, 30),
        "more": {"x": None, "y": [1, None]},
    }
    instructions = {"domain": "travel", "reason_for_call": "You want.", "task_instructions": ""}
    row = {
        "id": 7,
        "user_scenario": {"persona": None, "instructions": instructions},
        "evaluation_criteria": {
            "actions": [{"name": "book", "arguments": arguments}],
            "communicate_info": None,
        },
    }
    task = repaired(row)
    assert task["evaluation_criteria"]["actions"][0]["arguments"] == {
        "date": "2025-09-03",
        "at": "2025-09-03",
        "time": "2025-09-03 07:30:00",
        "more": {"y": [1, None]},
    }
    assert (task["id"], task["domain"]) == ("7", "travel")
    assert task["evaluation_criteria"]["communicate_info"] == []
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row, default=str) + "\n" + '{"id": "x"}\n')
    with pytest.raises(UserError, match="line 2"):
        load_rows(path)
