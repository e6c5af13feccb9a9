"""Demonstrations for the warm start, by a world's teacher."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from itertools import groupby

from nanorchestra.agent.context import GrowingContext
from nanorchestra.agent.environment import Environment
from nanorchestra.agent.world import Lesson, World, demonstrates
from nanorchestra.config import Config
from nanorchestra.errors import require
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Trajectory, Turn
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.grpo import as_group
from nanorchestra.training.optimizers import scheduled
from nanorchestra.training.packing import Group
from nanorchestra.training.progress import Progress

AVERAGED = 5  # steps, about, over which the distance from the teacher is averaged
WARMUP_STEPS = 20
HOLD = 0.5  # of the steps have the full learning rate: copying is learnt suddenly, sometimes late
# Lessons begin with one tool on offer, then two, then all. The next number follows a step with a
# loss below FEW_LOSS, or FEW_STEPS steps.
FEW_TOOLS, FEW_STEPS, FEW_LOSS = 2, 70, 0.12


class Demonstrations:
    """What the steps of a warm start learn from. UserError if there are steps and no teacher.

    `seconds` are those of the latest `groups`, `entropy` is that of the teacher in them.
    """

    def __init__(self, config: Config, world: World, tokenizer: Tokenizer):
        self.config, self.world, self.tokenizer = config, world, tokenizer
        self.seconds = self.entropy = 0.0
        require(
            not config.warm_start.steps or demonstrates(world),
            f"task.world: nothing demonstrates {config.task.world!r}; set warm_start.steps = 0",
        )

    def groups(self, step: int, lesson_tools: int, ranks: Ranks) -> list[Group]:
        """Returns the demonstrations of a step, with so many tools; all ranks have all of them."""
        started = time.monotonic()
        count = self.config.warm_start.prompts
        indices = range(step * count, (step + 1) * count)
        most_tools = lesson_tools if lesson_tools <= FEW_TOOLS else 0
        shown = []
        for index in indices[ranks.rank :: ranks.world_size]:
            environment, turns = self.world.lesson(index, most_tools)
            shown.append((index, demonstration(turns, environment, self.tokenizer)))
        everyone = [pair for part in ranks.all_gather(shown) for pair in part]
        trajectories = [trajectory for _, trajectory in sorted(everyone, key=lambda pair: pair[0])]
        # What demonstrations of one task begin with in common, its prompt, is computed once.
        tasks = groupby(trajectories, key=lambda trajectory: trajectory.task_id)
        groups = [as_group(list(members)) for _, members in tasks]
        self.entropy = teacher_entropy(groups)
        self.seconds = time.monotonic() - started
        return groups

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        settings = self.config.warm_start
        return scheduled(step, settings.learning_rate, settings.steps, WARMUP_STEPS, hold=HOLD)

    def learnt(self, progress: Progress) -> bool:
        """Returns whether the policy is as close to the teacher as warm_start.teacher_kl says."""
        wanted = self.config.warm_start.teacher_kl
        return wanted > 0 and progress.step >= AVERAGED and progress.teacher_kl <= wanted

    def advance(self, progress: Progress, loss: float) -> None:
        """Notes how far the policy is from the teacher in the finished step, of this mean loss.

        Offers more tools in the next lessons, if the step says so.
        """
        # The loss is the teacher's entropy and KL(teacher || policy).
        weight = max(1 / AVERAGED, 1 / progress.step)
        progress.teacher_kl += weight * (loss - self.entropy - progress.teacher_kl)
        if progress.lesson_tools > FEW_TOOLS:
            return
        if loss < FEW_LOSS or progress.step - progress.lesson_since >= FEW_STEPS:
            progress.lesson_tools += 1
            progress.lesson_since = progress.step


def teacher_entropy(groups: Iterable[Group]) -> float:
    """Returns the mean of -log p(id) under the teacher over the ids in the loss, in nats."""
    samples = [sample for group in groups for sample in group.samples]
    logprobs = sum(sum(sample.sampler_logprobs) for sample in samples)
    return -logprobs / sum(sample.loss_ids for sample in samples)


def demonstration(lessons: Iterable[Lesson], env: Environment, tokenizer: Tokenizer) -> Trajectory:
    """Returns a demonstration as the trajectory of a policy that writes the same.

    `lessons` may act in `env` as they are iterated over.
    """
    context, t = GrowingContext(tokenizer, env), Trajectory(env.task.id, 0)
    given = context.prompt().ids
    t.prompt_length = len(given)
    for lesson in lessons:
        calls = [lesson.call] if lesson.call else []
        ids = chat.encode_assistant(tokenizer, lesson.thought, lesson.content, calls)
        t.append_given(given)
        # The teacher's choice decides all ids of the turn.
        t.append_sampled(ids, [lesson.logprob] + [0.0] * (len(ids) - 1), [-1] * len(ids))
        turn = Turn(len(t.ids) - len(ids), len(t.ids), "stop", calls)
        t.turns.append(turn)
        if not lesson.result:
            break
        given = context.observe(turn, [lesson.result], math.inf).ids
    return t
