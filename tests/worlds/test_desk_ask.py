"""What is typed becomes a task of the desk, or is refused in one line."""

from __future__ import annotations

import pytest

from nanorchestra.errors import UserError
from nanorchestra.records import Preference
from worlds.desk import Desk
from worlds.desk_ask import EXAMPLES, as_task
from worlds.desk_programs import PROGRAMS
from worlds.programs import play_program

ORDER = EXAMPLES[0]


def asked(question, preference=""):
    return as_task(question, Preference.parse(preference, "it"))


def test_the_program_of_the_desk_finds_the_answers_of_typed_questions(sandbox):
    """So they are tasks like any other; the same question has the same answer."""
    world, kinds = Desk(0, sandbox), set()
    for number in range(100, 160):
        task = asked(f"What is the age of order {number}?")
        attempt = play_program(PROGRAMS["perfect"], world.environment(task, 0))
        kinds.add(task.kind)
        assert attempt.outcome or "matter" in task.kind
    assert kinds == {"value", "chain", "chain product", "chain matter"}
    assert asked(ORDER).data == asked(ORDER, "fast").data
    task = asked("47*6 ?")
    assert play_program(PROGRAMS["program"], world.environment(task, 0)).answer == "282"


def test_a_wish_is_read_in_the_question_or_in_the_preference():
    for question, preference, text, name in (
        (f"{ORDER} I cannot wait.", "cheap", "I cannot wait.", "fast"),
        (ORDER, "i am in a hurry usd=0.5", "I am in a hurry.", "fast"),
        (ORDER, "cost=1", "Keep it cheap.", "cheap"),
    ):
        known = asked(question, preference).preference
        assert (known.text, known.name) == (text, name)
        assert known.usd == (0.5 if "usd" in preference else None)


def test_what_is_outside_the_world_is_refused_in_one_line_with_examples():
    for typed in ("hi", "2", "417 * 6", "the rank of order 4711", f"{'9' * 5000} * 3"):
        with pytest.raises(UserError, match="^outside the .*; ask like .*of order 512") as error:
            asked(typed)
        assert len(str(error.value)) < 400
