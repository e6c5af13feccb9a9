"""Worlds of recorded answers: what is told and replayed, and baselines that know no more."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from statistics import fmean

import pytest
from openai_server import openai_server, said

import evaluate
from nanorchestra.config import TaskSection
from nanorchestra.records import ToolCall
from worlds import metrics
from worlds.load import open_world
from worlds.programs import ProgramAttempt, play_program
from worlds.recorded import load_cases
from worlds.recorded_programs import Baselines

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


def opened(folder, cases):
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return open_world(TaskSection(f"recorded:{file}"), 0, None)


def tasks_of(world, split="held_out"):
    return [world.task(split, index) for index in range(world.size(split))]


def played(program, world, tasks):
    attempts = []
    for task in tasks:
        attempt = play_program(program, world.environment(task, 0))
        attempts.append(metrics.score(task, attempt))
    return attempts


def test_a_case_is_told_as_its_user_knows_it_and_never_by_category_or_by_what_is_missing(tmp_path):
    cases = rows(200)
    world = opened(tmp_path, cases)
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


def test_nothing_of_the_held_out_half_has_a_part_in_a_choice(tmp_path):
    cases = rows(400)
    world = opened(tmp_path, cases)
    held_out = {task.data["case"] for task in tasks_of(world)}
    for case in cases:
        if case["id"] in held_out:
            case["answers"] = {name: ["A", 0, 9.0, 9.0] for name in SKILLS}
    other = opened(tmp_path, cases)
    names = [name for name in Baselines(world).programs() if name not in ("oracle", "chance")]
    ours, theirs = Baselines(world), Baselines(other)
    for task in tasks_of(world)[:200]:
        assert [ours.plan(name, task) for name in names] == [
            theirs.plan(name, task) for name in names
        ]
    assert world.bounds == other.bounds
    assert [offer.description for offer in world.offers] == [o.description for o in other.offers]


def test_the_teacher_asks_what_its_user_minds_less_often_and_knows_no_truth(tmp_path):
    cases = rows(200)
    world = opened(tmp_path, cases)
    asked = {}
    for index in range(800):
        env, lessons = world.lesson(index)
        first, wish = lessons[0], env.task.preference.name
        asked.setdefault(wish, []).append(first.call.name)
        assert first.thought == wish and first.logprob < 0
    shares = {wish: names.count("ant-1") / len(names) for wish, names in asked.items()}
    assert shares["right"] == pytest.approx(0.25, abs=0.08)
    assert shares["cheap"] < 0.03  # ant-1 costs twenty times as much as most
    for case in cases:
        for answer in case["answers"].values():
            answer[1] = 1 - answer[1]
    other = opened(tmp_path, cases)
    for index in range(20):
        texts = [[each.call for each in w.lesson(index)[1]] for w in (world, other)]
        assert texts[0] == texts[1]


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
    tasks = tasks_of(world)
    for name, right in (("best", 1.0), ("quick", 0.0)):
        program = Baselines(world).programs()[name]
        assert {attempt.outcome for attempt in played(program, world, tasks)} == {right}
