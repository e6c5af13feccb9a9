"""The first phase of a run: supervised steps on the demonstrations of a teacher or of a run."""

import time

from nanorchestra.training.lessons import demonstration
from nanorchestra.training.optimizers import scheduled
from nanorchestra.training.packing import Group
from nanorchestra.training.run import TrainingRun
from nanorchestra.training.trajectories import as_group

WARMUP_STEPS = 20
HOLD = 0.5  # of the steps have the full learning rate: copying is learnt suddenly, sometimes late
# Lessons begin with one tool on offer, then two, then all. The next number follows a step with a
# loss below FEW_LOSS, or FEW_STEPS steps.
FEW_TOOLS, FEW_STEPS, FEW_LOSS = 2, 70, 0.12
PRINT_EVERY = 20  # steps


def warm_start(run: TrainingRun) -> bool:
    """Trains to warm_start.steps; returns False if the run is asked to stop on the way."""
    return run.repeat(lambda: _step(run))


def _step(run):
    """Makes one supervised step, and records it."""
    progress, peak = run.progress, run.config.warm_start.learning_rate
    start = time.monotonic()
    groups = _lessons(run)
    shown = time.monotonic()
    rate = scheduled(progress.step, peak, run.steps, WARMUP_STEPS, hold=HOLD)
    metrics = run.trainer.supervised_step(groups, rate)
    times = {"demonstrations": shown - start, "train": time.monotonic() - shown}
    progress.step += 1
    if progress.lesson_tools <= FEW_TOOLS and (
        metrics["loss"] < FEW_LOSS or progress.step - progress.lesson_since >= FEW_STEPS
    ):
        progress.lesson_tools += 1
        progress.lesson_since = progress.step
    speed = metrics["tokens"] / sum(times.values())
    run.record_update({"tokens_per_s": speed}, metrics, times)
    if progress.step % PRINT_EVERY == 0:
        loss = metrics["loss"]
        run.say(
            f"warm start step {progress.step:4d}/{run.steps}  loss {loss:.3f}  "
            f"{speed:,.0f} tokens/s"
        )


def _lessons(run) -> list[Group]:
    """The demonstrations of the next step: recorded attempts, or the teacher's."""
    count, progress = run.config.warm_start.prompts, run.progress
    first = progress.step * count
    if run.examples:
        return [as_group(run.examples[i % len(run.examples)]) for i in range(first, first + count)]
    limits, worlds = run.config.rollout, run.worlds
    room = limits.context_tokens - limits.turn_tokens if limits.context == "rebuild" else 0

    def demonstrate(task):
        env = worlds.environment(task, 0)
        return as_group([demonstration(worlds.teach(env), env, run.tokenizer, room)])

    most_tools = progress.lesson_tools if progress.lesson_tools <= FEW_TOOLS else 0
    tasks = worlds.lesson_tasks(count, first, most_tools)
    return run.ranks.map(lambda mine: list(map(demonstrate, mine)), tasks)
