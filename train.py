"""Trains a tool orchestrator by GRPO: this page is the training loop.

    python train.py                                 the desk on a CPU (configs/nano.toml)
    python train.py --config base                   the base that it begins with, from a draft
    python train.py --config qwen3-8b --grpo.steps 50 --run.name short
    python train.py --resume runs/nano              continues exactly where a run stopped
    python train.py --resume runs/nano --grpo.steps 120          extends a finished run
    torchrun --nproc-per-node 8 train.py --config qwen3-8b       the same on several ranks
    python train.py --config qwen3-8b --dry-run     any run in small, on CPUs
    python train.py --config qwen3-8b --plan --gpus 8            memory by part, no training

`train` sets a run up and has its phases in order: warm start, evaluation, GRPO, evaluation.
`policy_update` is one optimizer step, `policy_loss` the loss. The method is that of ToolOrchestra
(arXiv 2511.21689, section 3). What a reader of other GRPO scripts finds added:

- An attempt has many turns. The engine keeps the session's KV cache while tools run, and text is
  never tokenised twice: what was sampled is what is trained on, id by id.
- Samples of a group are packed as a tree: what they begin with in common is computed once.
- The loss is divided by a number of the whole update. So neither packing nor micro-batches nor the
  number of ranks changes the gradient.
- Each id has the log-probability under which it was drawn, and the version of the weights.
- Any number of ranks runs this page: each plays its share of the attempts and computes its share
  of the gradient; FSDP2 adds the gradients up.

Every random draw is a function of run.seed, the step and the place in it. A run that is killed
resumes, also on another number of ranks.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nanorchestra import formats
from nanorchestra.agent.attempts import Player
from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.world import World, demonstrates
from nanorchestra.config import DRAFT, Config, GrpoSection
from nanorchestra.engine.engine import Engine
from nanorchestra.errors import INTERRUPTED, command, require
from nanorchestra.files import read_text, write_whole
from nanorchestra.formats.fetch import fetch
from nanorchestra.formats.load import open_checkpoint
from nanorchestra.model.checkpoint import save_checkpoint
from nanorchestra.model.lora import save_adapter
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Task, Trajectory
from nanorchestra.report.page import write_report
from nanorchestra.report.plan import plan
from nanorchestra.report.tables import held_out_text
from nanorchestra.schemas import Json
from nanorchestra.settings import is_dry_run
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from nanorchestra.training.build import (
    build_engine,
    build_rollout,
    build_trainer,
    device_and_dtype,
    load_policy,
    publish,
)
from nanorchestra.training.command import Stop, choose_run, parse, prepare_process
from nanorchestra.training.distributed import Ranks, backward
from nanorchestra.training.draft import draft
from nanorchestra.training.grpo import (
    CLIP_HIGH,
    CLIP_LOW,
    OBJECTIVES,
    as_group,
    bounded_exp,
    gave_answer,
    group_advantages,
)
from nanorchestra.training.optimizers import scheduled
from nanorchestra.training.packing import Group, MicroBatch, mini_batches, samples_in
from nanorchestra.training.progress import TrainingRun, peak_memory_mb
from nanorchestra.training.rollout import (
    ROLLOUT_S,
    Attempts,
    attempt_seeds,
    evaluation_seeds,
    play_on_ranks,
    require_begun,
    require_most_worked,
)
from nanorchestra.training.trainer import Trainer, UpdateMetrics, merge_updates
from nanorchestra.training.warm_start import Demonstrations
from reward import POLICY, PRICES, group_rewards, task_rewards
from worlds import metrics
from worlds.desk import Desk
from worlds.desk_programs import PROGRAMS
from worlds.load import note_on_tools, open_world
from worlds.routers import routers_by_name
from worlds.user_reward import UserReward, load_reward
from worlds.user_world import UserWorld


def train(run: TrainingRun, sandbox: Sandbox) -> bool:
    """Trains from where the run is to its end; returns False if it is asked to stop on the way."""
    ranks = run.ranks

    # ---- Set-up: a world of tasks, the model in training, and an engine with a copy of its weights

    spending = Spending.of_rank(run.folder.path / "spent", ranks.rank, ranks.world_size)
    world = open_world(run.config.task, run.config.run.seed, sandbox, spending)
    world.task("held_out", 0)  # UserError now if it has none
    config = settled(run, world)
    grpo, rollout = config.grpo, config.rollout

    _, dtype = device_and_dtype(config)
    model, tokenizer = load_policy(config, ranks, dtype, *open_checkpoint(config.model.path))
    trainer = build_trainer(config, model, tokenizer, ranks, dtype)
    engine = build_engine(config, model, tokenizer, ranks, dtype)
    player = build_player(config, engine, rollout.temperature)
    held_out_player = build_player(config, engine, config.evaluation.temperature)
    user_reward = reward_of_user(run, world)
    parts = getattr(world, "worlds", {"": world}).values()  # of a mixture
    own_worlds = [part for part in parts if isinstance(part, UserWorld)]
    for number, own in enumerate(own_worlds):
        keep_file(run, f"world{number or ''}", own.name, own.source)
    if agent := config.task.agent:
        keep_file(run, "agent", agent, read_text(agent.rpartition(":")[0]))
    note = note_on_tools(config.model.path, config.task.world, "model.path")
    if note and not is_dry_run(config):  # whose model is not the user's choice
        run.say(note)
    # Ranks wait for the slowest rollout, which may take hours where tools are slow.
    rollout_ranks = ranks.with_own_group(ROLLOUT_S)
    held_out = partial(evaluate, run, world, held_out_player, rollout_ranks, spending, user_reward)

    demonstrations = Demonstrations(config, world, tokenizer)
    run.begin(trainer, engine)
    player.on_done = run.show_attempt

    # ---- Before GRPO

    if run.progress.phase == "warm_start":
        warm_start(run, trainer, demonstrations)
        if run.stopped or run.asked_to_stop():
            return False
        # The held-out tasks before GRPO; then its optimizer, and its reference: the weights of now,
        # or with LoRA the base.
        publish(config, model, engine, dtype)
        run.progress.before = held_out("before")
        run.begin_grpo()
        run.save()
        if run.asked_to_stop():
            return False
    else:
        publish(config, model, engine, dtype)  # the checkpoint's weights

    # ---- GRPO

    for step in run.steps(grpo.steps):
        # Rollout: grpo.group_size attempts at each of grpo.prompts tasks.
        attempts = play_step(config, world, player, rollout_ranks, spending, step)

        # Rewards and advantages, group by group.
        groups, left_out = [], []  # what is learnt from; why the other attempts are not in the loss
        for task, members in attempts.groups(grpo.group_size):
            reward_group(task, members, grpo, user_reward, ranks)
            group, reasons = group_in_loss(members, grpo)
            if group.samples:
                groups.append(group)
            left_out += reasons

        # Update: one optimizer step, or with grpo.mini_batch several.
        update = learn(trainer, groups, grpo, step, rollout.temperature)

        # Publish: the engine samples the next attempts from the new weights. Without an update
        # too: the version counts steps, and no KV pages are cached, as in a resumed run.
        publish_s = publish(config, model, engine, dtype)
        record(run, attempts, left_out, update, spending, publish_s)

    if run.stopped:
        return False

    # ---- Results

    after = held_out("after")
    save_model(run, config, model, tokenizer, dtype)
    run.checkpoints.wait()
    if ranks.first:
        routers = evaluate_routers(config, world, user_reward)
        write_results(run, trainer, spending, after, routers)
    return True


def play_step(
    config: Config,
    world: World,
    player: Rollout,
    rollout_ranks: Ranks,
    spending: Spending,
    step: int,
) -> Attempts:
    """Plays the attempts of a step: a function of run.seed, the step and the engine's weights.

    UserError if most of them failed for reasons of the infrastructure, or no prompt leaves room.
    """
    grpo, warm_start = config.grpo, config.warm_start
    first = warm_start.steps * warm_start.prompts + step * grpo.prompts  # after the warm start's
    indices = [first + i // grpo.group_size for i in range(grpo.prompts * grpo.group_size)]
    seeds = attempt_seeds(config.run.seed, step, len(indices))
    attempts = play_on_ranks(
        player,
        world,
        "train",
        indices,
        seeds=seeds,
        environment_seeds=seeds,
        ranks=rollout_ranks,
        problem=lambda: spending.problem,
        together=grpo.group_size,
    )
    drawn_by = {version for t in attempts.trajectories for version in t.weight_versions}
    assert drawn_by <= {-1, step + 1}, "an id was drawn by the weights of another step"
    require_most_worked(attempts.trajectories, step)
    require_begun(attempts.trajectories, f"step {step + 1}", config)
    return attempts


def reward_group(
    task: Task,
    members: list[Trajectory],
    grpo: GrpoSection,
    user_reward: UserReward | None,
    ranks: Ranks,
) -> None:
    """Writes the rewards of the attempts at a task that the infrastructure did not fail."""
    valid = [attempt for attempt in members if attempt.status != "infrastructure"]
    if grpo.bounds == "group":  # R(tau) = r_out(tau) Mn(tau) . P, ToolOrchestra section 3
        rewards = group_rewards(valid, task.preference)
    else:  # in absolute form, comparable across steps: reward.task_rewards
        rewards = task_rewards(valid, task.preference, task.bounds)
    if user_reward:  # one process calls it, so that all have the same
        rewards = ranks.broadcast(user_reward(task, valid, rewards) if ranks.first else rewards)
    for attempt, reward in zip(valid, rewards, strict=True):
        attempt.reward = float(reward)


def group_in_loss(members: list[Trajectory], grpo: GrpoSection) -> tuple[Group, list[str]]:
    """Writes the advantages of the attempts at a task, and returns those in the loss as samples.

    Returns also why each of the others is not in the loss:

    "infrastructure"  a tool failed, not the policy: in no mean
    "homogeneous"     the rewards of the group are too much alike (`group_advantages`)
    "invalid_format"  without an answer, where the objective drops these. In the mean: what is left
                      is not centred again, as published
    """
    objective = OBJECTIVES[grpo.objective]
    valid = [attempt for attempt in members if attempt.status != "infrastructure"]
    left_out = ["infrastructure"] * (len(members) - len(valid))
    rewards = [attempt.reward for attempt in valid]
    advantages = group_advantages(rewards, grpo.min_std, objective)
    if advantages is None:
        return Group([], 0), left_out + ["homogeneous"] * len(valid)
    kept = []
    for attempt, advantage in zip(valid, advantages, strict=True):
        if objective.drop_invalid_format and not gave_answer(attempt):
            left_out.append("invalid_format")
        else:
            attempt.advantage = advantage
            kept.append(attempt)
    return as_group(kept, objective.drop_invalid_format), left_out


def learn(
    trainer: Trainer, groups: list[Group], grpo: GrpoSection, step: int, temperature: float
) -> dict[str, float]:
    """Makes the updates of a step: one, or with grpo.mini_batch several.

    Returns the metrics of the step, {} if there are no groups to learn from. All ranks call it with
    the same groups.
    """
    if not groups:
        return {}
    learning_rate = scheduled(step, grpo.learning_rate, grpo.steps, grpo.warmup_steps, grpo.hold)
    if grpo.mini_batch:  # the ratio of every update is to the policy before the first
        trainer.compute_first_logprobs(groups, temperature)
    updates = []
    for part in mini_batches(groups, grpo.mini_batch):
        updates.append(policy_update(trainer, part, grpo, learning_rate, temperature))
    return merge_updates(updates)


def policy_update(
    trainer: Trainer,
    groups: list[Group],
    grpo: GrpoSection,
    learning_rate: float,
    temperature: float,
) -> dict[str, float]:
    """Makes one optimizer step on the samples of all ranks; returns its metrics.

    All ranks call it with the same groups. temperature: the sampler's. With grpo.mini_batch the
    samples have first_logprobs.

    Metrics are means over the ids in the loss: `loss`, `entropy` in nats, the terms of
    `policy_loss`, and the mismatch between sampler and trainer (`UpdateMetrics.add_mismatch`);
    and those of `Trainer.optimizer_step`.
    """
    objective = OBJECTIVES[grpo.objective]
    loss_ids = sum(sample.loss_ids for sample in samples_in(groups))  # on all ranks
    sums = UpdateMetrics(loss_ids)
    micro_batches = trainer.micro_batches(groups)  # this rank's; every rank has equally many
    for batch in micro_batches:
        # [N] each, of the N ids in the loss; the KL from the reference is None without its term
        kind = objective.kl if grpo.kl_coef else None
        trainer_logprobs, entropy, kl = trainer.logprobs(batch, temperature, kind, grpo.min_entropy)
        # The trainer's before this step: with one update, those of now.
        first_logprobs = batch.first_logprobs if grpo.mini_batch else trainer_logprobs.detach()
        losses, terms = policy_loss(trainer_logprobs, first_logprobs, entropy, kl, batch, grpo)
        loss = losses.sum() / loss_ids  # a share of the mean; without ids 0, and it has a graph
        backward(loss, trainer.model, trainer.ranks, last=batch is micro_batches[-1])

        sums.add(loss=losses, entropy=entropy, **terms)
        sums.add_mismatch(batch.sampler_logprobs, first_logprobs)
        sums.flops += trainer.flops(batch, reference=kl is not None)

    update = sums.read(trainer.ranks)
    return update | trainer.optimizer_step(learning_rate, finite=math.isfinite(update["loss"]))


def policy_loss(
    trainer_logprobs: Tensor,
    first_logprobs: Tensor,
    entropy: Tensor,
    kl: Tensor | None,
    batch: MicroBatch,
    grpo: GrpoSection,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss at each id in the loss, [N], and terms of it for the metrics.

    With one update a step, as without grpo.mini_batch, the ratio is 1 but for the difference of
    sampler and trainer, and with an importance cap exactly 1. Where the clips do nothing, the
    gradient is that of -A v log pi, plus that of the KL term. They are for the later updates of a
    step.

    trainer_logprobs, first_logprobs (the trainer's before the first update of the step), entropy
    and kl are fp32 [N]. Gradients flow into trainer_logprobs and kl. Terms, each [N]:
    `clip_fraction`, 1 where the clip stops the id's gradient (the dual clip is not counted); `kl`;
    and with an importance cap `importance`, the weight v.
    """
    objective = OBJECTIVES[grpo.objective]
    advantages = batch.advantages
    if grpo.min_entropy:  # an id counts where the policy chooses; the KL of others is 0 already
        advantages = torch.where(entropy >= grpo.min_entropy, advantages, 0.0)

    # pi_old, the policy before this step: as the trainer computes it, or if there is one update and
    # no weight v that corrects for the sampler, as the sampler did.
    old_logprobs = batch.sampler_logprobs
    if grpo.mini_batch or grpo.importance_cap:
        old_logprobs = first_logprobs
    ratio = bounded_exp(trainer_logprobs - old_logprobs)  # r = pi / pi_old, [N]
    clipped_ratio = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    # PPO (1707.06347), equation (7); ToolOrchestra, (4)
    free, bounded = -advantages * ratio, -advantages * clipped_ratio
    losses = torch.maximum(free, bounded)
    clipped = bounded > free
    if objective.dual_clip:  # arXiv 1912.09729, equation (5): where A < 0, at most -A dual_clip
        beyond = (advantages < 0) & (ratio > objective.dual_clip)
        losses = torch.where(beyond, -advantages * objective.dual_clip, losses)

    terms = {"clip_fraction": clipped.double()}
    if grpo.importance_cap:  # truncated importance sampling (Ionides 2008)
        # v = pi_old / pi_sampler
        importance = bounded_exp(old_logprobs - batch.sampler_logprobs)
        terms["importance"] = importance.clamp(max=grpo.importance_cap)
        losses = losses * terms["importance"]
    if kl is not None:
        terms["kl"] = kl.detach()
        losses = losses + grpo.kl_coef * kl
    return losses, terms


