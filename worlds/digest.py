"""Tells one version of the miniature's world from another: a digest that stands beside weights.

train.py writes it to world.json of a model that has practised in the miniature, whose tasks are
drawn without end by code and tables that change. Tasks of other worlds come from files, programs or
experts of the reader, which this neither knows nor pays for.
"""

import hashlib
import json
from dataclasses import asdict, is_dataclass
from typing import Any

from nanorchestra.schemas import Json
from worlds.miniature.world import Miniature

FILE = "world.json"  # beside the weights; SHA256SUMS has it too
TASKS = 500  # of each split
LESSONS = 300
DIGITS = 9  # of a float: the last ones depend on the machine's logarithm and on Python's sum


def world_record(world: Miniature) -> Json:
    """Returns what FILE holds: the world's name, its seed and its digest."""
    return {"world": world.name, "seed": world.seed, "digest": digest(world)}


def digest(world: Miniature) -> str:
    """Returns the SHA-256, in hex, of the first tasks of both splits and of demonstrations.

    A task counts with all its fields, the messages and tools of its prompt; a demonstration with
    its prompt and turns, results included. What none of these draws shows is not in the digest. It
    is the same in every process; floats are rounded so that machines agree.
    """
    sums = hashlib.sha256()
    for split in ("train", "held_out"):
        for index in range(TASKS):
            task = world.task(split, index)
            environment = world.environment(task, 0)
            _add(sums, [task, environment.messages, environment.tools])
    for index in range(LESSONS):
        most_tools = index % 3  # as the warm start offers them: all, one, two
        environment, turns = world.lesson(index, most_tools)
        _add(sums, [environment.messages, environment.tools, list(turns)])
    return sums.hexdigest()


def _add(sums, value) -> None:
    """Adds a value as one line of JSON with sorted keys."""
    sums.update(json.dumps(_plain(value), sort_keys=True).encode() + b"\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        value = asdict(value)
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
