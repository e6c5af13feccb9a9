"""What is typed becomes a task of the miniature in the world's words, or is refused."""

from __future__ import annotations

import json

import pytest

from nanorchestra.errors import UserError
from worlds.miniature.ask import EXAMPLES, LINE_UP, as_preference, as_task
from worlds.miniature.offers import skill
from worlds.miniature.tables import PREFERENCES
from worlds.miniature.world import World, environment


def test_questions_in_the_worlds_first_form_are_read_as_they_are_meant():
    read = 0
    for task in World(3).tasks("train", 600):
        try:
            meant = as_task(task.question, "").data
        except UserError:
            continue  # another phrasing
        fields = ["kind", "subject", "difficulty"]
        if task.data["kind"] != "knowledge":  # codes of cases are made up
            fields += ["solution"]
        if task.data["kind"] in ("arithmetic", "lookup"):
            fields += ["answer"]
        assert {k: meant[k] for k in fields} == {k: task.data[k] for k in fields}, task.question
        read += 1
    assert read > 50


@pytest.mark.parametrize(
    "typed, asked",
    [
        *((example, example) for example in EXAMPLES),
        ("  WHAT IS the Mass of  element 79 ", EXAMPLES[2]),
        ("law case 372", EXAMPLES[0].replace("hard", "easy")),
        ("age of agent of customer of order 512", EXAMPLES[3]),
        ("47+36", "what is the value of 47 + 36?"),
    ],
)
def test_the_wording_may_differ_a_little(typed, asked):
    assert as_task(typed, "").question == asked


REFUSED = """hi|2|what is the capital of France?|2 ** 9|2 / 2 + 1|-5 + 3|__import__('os') + 1
(2 + 3) * 4|law case|tax case 372 is hard: what is its code?|what is the age of the order 512?
what is 1.5 + 2?|what is the age of the order of the agent 512?|law case 4711|417 + 6|6 * 417
what is the calling code of guinea-x?|12 + 34 - 5|07 + 12|law case 7 is hard: what is its code?"""


@pytest.mark.parametrize("typed", [*REFUSED.replace("\n", "|").split("|"), f"{'9' * 5000} + 1"])
def test_what_is_outside_the_world_is_refused_in_one_line_with_examples(typed):
    with pytest.raises(UserError, match="outside the miniature's world.*law case 372") as refused:
        as_task(typed, "")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_made_up_facts_agree_between_questions_and_experts_know_them(sandbox):
    task = as_task(EXAMPLES[0], "")
    assert task.data["answer"] == as_task(EXAMPLES[0], "be fast").data["answer"]
    assert "records" not in [tool["name"] for tool in task.data["tools"]]
    orion = lambda seed: environment(task, seed, sandbox).by_name["orion"]  # noqa: E731
    says = [orion(seed).call({}).content.split(": ")[1] for seed in range(200)]
    expected = skill("large", "law", "hard").right
    assert abs(says.count(task.data["answer"]) / 200 - expected) < 0.08
    asked = as_task(EXAMPLES[3], "")
    records = environment(asked, 0, sandbox).by_name["records"]
    table, key = asked.data["solution"]
    for following in ("customer", "agent", "age"):
        ((table, key),) = json.loads(records.call({"table": table, "id": key}).content).items()
        assert table == following
    assert str(key) == asked.data["answer"]
    shorter = as_task("what is the rank of the customer of order 512?", "")
    assert shorter.data["tables"]["order"] == asked.data["tables"]["order"]


@pytest.mark.parametrize(
    "wish, name, text",
    [
        ("", "balanced", "Mind cost and time."),
        ("a balance", "balanced", "Mind cost and time."),
        ("cheap as you can", "cheap", "Be cheap."),
        ("I want it right", "right", "Be right at any price."),
        ("be fast and avoid Lyra", "fast", "Be fast. Do not use small lyra."),
        ("never use orion", "balanced", "Mind cost and time. Do not use large orion."),
    ],
)
def test_a_wish_stands_in_the_prompt_in_the_worlds_words(wish, name, text):
    read, preference = as_preference(wish, LINE_UP)
    assert (read, preference.text) == (name, text)
    assert (preference.outcome, preference.cost, preference.latency) == PREFERENCES[name][1]
