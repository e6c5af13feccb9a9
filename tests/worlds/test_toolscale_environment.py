"""The worlds as the agent loop plays them, the users, preferences and catalogues, and files in and out."""

from __future__ import annotations

import asyncio
import copy
import datetime
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import ScriptedEngine

from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.records import Preference, ToolCall
from nanorchestra.tools.experts import EndpointError
from nanorchestra.training.lessons import as_session, as_turns
from reward import Price
from worlds.evaluation import task_bounds
from worlds.toolscale import preferences, user
from worlds.toolscale.environment import Action, SimulatedExpert, load_world, teach
from worlds.toolscale.formats import (
    export_tau2,
    import_tau2,
    load_questions,
    load_rows,
    load_tasks,
    repaired,
)
from worlds.toolscale.pipeline import main
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
    assert (
        main(
            [
                "--tasks",
                "40",
                "--seed",
                "5",
                "--domains",
                "railway",
                "--out",
                str(out),
                "--workers",
                "1",
            ]
        )
        == 0
    )
    return out


@pytest.fixture
def world(made):
    return load_world(made)


def play(env, message="It is done."):
    async def go():
        for name, arguments in env.scorer.golden_calls():
            assert not (await env.execute(ToolCall(name, arguments))).error
        told = f"It is done. {', '.join(env.scorer.criteria['communicate_info'])}"
        for _ in range(20):
            if await env.reply(told) is None:
                return

    asyncio.run(go())


def test_golden_play_scores_1_and_silence_0(world):
    for index in range(12):
        env = world.environment(world.task("train", index), 0)
        play(env)
        assert env.over and env.score("") == 1.0
        assert world.environment(world.task("train", index), 0).score("") == 0.0


def test_tasks_are_functions_of_split_index_and_seed_and_splits_share_none(world, made):
    assert world.task("train", 3) == load_world(made).task("train", 3) and world.task(
        "train", 3
    ) != load_world(made, seed=1).task("train", 3)
    ids = {
        split: {world.task(split, i).data["task"]["id"] for i in range(40)}
        for split in ("train", "held_out")
    }
    assert not ids["train"] & ids["held_out"] and len(ids["held_out"]) == 8
    json.dumps(world.task("train", 0).data)


def test_an_error_changes_nothing_and_unknown_or_unoffered_tools_are_refused(world):
    task = next(
        t
        for i in range(32)
        if len((t := world.task("train", i)).data["task"]["tools"])
        < len(world.worlds["railway"].tools)
    )
    env = world.environment(task, 0)
    before = env.world.hash(env.tables)
    hidden = next(name for name in env.world.by_name if name not in env.offered)
    for call in (
        ToolCall("nobody", {}),
        ToolCall(hidden, {}),
        ToolCall("calculate", {"expression": "x"}),
        ToolCall("calculate", {}),
        ToolCall("calculate", {}, error="not JSON"),
    ):
        result = asyncio.run(env.execute(call))
        assert result.error and result.content.startswith("Error: ")
    assert env.world.hash(env.tables) == before


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
    task = world.task("train", 0)
    env = world.environment(
        task,
        0,
        experts=lambda offered: (
            Does("Shall I go on?")
            if offered["alias"] == "expert-1"
            else Does("", ToolCall("calculate", {"expression": "2 * 3"}))
        ),
    )
    schema = env.tools[-1]["function"]
    assert schema["name"] == "call_expert" and schema["parameters"]["properties"]["expert"][
        "enum"
    ] == ["expert-1", "expert-2", "expert-3"]
    assert "gpt" not in json.dumps(env.tools).casefold()  # which model it is stays hidden
    called = asyncio.run(env.execute(ToolCall("call_expert", {"expert": "expert-2"})))
    assert (
        "expert-2 called calculate" in called.content
        and '"value": 6}' in called.content
        and (called.cost_usd, called.latency_s, called.output_tokens) == (0.5, 3.0, 20)
    )
    spoke = asyncio.run(env.execute(ToolCall("call_expert", {"expert": "expert-1"})))
    assert (
        "The user: Yes, please." in spoke.content
        and env.said == ["Shall I go on?"]
        and env.calls == [("calculate", {"expression": "2 * 3"})]
    )
    assert asyncio.run(env.execute(ToolCall("call_expert", {"expert": "expert-9"}))).error
    env.experts["expert-1"].action = None
    assert asyncio.run(env.execute(ToolCall("call_expert", {"expert": "expert-1"}))).infrastructure


