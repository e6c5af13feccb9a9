"""Domain tasks in small: they are proved, and a policy can act on what it reads."""

from __future__ import annotations

from collections import Counter

from worlds.toolscale import small
from worlds.toolscale.small import small_world
from worlds.toolscale.verify import verify
from worlds.toolscale.words import mentions

SPLITS = ("train", "held_out")


def test_tasks_are_proved_and_the_prompt_has_all_that_is_needed():
    """What is offered does not tell which branch is right: a refusal has the tool of the wish."""
    world, kinds = small_world(4), Counter()
    trained, held_out = ([world.task(split, n) for n in range(48)] for split in SPLITS)
    assert not {task.question for task in trained} & {task.question for task in held_out}
    for task in trained + held_out:
        tau2 = task.data["task"]
        home, golden = world.domains[tau2["domain"]], tau2["evaluation_criteria"]["actions"]
        assert verify(home, tau2) is None and len(golden) <= small.MOST_CALLS
        assert all(mentions(task.question, value) for value in golden[0]["arguments"].values())
        env = world.environment(task, 0)
        assert env.score("") == 0, "nothing done is never right"
        assert tau2["policy"] in env.messages[0]["content"]
        assert {action["name"] for action in golden} < set(env.offered)
        for rule in tau2["rules"]:
            assert {*rule["args"]["tools"]} <= set(env.offered)
        assert task.kind != "look-up, then refuse" or "write" in task.offers.values()
        kinds[task.kind] += 1
    looked_up = {f"look-up, then {what}" for what in ("write", "refuse", "answer")}
    assert {*kinds} == looked_up | {"write", "hand over"} and kinds["look-up, then refuse"] > 12
