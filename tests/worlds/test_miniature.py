"""The miniature: reproducible, solvable, with nothing shared between train and held-out tasks."""

from __future__ import annotations

import random
import re
from statistics import fmean

import pytest
import torch
from miniature_tasks import environment, tasks_of

from nanorchestra.config import RolloutSection
from nanorchestra.records import Preference, Task
from nanorchestra.training.warm_start import demonstration
from worlds.miniature.offers import describe
from worlds.miniature.tables import PREFERENCES, READING_LESSONS
from worlds.miniature.teacher import consider, teach
from worlds.miniature.world import Miniature


@pytest.fixture(scope="module")
def tasks():
    return {split: tasks_of(split, 400) for split in ("train", "held_out")}


def weighted(preference, avoided=()):
    return Preference("?", *PREFERENCES[preference][1], {name: -1.0 for name in avoided})


def test_a_task_is_a_function_of_seed_split_and_index(tasks):
    assert (
        Miniature(0, None).task("train", 17)
        == tasks["train"][17]
        != Miniature(4, None).task("train", 17)
    )


def test_train_and_held_out_share_no_number_or_fact(tasks):
    def numbers(split):
        asked = [task.question for task in tasks[split] if task.kind != "lookup"]
        return {n for question in asked for n in re.findall(r"\d\d+", question)}

    def facts(split):
        return {task.data["solution"] for task in tasks[split] if task.kind == "lookup"}

    for drawn in (numbers, facts):
        assert drawn("held_out") and not drawn("train") & drawn("held_out")


def test_the_prompt_states_preference_and_tools(tasks, sandbox):
    for task in tasks["train"]:
        words = task.preference.text.casefold()
        weights = task.preference.outcome, task.preference.cost, task.preference.latency
        assert PREFERENCES[task.preference.name][1] == weights
        for avoided in task.preference.avoided:
            assert any(t["what"] in words for t in task.data["tools"] if t["name"] == avoided)
    for task in tasks["held_out"][:100]:
        env, gold = environment(task, 0, sandbox), task.data["answer"]
        assert (env.score(f" {gold}. "), env.score(gold + "1"), env.score("")) == (1.0, 0.0, 0.0)
        tools = env.tools
        names = [t["name"] for t in task.data["tools"]]
        assert len(set(names)) == len(names) == len(tools)
        for offer, schema in zip(task.data["tools"], tools, strict=True):
            assert schema["function"]["name"] == offer["name"]
            assert schema["function"]["description"] == describe(offer)
    run = {"name": "tool-ku-no", "what": "code", "price": 3, "latency": 12}
    assert describe(run) == "12s 03c code tool-ku-no"


def test_aliases_are_many_and_differ_between_splits(tasks):
    names = {
        split: [offer["name"] for task in tasks[split] for offer in task.data["tools"]]
        for split in tasks
    }
    assert not set(names["train"]) & set(names["held_out"])
    for aliases in names.values():
        assert len(set(aliases)) > 0.5 * len(aliases)


def features(answer):
    """What stands on the surface of an answer: its length, its digits, its size, its parity."""
    digits = [int(d) for d in answer if d.isdigit()]
    shown = [float(len(answer) == n) for n in range(1, 6)] + [float(answer.startswith("-"))]
    shown += [float(digits[0] == d) for d in range(10)] + [
        float(digits[-1] == d) for d in range(10)
    ]
    return [*shown, int(answer) % 2, int(answer) % 3 == 0, len(set(digits)), int(answer) / 1000]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_nothing_on_the_surface_tells_a_right_answer_from_a_wrong_one(split):
    rows, labels = [], []
    for task in tasks_of(split, 3000, seed=3):
        wrong = random.Random(task.id).choice(task.data["wrong"])
        rows += [features(task.data["answer"]), features(wrong)]
        labels += [1.0, 0.0]
    x, y = torch.tensor(rows, dtype=torch.float64), torch.tensor(labels, dtype=torch.float64)
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    half = len(x) // 2
    weights = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=50)

    def loss():
        optimizer.zero_grad()
        logits = x[:half] @ weights[1:] + weights[0]
        value = torch.nn.functional.binary_cross_entropy_with_logits(logits, y[:half])
        (value + 1e-3 * weights.square().sum()).backward()
        return value

    optimizer.step(loss)
    guessed = (x[half:] @ weights[1:] + weights[0] > 0).double()
    assert (guessed == y[half:]).double().mean() < 0.53  # of 3,000, chance is 0.5 +- 0.009


