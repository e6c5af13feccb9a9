"""Tasks of the built-in author, what throws tasks away, and how attempts are scored."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest

from nanorchestra.errors import UserError
from worlds.toolscale.domains import build
from worlds.toolscale.pipeline import make_batch
from worlds.toolscale.score import Scorer, communicated, verdict
from worlds.toolscale.tasks import LEVELS, Act, evolve, generate, to_task
from worlds.toolscale.verify import (
    AMBIGUOUS,
    ERRS,
    FORMAT,
    LEAK,
    NOTHING,
    ROWS,
    TOLD,
    UNDETERMINED,
    UNFAIR,
    altered,
    mentions,
    signature,
    task_text,
    verify,
)
from worlds.toolscale.world import World

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def batch():
    return build("railway", 1)[0], make_batch("railway", 1, (1, 2, 3, 4, 5), 0)


def test_every_task_is_solved_by_its_golden_calls_and_not_without_them(batch):
    world, part = batch
    assert len(part["tasks"]) == part["golden"] == 50 and part["nothing"] == part["altered"] == 0
    for task in part["tasks"]:
        scorer = Scorer(world, task)
        calls, said = scorer.golden_calls(), task["evaluation_criteria"]["communicate_info"]
        assert (
            1 <= len(calls) <= 12
            and verify(world, task) is None
            and {name for name, _ in calls} <= set(task["tools"])
        )
        for skipped in range(len(calls)):
            assert scorer.score(calls[:skipped] + calls[skipped + 1 :], said).reward == 0
        if said:
            assert scorer.score(calls, []).reward == 0


def test_a_batch_is_a_function_of_its_arguments(batch):
    again = make_batch("railway", 1, (1, 2, 3, 4, 5), 0)
    assert again["tasks"] == batch[1]["tasks"] and again["rejected"] == batch[1]["rejected"]
    assert make_batch("railway", 1, (1, 2, 3, 4, 5), 1)["tasks"][0] != again["tasks"][0]


def test_the_text_is_fluent_enough_to_have_no_gaps(batch):
    for task in batch[1]["tasks"]:
        text = task_text(task)
        assert not any(mark in text for mark in ("{", "}", "None", "  ", "..", " .", "_")), text
        assert task["user_scenario"]["instructions"]["reason_for_call"].startswith(
            ("You ", "Today ")
        )


def test_the_level_is_a_dial():
    world, words = build("weather", 2)
    mean = {}
    for level in LEVELS:
        acts = [generate(world, words, random.Random(f"{level}/{n}"), level, n) for n in range(25)]
        mean[level] = (
            sum(len(act.calls) for _, act in acts),
            sum(len(to_task(world, words, draft, act, "t")["tools"]) for draft, act in acts),
        )
    assert (
        all(mean[level][0] < mean[level + 1][0] for level in (1, 2, 3, 4))
        and mean[1][1] < mean[3][1] < mean[5][1]
    )


def test_evolution_makes_an_easy_task_harder_by_the_same_rules():
    world, words = build("finance", 3)
    rng = random.Random(0)
    draft, act = generate(world, words, rng, 1)
    first = len(act.calls)
    for _ in range(6):
        harder = evolve(world, words, draft, rng)
        if harder is not None:
            draft, act = harder
            assert (
                Act(world, words, json.loads(json.dumps(draft))).calls == act.calls
            )  # a draft is plain JSON, and acting it out is a function
    assert len(act.calls) > first


# --- verification: each reason, by a task that was sound until one thing was changed


def find(batch, fits):
    world, part = batch
    return world, copy.deepcopy(next(task for task in part["tasks"] if fits(task)))


def actions(task):
    return task["evaluation_criteria"]["actions"]


def words(task):
    return task["user_scenario"]["instructions"]


def test_golden_calls_that_err_are_thrown_away(batch):
    world, task = find(batch, lambda t: True)
    actions(task)[-1]["arguments"][
        "passenger_id"
        if "passenger_id" in actions(task)[-1]["arguments"]
        else next(iter(actions(task)[-1]["arguments"]))
    ] = "nobody"
    assert verify(world, task) == ERRS
    with pytest.raises(UserError, match=f"task {task['id']}: golden call {len(actions(task)) - 1}"):
        Scorer(world, task).gold


def test_tasks_solved_by_doing_nothing_are_thrown_away(batch):
    world, task = find(batch, lambda t: not t["evaluation_criteria"]["env_assertions"])
    task["evaluation_criteria"]["reward_basis"] = ["DB"]  # a question only: nothing changes
    assert verify(world, task) == NOTHING


def test_tasks_whose_text_does_not_determine_an_argument_are_thrown_away(batch):
    world, task = find(
        batch,
        lambda t: (
            words(t)["known_info"].count("passenger number")
            or words(t)["known_info"].count("traveller number")
        ),
    )
    words(task)["known_info"] = "You are somebody."
    assert verify(world, task) == UNDETERMINED


def test_identifiers_that_a_lookup_reveals_may_not_stand_in_the_text(batch):
    world, task = find(
        batch,
        lambda t: (
            words(t)["unknown_info"]
            and len(actions(t)) > 2
            and actions(t)[0]["name"].startswith("identify")
        ),
    )
    person = next(
        value
        for action in actions(task)[1:]
        for value in action["arguments"].values()
        if isinstance(value, str) and value in next(iter(world.tables.values()))
    )
    words(task)["known_info"] += f" Your number is {person}."
    assert verify(world, task) == LEAK


def test_what_is_to_be_communicated_may_not_stand_in_the_text(batch):
    world, task = find(batch, lambda t: t["evaluation_criteria"]["communicate_info"])
    words(task)["task_instructions"] += (
        f" You think of {task['evaluation_criteria']['communicate_info'][0]}."
    )
    assert verify(world, task) == TOLD


def test_a_choice_that_the_text_does_not_make_is_thrown_away(batch):
    """The superlative is what tells one train from the others: without it several would do."""
    world, part = batch
    tried, noticed = 0, 0
    for number in range(4):
        for task in make_batch("railway", 1, (3, 4, 5), number + 5)["tasks"]:
            if (
                sum(
                    words(task)["reason_for_call"].count(word)
                    for word in ("the cheapest", "the most expensive")
                )
                == 1
            ):
                blunt = copy.deepcopy(task)
                words(blunt)["reason_for_call"] = (
                    words(blunt)["reason_for_call"]
                    .replace("the cheapest", "a")
                    .replace("the most expensive", "a")
                )
                tried += 2
                noticed += verify(world, blunt) == AMBIGUOUS
                wrong = copy.deepcopy(task)  # the other end of the list
                words(wrong)["reason_for_call"] = (
                    words(task)["reason_for_call"]
                    .replace("the cheapest", "THE")
                    .replace("the most expensive", "the cheapest")
                    .replace("THE", "the most expensive")
                )
                noticed += verify(world, wrong) == AMBIGUOUS
        if tried > 20:
            break
    assert (
        noticed >= 0.85 * tried > 10
    )  # the rest name the same record in another wish, or would fail for the others


def test_bad_formats_rows_and_unfair_tasks_are_thrown_away(batch):
    world, task = find(batch, lambda t: t["evaluation_criteria"]["env_assertions"])
    for change in (
        lambda t: t.pop("id"),
        lambda t: t.pop("evaluation_criteria"),
        lambda t: actions(t).append({"name": "x"}),
        lambda t: t["user_scenario"].update(instructions=3),
        lambda t: t["evaluation_criteria"].update(reward_basis=None),
        lambda t: t["evaluation_criteria"].update(communicate_info=[3]),
    ):
        bad = copy.deepcopy(task)
        change(bad)
        assert verify(world, bad) == FORMAT
    unfair = copy.deepcopy(task)
    unfair["evaluation_criteria"]["env_assertions"][0]["arguments"]["value"] = "something else"
    assert verify(world, unfair) == UNFAIR
    narrow = World(
        world.domain, copy.deepcopy(world.schema), world.tables, world.tools, world.policy
    )
    for shape in narrow.schema.values():  # a schema that no changed row can fit
        shape["fields"]["also_needed"] = {"type": "string"}
    assert verify(narrow, task) == ROWS


def test_near_duplicates_share_a_signature_and_others_do_not(batch):
    tasks = batch[1]["tasks"]
    assert len({signature(task) for task in tasks}) == len(tasks)
    twin = copy.deepcopy(
        next(task for task in tasks if any(c.isdigit() for c in words(task)["reason_for_call"]))
    )
    before = signature(twin)
    words(twin)["reason_for_call"] = (
        words(twin)["reason_for_call"].replace("1", "7").replace("2", "8")
    )
    words(twin)["known_info"] = "You are somebody else."
    assert signature(twin) == before
    words(twin)["reason_for_call"] += " Also this."
    assert signature(twin) != before


def test_mentions_knows_numbers_words_and_boundaries():
    assert (
        mentions("for $1,040.50 in all", 1040.5)
        and mentions("at most 15 of them", 15.0)
        and mentions("a side effect, please", "side_effect")
    )
    assert (
        not mentions("train T155", 15)
        and not mentions("on 2025-03-15", 15)
        and not mentions("at 15:30", 15)
        and not mentions("T1234", "T123")
        and not mentions("x", True)
    )


# --- scoring


@pytest.fixture
def attempt(batch):
    world, task = find(
        batch,
        lambda t: (
            len(actions(t)) > 3
            and t["evaluation_criteria"]["env_assertions"]
            and t["evaluation_criteria"]["communicate_info"]
        ),
    )
    scorer = Scorer(world, task)
    return (
        world,
        task,
        scorer,
        scorer.golden_calls(),
        task["evaluation_criteria"]["communicate_info"],
    )


def test_extra_reads_and_failed_calls_do_no_harm_and_an_extra_write_does(attempt):
    world, task, scorer, calls, said = attempt
    passengers = next(iter(world.tables))
    harmless = [("calculate", {"expression": "1 + 1"}), ("nothing", {}), (calls[-1][0], {})]
    assert scorer.score([*harmless, *calls, *harmless], ["hello", *said]).reward == 1
    email = next((name for name in world.by_name if "email" in name), None)
    if email:
        parts = scorer.score(
            [
                *calls,
                (
                    email,
                    {
                        next(
                            iter(world.by_name[email]["function"]["parameters"]["properties"])
                        ): next(iter(world.tables[passengers])),
                        "email": "x@y.example",
                    },
                ),
            ],
            said,
        ).parts
        assert not parts["DB"] and parts["ACTION"] and parts["COMMUNICATE"]


def test_an_action_with_a_missing_argument_is_noticed(attempt):
    world, task, scorer, calls, said = attempt
    position = next(i for i, (_, arguments) in enumerate(calls) if len(arguments) > 1)
    name, arguments = calls[position]
    short = dict(list(arguments.items())[:-1])
    assert (
        scorer.score([*calls[:position], (name, short), *calls[position + 1 :]], said).parts[
            "ACTION"
        ]
        is False
    )
    task["evaluation_criteria"]["actions"][position]["compare_args"] = list(short)
    assert (
        scorer.score([*calls[:position], (name, short), *calls[position + 1 :]], said).parts[
            "ACTION"
        ]
        is True
    )
    assert (
        scorer.score([*calls[:position], (name, {}), *calls[position + 1 :]], said).parts["ACTION"]
        is False
    )


def test_a_whole_number_is_the_same_with_and_without_a_point():
    world, _ = build("railway", 1)
    for task in make_batch("railway", 1, (3, 4), 1)["tasks"]:
        scorer = Scorer(world, task)
        calls = [
            (
                name,
                {
                    key: int(value) if isinstance(value, float) and value.is_integer() else value
                    for key, value in arguments.items()
                },
            )
            for name, arguments in scorer.golden_calls()
        ]
        assert scorer.score(calls, task["evaluation_criteria"]["communicate_info"]).reward == 1


def test_a_calculation_counts_by_its_value(batch):
    world, task = find(batch, lambda t: any(action["name"] == "calculate" for action in actions(t)))
    scorer = Scorer(world, task)
    calls, said = scorer.golden_calls(), task["evaluation_criteria"]["communicate_info"]
    turned = [
        (
            name,
            {"expression": " + ".join(reversed(arguments["expression"].split(" + ")))}
            if name == "calculate"
            else arguments,
        )
        for name, arguments in calls
    ]
    other = [
        (
            name,
            {"expression": arguments["expression"] + " + 1"} if name == "calculate" else arguments,
        )
        for name, arguments in calls
    ]
    assert (
        turned != calls
        and scorer.score(turned, said).reward == 1
        and scorer.score(other, said).reward == 0
    )


@pytest.mark.parametrize(
    "info, message, found",
    [
        ("1,000", "It costs 1000 dollars.", True),
        ("1000", "It costs $1,000.00.", True),
        ("1,000", "It costs 1,000.", True),
        ("12.5", "That is 12.50 in all", True),
        ("5", "It is 15.", False),
        ("5", "It is 5%.", True),
        ("5", "on 2025-05-05", False),
        ("Gold", "you are GOLD now", True),
        ("gold", "golden", False),
        ("555-1234", "call 555-1234.", True),
        ("555-1234", "call 555-12345", False),
        ("2026-01-05", "on 2026-01-05", True),
        ("1000", "10000", False),
    ],
)
def test_what_is_communicated(info, message, found):
    assert communicated(info, ["hello", message]) is found


def test_real_communications_are_found_with_and_without_separators():
    path = DATA / "tau2" / "retail" / "tasks.json"
    if not path.exists():
        pytest.skip("no shared data")
    infos = [
        info
        for task in json.loads(path.read_text())
        for info in task["evaluation_criteria"]["communicate_info"]
    ]
    assert len(infos) > 20
    for info in infos:
        spelled = f"{float(info):,.2f}" if info.replace(".", "").isdecimal() else info
        assert communicated(info, [f"Your total is ${spelled}, thank you."]) and not communicated(
            info, [f"Your total is 7{spelled}9."]
        )


@pytest.mark.parametrize(
    "answer, met",
    [
        ('{"met": true}', True),
        ('It does. {"met": true}', True),
        ('{"met": false}', False),
        ('{"met": "true"}', False),
        ("true", False),
        ("", False),
        ("{met}", False),
        (None, False),
        ('[{"met": true}]', True),
    ],
)
def test_a_judge_that_cannot_be_read_counts_as_a_failure(attempt, answer, met):
    assert verdict(answer) is met
    _, task, scorer, calls, said = attempt
    task["evaluation_criteria"] |= {
        "reward_basis": ["NL_ASSERTION"],
        "nl_assertions": ["The agent is polite."],
    }
    assert scorer.score(calls, said, lambda assertion, messages: answer).reward == float(met)
    assert scorer.score(calls, said).reward == 0  # and so does one that is not there


def test_assertions_are_about_the_final_tables(attempt):
    world, task, scorer, calls, said = attempt
    assert scorer.score([], said).parts["ENV_ASSERTION"] is False
    task["evaluation_criteria"]["env_assertions"] = [
        {"func_name": "assert_something", "arguments": {}}
    ]
    assert (
        scorer.score(calls, said).parts["ENV_ASSERTION"] is False
    )  # one that is not known cannot hold


def test_the_initial_state_of_a_task_is_set_up(batch):
    world, task = find(batch, lambda t: True)
    table, key = next((t, next(iter(rows))) for t, rows in world.tables.items())
    task["initial_state"] = {
        "initialization_data": {
            "agent_data": {table: {key: {"city": "Nowhere"}, "N1": {"city": "New"}}}
        }
    }
    tables = Scorer(world, task).start()
    assert (
        tables[table][key]["city"] == "Nowhere"
        and tables[table][key]["first_name"]
        and tables[table]["N1"] == {"city": "New"}
        and world.tables[table][key]["city"] != "Nowhere"
    )
    task["initial_state"] = {
        "initialization_actions": [
            {"env_type": "assistant", "func_name": "nothing", "arguments": {}}
        ]
    }
    with pytest.raises(UserError, match="initialization action nothing"):
        Scorer(world, task).start()


def test_altered_changes_one_argument_and_nothing_else(batch):
    world, part = batch
    rng = random.Random(1)
    for task in part["tasks"]:
        calls = Scorer(world, task).golden_calls()
        other = altered(world, calls, rng)
        assert [name for name, _ in other] == [name for name, _ in calls]
        assert sum(a[1][key] != b[1][key] for a, b in zip(calls, other) for key in a[1]) == 1