def warm_start(run: TrainingRun, trainer: Trainer, demonstrations: Demonstrations) -> None:
    """Makes the supervised steps that are left. A model that calls tools needs none."""
    for step in run.steps(
        run.config.warm_start.steps, enough=lambda: demonstrations.learnt(run.progress)
    ):
        started = time.monotonic()
        groups = demonstrations.groups(step, run.progress.lesson_tools, run.ranks)
        update = supervised_update(trainer, groups, demonstrations.learning_rate(step))
        demonstrations.advance(run.progress, update["loss"])
        tokens_per_s = sum(group.tokens for group in groups) / (time.monotonic() - started)
        row = {"teacher_kl": run.progress.teacher_kl, "tokens_per_s": tokens_per_s}
        run.record_step(row, update, {"demonstrations": demonstrations.seconds})


def supervised_update(
    trainer: Trainer, groups: list[Group], learning_rate: float
) -> dict[str, float]:
    """Makes one optimizer step on demonstrations; returns its metrics.

    `loss` is the mean negative log-likelihood of the ids in the loss, and `entropy` their mean
    entropy, both in nats. The others are those of `Trainer.optimizer_step`.
    """
    loss_ids = sum(sample.loss_ids for sample in samples_in(groups))
    sums = UpdateMetrics(loss_ids)
    micro_batches = trainer.micro_batches(groups)
    for batch in micro_batches:
        logprobs, entropy, _ = trainer.logprobs(batch)  # [N], [N]
        loss = -logprobs.sum() / loss_ids
        backward(loss, trainer.model, trainer.ranks, last=batch is micro_batches[-1])
        sums.add(loss=-logprobs, entropy=entropy)
        sums.flops += trainer.flops(batch)
    update = sums.read(trainer.ranks)
    return update | trainer.optimizer_step(learning_rate, finite=math.isfinite(update["loss"]))


