"""Domain tasks in small: they fit, they are proved, and a policy can act on what it reads."""

from __future__ import annotations

import pytest

from nanorchestra.settings import load_config
from nanorchestra.training.lessons import as_session
from worlds.toolscale import environment, small
from worlds.toolscale.small import small_world
from worlds.toolscale.verify import mentions, verify


@pytest.fixture(scope="module")
def world():
    return small_world(4)


def test_it_is_a_function_of_the_seed_with_tasks_enough(world, monkeypatch):
    assert (
        len(world.worlds) == 3
        and len(world.splits["train"]) >= 90
        and len(world.splits["held_out"]) >= 20
    )
    assert world.task("train", 7).data["world"] == "domains"
    monkeypatch.setattr(small, "TASKS", 50)
    one = small_world(4)
    assert (
        small_world(4) == one
        and small_world(5).splits != one.splits
        and all(
            task in world.splits["train"] + world.splits["held_out"] for task in one.splits["train"]
        )
    )


def test_prompts_and_golden_conversations_fit_the_miniatures_context_and_score(
    world, nano_tokenizer
):
    limits = load_config("configs/nano.toml").rollout
    for split, tasks in world.splits.items():
        for task in world.tasks(split, len(tasks)):
            env = world.environment(task, 0)
            assert env.score("") == 0
            prompt, ids, sampled = as_session(environment.teach(env), env, nano_tokenizer)
            assert env.score("") == 1 and env.over
            assert (
                len(prompt) <= 900
                and len(prompt) + len(ids) <= limits.context_tokens
                and sum(sampled) < 2 * limits.turn_tokens
            )


def test_tasks_pass_the_pipelines_checks_and_the_prompt_holds_all_that_the_first_call_needs(world):
    for index in range(len(world.splits["train"])):
        task = world.task("train", index)
        tau2, home = task.data["task"], world.worlds[task.data["domain"]]
        assert verify(home, tau2) is None
        first = tau2["evaluation_criteria"]["actions"][0]
        assert all(
            mentions(task.question, value) for value in first["arguments"].values()
        ) or home.by_name[first["name"]]["kind"] in ("calculate", "handover")
        env = world.environment(task, 0)
        unused = set(home.by_name) - env.offered
        assert {
            action["name"] for action in tau2["evaluation_criteria"]["actions"]
        } <= env.offered and 2 <= len(env.offered) <= small.MOST_CALLS + 1
        assert tau2["policy"] in env.messages[0]["content"] and not any(
            name in env.messages[0]["content"] for name in unused
        )
