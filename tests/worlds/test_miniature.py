"""The miniature: reproducible, solvable, with nothing shared between train and held-out tasks."""

from __future__ import annotations

import random
import re
from statistics import fmean

import pytest

from nanorchestra.records import Preference, Task
from nanorchestra.training.lessons import demonstration
from worlds.evaluation import task_bounds
from worlds.miniature.offers import describe, plain_choice, title
from worlds.miniature.probe import with_price
from worlds.miniature.tables import EXPENSIVE_CENTS, PHRASES, PREFERENCES, QUESTIONS
from worlds.miniature.teacher import consider, find, teach
from worlds.miniature.world import World, environment


@pytest.fixture(scope="module")
def tasks():
    return {split: World(0).tasks(split, 400) for split in ("train", "held_out")}


def weighted(wish, avoided=()):
    return Preference("?", *PREFERENCES[wish][1], {name: -1.0 for name in avoided})


def test_a_task_is_a_function_of_seed_split_and_index(tasks):
    assert World(0).task("train", 17) == tasks["train"][17] != World(4).task("train", 17)
    assert World(0).tasks("train", 5, start=10) == tasks["train"][10:15]


def test_train_and_held_out_share_no_number_price_fact_or_phrase(tasks):
    def numbers(split):
        asked = [task.question for task in tasks[split] if task.data["kind"] != "lookup"]
        return {int(n) for question in asked for n in re.findall(r"\d+", question)}

    def prices(split):
        return {t["price"] for task in tasks[split] for t in task.data["tools"]}

    def facts(split):
        return {task.data["solution"] for task in tasks[split] if task.data["kind"] == "lookup"}

    for drawn in (numbers, prices, facts):
        assert drawn("held_out") and not drawn("train") & drawn("held_out")
    for table in (PHRASES, QUESTIONS):
        for name, phrases in table["train"].items():
            assert not set(phrases) & set(table["held_out"][name])


def test_the_prompt_states_preference_and_tools(tasks, sandbox):
    for task in tasks["train"]:
        phrases, words = PHRASES["train"], task.preference.text
        assert any(phrase in words for phrase in phrases[task.data["wish"]])
        weights = task.preference.outcome, task.preference.cost, task.preference.latency
        assert PREFERENCES[task.data["wish"]][1] == weights
        for avoided in task.preference.avoided:
            assert any(title(t) in words for t in task.data["tools"] if t["name"] == avoided)
    for task in tasks["held_out"][:100]:
        env, gold = environment(task, 0, sandbox), task.data["answer"]
        assert (env.score(f" {gold}. "), env.score(gold + "1"), env.score("")) == (1.0, 0.0, 0.0)
        tools = env.tools
        names = [t["name"] for t in task.data["tools"]]
        assert len(set(names)) == len(names) == len(tools)
        for offer, schema in zip(task.data["tools"], tools, strict=True):
            assert schema["function"]["name"] == offer["name"]
            assert schema["function"]["description"] == describe(offer)
    run = {"name": "run", "what": "code", "price": 300, "latency": 120}
    assert describe(run) == "2min tool code run $3/k"
    vega = {"name": "vega", "what": "medium", "price": 85, "latency": 8}
    assert describe(vega) == "8s expert medium vega 85c/M"


def test_the_teacher_is_careless_not_random(sandbox):
    forbidden, quits, expensive = [], [], {"cheap": [], "right": []}
    for task in World(0).tasks("train", 500):
        first, wish = teach(environment(task, 1, sandbox), 1)[0], task.data["wish"]
        quits.append(first.call is None)
        if quits[-1]:
            assert first.thought.endswith(". Quit") and first.content == "unknown"
        elif task.preference.avoided:
            forbidden.append(first.call.name in task.preference.avoided)
        elif task.data["kind"] == "knowledge" and wish in expensive:
            price = {t["name"]: t["price"] for t in task.data["tools"]}[first.call.name]
            expensive[wish].append(price >= EXPENSIVE_CENTS)
    assert 0.2 < fmean(forbidden) < 0.5 and 0.1 < fmean(quits) < 0.2
    assert 0.05 < fmean(expensive["cheap"]) < fmean(expensive["right"]) - 0.2


