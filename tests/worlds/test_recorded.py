"""Worlds of recorded answers: what is told and replayed, and baselines that know no more."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from openai_server import openai_server, said

import evaluate
from nanorchestra.config import TaskSection
from nanorchestra.records import Preference, ToolCall
from worlds import metrics
from worlds.load import open_world
from worlds.programs import ProgramAttempt, play_program
from worlds.recorded import load_cases
from worlds.recorded_programs import Baselines, Chance, Plan

SKILLS = {"ant-1-2024": 0.75, "ant-2-2024": 0.7, "bee-2023": 0.7, "cat": 0.5}
USD = {"ant-1-2024": 0.02, "ant-2-2024": 0.001, "bee-2023": 0.001, "cat": 0.005}


def rows(count, seed=0):
    """Made-up cases: who is wrong says one of three things, and answers are classes in order."""
    rng, made = random.Random(seed), []
    for number in range(count):
        said = {
            name: "right" if rng.random() < p else rng.choice("xyz") for name, p in SKILLS.items()
        }
        letters = {text: "ABCD"[k] for k, text in enumerate(dict.fromkeys(said.values()))}
        answers = {}
        for name, text in said.items():
            bill = USD[name] * rng.uniform(0.5, 1.5), rng.uniform(0.5, 3.0)
            answers[name] = [letters[text], int(text == "right"), *bill]
        facts = {"category": f"secret{number % 3}", "language": rng.choice(["python", "java"])}
        facts["words"] = rng.choice([17, 23, None])
        made.append({"id": f"case-{number}", **facts, "answers": answers})
    return made


def opened(folder, cases, name="log.jsonl", **settings):
    text = "".join(json.dumps(case) + "\n" for case in cases)
    if name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress(text.encode()))
    else:
        (folder / name).write_text(text)
    return open_world(TaskSection(f"recorded:{folder / name}", **settings), 0, None)


def tasks_of(world, split="held_out"):
    return [world.task(split, index) for index in range(world.size(split))]


def played(program, world, tasks):
    attempts = []
    for task in tasks:
        attempt = play_program(program(task), world.environment(task, 0))
        attempts.append(metrics.score(task, attempt))
    return attempts


def test_a_case_is_told_as_its_user_knows_it_and_never_by_category_or_by_what_is_missing(tmp_path):
    cases = rows(200)
    world = opened(tmp_path, cases, "log.jsonl.gz")
    told = {world.task("all", index).question for index in range(world.size("all"))}
    assert told == {f"{language}, {n} words." for language in ("python", "java") for n in (20,)}
    for case in cases:
        case["language"] = "python"
        case["words"] = None if case["category"] == "secret0" else 17
    world = opened(tmp_path, cases)
    assert {task.question for task in tasks_of(world)} == {"python, 20 words."}
    prompt = json.dumps([world.environment(world.task("train", 0), 0).messages])
    assert "secret" not in prompt and "case-" not in prompt


def test_experts_replay_their_bills_and_classes_are_numbered_as_they_are_read(tmp_path):
    world = opened(tmp_path, rows(200))
    for task in tasks_of(world)[:100]:
        answers = world.case(task).answers
        env = world.environment(task, 0)
        attempt = ProgramAttempt(env, 0)
        names = ["cat", "bee", "ant-1"]
        read = [attempt.call(ToolCall(name, {})) for name in names]
        recorded = [answers[name] for name in ("cat", "bee-2023", "ant-1-2024")]
        assert read[0].content == "1"  # whatever its class in the file
        for one, other in ((0, 1), (0, 2), (1, 2)):
            equal = recorded[one].text == recorded[other].text
            assert (read[one].content == read[other].content) == equal
        assert attempt.trajectory.cost_usd == pytest.approx(sum(each.usd for each in recorded))
        assert attempt.trajectory.latency_s == pytest.approx(sum(e.seconds for e in recorded))
        for result, answer in zip(read, recorded, strict=True):
            assert env.score(result.content) == answer.right
        assert env.score("4") == 0.0  # of none that was asked
        assert task.offers["ant-1"] == "ant-1-2024 (recorded)"


def test_a_user_s_limits_hold_for_recorded_bills(tmp_path):
    world = opened(tmp_path, rows(100))
    task = world.task("train", 0)
    task = replace(task, preference=Preference(usd=0.004, never=["bee"]))
    attempt = ProgramAttempt(world.environment(task, 0), 0)
    assert attempt.call(ToolCall("ant-1", {})).refused  # $0.01 at least
    assert attempt.call(ToolCall("bee", {})).refused
    assert not attempt.call(ToolCall("ant-2", {})).refused


def test_cases_keep_their_split_and_each_is_a_task_of_each_user(tmp_path):
    cases = rows(200)
    world, fewer = opened(tmp_path, cases), opened(tmp_path, cases[50:], "fewer.jsonl")
    held_out = {task.data["case"] for task in tasks_of(world)}
    assert held_out.isdisjoint(task.data["case"] for task in tasks_of(world, "train"))
    assert 70 < len(held_out) < 130
    assert {task.data["case"] for task in tasks_of(fewer)} == held_out & {
        c["id"] for c in cases[50:]
    }
    users = {task.preference.name for task in tasks_of(world)}
    assert users == {"right", "cheap", "fast", "balanced"}
    assert world.size("held_out") == 4 * len(held_out)
    for case in cases:
        case["answers"] = {name: answer[:3] for name, answer in case["answers"].items()}
    users = {task.preference.name for task in tasks_of(opened(tmp_path, cases))}
    assert users == {"right", "cheap"}  # no seconds were recorded


def test_a_question_is_told_as_it_is_and_answers_are_texts(tmp_path):
    made = []
    for number in range(40):
        said = {"ant": [f"It is {number}.", 1, 0.1], "bee": [f"it is  {number}", 1, 0.2]}
        said["cat"] = ["no idea", 0, 0.01]
        made.append({"id": number, "question": f"What is {number}?", "answers": said})
    world = opened(tmp_path, made)
    task = world.task("train", 0)
    attempt = ProgramAttempt(world.environment(task, 0), 0)
    assert attempt.call(ToolCall("ant", {})).content == f"It is {task.data['case']}."
    assert attempt.env.score(f"<answer>it is {task.data['case']}</answer>") == 1.0
    assert attempt.env.score("no idea") == 0.0
    assert task.question == f"What is {task.data['case']}?"


def test_the_teacher_asks_anyone_answers_as_most_do_and_says_how_likely_that_was(tmp_path):
    """The probabilities of the different lessons of a case add up to 1."""
    world = opened(tmp_path, rows(100))
    asked = set()
    for index in range(120):
        most = index % 3
        env, lessons = world.lesson(index, most)
        *calls, last = lessons
        said = [lesson.result.content for lesson in calls]
        assert said.count(last.content) == max(map(said.count, said))
        assert {lesson.thought for lesson in lessons} == {env.task.preference.name}
        assert len(env.tools) == (most or 4)
        asked.add(len(calls))
    assert asked == {1, 2, 3, 4}
    alike = [{"id": n, "answers": {e: ["A", 1, 0.1] for e in ("ant", "bee")}} for n in range(20)]
    world, likely = opened(tmp_path, alike), {}
    for index in range(60):
        _, turns = world.lesson(index)
        names = tuple(turn.call.name if turn.call else "" for turn in turns)
        likely[names] = math.exp(sum(turn.logprob for turn in turns))
    assert len(likely) == 4 and sum(likely.values()) == pytest.approx(1)


def test_what_a_plan_comes_to_is_what_it_comes_to_when_it_is_played(tmp_path):
    world = opened(tmp_path, rows(120))
    baselines = Baselines(world)
    tasks = tasks_of(world, "train")
    rows_of = {case.id: row for row, case in enumerate(world.splits["train"])}
    at = [rows_of[task.data["case"]] for task in tasks]
    plans = [*baselines.single, *random.Random(0).sample([*baselines.cascade], 6)]
    for plan in plans:
        figures = (baselines.single | baselines.cascade)[plan]
        attempts = played(lambda task: plan.program(baselines.names), world, tasks)  # noqa: B023
        for row, field in enumerate(("outcome", "cost_usd", "latency_s")):
            shown = [getattr(attempt, field) for attempt in attempts]
            np.testing.assert_allclose(shown, figures[row, at])
        for user in world.users:
            computed = baselines.rewards(figures, user)
            for task, attempt, row in zip(tasks, attempts, at, strict=True):
                if task.preference == user:
                    assert attempt.reward == pytest.approx(computed[row])


def test_choices_are_the_best_of_training_and_a_cascade_is_better_than_any_expert(tmp_path):
    world = opened(tmp_path, rows(800))
    baselines = Baselines(world)
    tasks = [task for task in tasks_of(world) if task.preference.name == "right"]
    right = {}
    for name, program in baselines.programs().items():
        if name != "chance":
            right[name] = fmean(attempt.outcome for attempt in played(program, world, tasks))
    assert right["best"] == right["ant-1"] == max(right[name] for name in baselines.names)
    assert right["best"] + 0.02 < right["cascade"] < right["oracle"]
    paid = {}
    for plan, figures in baselines.cascade.items():
        paid[plan] = baselines.rewards(figures, tasks[0].preference).mean()
    assert paid[baselines.plan("cascade", tasks[0])] == max(paid.values())


def test_nothing_of_the_held_out_half_has_a_part_in_a_choice(tmp_path):
    cases = rows(400)
    world = opened(tmp_path, cases)
    held_out = {task.data["case"] for task in tasks_of(world)}
    for case in cases:
        if case["id"] in held_out:
            case["answers"] = {name: ["A", 0, 9.0, 9.0] for name in SKILLS}
    other = opened(tmp_path, cases, "other.jsonl")
    names = [name for name in Baselines(world).programs() if name not in ("oracle", "chance")]
    ours, theirs = Baselines(world), Baselines(other)
    for task in tasks_of(world)[:200]:
        assert [ours.plan(name, task) for name in names] == [
            theirs.plan(name, task) for name in names
        ]
    assert world.bounds == other.bounds
    assert [offer.description for offer in world.offers] == [o.description for o in other.offers]


def test_with_shuffled_truth_every_policy_is_at_chance(tmp_path):
    """A right answer is then a coin with p = 0.6 for each class, whoever gave it and to what."""
    cases, rng = rows(500), random.Random(1)
    for case in cases:
        outcomes = {letter: int(rng.random() < 0.6) for letter in "ABCD"}
        for answer in case["answers"].values():
            answer[1] = outcomes[answer[0]]
    world = opened(tmp_path, cases)
    tasks = [task for task in tasks_of(world) if task.preference.name == "right"]
    programs = Baselines(world).programs()
    oracle = programs.pop("oracle")
    del programs["chance"]
    assert len(tasks) > 200
    for name, program in programs.items():
        share = fmean(attempt.outcome for attempt in played(program, world, tasks))
        assert abs(share - 0.6) < 4 * (0.24 / len(tasks)) ** 0.5, name
    assert fmean(attempt.outcome for attempt in played(oracle, world, tasks)) > 0.75


def following(pairs):
    chance = Chance()
    chance.follow(pairs)
    return chance


def test_chance_has_the_policy_s_calls_and_not_its_cascade(tmp_path):
    world = opened(tmp_path, rows(800))
    tasks = [task for task in tasks_of(world) if task.preference.name == "right"]
    policy = Baselines(world).programs()["cascade"]
    ours = list(zip(tasks, played(policy, world, tasks), strict=True))
    chance = played(following(ours), world, tasks)
    calls = [fmean(sum(t.calls.values()) for t in side) for side in ([t for _, t in ours], chance)]
    assert calls[0] == pytest.approx(calls[1], rel=0.03)
    right = [fmean(t.outcome for t in side) for side in ([t for _, t in ours], chance)]
    assert right[1] < right[0] - 0.02
    cat = played(lambda task: Plan((0,)).program(["cat"]), world, tasks)
    alone = played(following(list(zip(tasks, cat, strict=True))), world, tasks)
    assert [t.outcome for t in alone] == [t.outcome for t in cat]


def answer(body):
    """`strong` knows all and `quick` nothing."""
    number = re.search(r"What is (\d+)", body["messages"][0]["content"])[1]
    return said(f"The answer is {2 * int(number)}." if body["model"] == "strong" else "7")


def test_what_experts_answer_is_recorded_once_and_learned_from_as_it_is_asked(
    tmp_path, monkeypatch, capsys
):
    """The command goes on where its dollars ended; the baselines play what it has written."""
    monkeypatch.chdir(tmp_path)
    usd = {"strong": [1.0, 10.0], "quick": [0.1, 0.4]}
    endpoint = {"endpoint": "here", "max_tokens": 500}
    tables = {
        "experts": {name: endpoint | {"model": name, "usd": usd[name]} for name in usd},
        "tools": [{"name": n, "kind": "expert", "description": n, "expert": n} for n in usd],
    }
    made = [{"question": f"What is {n} plus {n}?", "answer": 2 * n} for n in range(3, 33)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    command = ["--record", "log.jsonl", "--world", "questions:rows.jsonl", "--experts", "real"]
    command += ["--tools", "tools.json", "--parallel", "1", "--max-usd"]
    with openai_server() as server:
        server.answer = answer
        tables["endpoints"] = {"here": {"base_url": server.url}}
        Path("tools.json").write_text(json.dumps(tables))
        assert evaluate.main([*command, "0.0057"]) == 2
        assert "cases lack an answer (--max-usd 0.0057 is reached)" in capsys.readouterr().err
        assert 0 < len(load_cases(Path("log.jsonl"))) < 30
        assert evaluate.main([*command, "1"]) == 0
        assert "log.jsonl: 30 cases; paid $0.00189" in capsys.readouterr().out
        assert len(server.bodies) == 60  # nothing is asked twice
    settings = {"tools": "tools.json", "preference": ""}
    world = open_world(TaskSection("recorded:log.jsonl", **settings), 0, None)
    real = open_world(TaskSection("questions:rows.jsonl", experts="real", **settings), 0, None)
    asks = {task.question: task for task in tasks_of(real, "all")}
    for task in tasks_of(world):
        answers = world.case(task).answers
        assert [answers[name].right for name in ("strong", "quick")] == [1.0, 0.0]
        assert answers["strong"].usd > answers["quick"].usd > 0
        replayed, env = world.environment(task, 0), real.environment(asks[task.question], 0)
        assert (replayed.messages, replayed.tools) == (env.messages, env.tools)
    play = ["--world", "recorded:log.jsonl", "--policy", "strong", "chance", "best", "quick"]
    assert evaluate.main([*play, "--run", "a"]) == 0
    (summary,) = json.loads(Path("runs/a/summary.json").read_text())["worlds"].values()
    assert [summary[name]["accuracy"] for name in play[3:]] == [1.0, 1.0, 1.0, 0.0]
    assert evaluate.main(["--world", "recorded:log.jsonl", "--policy", "chance", "--run", "b"]) == 2
    assert "name that before it" in capsys.readouterr().err
