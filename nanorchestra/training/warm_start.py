"""Demonstrations for the warm start, by a world's teacher."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from nanorchestra.agent.context import context_of
from nanorchestra.agent.environment import Environment
from nanorchestra.agent.world import Lesson, World, demonstrates
from nanorchestra.config import Config, RolloutSection
from nanorchestra.errors import require
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Trajectory, Turn
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.grpo import as_group
from nanorchestra.training.optimizers import scheduled
from nanorchestra.training.packing import Group
from nanorchestra.training.progress import Progress

WARMUP_STEPS = 20
HOLD = 0.5  # of the steps have the full learning rate: copying is learnt suddenly, sometimes late
# Lessons begin with one tool on offer, then two, then all. The next number follows a step with a
# loss below FEW_LOSS, or FEW_STEPS steps.
FEW_TOOLS, FEW_STEPS, FEW_LOSS = 2, 70, 0.12


class Demonstrations:
    """What the steps of a warm start learn from. UserError if there are steps and no teacher.

    `seconds` are those of the latest `groups`.
    """

    def __init__(self, config: Config, world: World, tokenizer: Tokenizer):
        self.config, self.world, self.tokenizer = config, world, tokenizer
        self.seconds = 0.0
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
            shown.append((index, as_group([self._trajectory(environment, turns)])))
        everyone = [pair for part in ranks.all_gather(shown) for pair in part]
        self.seconds = time.monotonic() - started
        return [group for _, group in sorted(everyone, key=lambda pair: pair[0])]

    def _trajectory(self, environment, turns) -> Trajectory:
        return demonstration(turns, environment, self.tokenizer, self.config.rollout)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        settings = self.config.warm_start
        return scheduled(step, settings.learning_rate, settings.steps, WARMUP_STEPS, hold=HOLD)

    def advance(self, progress: Progress, loss: float) -> None:
        """Offers more tools in the next lessons, if the finished step says so."""
        if progress.lesson_tools > FEW_TOOLS:
            return
        if loss < FEW_LOSS or progress.step - progress.lesson_since >= FEW_STEPS:
            progress.lesson_tools += 1
            progress.lesson_since = progress.step


def demonstration(
    lessons: Iterable[Lesson], env: Environment, tokenizer: Tokenizer, settings: RolloutSection
) -> Trajectory:
    """Returns a demonstration as the trajectory of a policy that writes the same.

    `settings` say what it reads. `lessons` may act in `env` as they are iterated over.
    """
    context, t, start = context_of(settings, tokenizer, env), Trajectory(env.task.id, 0), 0
    given = context.prompt().ids
    t.prompt_length = len(given)
    for lesson in lessons:
        calls = [lesson.call] if lesson.call else []
        ids = chat.encode_assistant(tokenizer, lesson.thought, lesson.content, calls)
        t.append_given(given)
        t.append_sampled(ids, [0.0] * len(ids), [-1] * len(ids))
        turn = Turn(len(t.ids) - len(ids), len(t.ids), "stop", calls, context=start)
        t.turns.append(turn)
        if not lesson.result:
            break
        for call in calls:
            env.evidence.add(call, lesson.result)
        observation = context.observe(turn, lesson.content, [lesson.result], math.inf)
        if prompt := context.prompt():
            start = len(t.ids)
        given = (prompt or observation).ids
    return t
