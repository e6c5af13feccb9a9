"""Samples the attempts of a GRPO step and computes their rewards and advantages."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import Config
from nanorchestra.errors import require
from nanorchestra.records import Task, Trajectory
from nanorchestra.schemas import Json
from nanorchestra.training.bill import Bill
from nanorchestra.training.objectives import group_advantages, objective_of, overlong_punishment
from nanorchestra.training.packing import Group, MicroBatch
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.trajectories import as_group, from_row, in_loss, longest_context, to_row

FAILED_SHARE = 0.5  # a step of which more attempts fail ends the run


@dataclass
class Batch:
    """The attempts of one step: tasks[i] belongs to trajectories[i], groups stand together.

    kept: of each group the attempts that enter the loss, without groups that have none.
    filtered: the share of attempts that do not, by reason. groups: the samples of `kept`.
    referred: Trainer.refer of the groups, if it was computed beside the step before. seconds: how
    long sampling took.
    """

    tasks: list[Task] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    retried: int = 0
    seconds: float = 0.0
    kept: list[list[Trajectory]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    filtered: dict[str, float] = field(default_factory=dict)
    referred: list[MicroBatch] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the prompts, per second of sampling."""
        return sum(len(t.ids) - t.prompt_length for t in self.trajectories) / self.seconds

    def to_notes(self) -> Json:
        """Returns the batch as JSON for a checkpoint, without what `Sampler.judge` computes."""
        rows = [to_row(*pair) for pair in zip(self.tasks, self.trajectories, strict=True)]
        return {"rows": rows, "retried": self.retried, "seconds": self.seconds}

    @classmethod
    def from_notes(cls, notes: Json) -> Batch:
        """Returns the batch of `to_notes`, not yet judged."""
        tasks, trajectories = map(list, zip(*map(from_row, notes["rows"]), strict=True))
        return cls(tasks, trajectories, notes["retried"], notes["seconds"])


class Sampler:
    """Makes batches. A batch is a function of the step's number and of the engine's weights.

    A sampler reads no state of the run, so the next batch can be made during this step's update.
    """

    def __init__(self, config: Config, worlds: Any, rollout: Rollout, ranks: Ranks, bill: Bill):
        self.config, self.worlds = config, worlds
        self.rollout = DividedRollout(rollout, ranks, bill, config.grpo.group_size)
        self.objective = objective_of(config.grpo)

    def batch(self, step: int) -> Batch:
        """Samples a step's groups and judges them; more while too few have an advantage.

        The latter is dynamic sampling (DAPO, arXiv 2503.14476, section 3.2). UserError if more than
        FAILED_SHARE of the attempts fail: what is left would teach when tools happen to be up.
        """
        start, batch = time.monotonic(), Batch()
        for again in range(1 + self.objective.resample):
            tasks, seeds = self._draw(step, again)
            trajectories, retried = self.worlds.attempt(self.rollout, tasks, seeds)
            batch.tasks += tasks
            batch.trajectories += trajectories
            batch.retried += retried
            _check_failures(trajectories, step)
            self.judge(batch)
            if len(batch.kept) == self.config.grpo.prompts:
                break
        batch.seconds = time.monotonic() - start
        return batch

    def judge(self, batch: Batch) -> None:
        """Computes rewards and advantages of a batch, and which samples enter the loss."""
        grpo, objective = self.config.grpo, self.objective
        batch.kept, reasons = [], Counter()
        for start in range(0, len(batch.tasks), grpo.group_size):
            task, members = batch.tasks[start], batch.trajectories[start : start + grpo.group_size]
            rewards = self.worlds.training_rewards(task, members, grpo.bounds)
            if objective.overlong_share:
                pairs = zip(rewards, members, strict=True)
                rewards = [reward + self._overlong(member) for reward, member in pairs]
            advantages, why = group_advantages(
                rewards,
                [member.status != "infrastructure" for member in members],
                [
                    bool(m.answer) and m.status == "answered" and any(in_loss(m, True))
                    for m in members
                ],
                objective,
                grpo.min_std,
            )
            kept = []
            for member, advantage, reason in zip(members, advantages, why, strict=True):
                member.advantage = advantage
                if reason:
                    reasons[reason] += 1
                else:
                    kept.append(member)
            if kept and len(batch.kept) < grpo.prompts:
                batch.kept.append(kept)
        by_turn = objective.drop_invalid_format
        batch.groups = [as_group(members, by_turn) for members in batch.kept]
        batch.filtered = {why: count / len(batch.tasks) for why, count in reasons.items()}

    def _overlong(self, member) -> float:
        if member.status == "token_limit":
            return -1.0
        limit = self.config.rollout.context_tokens
        share = round(self.objective.overlong_share * limit)
        return overlong_punishment(longest_context(member), limit, share)

    def _draw(self, step, again) -> tuple[list[Task], list[int]]:
        """The task and the seed of each attempt of a step. `again` counts its extra rollouts."""
        grpo, warm_start = self.config.grpo, self.config.warm_start
        number = step
        if again:  # one that no step begins with
            number = grpo.steps + step * self.objective.resample + again - 1
        first = warm_start.steps * warm_start.prompts + number * grpo.prompts
        drawn = self.worlds.tasks(grpo.prompts, first)
        tasks = [task for task in drawn for _ in range(grpo.group_size)]
        seeds = [
            random.Random(f"{self.config.run.seed}/rollout/{number}/{i}").getrandbits(48)
            for i in range(len(tasks))
        ]
        return tasks, seeds


def _check_failures(trajectories, step):
    failed = [t.failure for t in trajectories if t.failure]
    require(
        len(failed) <= FAILED_SHARE * len(trajectories),
        f"step {step + 1}: {len(failed)} of {len(trajectories)} attempts failed, repeated ones "
        f"too, for reasons of the infrastructure; the first: {''.join(failed[:1])[:200]}",
    )


@dataclass
class DividedRollout:
    """A rollout whose attempts are divided over the ranks; every rank has all trajectories.

    Attempts `together` in a row are made by one rank. `bill` is what the ranks may spend.
    """

    rollout: Rollout
    ranks: Ranks
    bill: Bill
    together: int = 1

    def run(self, environments: Sequence[Environment], seeds: Sequence[int]) -> list[Trajectory]:
        """Returns an attempt in each environment, as Rollout.run does.

        UserError if the run has no dollars left for them.
        """

        def run(pairs):
            return self.rollout.run(*zip(*pairs, strict=True)) if pairs else []

        self.bill.divide(self.ranks)
        pairs = list(zip(environments, seeds, strict=True))
        trajectories = self.ranks.map(run, pairs, self.together)
        self.bill.require_left(self.ranks)
        return trajectories
