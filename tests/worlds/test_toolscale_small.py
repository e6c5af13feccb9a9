"""Domain tasks in small: they fit, they are proved, and a policy can act on what it reads."""

from __future__ import annotations

import copy
import random
import re

import pytest

from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError
from nanorchestra.training.warm_start import demonstration
from worlds.load import open_world
from worlds.toolscale import small
from worlds.toolscale.blueprint import BUILT_IN, build
from worlds.toolscale.dataset import teach
from worlds.toolscale.domain import leaves
from worlds.toolscale.invented import PEOPLE, VOCABULARY, invent
from worlds.toolscale.planner import Planner
from worlds.toolscale.program import parse_call
from worlds.toolscale.small import small_world
from worlds.toolscale.verify import mentions, verify

COUNT = 72
SPLITS = ("train", "held_out")


@pytest.fixture(scope="module")
def world():
    return small_world(4)


@pytest.fixture(scope="module")
def tasks(world):
    return [world.task(split, number) for split in SPLITS for number in range(COUNT)]


def test_a_task_is_a_function_of_seed_split_and_number(world, tasks):
    assert len(world.domains) == 3 and tasks[7].world == "domains"
    assert small_world(4).task("train", 7) == tasks[7]
    assert small_world(5).task("train", 7) != tasks[7]
    drawn = [task.data["task"] for task in tasks]
    assert {task["level"] for task in drawn} == {1, 2}
    assert len({(task["level"], task["domain"]) for task in drawn}) == 6
    asked = [task.question for task in tasks]
    assert len({*asked[:COUNT]} & {*asked[COUNT:]}) == 0 and len({*asked}) > 0.9 * len(asked)


def test_prompts_and_golden_conversations_fit_a_small_context_and_score(
    world, tasks, nano_tokenizer
):
    for task in tasks:
        env = world.environment(task, 0)
        assert env.score("") == 0, "nothing done is never right"
        shown = demonstration(teach(env), env, nano_tokenizer)
        assert env.score("") == 1 and env.over
        assert shown.prompt_length <= 900 and len(shown.ids) <= 1408


def test_demonstrations_are_right_in_a_share_that_is_stated(world, tasks):
    assert (world.skill, small_world(4, spoiled=0.75).skill) == (1, 0.25)
    for skill, least, most in ((0.0, 0, 0.1), (0.5, 0.3, 0.7)):
        scores = []
        for task in tasks:
            env = world.environment(task, 0)
            *_, last = teach(env, skill)
            assert last.content and not last.result
            scores.append(env.score(""))
        assert least <= sum(scores) / len(scores) <= most


def test_tasks_are_proved_and_the_prompt_has_all_that_is_needed(world, tasks):
    denied = 0
    for task in tasks:
        tau2, home = task.data["task"], world.domains[task.data["task"]["domain"]]
        assert verify(home, tau2) is None
        golden = tau2["evaluation_criteria"]["actions"]
        mentioned = all(mentions(task.question, value) for value in golden[0]["arguments"].values())
        assert mentioned or home.by_name[golden[0]["name"]]["kind"] in ("calculate", "handover")
        env = world.environment(task, 0)
        prompt = env.messages[0]["content"]
        assert {action["name"] for action in golden} <= set(env.offered)
        assert len(golden) <= small.MOST_CALLS < small.MOST_CHARS and tau2["policy"] in prompt
        assert not any(f"- {name}: " in prompt for name in set(home.by_name) - set(env.offered))
        for rule in tau2["rules"]:  # what it forbids is offered, and forbidden in words
            assert rule["text"] in prompt and {*rule["args"]["tools"]} <= set(env.offered)
            denied += rule["check"] == "never"
    assert denied


def test_what_is_offered_does_not_tell_which_branch_is_right(world, tasks):
    """Where a fact or a rule decides, the tools of the wish and of what may take its place are."""
    conditions = 0
    for task in tasks:
        tau2 = task.data["task"]
        if not any(rule["check"] == "made" for rule in tau2["rules"]):
            continue
        conditions += 1
        parts = dict(world.splits["train"].domains)[tau2["domain"]]
        planner = Planner(*parts, random.Random(tau2["id"]))
        act = planner.generate(2, planner.rng.randrange(len(planner.kinds)), known=True)
        spoken = {kind for wish in act.done for kind in (wish, *planner.kinds[wish].get("or", ()))}
        calls = (call for kind in spoken for call in planner.kinds[kind].get("do", ()))
        assert {parse_call(call)[0] for call in calls} <= set(tau2["tools"])
    assert conditions > 20


def test_a_small_world_leaves_the_domains_of_its_seed_as_they_were():
    before = {name: copy.deepcopy(build(name, 4)[1].data["wishes"]) for name in BUILT_IN}
    small_world(4)
    for name in BUILT_IN:
        assert build(name, 4)[1].data["wishes"] == before[name]