def test_a_simulated_expert_of_full_skill_solves_and_one_of_none_does_not(world):
    for skill, wanted in ((1.0, 8), (0.0, 0)):
        won = 0
        for index in range(8):
            env = world.environment(
                world.task("train", index),
                0,
                experts=lambda offered: SimulatedExpert(skill, Price(1, 1), 1.0, "s"),
            )
            for _ in range(40):
                if not env.over:
                    asyncio.run(env.execute(ToolCall("call_expert", {"expert": "expert-1"})))
            won += env.score("")
        assert won == wanted


def test_the_agent_loop_plays_a_world_with_a_user(world, nano_tokenizer):
    task = next(
        t
        for i in range(32)
        if not (t := world.task("train", i)).data["task"]["evaluation_criteria"]["communicate_info"]
    )
    env = world.environment(task, 0)
    calls = [
        f"<think>\nt\n</think>\n\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"
        for name, arguments in env.scorer.golden_calls()
    ]
    wishes = len(env.user.wishes)
    script = [*calls, *["<think>\nt\n</think>\n\nThat is done.<|im_end|>"] * wishes]
    heard = env.user.wishes[1:]  # each wish after the first answers "That is done."
    rollout = Rollout(
        ScriptedEngine(nano_tokenizer, [script]),
        nano_tokenizer,
        lambda seed, budget: None,
        Limits(turns=40, context_tokens=10**6),
    )
    (t,) = rollout.run([env], [0])
    assert (t.status, t.outcome, t.answer, len(t.turns)) == (
        "answered",
        1.0,
        "That is done.",
        len(script),
    )
    text = nano_tokenizer.decode(t.ids)
    for wish in heard:
        assert f"<|im_start|>user\n{wish}<|im_end|>" in text


def test_a_user_who_cannot_be_reached_is_infrastructure(world, nano_tokenizer):
    class Gone:
        def reply(self, message):
            raise EndpointError("Timeout")

    env = world.environment(world.task("train", 0), 0, user=Gone())
    rollout = Rollout(
        ScriptedEngine(nano_tokenizer, [["<think>\nt\n</think>\n\nHello?<|im_end|>"]]),
        nano_tokenizer,
        lambda seed, budget: None,
        Limits(context_tokens=10**6),
    )
    assert rollout.run([env], [0])[0].status == "infrastructure"


# --- users

SCENARIO = {
    "persona": None,
    "instructions": {
        "reason_for_call": "You want to book 2 seats on the Silver Arrow. If there are not enough left, you want the Red Star instead. Then you need to learn what your miles are.",
        "known_info": "You are Mei Rossi and your zip code is 12345.",
        "unknown_info": "You do not know your passenger number.",
        "task_instructions": "You are brief.",
    },
}


def test_the_scripted_user_tells_what_it_knows_when_asked_confirms_and_ends():
    talk = ScriptedUser(SCENARIO)
    assert (
        talk.open()
        == "I want to book 2 seats on the Silver Arrow. If there are not enough left, I want the Red Star instead."
    )
    assert (
        talk.reply("What is your name and zip code?") == "I am Mei Rossi and my zip code is 12345."
    )
    assert (
        talk.reply("Could you give me your passenger number?")
        == "I do not know my passenger number. I am Mei Rossi and my zip code is 12345."
    )
    assert talk.reply("I will book 2 seats. Do you confirm?") == "Yes, please."
    assert talk.reply("Which colour do you like?") == talk.wishes[0]  # it invents nothing
    assert talk.reply("Booked.") == "Then I need to learn what my miles are."
    assert talk.reply("You have 300. Anything else?") == f"No, thank you. {STOP}"


