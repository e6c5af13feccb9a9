"""Domain tasks in small: they fit, they are proved, and a policy can act on what it reads."""

from __future__ import annotations

import copy
import random

import pytest

from nanorchestra.config import RolloutSection, TaskSection
from nanorchestra.errors import UserError
from nanorchestra.training.warm_start import demonstration
from worlds.load import open_world
from worlds.toolscale import small
from worlds.toolscale.blueprint import BUILT_IN, build
from worlds.toolscale.dataset import teach
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
        shown = demonstration(teach(env), env, nano_tokenizer, RolloutSection())
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
        pairs = world.splits["train"].domains
        parts = next(pair for pair in pairs if pair[0].name == tau2["domain"])
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