def evaluate(
    run: TrainingRun,
    world: World,
    player: Rollout,
    rollout_ranks: Ranks,
    spending: Spending,
    user_reward: UserReward | None,
    when: str,
) -> Json:
    """Plays and records the held-out tasks, "before" or "after" GRPO; returns their summary."""
    share = -(-run.config.evaluation.tasks // rollout_ranks.world_size)
    with run.held_out_tasks(when, share) as on_done:
        player.on_done = on_done
        attempts = play_held_out(run.config, world, player, rollout_ranks, spending, user_reward)
    run.record_attempts(when, attempts.tasks, attempts.trajectories)
    return metrics.summarise(attempts.tasks, attempts.trajectories)


def evaluate_routers(
    config: Config, world: World, user_reward: UserReward | None
) -> dict[str, Json]:
    """Returns the held-out summaries of the programs for the desk, which cost nothing."""
    summaries = {}
    if world.name == Desk.name:
        for name, router in routers_by_name(PROGRAMS).items():
            attempts = play_held_out(config, world, router, Ranks(), Spending(), user_reward)
            summaries[name] = metrics.summarise(attempts.tasks, attempts.trajectories)
    return summaries


def play_held_out(
    config: Config,
    world: World,
    player: Player,
    rollout_ranks: Ranks,
    spending: Spending,
    user_reward: UserReward | None,
) -> Attempts:
    """Plays and scores one attempt at each held-out task, all with experts of the same seed."""
    tasks = config.evaluation.tasks
    attempts = play_on_ranks(
        player,
        world,
        "held_out",
        list(range(tasks)),
        seeds=evaluation_seeds(config.run.seed, tasks),
        environment_seeds=[config.run.seed] * tasks,
        ranks=rollout_ranks,
        problem=lambda: spending.problem,
    )
    require_begun(attempts.trajectories, "the held-out tasks", config)
    if rollout_ranks.first:  # one process calls the user's reward, so that all have the same
        for task, attempt in zip(attempts.tasks, attempts.trajectories, strict=True):
            metrics.score(task, attempt, user_reward)
    rewards = rollout_ranks.broadcast([attempt.reward for attempt in attempts.trajectories])
    for attempt, reward in zip(attempts.trajectories, rewards, strict=True):
        attempt.reward = reward
    return attempts


def record(
    run: TrainingRun,
    attempts: Attempts,
    left_out: list[str],
    update: dict[str, float],
    spending: Spending,
    publish_s: float,
) -> None:
    """Records a step of GRPO, and the attempts of its first group, or all if it was skipped.

    left_out: why attempts are not in the loss, each of them. publish_s: seconds of `publish`.
    """
    group_size = run.config.grpo.group_size
    filtered = Counter(left_out)
    row = metrics.measure(attempts.tasks, attempts.trajectories, group_size) | {
        "tokens_per_s": attempts.tokens_per_s,
        "filtered": {why: count / len(attempts.tasks) for why, count in filtered.items()},
        "retried": attempts.repeated,
        "rewritten": metrics.rewritten_share(attempts.trajectories),
        "bill_usd": spending.total(),
    }
    skipped = update.get("skipped") == 1
    shown = len(attempts.tasks) if skipped else group_size
    run.record_attempts(
        "skipped" if skipped else "grpo", attempts.tasks[:shown], attempts.trajectories[:shown]
    )
    run.record_step(row, update, {"rollout": attempts.seconds, "weights": publish_s})


def save_model(
    run: TrainingRun, config: Config, model: Qwen3, tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    """Saves the trained weights as model/ in the run's directory, and adapters as adapter/ too."""
    path, first = run.folder.path, run.ranks.first
    save_checkpoint(model, tokenizer, path / "model", dtype=dtype, write=first)
    if config.lora.rank:
        save_adapter(model, path / "adapter", config.model.path, write=first)


def write_results(
    run: TrainingRun, trainer: Trainer, spending: Spending, after: Json, routers: dict[str, Json]
) -> None:
    """Writes summary.json and the report, and prints the results."""
    tasks = run.config.evaluation.tasks
    summary = {
        "seconds": run.elapsed,
        "steps": run.progress.step,
        "seed": run.config.run.seed,
        "peak_memory_mb": peak_memory_mb(),
        "bill_usd": spending.total(),
        "parameters": trainer.parameters(),
        "held_out": {
            "tasks": tasks,
            "before": run.progress.before,
            "after": after,
            "routers": routers,
        },
    }
    if is_dry_run(run.config):
        print(
            "dry run: nano's base after a few steps in small; the table shows that a run "
            "works, and its figures mean nothing"
        )
    print(held_out_text(summary))
    run.folder.write_json("summary.json", summary)
    run.report(run.folder.path, False)


def settled(run: TrainingRun, world: World) -> Config:
    """Returns the config with epochs as steps, and a path or word for the very model.

    config.toml then states both; of a draft, which is written first, it keeps the word. UserError
    for epochs of a world without end.
    """
    grpo, tasks = run.config.grpo, world.size("train")
    if grpo.epochs:
        require(
            tasks,
            f"grpo.epochs: {run.config.task.world} has tasks without end; set grpo.steps, and "
            "epochs to 0",
        )
        steps = math.ceil(grpo.epochs * tasks / grpo.prompts)
        run.change({"grpo.steps": steps, "grpo.epochs": 0})
    if run.config.model.path == DRAFT:
        return run.config.replace({"model.path": str(write_draft(run, world))})
    # A hub id gets its commit, so that the run goes on with it.
    run.change({"model.path": fetch(run.config.model.path, run.ranks)})
    return run.config


def write_draft(run: TrainingRun, world: World) -> Path:
    """Returns the run's directory draft/, which has an untrained model for the world.

    One rank writes it, whole and once: a resumed run has it already. UserError if nothing
    demonstrates the world's tasks.
    """
    path = run.folder.path / DRAFT
    if run.ranks.first and not path.exists():
        require(
            demonstrates(world),
            f"model.path is {DRAFT}, and nothing demonstrates {run.config.task.world!r}; name a "
            "checkpoint or a hub id",
        )
        draft(world, run.config.run.seed, path)
    run.ranks.barrier()
    return path


def build_player(config: Config, engine: Engine, temperature: float) -> Rollout:
    """Returns what plays attempts: our loop on the engine, or an agent of the user's."""
    player = build_rollout(config, engine, PRICES[POLICY], temperature)
    agent = config.task.agent
    if not agent:
        return player
    from nanorchestra.serving.agents import played_by

    return played_by(agent, player, config.task.agent_timeout_s)  # docs/training.md


def reward_of_user(run: TrainingRun, world: World) -> UserReward | None:
    """Returns the function that task.reward names. docs/worlds.md has an example. UserError."""
    reward = load_reward(run.config.task.reward, world.task("train", 0))
    if reward:
        keep_file(run, "reward", reward.name, reward.source)
    return reward


def keep_file(run: TrainingRun, part: str, name: str, source: str) -> None:
    """Keeps the user's file of a part in the run's directory, as PART.py.

    UserError if a step has been taken with another file.
    """
    kept = run.folder.path / f"{part}.py"
    if kept.is_file() and any(run.folder.rows("metrics")):
        right = f"it is not the file that the run began with, which is {kept}; put that back"
        require(read_text(kept) == source, f"{name}: {right}, or start another run")
    elif run.ranks.first:
        write_whole(kept, source)
        run.say(f"{part}: {name}, kept as {kept}")


@command("train.py")
def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments, __doc__)
    config, path, resumed = choose_run(options)
    if options.plan:
        text, fits = plan(
            config, options.gpus, options.memory or None, options.gpu, formats.directory_of
        )
        print(text)
        return 0 if fits else 1

    device, dtype = device_and_dtype(config)
    prepare_process(config)
    # FSDP2 computes in another dtype than that of the weights, also over one rank. A base in 4 bits
    # is not sharded; it and the adapters choose their dtypes themselves.
    mixed_precision = dtype != torch.float32 and config.lora.base != "int4"
    ranks = Ranks.start(device, shard=config.parallel.shard, mixed_precision=mixed_precision)
    with Stop() as stop, Sandbox() as sandbox:
        run = TrainingRun(config, path, ranks, stop, write_report, resumed=resumed)
        try:
            finished = train(run, sandbox)
        except BaseException:
            if not run.begun:  # frees the name for a corrected command
                shutil.rmtree(path, ignore_errors=True)
            raise
        run.close(finished)
        ranks.close()
    # torchrun would start again what ends with another status than 0.
    return 0 if finished or ranks.world_size > 1 else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