def test_the_scripted_user_leaves_when_handed_over_or_out_of_patience():
    talk = ScriptedUser(SCENARIO)
    talk.open()
    assert TRANSFER in talk.reply("You are being transferred to a human agent.")
    talk = ScriptedUser(SCENARIO, patience=3)
    talk.open()
    assert [ended(talk.reply("Who are you?")) for _ in range(4)] == [False, False, False, True]


def test_the_scripted_user_says_only_what_is_in_the_scenario(world):
    rng = random.Random(0)
    lines = [
        "What is your name?",
        "Please confirm.",
        "Done.",
        "Anything else?",
        "What is your order number?",
        "Why?",
        "",
    ]
    for index in range(20):
        scenario = world.task("train", index).data["task"]["user_scenario"]
        talk = ScriptedUser(scenario)
        allowed = (
            first_person(
                " ".join(
                    scenario["instructions"][field] or ""
                    for field in ("reason_for_call", "known_info", "unknown_info")
                )
            )
            + " Yes, please. No, thank you. Thank you, that is all. "
            + STOP
        )
        for said in [talk.open(), *(talk.reply(rng.choice(lines)) for _ in range(12))]:
            assert all(word in allowed for word in said.split())


def test_first_person():
    assert (
        first_person(
            "You are calling to change your seat. You do not know yours, and want it given to you."
        )
        == "I am calling to change my seat. I do not know mine, and want it given to me."
    )


