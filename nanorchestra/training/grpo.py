"""The second phase of a run: GRPO. A batch of attempts is sampled, judged, learnt from; again."""

import time
from collections import Counter
from itertools import chain

import torch

from nanorchestra.records import Trajectory
from nanorchestra.training.objectives import Objective
from nanorchestra.training.optimizers import scheduled
from nanorchestra.training.overlap import beside
from nanorchestra.training.packing import mini_batches, samples_in
from nanorchestra.training.run import TrainingRun
from nanorchestra.training.sampling import Batch, Sampler
from nanorchestra.training.trajectories import in_loss


def grpo(run: TrainingRun) -> bool:
    """Makes the phase's steps; returns False if the run is asked to stop on the way."""
    ranks, threads = run.ranks, torch.get_num_threads()
    if run.config.rollout.overlap:
        ranks = run.ranks.beside()  # what the two threads exchange must not mix
        torch.set_num_threads(max(1, threads // 2))  # the other half for the rollout
    rollout = run.rollout(run.config.rollout.temperature)
    sampler = Sampler(run.config, run.worlds, rollout, ranks, run.bill)
    if run.ahead:
        sampler.judge(run.ahead)
    finished = run.repeat(lambda: grpo_step(run, sampler))
    torch.set_num_threads(threads)
    return finished


def grpo_step(run: TrainingRun, sampler: Sampler) -> None:
    """Makes one step: sample, reward, advantage, update, publish the weights, record.

    With overlap the next step's batch is sampled during the update, by the weights before it.
    """
    config, step = run.config, run.progress.step
    start = time.monotonic()
    batch = run.ahead or sampler.batch(step)  # attempts with rewards and advantages
    coming = None
    if config.rollout.overlap and step + 1 < run.steps:
        coming = beside(lambda: next_batch(run, sampler, step + 1), run.ranks.device)
    sampled = time.monotonic()

    metrics = learn(run, batch, sampler.objective) if batch.kept else {}
    updated = time.monotonic()

    run.ahead = coming.result() if coming else None
    waited = time.monotonic() - updated
    # Without an update, too: as in a resumed run, no step finds cached pages of the one before.
    run.publish()
    published = time.monotonic()

    run.progress.step += 1
    times = {
        "rollout": sampled - start,
        "train": updated - sampled,
        "weights": published - updated - waited,
        "wait": waited,
    }
    _record(run, batch, metrics, times)


def next_batch(run: TrainingRun, sampler: Sampler, step: int) -> Batch:
    """Samples a step's batch beside the update before.

    In one process on a CPU the update takes longer than the rollout, so the reference's pass is
    made here too. With a mesh the collectives of two threads would mix; with LoRA the reference is
    the model in training; mini-batches are packed otherwise than the groups.
    """
    batch, config = sampler.batch(step), run.config
    apart = run.ranks.mesh is None and not config.lora.rank and not config.grpo.mini_batch
    if batch.kept and config.grpo.kl_coef and apart:
        batch.referred = run.trainer.refer(batch.groups)
    return batch


def learn(run: TrainingRun, batch: Batch, objective: Objective) -> dict[str, float]:
    """Updates the model by the attempts of a step; returns the metrics.

    With grpo.mini_batch there are several updates. Their ratios are to the policy before the first,
    whose log-probabilities the trainer computes, and their metrics are means.
    """
    grpo, rollout, trainer = run.config.grpo, run.config.rollout, run.trainer
    learning_rate = scheduled(
        run.progress.step,
        grpo.learning_rate,
        grpo.steps,
        grpo.warmup_steps,
        grpo.final_fraction,
    )
    groups, size, old = batch.groups, grpo.mini_batch, None
    if size:
        old = trainer.score(groups, rollout.temperature)
        for sample, logprobs in zip(samples_in(groups), old, strict=True):
            sample.old_logprobs = logprobs
    totals, parts = Counter(), mini_batches(groups, size)
    for part in parts:
        result = trainer.policy_step(
            part,
            learning_rate,
            objective,
            temperature=rollout.temperature,
            length=rollout.context_tokens,
            referred=batch.referred,
        )
        totals.update(result.metrics)
    note_logprobs(batch.kept, old or result.logprobs, objective.drop_invalid_format)
    summed = ("flops", "tokens")
    return {name: x if name in summed else x / len(parts) for name, x in totals.items()}


def _record(run, batch, metrics, times):
    """Records the step and its first group, or all attempts if it is skipped."""
    progress, size = run.progress, run.config.grpo.group_size
    skipped = "skipped" in metrics
    pairs = list(zip(batch.tasks, batch.trajectories, strict=True))
    for task, trajectory in pairs if skipped else pairs[:size]:
        run.record_trajectory("skipped" if skipped else progress.phase, task, trajectory)
    row = {
        **run.worlds.measure(batch.tasks, batch.trajectories, size),
        "tokens_per_s": batch.tokens_per_s,
        "filtered": batch.filtered,
        "retried": batch.retried,
    }
    if bill := run.bill.total(run.ranks):
        row["bill_usd"] = bill  # of the run so far
    line = (
        f"step {progress.step:4d}/{run.steps}  reward {row['reward']:.3f}  "
        f"accuracy {row['accuracy']:.2f}  cost {row['cost_usd'] * 1e3:.2f} m$  "
        f"latency {row['latency_s']:.1f} s  preference {row['preference']:.2f}  "
        f"{row['tokens_per_s']:,.0f} tokens/s"
    )
    if not batch.kept:
        line += f"  no update: no group has an advantage ({', '.join(batch.filtered)})"
    run.say(line)
    run.record_update(row, metrics, times)


def note_logprobs(kept: list[list[Trajectory]], logprobs: list[list[float]], by_turn: bool) -> None:
    """Writes on the trajectories the log-probabilities of the samples that as_group makes of them.

    They are those of all ids in the loss, in order. Other sampled ids have None.
    """
    values = chain.from_iterable(logprobs)
    for member in chain.from_iterable(kept):
        pairs = zip(member.sampled, in_loss(member, by_turn), strict=True)
        member.trainer_logprobs = [next(values) if used else None for drawn, used in pairs if drawn]
