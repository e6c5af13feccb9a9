"""The desk: reproducible, solvable by what results say and only by that; a teacher of form."""

from __future__ import annotations

import re
from collections import Counter
from statistics import fmean

import pytest

from nanorchestra.agent.tool import Allowance
from worlds.desk import EXPERTS, KINDS, SKILLS, SUBJECT, Desk, matters_of
from worlds.desk_programs import PROGRAMS
from worlds.routers import routers_by_name


@pytest.fixture(scope="module")
def world(sandbox):
    return Desk(0, sandbox)


def tasks_of(world, split, count=400):
    return [world.task(split, index) for index in range(count)]


def used(env, name, **arguments):
    return env.by_name[name].call(arguments)


def test_a_task_is_a_function_of_seed_split_and_index(world):
    tasks = tasks_of(world, "train", 50)
    assert tasks == tasks_of(Desk(0, None), "train", 50) != tasks_of(Desk(1, None), "train", 50)
    assert world.task("all", 3) == world.task("held_out", 3) != world.task("train", 3)


def test_no_number_of_a_held_out_task_occurs_in_training(world):
    def numbers(split):
        """Returns the numbers of rows and matters, and the first factors of products."""
        found = set()
        for task in tasks_of(world, split):
            rows = [row for rows in task.data["notes"].values() for row in rows.values()]
            texts = [task.question, *(row["note"] for row in rows)]
            found |= {number for text in texts for number in re.findall(r"\d{3}", text)}
            if task.kind.endswith("product"):
                for text in texts:
                    found |= set(re.findall(r"(\d\d)\D+\d\b", text))
        return found

    assert len(numbers("held_out")) > 100 and not numbers("held_out") & numbers("train")


def test_no_word_of_an_unseen_matter_occurs_in_training(sandbox):
    def matters(split):
        tasks = tasks_of(Desk(0, sandbox, "unseen"), split)
        texts = [task.question + str(task.data["notes"]) for task in tasks]
        return {word for text in texts for word in re.findall(r"[a-z]+", text)} & {*SUBJECT}

    assert matters("train") == {*matters_of("train")}
    assert matters("held_out") == {*matters_of("unseen")}
    assert len(matters_of("unseen")) == 30 and not {*matters_of("train")} & {*matters_of("unseen")}


def test_the_prompt_states_wish_and_terms_and_says_that_experts_are_simulated(world):
    for task in tasks_of(world, "train"):
        env = world.environment(task, 0)
        assert env.messages[0]["content"] == f"{task.question} {task.preference.text}"
        about = env.by_name["ask"].description
        assert "simulated" in about
        for name, (cents, seconds) in task.data["offers"].items():
            assert f"{name} {cents:02d}c" in about and f"{name} {seconds:02d}s" in about
            question = {"expert": name, "question": "king 700"}
            result = used(env, "ask", **question)
            assert result.cost_usd == pytest.approx(cents / 100, rel=0.16)
            assert result.latency_s == pytest.approx(seconds, rel=0.16)
            assert result.cost_usd <= env.by_name["ask"].most_usd(question)


def test_what_experts_say_is_a_function_of_the_seed_and_as_good_as_their_skill(world):
    right, unsure = {}, {True: [], False: []}
    for index in range(4000):
        task = world.task("train", index)
        if task.kind != "matter":
            continue
        (matter,) = task.data["answers"]
        env, again = world.environment(task, 5), world.environment(task, 5)
        for name in EXPERTS:
            said = used(env, "ask", expert=name, question=matter).content
            assert said == used(again, "ask", expert=name, question=f" {matter} ").content
            how, value = said.split(": ")
            is_right = value == task.data["answer"]
            right.setdefault((name, SUBJECT[matter.split()[0]]), []).append(is_right)
            unsure[is_right].append(how == "unsure")
    for (name, subject), found in right.items():
        assert fmean(found) == pytest.approx(SKILLS[name][subject], abs=0.09)
    assert fmean(unsure[True]) == pytest.approx(0.1, abs=0.04)
    assert fmean(unsure[False]) == pytest.approx(0.4, abs=0.06)


def test_only_a_policy_that_follows_results_can_be_right_in_35_percent(world):
    """A router is right in no chain, even one that knows the skills; and most tasks are chains."""
    assert sum(share for kind, (share, *_) in KINDS.items() if kind.startswith("chain")) > 0.65
    tasks = tasks_of(world, "held_out", 300)
    assert {task.kind for task in tasks} == set(KINDS)
    outcomes = {}
    for name, router in routers_by_name(PROGRAMS).items():
        attempts = router.run([world.environment(task, 0) for task in tasks], [0] * 300)
        outcomes[name] = [attempt.outcome for attempt in attempts]
        assert all(attempt.cost_usd > 0 and attempt.latency_s > 0 for attempt in attempts)
    for index, task in enumerate(tasks):
        if task.kind.startswith("chain"):
            assert not outcomes["router"][index] and not outcomes["oracle-router"][index]
        if "matter" not in task.kind:
            assert outcomes["program"][index] and outcomes["perfect"][index]
    right = {name: fmean(found) for name, found in outcomes.items()}
    assert right["router"] < right["oracle-router"] < 0.35 < right["program"] < right["perfect"]


def test_the_teacher_has_the_form_and_not_what_pays(world):
    right, calls = [], Counter()
    for index in range(1500):
        env, lessons = world.lesson(index)
        right.append(env.score(lessons[-1].content))
        for lesson in lessons:
            if lesson.call:
                env.prepare(lesson.call, Allowance())  # RefusedError if it has another form
                calls[lesson.call.arguments.get("expert")] += 1
    assert fmean(right) == pytest.approx(0.27, abs=0.04)
    shares = [calls[name] / sum(calls[each] for each in EXPERTS) for name in EXPERTS]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)
