"""The digest of the miniature's world: the same everywhere, another one for another world."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from nanorchestra.agent.load import NANO
from nanorchestra.files import read_object
from nanorchestra.records import ToolResult
from worlds import digest as program
from worlds.digest import FILE, digest
from worlds.miniature.world import Miniature

ROOT = Path(__file__).parents[2]
PRINT = """
from nanorchestra.tools.sandbox import Sandbox
from worlds.digest import digest
from worlds.miniature.world import Miniature
with Sandbox() as sandbox:
    print(digest(Miniature(0, sandbox)))
"""


@pytest.mark.slow
def test_the_digest_is_the_same_in_every_process(sandbox):
    printed = []
    for seed in ("0", "1"):
        command, env = [sys.executable, "-c", PRINT], os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        printed.append(done.stdout.strip())
    assert printed == [digest(Miniature(0, sandbox))] * 2


class ChangedWorld(Miniature):
    """The miniature, with one task or one demonstration as the functions make it."""

    def __init__(self, sandbox, task=lambda task: task, lesson=lambda env, turns: (env, turns)):
        super().__init__(0, sandbox)
        self.__dict__.update(change_task=task, change_lesson=lesson)

    def task(self, split, index):
        task = super().task(split, index)
        return self.change_task(task) if (split, index) == ("held_out", 7) else task

    def lesson(self, index, most_tools=0):
        env, turns = super().lesson(index, most_tools)
        return self.change_lesson(env, turns) if index == 7 else (env, turns)


def test_what_a_policy_or_the_reward_sees_changes_the_digest(sandbox, monkeypatch):
    monkeypatch.setattr(program, "TASKS", 10)
    monkeypatch.setattr(program, "LESSONS", 10)

    def reworded(task):
        return replace(task, preference=replace(task.preference, text="Spend less."))

    def repriced(task):
        return replace(task, bounds=replace(task.bounds, cost_usd=(0.0, 1.0)))

    def rethought(env, turns):
        return env, [replace(turns[0], thought="another one"), *turns[1:]]

    def other_result(env, turns):
        return env, [replace(turns[0], result=ToolResult("another one")), *turns[1:]]

    changed = {
        "phrase": {"task": reworded},
        "answer": {"task": lambda task: replace(task, data=task.data | {"answer": "x"})},
        "bounds": {"task": repriced},
        "thought": {"lesson": rethought},
        "result": {"lesson": other_result},
        "shorter": {"lesson": lambda env, turns: (env, turns[:-1])},
    }
    same = digest(Miniature(0, sandbox))
    assert digest(ChangedWorld(sandbox)) == same
    digests = {name: digest(ChangedWorld(sandbox, **change)) for name, change in changed.items()}
    digests |= {"seed": digest(Miniature(1, sandbox)), "same": same}
    assert len(set(digests.values())) == len(digests), digests


def test_floats_that_differ_in_rounding_alone_are_the_same():
    assert program._plain({"a": (0.1 + 0.2, 1)}) == program._plain({"a": [0.3, 1]})
    assert program._plain(1 / 3) != program._plain(1 / 3 + 1e-8)


@pytest.mark.parametrize("name", ["base", "nano"])
def test_a_bundled_checkpoint_of_another_world_is_a_warning(name, sandbox):
    path = NANO.with_name(name) / FILE
    if not path.exists():
        pytest.skip(f"assets/{name} has no {FILE}")
    record = read_object(path)
    if digest(Miniature(record["seed"], sandbox)) != record["digest"]:
        again = {"base": "base", "nano": "nano-long"}[name]
        warnings.warn(
            f"assets/{name}: the world has changed since it was trained; "
            f"python train.py --config {again} trains it again",
            stacklevel=1,
        )