def test_the_teacher_chooses_whatever_the_user_wants(sandbox):
    chosen = {preference: [] for preference in PREFERENCES}
    for task in tasks_of("train", 1500):
        if task.kind != "knowledge":
            continue
        lessons, tools = teach(environment(task, 1, sandbox), 1), task.data["tools"]
        assert all(turn.call.name not in task.preference.avoided for turn in lessons[:-1])
        experts = [offer for offer in tools if offer["what"] not in ("code", "search")]
        prices = sorted(offer["price"] for offer in experts)
        price = {t["name"]: t["price"] for t in tools}[lessons[0].call.name]
        chosen[task.preference.name].append(sum(p < price for p in prices) / (len(prices) - 1 or 1))
    assert all(0.4 < fmean(places) < 0.6 for places in chosen.values())


def test_a_thought_lists_what_the_prompt_says():
    medium = {"name": "ka-lo", "what": "medium", "price": 85, "latency": 60}
    code = {"name": "ru-ni", "what": "code", "price": 90, "latency": 12}
    large = {"name": "ze-fi", "what": "large", "price": 40, "latency": 90}
    small = {"name": "po-da", "what": "small", "price": 5, "latency": 9}
    tools = [medium, code, large, small]
    data = {"subject": "law", "difficulty": "hard", "tools": tools}
    for preference, asked, listed in (
        ("right", [], "medium, code, large"),
        ("balanced", ["ru-ni"], "60s 85c medium, 90s 40c large"),
        ("fast", [], "60s medium, 12s code, 90s large. lowest medium"),
        ("cheap", [], "85c medium, 90c code, 40c large. lowest large"),
        ("cheap", ["ka-lo", "ze-fi"], "90c code"),  # no expert is left
    ):
        task = Task("t", "?", weighted(preference, ["po-da"]), kind="knowledge", data=data)
        assert consider(task, asked) == f"{preference}. not small. {listed}. use for hard law"
    chain = data | {"subject": "chain", "solution": ["order", 512]}
    task = Task("t", "?", weighted("right", ["po-da"]), kind="chain", data=chain)
    assert consider(task, ["ru-ni"]).endswith("medium, large. use for order chain")


def test_first_lessons_offer_few_tools_and_keep_the_one_that_fits(sandbox):
    for count in (1, 2):
        for index in range(100):
            env, lessons = Miniature(0, sandbox).lesson((READING_LESSONS + 1) * index, count)
            task = env.task
            offered = [t["what"] for t in task.data["tools"]]
            assert len(offered) == count and (task.kind != "chain" or "records" in offered)
            last = lessons[-1]
            assert last.content and last.thought.startswith(f"{task.preference.name} ")


def test_demonstrations_mask_what_tools_said(nano_tokenizer, sandbox):
    for task in tasks_of("train", 20):
        env = environment(task, 0, sandbox)
        t = demonstration(teach(env, 0), env, nano_tokenizer, RolloutSection())
        ids, sampled = (part[t.prompt_length :] for part in (t.ids, t.sampled))
        written = nano_tokenizer.decode([i for i, own in zip(ids, sampled, strict=True) if own])
        given = nano_tokenizer.decode([i for i, own in zip(ids, sampled, strict=True) if not own])
        assert "tool_response" not in written and written.endswith("<|im_end|>")
        assert given.count("<tool_response>") == written.count("<tool_call>")


def test_lessons_of_reading_have_no_tool_and_say_what_the_user_wants(sandbox):
    count, bans = 0, 0
    for index in range(200):
        env, lessons = Miniature(0, sandbox).lesson(index)
        if index % (READING_LESSONS + 1) == 0:
            assert env.tools
            continue
        (lesson,) = lessons
        preference = env.task.preference
        assert not env.tools and not lesson.call and lesson.content == "no tool"
        first, *rest, about = lesson.thought.split(". ")
        assert first == preference.name and about.startswith("use for ")
        kinds = [t["what"] for t in env.task.data["tools"] if t["name"] in preference.avoided]
        assert rest == [f"not {kind}" for kind in kinds]
        prompt = env.messages[0]["content"].casefold()
        assert all(kind in prompt for kind in kinds)
        if env.task.kind in ("knowledge", "chain"):  # the subject, or the first table
            word = about.split()[-1 if env.task.kind == "knowledge" else 2]
            assert word in prompt
        count, bans = count + 1, bans + len(kinds)
    assert count == 150 and bans > 40
