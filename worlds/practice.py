"""What a run practises on and what it learns from an attempt: tasks and lessons of the worlds in `task.world`, rewards, advantages, groups.

Nothing here computes with a model. A task is a function of its place in the mixture, so that every rank, and a resumed run, has the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from nanorchestra.agent.environment import Environment
from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Task, Trajectory
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.lessons import as_session, as_turns
from nanorchestra.training.objectives import group_advantages, overlong_punishment
from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.trajectories import contexts, parts
from reward import group_rewards, reward_parts
from worlds.evaluation import means, obedience, task_bounds
from worlds.miniature.teacher import Habits, teach, texts
from worlds.miniature.world import World, environment
from worlds.mixture import Mixture, parse_mixture
from worlds.toolscale import environment as toolscale
from worlds.toolscale.small import small_world

MINIATURE, DOMAINS = "miniature", "domains"  # worlds of task.world that need no files


class Practice:
    """The tasks of a run, in the proportions of `task.world`, and what its attempts at them are worth."""

    def __init__(self, config: Config, sandbox: Sandbox):
        self.config, self.sandbox = config, sandbox
        seed, warm_start = config.run.seed, config.warm_start
        self.mixture = Mixture(parse_mixture(config.task.world, "task.world"), seed)
        self.miniature = World(seed, config.world.avoid_share, config.world.avoid_favourite)
        self.lessons = World(seed, lessons=True)
        self.domains = {
            name: open_world(name, config) for name in self.mixture.weights if name != MINIATURE
        }
        self.habits = Habits(warm_start.sensible, warm_start.heedful, warm_start.quits)

    # Tasks.

    def tasks(self, count: int, start: int) -> list[Task]:
        """The training tasks of places of the mixture."""
        return [
            self.domains.get(name, self.miniature).task("train", number)
            for name, number in self.mixture.places(count, start)
        ]

    @property
    def has_miniature(self) -> bool:
        return MINIATURE in self.mixture.weights

    def judged_by(self, count: int, start: int = 0) -> list[Task]:
        """Held-out tasks that the run is judged by: the miniature's, if it is in the mixture."""
        return (
            self.miniature.tasks("held_out", count, start)
            if self.has_miniature
            else self.of_domains(count, start)
        )

    def of_domains(self, count: int, start: int = 0) -> list[Task]:
        """Held-out tasks of the domains alone, in the mixture's proportions."""
        mixed = Mixture(
            {name: weight for name, weight in self.mixture.weights.items() if name in self.domains},
            self.config.run.seed,
        )
        return [
            self.domains[name].task("held_out", number)
            for name, number in mixed.places(count, start)
        ]

    def environment(self, task: Task, seed: int, sandbox: Sandbox | None = None) -> Environment:
        """One attempt at a task."""
        world = self.domains.get(task.data.get("world"))
        return (
            world.environment(task, seed)
            if world
            else environment(task, seed, sandbox or self.sandbox)
        )

    def check_room(self, tokenizer: Tokenizer) -> None:
        """UserError if the prompts of a world, which hold tools and maybe a policy, leave no room for a turn."""
        limits = self.config.rollout
        for name, world in (
            self.domains | ({MINIATURE: self.miniature} if self.has_miniature else {})
        ).items():
            prompts = (self.environment(task, 0) for task in world.tasks("train", 20))
            longest = max(len(chat.encode(tokenizer, env.messages, env.tools)) for env in prompts)
            if longest + limits.turn_tokens > limits.context_tokens:
                raise UserError(
                    f"{name}: prompts of {longest} tokens; rollout.context_tokens is {limits.context_tokens}, it must be at least "
                    f"{longest + limits.turn_tokens} for one turn, and more for a conversation"
                )

    # Lessons.

    def texts(self, count: int) -> Iterator[str]:
        """About `count` demonstrations as text, for the tokenizer to be trained on."""
        counts = Counter(name for name, _ in self.mixture.places(count))
        shown = (
            [texts(self.lessons, counts[MINIATURE], self.sandbox, self.habits)]
            if counts[MINIATURE]
            else []
        )
        return itertools.chain(
            *shown, *(toolscale.texts(world, counts[name]) for name, world in self.domains.items())
        )

    def lesson_tasks(self, count: int, start: int, most_tools: int) -> list[Task]:
        """The tasks of lessons. While those of the miniature offer `most_tools` tools at most (0: no limit) there are no others beside them:
        a domain's long texts, whose loss is high, would drown the first steps of copying."""
        lessons = dataclasses.replace(self.lessons, most_tools=most_tools)
        places = self.mixture.places(count, start)
        if most_tools and self.has_miniature:
            places = [(name, number) for name, number in places if name == MINIATURE]
        return [self.domains.get(name, lessons).task("train", number) for name, number in places]

    def demonstrations(self, task: Task, tokenizer: Tokenizer) -> Group:
        """The teacher's attempts at a task."""
        limits, samples = self.config.rollout, []
        for seed in range(self.config.warm_start.samples):
            env = self.environment(task, seed)
            lessons = (
                toolscale.teach(env)
                if isinstance(env, toolscale.DomainEnvironment)
                else teach(env, seed, self.habits)
            )
            if limits.context == "rebuild":
                turns = as_turns(
                    lessons, env, tokenizer, limits.context_tokens - limits.turn_tokens
                )
                samples += [(prompt, Sample(ids, [True] * len(ids))) for prompt, ids in turns]
            else:
                prompt, ids, sampled = as_session(lessons, env, tokenizer)
                samples.append((prompt, Sample(ids, sampled)))
        return Group.of(samples)

    # What attempts are worth.

    def groups(
        self, tasks: list[Task], trajectories: list[Trajectory]
    ) -> tuple[list[list[Trajectory]], Counter[str]]:
        """Writes advantages on the attempts; returns those of each group that enter the loss, and
        how many are left out for each reason.
        """
        section, size, limit = (
            self.config.grpo,
            self.config.grpo.group_size,
            self.config.rollout.context_tokens,
        )
        reasons: Counter[str] = Counter()
        kept: list[list[Trajectory]] = []
        for start in range(0, len(tasks), size):
            members, task = trajectories[start : start + size], tasks[start]
            valid = [member.status != "infrastructure" for member in members]
            cut = [
                section.drop_overlong and member.status in ("token_limit", "turn_limit")
                for member in members
            ]
            if section.bounds == "task":
                rewards = [member.reward for member in members]
            else:
                rewards = group_rewards(members, task.preference, valid)
            if section.overlong_share:
                lengths = [
                    max(end - begin for begin, _, end in contexts(member)) for member in members
                ]
                rewards = [
                    reward
                    + (
                        -1.0
                        if member.status == "token_limit"
                        else overlong_punishment(
                            length, limit, round(section.overlong_share * limit)
                        )
                    )
                    for reward, member, length in zip(rewards, members, lengths)
                ]
            advantages, why = group_advantages(
                rewards,
                valid,
                well_formed=[member.well_formed for member in members],
                overlong=cut,
                min_std=section.min_std,
                drop_invalid_format=section.drop_invalid_format,
                std=section.normalise_std,
                clip=section.advantage_clip,
            )
            for member, advantage in zip(members, advantages):
                member.advantage = advantage
            reasons.update(reason for reason in why if reason)
            kept.append([member for member, reason in zip(members, why) if reason is None])
        return [members for members in kept if members], reasons

    def group(self, members: list[Trajectory]) -> Group:
        """The attempts at a task as the trainer takes them: a sample each, or one for each turn."""
        return Group.of([part for member in members for part in parts(member)])

    def measure(self, tasks: list[Task], trajectories: list[Trajectory]) -> dict[str, Any]:
        """Means over the rollout, rewards in their absolute form; calls by what stands behind the alias; how the attempts ended. What the infrastructure
        failed is in no mean, unless there is nothing else."""
        size, pairs = self.config.grpo.group_size, list(zip(tasks, trajectories))
        groups = [
            [t.reward for t in trajectories[i : i + size] if t.status != "infrastructure"]
            for i in range(0, len(tasks), size)
        ]
        spreads = [stdev(group) for group in groups if len(group) > 1]
        statuses = Counter(t.status for t in trajectories)
        pairs = [(task, t) for task, t in pairs if t.status != "infrastructure"] or pairs
        calls: Counter[str] = Counter()
        earned: Counter[str] = Counter()  # of the rewards, by what earned it
        for task, trajectory in pairs:
            behind = {t["name"]: t["what"] for t in task.data["tools"]}
            for name, count in trajectory.calls.items():
                calls[behind.get(name, "unknown")] += count
            paid = reward_parts(trajectory, task.preference, task_bounds(task))
            for part, value in paid.items():
                earned[part] += value / len(pairs)
        return (
            means(pairs)
            | obedience(pairs)
            | {
                "reward_parts": dict(earned),
                "turns": fmean(len(t.turns) for _, t in pairs),
                "group_std": fmean(spreads) if spreads else 0.0,
                "calls": {k: v / len(pairs) for k, v in sorted(calls.items())},
                "statuses": {k: v / len(tasks) for k, v in sorted(statuses.items())},
            }
        )


def open_world(name: str, config: Config) -> toolscale.ToolScaleWorld:
    """A world of task.world beside the miniature: "domains", a directory that data_gen.py wrote, or a .jsonl file of tau2 tasks. UserError."""
    if name == DOMAINS:
        return small_world(config.run.seed, name)
    if not Path(name).exists():
        raise UserError(
            f"task.world: there is no world {name!r}; it must be {MINIATURE}, {DOMAINS}, a directory that data_gen.py wrote, or a .jsonl file of tau2 tasks"
        )
    return toolscale.load_world(name, config.run.seed, config.task.experts)
