"""An environment of a user's own: the page's example plays; a bad reward is one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from scripted import call, play

from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError
from worlds.load import open_world

EXAMPLE = Path(__file__).parents[2] / "examples" / "make24.py"  # that docs/worlds.md shows


def opened(file, seed=0):
    return open_world(TaskSection(str(file)), seed, None)


def test_the_example_of_the_page_plays_with_its_own_reward(nano_tokenizer):
    world = opened(EXAMPLE)
    tasks = [world.task("train", index) for index in range(20)]
    assert tasks == [opened(EXAMPLE).task("train", index) for index in range(20)]
    held_out = {world.task("held_out", index).question for index in range(20)}
    assert not held_out & {task.question for task in tasks}

    environment = world.environment(tasks[0], 0)
    numbers, target = environment.instance.numbers, environment.instance.target
    adds = call(name="add").replace('"text": "hi"', f'"numbers": {numbers[:2]}')
    cheats = call(name="add").replace('"text": "hi"', f'"numbers": {[*numbers, *numbers]}')
    answer = " + ".join(map(str, numbers[:2]))
    (attempt,), _ = play(nano_tokenizer, [cheats, adds, answer], envs=[environment])
    refused, added = (turn.results[0] for turn in attempt.turns[:2])
    assert refused.error and "ValueError: the numbers are" in refused.content
    assert added.content == str(sum(numbers[:2])) and attempt.calls == {"add": 2}
    missed = abs(target - sum(numbers[:2]))
    assert attempt.status == "answered" and attempt.outcome == pytest.approx(1 - missed / 10)


def test_only_public_methods_of_the_class_itself_are_tools(tmp_path):
    file = tmp_path / "json.py"  # replaces no module of the same name
    file.write_text(
        'class Base:\n    def inherited(self) -> int:\n        """Is none."""\n'
        f"class A(Base):\n{RESET}{TOOL}"
        "    def _helper(self):\n        pass\n"
        "    @property\n    def broken(self):\n        return 1 / 0\n"
        "    @staticmethod\n    def static() -> int:\n        return 1\n"
        "    @classmethod\n    def of_class(cls) -> int:\n        return 1\n"
    )
    assert opened(file).task("train", 0).offers == {"ask": "ask"}
    assert hasattr(sys.modules["json"], "dumps")


@pytest.mark.parametrize(
    "drifts", ["str(random.random())", "setattr(self, 'answer', random.random()) or 'What?'"]
)
def test_a_reset_that_does_not_follow_the_seed_is_refused(tmp_path, drifts):
    file = tmp_path / "drifts.py"
    file.write_text(f"import random\nclass A:\n{RESET}".replace("'What?'", drifts))
    says = f"{file}: A.reset: two calls with seed 0 gave different tasks; draw from "
    with pytest.raises(UserError, match=re.escape(says + "random.Random(seed)")):
        opened(file)


RESET = "    def reset(self, seed):\n        return 'What?'\n"
TOOL = "    def ask(self, what: str) -> str:\n        '''Asks.'''\n        return what\n"


@pytest.mark.parametrize(
    "body, says",
    [
        ("return 1 / 0", "A.reward, line 5: ZeroDivisionError"),
        ("return 1.5", "A.reward: it returned 1.5; it must be from 0 to 1"),
        (None, "A: no reward and no answer"),
    ],
)
def test_a_reward_that_is_none_ends_the_run_with_one_line(tmp_path, body, says):
    file = tmp_path / "bad_reward.py"
    reward = f"    def reward(self, answer):\n        {body}\n" if body else ""
    file.write_text(f"class A:\n{RESET}{reward}")
    world = opened(file)
    with pytest.raises(UserError, match=re.escape(says)):
        world.environment(world.task("train", 0), 0).score("42")
