"""Measures whether attempts wait for each other's tools: python benchmarks/waiting.py.

64 attempts of the bundled nano run at once, with experts that take 2 real seconds. The critical
path is the longest attempt: its experts' seconds and its own sampling, alone on the machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.load import NANO, load_rollout
from nanorchestra.agent.loop import Limits
from nanorchestra.records import Task, ToolResult, Trajectory
from nanorchestra.tools.sandbox import Sandbox
from worlds.miniature.world import World, environment

ATTEMPTS, SECONDS = 64, 2.0


class Slow:
    """A tool whose call takes `seconds` more."""

    blocking = True

    def __init__(self, tool: Any, seconds: float):
        self.tool, self.seconds = tool, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns the tool's result."""
        time.sleep(self.seconds)
        return self.tool.call(arguments)


def main() -> None:
    """Prints wall time and critical path."""
    torch.set_num_threads(1)
    rollout = load_rollout(NANO, Limits(8, 96, 1024), {}, ATTEMPTS)
    rollout.lockstep = False
    tasks = World(0).tasks("held_out", ATTEMPTS)
    with Sandbox() as sandbox:

        def make(task: Task, seconds: float) -> ToolEnvironment:
            env = environment(task, 0, sandbox)
            for name, tool in env.by_name.items():
                if tool.kind == "expert":
                    env.by_name[name] = Slow(tool, seconds)
            return env

        def play(tasks: Sequence[Task], seeds: Sequence[int], seconds: float):
            start = time.monotonic()
            played = rollout.run([make(task, seconds) for task in tasks], list(seeds))
            return time.monotonic() - start, played

        play(tasks[:2], (0, 1), 0.0)  # warm up
        alone = [play([task], [seed], 0.0)[0] for seed, task in enumerate(tasks)]
        wall, played = play(tasks, range(ATTEMPTS), SECONDS)
    waits = [SECONDS * _asked(*pair) for pair in zip(tasks, played, strict=True)]
    path = max(wait + own for wait, own in zip(waits, alone, strict=True))
    print(f"{os.cpu_count()} cores: {ATTEMPTS} attempts, {sum(waits) / SECONDS:.0f} expert turns")
    print(f"wall {wall:.2f} s, critical path {path:.2f} s: {wall / path - 1:.1%} above it")


def _asked(task: Task, played: Trajectory) -> int:
    """Counts the turns that waited for an expert."""
    tools = {"code", "search", "records"}
    experts = {offer["name"] for offer in task.data["tools"] if offer["what"] not in tools}
    return sum(
        any(
            call.name in experts and not result.refused
            for call, result in zip(turn.calls, turn.results, strict=True)
        )
        for turn in played.turns
    )


if __name__ == "__main__":
    main()