def test_the_language_model_user_sees_the_scenario_and_both_end_by_the_same_signals(monkeypatch):
    bodies, answers = [], iter(["I want seats.", f"Thanks {STOP}"])
    monkeypatch.setattr(
        user,
        "chat_completion",
        lambda url, body, **_: (
            bodies.append(copy.deepcopy(body)),
            ({"content": next(answers)}, (1, 1)),
        )[1],
    )
    talk = LanguageModelUser(SCENARIO, "http://x", "m")
    assert talk.open() == "I want seats." and ended(talk.reply("Done."))
    system = bodies[0]["messages"][0]["content"]
    assert all(words in system for words in ("Mei Rossi", "Silver Arrow", *user.SIGNALS))
    assert [message["role"] for message in bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


# --- preferences and catalogues


def test_the_vector_is_recovered_from_the_words_of_either_split():
    rng = random.Random(0)
    texts = {split: {} for split in preferences.SPLITS}
    for _ in range(600):
        wish = preferences.draw(rng, ["expert-1", "expert-2", "expert-3"])
        for split in preferences.SPLITS:
            text = preferences.write(wish, rng, split)
            back = preferences.read(text)
            assert (back.outcome, back.cost, back.latency, back.tools) == (
                wish.outcome,
                wish.cost,
                wish.latency,
                wish.tools,
            )
            texts[split].setdefault(str(wish), set()).add(text)
    assert max(map(len, texts["train"].values())) > 8  # many phrasings of one vector
    with pytest.raises(ValueError, match="no known phrasing"):
        preferences.read("Sing me a song.")


def test_held_out_phrasings_experts_and_prices_never_occur_in_train():
    for phrasings in preferences.PHRASES.values():
        assert not set(phrasings["train"]) & set(phrasings["held_out"])
    every = [
        phrase
        for phrasings in preferences.PHRASES.values()
        for split in phrasings.values()
        for phrase in split
    ]
    assert len(set(every)) == len(every)
    rng = random.Random(0)
    offered = {
        split: [expert for _ in range(300) for expert in preferences.catalogue(rng, split)]
        for split in preferences.SPLITS
    }
    for field in ("model", "schedule"):
        assert not {e[field] for e in offered["train"]} & {e[field] for e in offered["held_out"]}
    assert (
        len({(e["alias"], e["model"]) for e in offered["train"]}) == 18
    )  # every model has stood behind every alias
    assert all(
        str(e["input_per_million"]) in e["description"] and e["model"] not in e["description"]
        for e in offered["train"]
    )


def test_demonstrations_are_golden_and_their_ids_are_what_the_loop_would_have_written(
    made, nano_tokenizer
):
    world = load_world(made)
    for task in world.tasks("train", 4):
        env = world.environment(task, 0)
        prompt, ids, sampled = as_session(teach(env), env, nano_tokenizer)
        assert env.score("") == 1.0 and env.over and len(ids) == len(sampled)
        said = nano_tokenizer.decode([i for i, mine in zip(ids, sampled) if mine])
        assert all(name in said for name, _ in env.scorer.golden_calls())
        assert prompt == chat.encode(nano_tokenizer, world.environment(task, 0).messages, env.tools)


def test_in_a_rebuilt_context_the_same_is_said_and_each_prompt_knows_what_came_before(
    made, nano_tokenizer
):
    world = load_world(made)
    for task in world.tasks("train", 4):
        env = world.environment(task, 0)
        turns = as_turns(teach(env), env, nano_tokenizer, 10**6)
        other = world.environment(task, 0)
        _, ids, sampled = as_session(teach(other), other, nano_tokenizer)
        assert env.score("") == 1.0 and [i for _, said in turns for i in said] == [
            i for i, mine in zip(ids, sampled) if mine
        ]
        calls = env.scorer.golden_calls()
        last = nano_tokenizer.decode(turns[-1][0])
        assert all(f"{name}(" in last for name, _ in calls) and ("User: " in last) == (
            len(turns) > len(calls) + 1
        )
        assert all(f"{name}(" not in nano_tokenizer.decode(turns[0][0]) for name, _ in calls)


def test_an_expert_is_counted_by_its_alias_within_bounds_of_its_price(world):
    task = world.task("train", 0)
    env = world.environment(task, 0)
    result = asyncio.run(env.execute(ToolCall("call_expert", {"expert": "expert-2"})))
    assert result.alias == "expert-2"
    bounds = task_bounds(task)
    assert 0 < result.cost_usd < bounds.cost_usd[1] and 0 < result.latency_s < bounds.latency_s[1]


def test_train_refuses_a_context_without_room_for_a_policy(made, tmp_path):
    command = [
        sys.executable,
        "train.py",
        "--task.world",
        str(made),
        "--run.root",
        str(tmp_path),
        "--model.tokenizer_tasks",
        "8",
    ]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (
        ended.returncode == 2
        and "rollout.context_tokens is 1024, it must be at least" in ended.stderr
    )


# --- formats


def test_a_task_file_with_a_half_written_line_or_a_bad_field_is_refused_and_the_line_named(
    made, tmp_path
):
    text = (made / "tasks.jsonl").read_text()
    lines = text.splitlines()
    for content, says in (
        (text[:-30], "line 40 is not JSON"),
        (lines[0] + "\n" + lines[0], "line 2: id"),
        ("[]\n", "line 1: task: id"),
        ("", "holds no task"),
        (
            lines[0].replace('"actions"', '"acts"'),
            "line 1: task railway-5-0: evaluation_criteria.actions",
        ),
    ):
        (tmp_path / "tasks.jsonl").write_text(content)
        with pytest.raises(UserError, match=says):
            load_tasks(tmp_path / "tasks.jsonl")
    with pytest.raises(UserError, match="no .*worlds/railway"):
        (tmp_path / "tasks.jsonl").write_text(text)
        load_world(tmp_path)


def test_tau2_directories_go_out_and_come_back(made, tmp_path):
    loaded = load_world(made)
    world, tasks = loaded.worlds["railway"], loaded.splits["train"]
    export_tau2(world, tasks, tmp_path / "railway")
    back, again = import_tau2(tmp_path / "railway")
    assert back.hash(back.tables) == world.hash(world.tables) and back.policy == world.policy
    assert [task["evaluation_criteria"] for task in again] == [
        task["evaluation_criteria"] for task in tasks
    ]
    assert set(json.loads((tmp_path / "railway" / "tasks.json").read_text())[0]) == {
        "id",
        "description",
        "user_scenario",
        "ticket",
        "initial_state",
        "evaluation_criteria",
    }


@pytest.mark.parametrize("name, count", [("retail", 114), ("mock", 10)])
def test_real_tau2_domains_load(name, count):
    if not (DATA / "tau2" / name).exists():
        pytest.skip("no shared data")
    world, tasks = import_tau2(DATA / "tau2" / name)
    assert (
        len(tasks) == count
        and world.tables
        and world.policy
        and all(task["evaluation_criteria"]["reward_basis"] for task in tasks)
    )


def test_rows_of_the_dataset_are_repaired(tmp_path):
    action = {
        "name": "book",
        "arguments": {
            "date": datetime.datetime(2025, 9, 3),
            "seat": None,
            "at": "2025-09-03T00:00:00.000Z",
            "time": datetime.datetime(2025, 9, 3, 7, 30),
            "more": {"x": None, "y": [1, None]},
        },
    }
    row = {
        "id": 7,
        "description": None,
        "user_scenario": {
            "persona": None,
            "instructions": {
                "domain": "travel",
                "reason_for_call": "You want.",
                "known_info": "",
                "unknown_info": None,
                "task_instructions": "",
            },
        },
        "initial_state": None,
        "evaluation_criteria": {"actions": [action], "communicate_info": None},
    }
    task = repaired(row)
    assert task["evaluation_criteria"]["actions"][0]["arguments"] == {
        "date": "2025-09-03",
        "at": "2025-09-03",
        "time": "2025-09-03 07:30:00",
        "more": {"y": [1, None]},
    }
    assert (task["id"], task["domain"], task["evaluation_criteria"]["communicate_info"]) == (
        "7",
        "travel",
        [],
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row, default=str) + "\n" + '{"id": "x"}\n')
    with pytest.raises(UserError, match="line 2"):
        load_rows(path)


