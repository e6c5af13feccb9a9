"""Domain tasks in small: they fit, they are proved, and a policy can act on what it reads."""

from __future__ import annotations

import pytest

from nanorchestra.training.lessons import demonstration
from worlds.toolscale import small
from worlds.toolscale.dataset import teach
from worlds.toolscale.small import small_world
from worlds.toolscale.verify import mentions, verify


@pytest.fixture(scope="module")
def world():
    return small_world(4)


def test_it_is_a_function_of_the_seed_with_tasks_enough(world, monkeypatch):
    assert len(world.worlds) == 3 and world.task("train", 7).data["world"] == "domains"
    assert len(world.splits["train"]) >= 90 and len(world.splits["held_out"]) >= 20
    monkeypatch.setattr(small, "TASKS", 5)
    one = small_world(4)
    assert small_world(4) == one and small_world(5).splits != one.splits


def test_prompts_and_golden_conversations_fit_a_small_context_and_score(world, nano_tokenizer):
    for split, tasks in world.splits.items():
        for index in range(len(tasks)):
            env = world.environment(world.task(split, index), 0)
            assert env.score("") == 0
            shown = demonstration(teach(env), env, nano_tokenizer)
            assert env.score("") == 1 and env.over
            assert shown.prompt_length <= 900 and len(shown.ids) <= 1024


def test_tasks_are_proved_and_the_prompt_has_all_that_the_first_call_needs(world):
    for index in range(len(world.splits["train"])):
        task = world.task("train", index)
        tau2, home = task.data["task"], world.worlds[task.data["kind"]]
        assert verify(home, tau2) is None
        golden = tau2["evaluation_criteria"]["actions"]
        told = all(mentions(task.question, value) for value in golden[0]["arguments"].values())
        assert told or home.by_name[golden[0]["name"]]["kind"] in ("calculate", "handover")
        env = world.environment(task, 0)
        prompt = env.messages[0]["content"]
        assert {action["name"] for action in golden} <= set(env.offered)
        assert 2 <= len(env.offered) <= small.MOST_CALLS + 1 and tau2["policy"] in prompt
        assert not any(f"- {name}: " in prompt for name in set(home.by_name) - set(env.offered))