def test_domains_can_be_named(sandbox):
    world = open_world(TaskSection("domains:bank+railway"), 0, sandbox)
    assert [*world.domains] == ["bank", "railway"]
    assert world.name == "domains:bank+railway" == world.task("train", 0).world
    with pytest.raises(UserError, match="domain 'shop': there are bank, clinic"):
        open_world(TaskSection("domains:bank+shop"), 0, sandbox)


HELD_OUT = ("railway", "telecom", "university")
TRAINED = ("bank", "clinic", "ecommerce", "helpdesk", "restaurant")
DRAWN = "domains-drawn:invented+bank+invented+clinic+invented+helpdesk+invented+restaurant"


@pytest.fixture(scope="module")
def drawn_world(sandbox):
    return open_world(TaskSection(DRAWN), 3, sandbox)


def test_a_drawn_task_has_names_of_its_own_and_its_demonstration_scores(drawn_world):
    """What the teacher does stands in the prompt, under names that no other task has."""
    names, kinds = [], []
    for number in range(30):
        task = drawn_world.task("train", number)
        env = drawn_world.environment(task, 0)
        assert env.score("") == 0
        lessons = [lesson for lesson in teach(env) if lesson.call or lesson.thought]
        shown = [lesson.call for lesson in lessons if lesson.call]
        assert not any("<" in re.sub(" [<=>!]+ ", " ", lesson.thought) for lesson in lessons)
        shape = drawn_world.domains[task.data["task"]["domain"]].names.shape
        fields = [name for lesson in lessons if lesson.call for name in _fields(lesson.result)]
        assert not any("_" in name for name in fields if shape != "snake")
        assert env.score("") == 1 and env.over and len(env.trace) <= 7
        functions = {each["function"]["name"]: each["function"] for each in env.tools}
        for call in shown:
            assert {*call.arguments} == {*functions[call.name]["parameters"]["properties"]}
        names += functions
        kinds.append(task.kind)
    again = open_world(TaskSection(DRAWN), 3, None)
    assert again.task("train", 29) == task and again.task("held_out", 29) != task
    assert len({*names}) > 0.9 * len(names)
    looked = sum(kind.startswith("look-up") for kind in kinds) / len(kinds)
    assert 0.6 < looked < 0.9 and len({*kinds}) >= 4


def _fields(result):
    """The names of the fields of a result, which is JSON or an error."""
    return re.findall(r'"([^"]+)": ', result.content)


def test_an_invented_domain_has_no_tool_twice():
    """A record is looked up by one tool and listed by one, and no two tools do or say the same."""
    for seed in range(400):
        drawn = invent(random.Random(seed))
        assert invent(random.Random(seed)) == drawn
        tools, reads = drawn["tools"].values(), []
        for tool in tools:
            if tool["kind"] == "read":
                reads += re.findall(r"= (get|select)\((\w+)", tool["program"][0])
        assert len({*reads}) == len(reads), reads
        assert {table for _, table in reads} == {PEOPLE, *drawn["refs"]} == {*drawn["tables"]}
        assert len({str((tool["arguments"], tool["program"])) for tool in tools}) == len(tools)
        assert len({tool["description"] for tool in tools}) == len(tools)
        said = [reference["by"][0] for reference in drawn["refs"].values()]
        assert len({*said}) == len(said)


def test_no_drawn_name_is_one_of_the_held_out_domains():
    """Names that these alone have are in no vocabulary, whole or as a word of a name."""
    theirs = set().union(*map(_names, HELD_OUT)) - set().union(*map(_names, TRAINED))
    assert {"booking", "enrolment_id", "roaming"} < theirs
    words = VOCABULARY
    drawn = [*words["things"], *words["people"], *words["items"], *words["parts"]]
    drawn += [*words["plain_words"], *words["id_words"], *words["goods"]]
    for kind in ("numbers", "enums", "days", "verbs", "part_verbs"):
        drawn += [name for entry in words[kind] for name in entry["names"]]
    drawn += [name for kind in words if kind.endswith("_names") for name in words[kind]]
    assert len(drawn) > 500
    singular = {word.removesuffix("s") for name in drawn for word in re.split("[_ ]", name)}
    assert not {name.removesuffix("s") for name in theirs} & (singular | {*drawn})


def _names(name):
    """The names of a domain's tables, fields, tools and arguments, and the words of these."""
    domain, _ = build(name, 0)
    names = {*domain.tables, *domain.by_name}
    for tool in domain.tools:
        names |= {*tool["function"]["parameters"]["properties"]}
    records = [row for table in domain.tables.values() for row in table.values()]
    names |= {field for field, _ in leaves(records)}
    return names | {word for each in names for word in each.split("_")}