def test_question_files_of_each_style(tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [
        {
            "id": "a",
            "question": "Q?",
            "image": "",
            "answer": "4",
            "answer_type": "exactMatch",
            "category": "Math",
        },
        {"question": "picture", "image": "data:...", "answer": "no"},
        {
            "question_id": 5,
            "question": "G?",
            "reference_answer": "yes",
            "model_answer": "no",
            "task": "Logic",
        },
        {"Prompt": "F?", "Answer": "Jane"},
        {"problem": "P?", "answer": 3},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    tasks = load_questions(path)
    assert [(task.id, task.question, task.data["answer"]) for task in tasks] == [
        ("a", "Q?", "4"),
        ("5", "G?", "yes"),
        ("4", "F?", "Jane"),
        ("5", "P?", "3"),
    ]
    assert tasks[0].data["answer_type"] == "exactMatch" and tasks[0].preference == Preference()
    (tmp_path / "q.json").write_text(json.dumps(rows))
    assert len(load_questions(tmp_path / "q.json", most=2)) == 2
    for bad, says in (
        ('{"text": 1}', "no question and answer"),
        ('{"question": "", "answer": "x"}', "not empty"),
        ("[1]", "must be an object"),
        ('{"question": "a"', "not JSON"),
    ):
        path.write_text(bad)
        with pytest.raises(UserError, match=f"line 1.*{says}"):
            load_questions(path)


def test_frames_loads():
    if not (DATA / "frames.jsonl").exists():
        pytest.skip("no shared data")
    tasks = load_questions(DATA / "frames.jsonl")
    assert len(tasks) == 824 and tasks[0].data["answer"] == "Jane Ballou"
