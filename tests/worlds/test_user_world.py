"""An environment of a user's own: the page's example plays and trains; a bad file is one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from scripted import call, play

from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError
from worlds.load import open_world

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(tmp_path):
    """The file of docs/worlds.md."""
    file = tmp_path / "make24.py"
    file.write_text((ROOT / "examples" / "make24.py").read_text())
    return file


def opened(file, seed=0):
    return open_world(TaskSection(str(file)), seed, None)


def test_the_example_of_the_page_plays_with_its_own_reward(example, nano_tokenizer):
    world = opened(example)
    tasks = [world.task("train", index) for index in range(20)]
    assert tasks == [opened(example).task("train", index) for index in range(20)]
    assert len({task.question for task in tasks}) == 20 and world.size("train") is None
    held_out = {world.task("held_out", index).question for index in range(20)}
    assert not held_out & {task.question for task in tasks}
    assert world.task("all", 3) == world.task("held_out", 3)

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
        f"class A(Base):\n    limit = 7\n{RESET}{TOOL}"
        "    def _helper(self):\n        pass\n"
        "    @property\n    def broken(self):\n        return 1 / 0\n"
        "    @staticmethod\n    def static() -> int:\n        return 1\n"
        "    @classmethod\n    def of_class(cls) -> int:\n        return 1\n"
    )
    assert opened(file).task("train", 0).offers == {"ask": "ask"}
    assert hasattr(sys.modules["json"], "dumps")


def test_two_attempts_at_a_task_do_not_share_their_state(tmp_path):
    file = tmp_path / "counts.py"
    file.write_text(
        "class Counts:\n"
        "    def reset(self, seed):\n        self.calls = 0\n        return 'Count.'\n"
        "    def step(self) -> int:\n        '''Counts.'''\n"
        "        self.calls += 1\n        return self.calls\n"
        "    def reward(self, answer):\n        return self.calls == 1\n"
    )
    world = opened(file)
    task = world.task("train", 0)
    first, second = world.environment(task, 0), world.environment(task, 0)
    assert first.by_name["step"].call({}).content == "1"
    assert second.by_name["step"].call({}).content == "1"
    assert first.by_name["step"].call({}).content == "2"
    assert (first.score(""), second.score("")) == (0.0, 1.0)


def test_a_preference_and_an_answer_may_be_stated(tmp_path):
    file = tmp_path / "stated.py"
    file.write_text(
        "class Stated:\n"
        "    def reset(self, seed):\n        self.answer = 'Paris'\n"
        "        return {'question': 'Capital?', 'preference': 'Be quick. latency=1 ask=-1',"
        " 'bounds': (0, 30),"
        " 'kind': 'geo'}\n"
        "    def ask(self, what: str) -> str:\n        '''Asks.'''\n        return 'Paris'\n"
    )
    task = opened(file).task("train", 0)
    assert task.kind == "geo" and task.preference.latency == 1
    assert task.preference.tools == {"ask": -1} and task.bounds.latency_s == (0.0, 30)
    environment = opened(file).environment(task, 0)
    assert environment.score("paris.") == 1.0 and environment.score("London") == 0.0


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


def test_a_step_of_grpo_learns_in_it(example, make_training):
    run = make_training("own", {"task.world": str(example), "grpo.steps": 1})
    assert run.train()
    (row,) = run.folder.rows("metrics")
    assert row["grad_norm"] > 0
    assert {attempt["task"]["world"] for attempt in run.folder.rows("trajectories")} == {
        str(example)
    }
