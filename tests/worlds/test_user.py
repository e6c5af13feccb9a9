"""What the scripted user says, to agents that write in words of their own."""

from __future__ import annotations

import pytest

from worlds.toolscale.user import PATIENCE, STOP, TRANSFER, YES, ScriptedUser, first_person, opening

TASK = {
    "user_scenario": {
        "instructions": {
            "known_info": "Your name is Mei Rossi.",
            "reason_for_call": "You want to have 3 seats in your booking. You want a person.",
        }
    },
    "evaluation_criteria": {
        "actions": [
            {"name": "booking", "arguments": {"booking_id": "R5"}},
            {
                "name": "set_seats",
                "arguments": {"booking_id": "R5", "seats": 3, "why": "more_room"},
            },
        ]
    },
}
OPENING = "My name is Mei Rossi. I want to have 3 seats in my booking. I want a person."


@pytest.mark.parametrize(
    "message, pending, answer",
    [
        ("Shall I set booking R5 to 3 seats (why: more room)?", (1,), YES),
        ("So, to be sure: R5, 3 seats, more_room. Correct?", (1,), YES),
        ("Shall I set booking R5 to 4 seats (why: more room)?", (1,), OPENING),
        ("Shall I set booking R6 to 3 seats (why: more room)?", (1,), OPENING),
        ("Shall I set R5 to 3 seats, why: more room?", (), OPENING),  # it is done
        ("Who are you?", (1,), OPENING),
        ("Anything else?", (1,), OPENING),
        ("Done. Anything else?", (), f"Thank you. {STOP}"),
        ("One moment, let me look that up.", (1,), "All right, I will wait."),
        ("I am sorry, that is not possible.", (1,), f"Thank you. {STOP}"),
        ("This is done.", (), f"Thank you. {STOP}"),
    ],
)
def test_it_confirms_what_it_wants_and_says_it_again_else(message, pending, answer):
    assert opening(TASK) == OPENING
    assert ScriptedUser(TASK).reply(message, pending, handed=False) == answer


def test_it_goes_where_it_is_handed_and_when_it_is_out_of_patience():
    assert TRANSFER in ScriptedUser(TASK).reply("Please wait.", (1,), handed=True)
    user = ScriptedUser(TASK)
    answers = [user.reply("Who are you?", (1,), False) for _ in range(PATIENCE + 1)]
    assert answers[:-1] == [OPENING] * PATIENCE and TRANSFER in answers[-1]


def test_it_speaks_of_itself():
    for said, spoken in (
        ("You are Ana and you want your money.", "I am Ana and I want my money."),
        ("Let them call you. The fault is yours.", "Let them call me. The fault is mine."),
        (
            "You want it sent to you, but only if you paid.",
            "I want it sent to me, but only if I paid.",
        ),
    ):
        assert first_person(said) == spoken
