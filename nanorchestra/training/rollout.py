"""Plays the attempts of a step or of an evaluation, divided over the ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nanorchestra.agent.attempts import Player, play
from nanorchestra.agent.world import Split, World
from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.records import Task, Trajectory
from nanorchestra.settings import is_dry_run
from nanorchestra.training.distributed import Ranks

ROLLOUT_S = 24 * 3600.0  # that a rank may need longer for its attempts than the others
FAILED_SHARE = 0.5  # a step of which more attempts fail ends the run


@dataclass
class Attempts:
    """Attempts that were played: trajectories[i] is one at tasks[i].

    repeated: how many were played again because the infrastructure failed them. seconds: of
    playing.
    """

    tasks: list[Task]
    trajectories: list[Trajectory]
    repeated: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first prompts, tool results and later prompts too, per second."""
        return sum(len(t.ids) - t.prompt_length for t in self.trajectories) / self.seconds

    def groups(self, size: int) -> Iterator[tuple[Task, list[Trajectory]]]:
        """Yields each task with its attempts, which are `size` in a row."""
        for start in range(0, len(self.tasks), size):
            yield self.tasks[start], self.trajectories[start : start + size]


def play_on_ranks(
    player: Player,
    world: World,
    split: Split,
    indices: list[int],
    *,
    seeds: list[int],
    environment_seeds: list[int],
    ranks: Ranks,
    problem: Callable[[], str],
    together: int = 1,
) -> Attempts:
    """Plays attempt i at task indices[i] of a split; every rank has all attempts, in this order.

    seeds: of sampling. environment_seeds: of the simulated experts. problem() says why the run has
    to end, "" if it has not. A rank plays a run of neighbours, and makes their tasks and
    environments. `together` of these, those at one task, stay on one rank, whose engine then shares
    their prompt; so the last ranks may have fewer, or none. All ranks call it together. UserError
    if one has a problem.
    """
    started = time.monotonic()
    share = -(-len(indices) // (ranks.world_size * together)) * together
    own = slice(ranks.rank * share, (ranks.rank + 1) * share)
    own_tasks = [world.task(split, index) for index in indices[own]]
    own_environment_seeds = environment_seeds[own]

    def environment(i):
        return world.environment(own_tasks[i], own_environment_seeds[i])

    own_trajectories, own_repeated = play(player, environment, seeds[own], problem)
    attempts = Attempts([], [], 0, 0.0)
    for part in ranks.all_gather((own_tasks, own_trajectories, own_repeated)):
        tasks, trajectories, repeated = part
        attempts.tasks += tasks
        attempts.trajectories += trajectories
        attempts.repeated += repeated
    for their_problem in ranks.all_gather(problem()):
        if their_problem:
            raise UserError(their_problem)
    attempts.seconds = time.monotonic() - started
    return attempts


def attempt_seeds(run_seed: int, step: int, count: int) -> list[int]:
    """Returns the seeds of a step's attempts: of sampling, tools and simulated experts."""
    return [random.Random(f"{run_seed}/rollout/{step}/{i}").getrandbits(48) for i in range(count)]


def evaluation_seeds(run_seed: int, count: int) -> list[int]:
    """Returns the seeds of sampling at held-out tasks."""
    return [run_seed * 1_000_003 + i for i in range(count)]


def require_most_worked(trajectories: list[Trajectory], step: int) -> None:
    """Raises UserError if more than FAILED_SHARE of a step's attempts failed, repeated ones too.

    What is left would teach when tools happen to be up.
    """
    failures = [t.failure for t in trajectories if t.failure]
    if len(failures) > FAILED_SHARE * len(trajectories):
        raise UserError(
            f"step {step + 1}: {len(failures)} of {len(trajectories)} attempts failed, repeated "
            f"ones too, for reasons of the infrastructure; the first: {failures[0][:200]}"
        )


def require_begun(trajectories: list[Trajectory], what: str, config: Config) -> None:
    """Raises UserError if no attempt has sampled an id, since no prompt leaves room for one.

    what: those attempts, such as "step 1".
    """
    if any(t.turns or t.status != "token_limit" for t in trajectories):
        return
    longest = max(t.prompt_length for t in trajectories)
    context, turn = config.rollout.context_tokens, config.rollout.turn_tokens
    file = "nanorchestra/dry_run.toml: " if is_dry_run(config) else ""
    raise UserError(
        f"{file}rollout.context_tokens is {context}: no attempt of {what} can begin; the longest "
        f"prompt has {longest} ids and a turn up to {turn}, so it should be at least "
        f"{longest + turn}"
    )
