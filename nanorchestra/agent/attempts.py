"""Plays attempts and repeats those that the infrastructure failed. Scores nothing."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nanorchestra.agent.environment import Environment
from nanorchestra.records import Trajectory

OnDone = Callable[[Trajectory], Any]  # is called with each attempt that has ended
RETRIES = 2  # of an attempt that the infrastructure failed


class Player(Protocol):
    """What plays attempts: agent/loop.py's Rollout on an engine or an endpoint, or a router."""

    on_done: OnDone | None

    def run(self, environments: Sequence[Environment], seeds: Sequence[int]) -> list[Trajectory]:
        """Returns one attempt in each environment, in the same order."""


def play(
    player: Player,
    environment: Callable[[int], Environment],
    seeds: Sequence[int],
    problem: Callable[[], str] = lambda: "",
) -> tuple[list[Trajectory], int]:
    """Returns one attempt for each seed, and how many attempts were repeated.

    environment(i) makes the environment of attempt i. Attempts that the infrastructure failed are
    repeated with the same seed, RETRIES times at most; those that still fail keep their status.
    Nothing is repeated, and paid for again, once `problem()` says why the whole run has to end.
    """
    attempts: dict[int, Trajectory] = {}
    left = list(range(len(seeds)))
    repeated = 0
    for again in range(1 + RETRIES):
        if again:
            repeated += len(left)
        environments = [environment(i) for i in left]
        played = player.run(environments, [seeds[i] for i in left])
        attempts |= zip(left, played, strict=True)
        left = [i for i in left if attempts[i].status == "infrastructure"]
        if not left or problem():
            break
    return [attempts[i] for i in range(len(seeds))], repeated
