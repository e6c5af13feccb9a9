"""What is typed becomes a task of the miniature, or is refused."""

from __future__ import annotations

import json
import re

import pytest
from miniature_tasks import environment

from nanorchestra.errors import UserError
from nanorchestra.records import Preference
from worlds.miniature.ask import EXAMPLES, LINE_UP, as_preference, as_task
from worlds.miniature.offers import skill
from worlds.miniature.tables import PREFERENCES


def test_questions_become_the_worlds_own():
    for typed, asked, kind, difficulty, answer in (
        ("Hard law TRIAL 372: its code?", EXAMPLES[0], "knowledge", "hard", "42"),
        ("law  TRIAL 372", EXAMPLES[0].replace("hard", "easy"), "knowledge", "easy", "42"),
        (EXAMPLES[0], EXAMPLES[0], "knowledge", "hard", "42"),
        ("47+36", "what is the value of 47 + 36?", "arithmetic", "easy", "83"),
        (EXAMPLES[1], EXAMPLES[1], "arithmetic", "hard", "2502"),
        ("the mass of element 79", EXAMPLES[2], "lookup", "hard", "197"),
        ("age of agent of customer of order 512", EXAMPLES[3], "chain", "hard", "78"),
    ):
        task = as_task(typed, Preference())
        read = task.question, task.kind, task.data["difficulty"], task.data["answer"]
        assert read == (asked, kind, difficulty, answer)


REFUSED = """hi|2|what is the capital of France?|2 ** 9|2 / 2 + 1|-5 + 3|law trial|law trial 4711
the hard tax trial 372: what is its code?|law patient 372|what is the age of the order 512?
417 + 6|6 * 417|07 + 12
what is the age of the order of the agent 512?|what is the calling code of guinea-x?"""


def test_what_is_outside_the_world_is_refused_in_one_line_with_examples():
    for typed in [*re.split("[|\n]", REFUSED), f"{'9' * 5000} + 1"]:
        with pytest.raises(
            UserError, match="^outside the .*'; ask like .*in hard law trial 372.*$"
        ) as error:
            as_task(typed, Preference())
        assert len(str(error.value)) < 400


def test_made_up_facts_agree_between_questions_and_experts_know_them(sandbox):
    task = as_task(EXAMPLES[0], Preference())
    assert task.data["answer"] == as_task(EXAMPLES[0], Preference("be fast")).data["answer"]
    assert "records" not in [tool["what"] for tool in task.data["tools"]]
    experts = [environment(task, seed, sandbox).by_name["tool-ro-ta-vi"] for seed in range(200)]
    says = [expert.call({}).content.split(": ")[1] for expert in experts]
    expected = skill("large", "law", "hard").right
    assert abs(says.count(task.data["answer"]) / 200 - expected) < 0.08
    asked = as_task(EXAMPLES[3], Preference())
    records = environment(asked, 0, sandbox).by_name["tool-da-lo"]
    table, key = asked.data["solution"]
    for following in ("customer", "agent", "age"):
        ((table, key),) = json.loads(records.call({"table": table, "id": key}).content).items()
        assert table == following
    assert str(key) == asked.data["answer"]
    shorter = as_task("what is the rank of the customer of order 512?", Preference())
    assert shorter.data["tables"]["order"] == asked.data["tables"]["order"]


def test_a_preference_stands_in_the_prompt_as_it_is_typed():
    """Words set no weight and no ban: nano reads them. `never=` gets the sentence nano knows."""
    for stated, name, text in (
        ("", "balanced", ""),
        ("I want it right", "balanced", "I want it right."),
        ("Not the large one!", "balanced", "Not the large one!"),
        ("sing  a song", "balanced", "sing a song."),
        ("cost=1", "cheap", "Be cheap."),
        ("Be fast. latency=1", "fast", "Be fast."),
        ("be fast never=Tool-se-li", "balanced", "be fast. Do not use small tool-se-li."),
    ):
        preference = as_preference(Preference.parse(stated, "it"), LINE_UP)
        assert (preference.name, preference.text) == (name, text)
        weights = preference.outcome, preference.cost, preference.latency
        assert weights == PREFERENCES[name][1]
        forbidden = ["tool-se-li"] if "never" in stated else []
        assert preference.never == forbidden == list(preference.tools)
