"""What is typed becomes a task of the miniature in the world's words, or is refused."""

from __future__ import annotations

import json
import random

import pytest

from nanorchestra.errors import UserError
from worlds.miniature.ask import EXAMPLES, LINE_UP, as_preference, as_task
from worlds.miniature.offers import skill
from worlds.miniature.tables import PHRASES, PREFERENCES
from worlds.miniature.world import World, environment

LAW = EXAMPLES[0]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_question_of_the_world_is_read_as_it_is_meant(split):
    for task in World(3).tasks(split, 300):
        meant = as_task(task.question, "").data
        fields = ["kind", "subject", "difficulty"]
        if task.data["kind"] in ("arithmetic", "lookup"):  # the facts of the rest are made up
            fields += ["answer", "solution"]
        if task.data["kind"] == "chain":
            assert list(meant["tables"]) == list(task.data["tables"])
            fields += ["solution"]
        assert {k: meant[k] for k in fields} == {k: task.data[k] for k in fields}, task.question
    kinds = [as_task(example, "").data["kind"] for example in EXAMPLES]
    assert kinds == ["knowledge", "arithmetic", "lookup", "chain"]


@pytest.mark.parametrize(
    "typed, asked",
    [
        ("  WHAT IS the Mass of  element 79 ", "what is the mass of element 79?"),
        ("law case 372, the hard one", LAW),
        ("age of agent of customer of order 512", EXAMPLES[3]),
        ("what is the atomic number of the gold?", "what is the atomic number of gold?"),
    ],
)
def test_the_wording_may_differ(typed, asked):
    assert as_task(typed, "").question == asked


def test_arithmetic_is_what_python_makes_of_it():
    rng = random.Random(1)
    for _ in range(100):
        sign = rng.choice("+-*")
        ranges = ((100, 999), (2, 9)) if sign == "*" else ((10, 99), (10, 99))
        a, b = (rng.randint(*bounds) for bounds in ranges)
        space = rng.choice(["", " "])
        task = as_task(f"what is {a}{space}{sign}{space}{b}?", "")
        assert task.data["answer"] == str(eval(f"{a}{sign}{b}"))
        assert task.data["solution"] == f"{a} {sign} {b}"
        assert task.question == f"what is the value of {a} {sign} {b}?"


REFUSED = """hi|2|what is the capital of France?|2 ** 9|2 / 2 + 1|-5 + 3|__import__('os') + 1
(2 + 3) * 4|law case|tax case 372 is hard: what is its code?|what is the age of the order 512?
what is 1.5 + 2?|what is the age of the order of the agent 512?|law case 4711|417 + 6|6 * 417
what is the calling code of guinea-x?|12 + 34 - 5|07 + 12|law case 7 is hard: what is its code?"""


@pytest.mark.parametrize("typed", [*REFUSED.replace("\n", "|").split("|"), f"{'9' * 5000} + 1"])
def test_what_is_outside_the_world_is_refused_in_one_line_with_examples(typed):
    with pytest.raises(UserError, match="outside the miniature's world.*law case 372") as refused:
        as_task(typed, "")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_experts_know_a_made_up_code_as_well_as_their_skill_says(sandbox):
    task = as_task(LAW, "")
    assert task.data["answer"] == as_task(LAW, "be fast").data["answer"]
    assert task.data["answer"] not in task.data["wrong"]
    assert "records" not in [tool["name"] for tool in task.data["tools"]]
    orion = lambda seed: environment(task, seed, sandbox).by_name["orion"]  # noqa: E731
    says = [orion(seed).call({}).content.split(": ")[1] for seed in range(200)]
    expected = skill("large", "law", "hard").right
    assert abs(says.count(task.data["answer"]) / 200 - expected) < 0.08


def test_records_lead_to_the_answer_and_agree_between_questions(sandbox):
    asked = as_task(EXAMPLES[3], "")
    records = environment(asked, 0, sandbox).by_name["records"]
    table, key = asked.data["solution"]
    for following in ("customer", "agent", "age"):
        ((table, key),) = json.loads(records.call({"table": table, "id": key}).content).items()
        assert table == following
    assert str(key) == asked.data["answer"]
    shorter = as_task("what is the rank of the customer of order 512?", "")
    assert shorter.data["tables"]["order"] == asked.data["tables"]["order"]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_worlds_own_wishes_are_scored_as_there(split):
    for name, phrases in PHRASES[split].items():
        for phrase in phrases:
            if name in PREFERENCES:
                read, preference = as_preference(phrase, LINE_UP)
                weights = preference.outcome, preference.cost, preference.latency
                assert (read, weights, preference.tools) == (name, PREFERENCES[name][1], {})
            else:
                ban = phrase.format("small lyra")
                assert as_preference(f"Be cheap. {ban}", LINE_UP)[1].avoided == ("lyra",), phrase


@pytest.mark.parametrize(
    "wish, text",
    [
        ("", "Mind cost and time."),
        ("cheap as you can", "Be cheap."),
        ("I need accuracy", "Be right at any price."),
        ("quickly! and avoid Lyra", "Be fast. Do not use small lyra."),
        ("never use orion", "Mind cost and time. Do not use large orion."),
        ("ask orion, it does not matter, not lyra", "Mind cost and time. Do not use small lyra."),
    ],
)
def test_a_wish_stands_in_the_prompt_in_the_worlds_words(wish, text):
    assert as_preference(wish, LINE_UP)[1].text == text
