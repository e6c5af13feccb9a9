"""The first phase of a run: supervised steps on the demonstrations of a teacher or of a run."""

from __future__ import annotations

import time

from nanorchestra.records import Task
from nanorchestra.training.lessons import as_session, as_turns
from nanorchestra.training.optimizers import Schedule
from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.run import TrainingRun
from nanorchestra.training.trajectories import as_group, take

WARMUP_STEPS = 20
HOLD = 0.5  # of the steps have the full learning rate: copying is learnt suddenly, sometimes late
# Lessons begin with one tool on offer, then two, then all. The next number follows a step with a
# loss below FEW_LOSS, or FEW_STEPS steps.
FEW_TOOLS, FEW_STEPS, FEW_LOSS = 2, 70, 0.12
PRINT_EVERY = 20  # steps


def warm_start(run: TrainingRun) -> bool:
    """Trains to warm_start.steps; returns False if the run is asked to stop on the way."""
    settings, progress = run.config.warm_start, run.progress
    schedule = Schedule(settings.learning_rate, settings.steps, WARMUP_STEPS, hold=HOLD)
    stopped = False
    with run.bar(settings.steps, "warm start", progress.step) as bar:
        while progress.step < settings.steps and not stopped:
            start = time.monotonic()
            groups = _lessons(run)
            shown = time.monotonic()
            metrics = run.trainer.supervised_step(groups, schedule.at(progress.step))
            times = {"demonstrations": shown - start, "train": time.monotonic() - shown}
            progress.step += 1
            if progress.lesson_tools <= FEW_TOOLS and (
                metrics["loss"] < FEW_LOSS or progress.step - progress.lesson_since >= FEW_STEPS
            ):
                progress.lesson_tools += 1
                progress.lesson_since = progress.step
            _record(run, groups, metrics, times)
            bar.update()
            stopped = run.end_step()
    return not stopped


def _lessons(run: TrainingRun) -> list[Group]:
    """The demonstrations of the next step."""
    count, progress = run.config.warm_start.prompts, run.progress
    first = progress.step * count
    if run.examples:
        chosen = take(run.examples, first, count, run.config.run.seed)
        return [as_group(members) for members in chosen]
    most_tools = progress.lesson_tools if progress.lesson_tools <= FEW_TOOLS else 0
    tasks = run.worlds.lesson_tasks(count, first, most_tools)
    return run.ranks.map(lambda mine: [_demonstration(run, task) for task in mine], tasks)


def _demonstration(run: TrainingRun, task: Task) -> Group:
    """The teacher's attempt at a task."""
    limits, env = run.config.rollout, run.worlds.environment(task, 0)
    lessons = run.worlds.teach(env)
    if limits.context == "append":
        prompt, ids, sampled = as_session(lessons, env, run.tokenizer)
        return Group.of([(prompt, Sample(ids, sampled))])
    room = limits.context_tokens - limits.turn_tokens
    turns = as_turns(lessons, env, run.tokenizer, room)
    return Group.of([(prompt, Sample(ids, [True] * len(ids))) for prompt, ids in turns])


def _record(run, groups, metrics, times):
    step, seconds = run.progress.step, sum(times.values())
    speed = metrics["tokens"] / seconds
    if "skipped" in metrics and run.ranks.first:
        ids = [group.prompt + sample.ids for group in groups for sample in group.samples]
        texts = [run.tokenizer.decode(sequence) for sequence in ids]
        run.folder.write_json("skipped.json", {"step": step, "texts": texts})
    row = {"phase": "warm_start", "step": step, "tokens_per_s": speed, "seconds": seconds}
    run.record_update(row, metrics, times, "skipped.json")
    if step % PRINT_EVERY == 0:
        steps, loss = run.config.warm_start.steps, metrics["loss"]
        run.say(f"warm start step {step:4d}/{steps}  loss {loss:.3f}  {speed:,.0f} tokens/s")
