"""Domain tasks in small: they fit, they are proved, and a policy can act on what it reads."""

from __future__ import annotations

from collections import Counter

import pytest

from nanorchestra.config import RolloutSection, TaskSection
from nanorchestra.errors import UserError
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.training.draft import VOCAB_SIZE, texts
from nanorchestra.training.warm_start import demonstration
from worlds.load import open_world
from worlds.toolscale import small
from worlds.toolscale.dataset import teach
from worlds.toolscale.small import small_world
from worlds.toolscale.verify import verify
from worlds.toolscale.words import mentions

COUNT = 72
SPLITS = ("train", "held_out")


@pytest.fixture(scope="module")
def world():
    return small_world(4)


@pytest.fixture(scope="module")
def tasks(world):
    return [world.task(split, number) for split in SPLITS for number in range(COUNT)]


def test_a_task_is_a_function_of_seed_split_and_number(world, tasks):
    assert len(world.domains) == 6 and tasks[7].world == "domains"
    assert small_world(4).task("train", 7) == tasks[7]
    assert small_world(5).task("train", 7) != tasks[7]
    drawn = [task.data["task"] for task in tasks]
    assert len({(task["level"], task["domain"]) for task in drawn}) == 12
    asked = [task.question for task in tasks]
    assert len({*asked[:COUNT]} & {*asked[COUNT:]}) == 0 and len({*asked}) > 0.9 * len(asked)


def test_golden_conversations_fit_a_small_context_and_are_right(world, tasks):
    tokenizer = train_bpe(texts(world, 600), VOCAB_SIZE)  # as a draft of these domains has
    for task in tasks:
        env = world.environment(task, 0)
        assert env.score("") == 0, "nothing done is never right"
        shown = demonstration(teach(env), env, tokenizer, RolloutSection())
        assert env.score("") == 1 and env.over
        assert shown.prompt_length <= 820 and len(shown.ids) <= 1152


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
    """What is offered does not tell which branch is right: a refusal has the tool of the wish."""
    kinds, said = Counter(), {split: set() for split in SPLITS}
    for place, task in enumerate(tasks):
        tau2 = task.data["task"]
        home, golden = world.domains[tau2["domain"]], tau2["evaluation_criteria"]["actions"]
        assert verify(home, tau2) is None and len(golden) <= small.MOST_CALLS
        assert all(mentions(task.question, value) for value in golden[0]["arguments"].values())
        env = world.environment(task, 0)
        prompt = env.messages[0]["content"]
        assert tau2["policy"] in prompt
        assert {action["name"] for action in golden} < set(env.offered)
        for rule in tau2["rules"]:
            assert rule["text"] in prompt and {*rule["args"]["tools"]} <= set(env.offered)
        assert task.kind != "look-up, then refuse" or "write" in task.offers.values()
        kinds[task.kind] += 1
        for action in golden:
            keys = [n for n in action["arguments"] if n.endswith(("_id", "account"))]
            said[SPLITS[place >= COUNT]].update(action["arguments"][name] for name in keys)
    looked_up = {f"look-up, then {what}" for what in ("write", "refuse", "answer")}
    assert {*kinds} == looked_up | {"write", "hand over"} and kinds["look-up, then refuse"] > 20
    assert not said["train"] & said["held_out"] and min(map(len, said.values())) > 40


def test_domains_can_be_named(sandbox):
    world = open_world(TaskSection("domains:bank+railway"), 0, sandbox)
    assert [*world.domains] == ["bank", "railway", "bank/held_out", "railway/held_out"]
    assert world.name == "domains:bank+railway" == world.task("train", 0).world
    with pytest.raises(UserError, match="domain 'shop': there are bank, clinic"):
        open_world(TaskSection("domains:bank+shop"), 0, sandbox)
    trained = {name for seed in range(8) for name in small_world(seed).domains}
    assert not trained & {"restaurant", "university"}
