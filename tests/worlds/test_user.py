"""What the scripted user says, to agents that write in words of their own."""

from __future__ import annotations

import pytest

from worlds.toolscale.user import PATIENCE, STOP, TRANSFER, YES, ScriptedUser

INSTRUCTIONS = {
    "known_info": "Your name is Mei Rossi.",
    "reason_for_call": "You want to have 3 seats in your booking. You want it sent to you.",
}
SET_SEATS = {
    "name": "set_seats",
    "arguments": {"booking_id": "R5", "seats": 3, "why": "more_room"},
}
TASK = {
    "user_scenario": {"instructions": INSTRUCTIONS},
    "evaluation_criteria": {"actions": [SET_SEATS]},
}
OPENING = "My name is Mei Rossi. I want to have 3 seats in my booking. I want it sent to me."


@pytest.mark.parametrize(
    "message, pending, answer",
    [
        ("Shall I set booking R5 to 3 seats (why: more room)?", (0,), YES),
        ("Shall I set booking R5 to 4 seats (why: more room)?", (0,), OPENING),
        ("Done. Anything else?", (), f"Thank you. {STOP}"),
        ("One moment, let me look that up.", (0,), "All right, I will wait."),
        ("I am sorry, that is not possible.", (0,), f"Thank you. {STOP}"),
    ],
)
def test_it_confirms_what_it_wants_and_says_it_again_else(message, pending, answer):
    assert ScriptedUser(TASK).reply(message, pending, handed=False) == answer


def test_it_goes_where_it_is_handed_and_when_it_is_out_of_patience():
    assert TRANSFER in ScriptedUser(TASK).reply("Please wait.", (0,), handed=True)
    user = ScriptedUser(TASK)
    answers = [user.reply("Who are you?", (0,), False) for _ in range(PATIENCE + 1)]
    assert answers[:-1] == [OPENING] * PATIENCE and TRANSFER in answers[-1]