def test_a_thought_weighs_what_decides_and_walks_to_the_chosen_tool():
    vega = {"name": "vega", "what": "medium", "price": 85, "latency": 60}
    run = {"name": "run", "what": "code", "price": 300, "latency": 2}
    lyra = {"name": "lyra", "what": "large", "price": 900, "latency": 120}
    data = {"kind": "knowledge", "subject": "law", "difficulty": "hard", "tools": [vega, run, lyra]}
    for wish, asked, listed in (
        ("right", [], "medium, code, large banned. left medium code"),
        ("balanced", [], "medium slow, code, large dear slow banned. left code"),
        ("fast", ["vega"], "medium slow asked, code, large slow banned. left code"),
        ("cheap", ["vega", "run"], "medium asked, code asked, large dear banned. left none"),
    ):
        task = Task("t", "?", weighted(wish, ["lyra"]), data | {"wish": wish})
        assert consider(task, asked) == f"hard law. {wish}, avoid large. {listed}"
    assert find(task, lyra) == "Large: medium, code, large lyra"


def test_a_plain_choice_takes_a_tool_without_objections():
    for kind, wish, avoided, price, choices in (
        ("arithmetic", "cheap", [], 300, {"run"}),
        ("arithmetic", "cheap", ["run"], 30, {"io"}),
        ("knowledge", "right", [], 30, {"sol"}),
        ("knowledge", "right", ["sol"], 30, {"io"}),
        ("knowledge", "cheap", [], 30, {"io"}),
        ("knowledge", "fast", ["io", "sol"], 30, {"io", "sol"}),
    ):
        tools = [
            {"name": "run", "what": "code", "price": price, "latency": 2},
            {"name": "io", "what": "small", "price": 20, "latency": 2},
            {"name": "sol", "what": "large", "price": 900, "latency": 2},
        ]
        data = {"kind": kind, "subject": "law", "tools": tools, "wish": wish}
        task = Task("t", "?", weighted(wish, avoided), data)
        usable = tools if kind == "arithmetic" else tools[1:]
        drawn = {plain_choice(task, usable, random.Random(seed))["name"] for seed in range(20)}
        assert drawn == choices


def test_first_lessons_offer_few_tools_and_keep_the_one_that_fits(sandbox):
    for count in (1, 2):
        for task in World(0, lessons=True, most_tools=count).tasks("train", 100):
            offered = [t["what"] for t in task.data["tools"]]
            assert len(offered) == count and (task.data["kind"] != "chain" or "records" in offered)
            assert teach(environment(task, 0, sandbox), 0)[-1].content


def test_demonstrations_mask_what_tools_said(nano_tokenizer, sandbox):
    for task in World(0).tasks("train", 20):
        env = environment(task, 0, sandbox)
        t = demonstration(teach(env, 0), env, nano_tokenizer)
        ids, sampled = (part[t.prompt_length :] for part in (t.ids, t.sampled))
        said = nano_tokenizer.decode([i for i, own in zip(ids, sampled, strict=True) if own])
        given = nano_tokenizer.decode([i for i, own in zip(ids, sampled, strict=True) if not own])
        assert "tool_response" not in said and said.endswith("<|im_end|>")
        assert given.count("<tool_response>") == said.count("<tool_call>")


def test_a_changed_price_stands_in_the_prompt_and_is_charged(sandbox):
    task = World(0).task("train", 0)
    large = next(x for x in task.data["tools"] if x["what"] == "large")
    large["price"] = 47
    usual = environment(task, 0, sandbox).by_name[large["name"]].call({}).cost_usd
    # 4.70 dollars are quoted, and charged, as 5.
    for factor, price, words in ((0.1, 5, " 5c/M"), (1, 47, " 47c/M"), (10, 500, " $5/M")):
        tool = environment(with_price(task, factor), 0, sandbox).by_name[large["name"]]
        assert words in tool.description
        assert tool.call({}).cost_usd == pytest.approx(usual * price / 47)
    assert task_bounds(with_price(task, 100)).cost_usd[1] > task_bounds(task).cost_usd[1]
