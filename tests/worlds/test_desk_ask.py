"""What is typed becomes a task of the desk, or is refused in one line."""

from __future__ import annotations

import re

import pytest

from nanorchestra.errors import UserError
from nanorchestra.records import Preference
from worlds.desk import KINDS, WISHES, Desk
from worlds.desk_ask import EXAMPLES, as_task
from worlds.desk_programs import PROGRAMS
from worlds.programs import play_program

ORDER = EXAMPLES[0]


def asked(question, preference=""):
    return as_task(question, Preference.parse(preference, "it"))


def test_a_typed_question_is_put_in_the_world_s_own_words():
    for typed, text, kinds in (
        ("code of the  ORDER 512", ORDER, {*KINDS} - {"matter", "product"}),
        ("what is the rank of trial 372?", "What is the rank of trial 372?", {"matter"}),
        ("47*6 ?", "What is 47 * 6?", {"product"}),
    ):
        task = asked(typed)
        assert task.question == text and task.kind in kinds and task == asked(text)


def test_the_program_of_the_desk_finds_the_answers_of_typed_questions(sandbox):
    """So they are tasks like any other; the same question has the same answer."""
    world, kinds = Desk(0, sandbox), set()
    for number in range(100, 160):
        task = asked(f"What is the age of order {number}?")
        attempt = play_program(PROGRAMS["perfect"](task), world.environment(task, 0))
        kinds.add(task.kind)
        assert attempt.outcome or "matter" in task.kind
    assert kinds == {"value", "chain", "chain product", "chain matter"}
    assert asked(ORDER).data == asked(ORDER, "fast").data
    task = asked("What is 47 * 6?")
    assert play_program(PROGRAMS["program"](task), world.environment(task, 0)).answer == "282"


def test_a_wish_is_read_in_the_question_or_in_the_preference():
    for question, preference, text, name in (
        (ORDER, "", "It must be right.", "right"),
        (f"{ORDER} keep it cheap", "", "Keep it cheap.", "cheap"),
        (f"{ORDER} I cannot wait.", "cheap", "I cannot wait.", "fast"),
        (ORDER, "i am in a hurry usd=0.5 never=ant", "I am in a hurry.", "fast"),
        (ORDER, "cost=1", "Keep it cheap.", "cheap"),
        (ORDER, "fast", "Be quick.", "fast"),
    ):
        task = asked(question, preference)
        known = task.preference
        assert (known.text, known.name, task.question) == (text, name, ORDER)
        assert (known.outcome, known.cost, known.latency) == WISHES[name][0]
        assert (known.never, known.usd) == ((["ant"], 0.5) if "never" in preference else ([], None))


OUTSIDE = """hi|2|what is the capital of France?|2 + 2|417 * 6|47 * 16|07 * 3|rank of order
the rank of order 4711|the rank of tax 512|the age of the agent of order 512|order 512"""


def test_what_is_outside_the_world_is_refused_in_one_line_with_examples():
    for typed in [*re.split("[|\n]", OUTSIDE), f"{'9' * 5000} * 3"]:
        with pytest.raises(UserError, match="^outside the .*; ask like .*of order 512") as error:
            asked(typed)
        assert len(str(error.value)) < 400
    for preference, says in (
        ("sing a song", "nano has not learnt 'sing a song'; it knows right, cheap, fast, It must"),
        ("cost=1 latency=1", "nano has not learnt 'balanced'"),
        ("ant=-1", "ant has a weight; the desk has none: write never=NAME"),
    ):
        with pytest.raises(UserError, match=f"preference: {says}"):
            asked(ORDER, preference)
