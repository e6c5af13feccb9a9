"""What the scripted user says from its first wish to the end, and how it changes its mind."""

from __future__ import annotations

import pytest

from worlds.toolscale.domain import Domain
from worlds.toolscale.user import PATIENCE, STOP, TRANSFER, ScriptedUser, ended

CHANGE = "I want to change my booking for the Silver Arrow to 3 seats in second class."
PHONE = "I also want to have my phone number changed to 555-0117."
HOURS = "Besides, I want to know what the opening hours of Basel Station are."
SCENARIO = {
    "instructions": {
        "known_info": "You are Mei Rossi and your zip code is 12345.",
        "unknown_info": "You do not know your passenger number or any booking number.",
    },
}
WISHES = [
    {"say": CHANGE.replace("my", "your").replace("I ", "You "), "actions": [0], "told": []},
    {"say": PHONE.replace("my", "your").replace("I ", "You "), "actions": [1], "told": []},
    {"say": HOURS.replace("I ", "you "), "actions": [], "told": ["06:00-22:00"]},
]
ACTIONS = [
    {
        "name": "change_booking",
        "arguments": {"booking_id": "R5", "seats": 3, "travel_class": "second"},
    },
    {"name": "change_phone", "arguments": {"passenger_id": "P1", "phone": "555-0117"}},
]
TASK = {
    "user_scenario": SCENARIO,
    "wishes": WISHES,
    "evaluation_criteria": {"actions": ACTIONS, "communicate_info": []},
}
TRAINS = {"T1": "Silver Arrow", "T2": "Red Star", "T3": "Golden Falcon"}


def tool(name, **properties):
    return {"kind": "write", "function": {"name": name, "parameters": {"properties": properties}}}


@pytest.fixture(scope="module")
def domain():
    classes = {"type": "string", "enum": ["second", "first", "flex"]}
    tables = {
        "bookings": {f"R{n}": {"booking_id": f"R{n}", "train_id": "T1"} for n in range(10)},
        "fares": {name: {"travel_class": name} for name in classes["enum"]},
        "trains": {key: {"train_id": key, "name": name} for key, name in TRAINS.items()},
    }
    tools = [tool("change_booking", travel_class=classes), tool("change_phone")]
    return Domain("railway", tables, tools, "")


KNOWN, ZIP = "I am Mei Rossi.", "My zip code is 12345."


def test_a_talk_from_the_first_wish_to_the_end(domain):
    talk, known = (
        ScriptedUser(TASK, domain),
        "I do not know my passenger number or any booking number.",
    )
    assert talk.wishes[0].say == CHANGE
    for message, pending, answer in (
        ("What is your name and zip code?", (0, 1), f"{KNOWN} {ZIP}"),
        ("And your passenger number?", (0, 1), known),
        ("I will change R5 to 3 seats in second class. Do you confirm?", (0, 1), "Yes, please."),
        ("Which colour do you like?", (0, 1), CHANGE),  # it invents nothing
        ("It is as you like it now.", (1,), PHONE),  # what is done is seen, whatever is said
        ("Shall I undo the change of your seats?", (1,), f"No. {PHONE}"),
        ("Done.", (), HOURS),
        ("From 06:00 to 22:00.", (), f"Thank you. {STOP}"),
    ):
        assert talk.reply(message, pending, False) == answer
    assert TRANSFER in ScriptedUser(TASK, domain).reply("One moment.", (0, 1), handed=True)
    talk = ScriptedUser(TASK, domain)
    patience = [ended(talk.reply("Who are you?", (), False)) for _ in range(PATIENCE + 1)]
    assert patience.index(True) == PATIENCE


def test_a_user_changes_its_mind_once_the_agent_is_about_to_do_it(domain):
    wish = WISHES[0] | {"first": "You want to cancel R5."}
    for message, answer in (
        ("One moment.", "All right, I will wait."),
        ("Shall I cancel R5?", CHANGE),
        ("I have cancelled R5.", CHANGE),
        ("I am sorry, that cannot be cancelled.", CHANGE),
    ):
        talk = ScriptedUser(TASK | {"wishes": [wish, WISHES[1]]}, domain)
        assert talk.wishes[0].opening == "I want to cancel R5."
        assert "Mei Rossi" in talk.reply("What is your name?", (0, 1), False)
        assert talk.reply(message, (0, 1), False) == answer
    talk = ScriptedUser(TASK | {"wishes": [WISHES[1], wish]}, domain)
    assert talk.reply("Done.", (0,), False) == "I want to cancel R5."
    assert talk.reply("Shall I cancel R5?", (0,), False) == CHANGE
    assert talk.reply("Shall I cancel R5?", (0,), False) == f"No. {CHANGE}"


def test_a_limit_is_no_count_that_the_agent_must_repeat(domain):
    limit = "If it takes more than 60 minutes, {}".format(WISHES[0]["say"])
    for say, asked, answer in (
        (limit, "It takes 90 minutes. Shall I change R5 to 3 seats in second class?", "Yes"),
        (limit, "Shall I change R5 to 4 seats in second class?", "No"),
        (f"{limit} At 60 minutes or less, no.", "It takes 90 minutes. Shall I change R5?", "Yes"),
    ):
        talk = ScriptedUser(TASK | {"wishes": [WISHES[0] | {"say": say}]}, domain)
        assert talk.reply(asked, (0,), False).startswith(answer), asked


def test_what_the_user_wants_if_a_rule_forbids_it_is_said_once(domain):
    say = (
        "You want to change R5 to 3 seats. If that is not allowed, you want a person to look at it."
    )
    task = TASK | {"wishes": [{"say": say, "actions": [0], "told": []}, WISHES[1]]}
    talk = ScriptedUser(task, domain)
    person = "If that is not allowed, I want a person to look at it."
    assert talk.reply("Sorry, that is not allowed.", (0, 1), False) == person
    assert (
        talk.reply("Would you like me to transfer you to a human agent?", (0, 1), False)
        == "Yes, please."
    )
    talk = ScriptedUser(task, domain)
    talk.reply("I cannot do that.", (0, 1), False)
    assert talk.reply("I really can't.", (0, 1), False) == PHONE
