"""Trains a tool orchestrator: warm start on demonstrations, GRPO in the world, evaluation before and after on held-out tasks.

    python train.py                                        the miniature on a CPU (configs/nano.toml)
    python train.py --config FILE --grpo.steps 300 --run.name longer
    python train.py --resume runs/nano                     goes on exactly where a run was stopped or killed
    torchrun --nproc-per-node 8 train.py --config FILE     the same on several ranks, of one machine or many
    python train.py --config FILE --dry-run                any run in small, on CPUs
    python train.py --rollouts 4 --model.path runs/nano/model --run.name seen      four steps of rollouts, written in full, and no training
    python train.py --rollouts 4 --rollout.endpoint URL --rollout.model NAME --run.name big      rollouts of a model behind an endpoint, to be imitated:
    python train.py --warm_start.trajectories runs/big

Everything drawn at random is a function of (run.seed, step, place), so a step can be computed again from the weights before it, and it
does not matter how many ranks share the work. Every rank makes its share of the attempts; all of them then know all trajectories.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from nanorchestra import Engine, SamplingParams, load_model
from nanorchestra.agent.load import NANO
from nanorchestra.agent.loop import Limits, PolicyPrice, Rollout
from nanorchestra.agent.policy import EndpointRollout, check_endpoint
from nanorchestra.config import BEST, Config, load_config, scaled_down, to_toml
from nanorchestra.errors import ArgumentParser, UserError
from nanorchestra.model.lora import add_adapters, merge, save_adapter
from nanorchestra.model.lora import reset as reset_adapters
from nanorchestra.model.quantise import is_quantised
from nanorchestra.model.qwen3 import PRESETS, ModelConfig, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.tokenizer import Tokenizer, train_bpe
from nanorchestra.model.weights import named_hf_tensors
from nanorchestra.records import Task, Trajectory
from nanorchestra.report.page import write_report
from nanorchestra.report.run import Run, table
from nanorchestra.report.watch import Watch, needed, peak_memory_mb
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.checkpoint import Checkpoints
from nanorchestra.training.optimizers import Schedule
from nanorchestra.training.overlap import beside, running
from nanorchestra.training.plan import GB, peak_flops, plan
from nanorchestra.training.ranks import Ranks, shard_model
from nanorchestra.training.trainer import Trainer, TrainerSettings
from nanorchestra.training.trajectories import (
    Batch,
    batches,
    contexts,
    from_row,
    load_kept,
    take,
    tally,
    to_row,
)
from reward import POLICY, PRICES
from worlds.evaluation import evaluate, score, summarise
from worlds.miniature.induction import draft_induction
from worlds.miniature.offers import describe
from worlds.miniature.probe import price_probe
from worlds.practice import Practice
from worlds.routers import evaluate_routers

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "nano.toml"
FEW_TOOLS = 2  # lessons of the warm start begin with warm_start.first_tools and go up to so many; then they offer all that a task has


def find_config(named: Path | None) -> Path | None:
    """The file, or the one in configs/ that is called so."""
    if named is None or named.exists() or named.name != str(named):
        return named
    inside = DEFAULT_CONFIG.with_name(f"{named}.toml")
    return inside if inside.exists() else named


Sampled = tuple[
    list[Task], list[Trajectory], list[list[Trajectory]], dict[str, float], int
]  # Training._sample


class Stop:
    """Turns SIGINT and SIGTERM into a flag that is read between steps; a second SIGINT ends the process at once. SIGTERM may come often: a scheduler
    sends it to torchrun, which passes it on, and to the ranks."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if self.asked:
            return
        self.asked = True
        tqdm.write(
            "stopping after this step (once more: at once, losing the steps since the last checkpoint)",
            file=sys.stderr,
        )


class Training:
    """One run: its parts, wired, on this rank. `step` counts the finished steps of `phase`; both, and the weights, are what a checkpoint holds."""

    def __init__(self, config: Config, run: Run, sandbox: Sandbox, ranks: Ranks):
        self.config, self.run, self.sandbox, self.ranks = config, run, sandbox, ranks
        self.practice = Practice(config, sandbox)
        self.dtype = getattr(torch, resolve(config)[1])
        self.peak = peak_flops(ranks.device, self.dtype)
        model, self.tokenizer = self._model()
        if config.rollout.context_tokens > model.config.max_position_embeddings:
            raise UserError(
                f"rollout.context_tokens is {config.rollout.context_tokens}; it must be at most {model.config.max_position_embeddings}, "
                f"the max_position_embeddings of {config.model.path}"
            )
        self.practice.check_room(self.tokenizer)
        self.examples = self._examples()
        settings, rollout, parallel = config.grpo, config.rollout, config.parallel
        training, prefill = self._attention(model.config)
        self.trainer = Trainer(
            model,
            vocab_limit=self.tokenizer.vocab_size,
            optimizer=config.warm_start.optimizer,
            ranks=ranks,
            settings=TrainerSettings(
                weight_decay=settings.weight_decay,
                grad_clip=settings.grad_clip,
                token_budget=settings.token_budget,
                activation_checkpointing=parallel.activation_checkpointing,
                cpu_offload=parallel.cpu_offload,
                dtype=self.dtype,
                attention=training,
            ),
        )
        with torch.device("meta"):
            engine_model = Qwen3(model.config).to(
                self.dtype
            )  # the engine's own copy, which has no weights before the first update
        engine_model.to_empty(device=ranks.device)
        rows = max(-(-settings.prompts // ranks.world) * settings.group_size, 1)
        pages = rollout.pages or rows * -(-rollout.context_tokens // rollout.page_size) + 64
        self.engine = Engine(
            engine_model,
            self.tokenizer,
            num_pages=pages,
            page_size=rollout.page_size,
            max_batch_tokens=rollout.max_batch_tokens,
            max_running=rows,
            max_context=rollout.context_tokens,
            attention=prefill,
        )
        self.checkpoints = Checkpoints(run.path / "checkpoints", config.run.keep_checkpoints, ranks)
        self.phase, self.step, self.before, self.seconds = "warm_start", 0, None, 0.0
        self.few_tools, self.few_since = (
            config.warm_start.first_tools,
            0,
        )  # how many the lessons of the warm start offer, and since which step
        self.watch = (
            Watch(run, config.run.log_to, config.run.report_every) if ranks.first else Watch(run)
        )
        self.best: dict[str, Any] | None = None  # measure, step and value of what model-best/ has
        self.skipped = 0  # steps in a row that were left out, not being finite
        self.ahead: Sampled | None = None  # the next step's rollout, made already
        self.started = time.monotonic()

    def _model(self) -> tuple[Qwen3, Tokenizer]:
        section, ranks, adapter = self.config.model, self.ranks, self.config.lora

        def build(shape: ModelConfig, seed: int | None = None) -> Qwen3:
            model = Qwen3(shape)
            if seed is not None:
                draft_induction(model, model.init_weights(seed))
            if adapter.rank:
                model.to(
                    self.dtype
                )  # the base is frozen: it needs no more digits than what computes with it
                add_adapters(model, adapter.rank, adapter.alpha, self.config.run.seed)
            return shard_model(
                model, ranks, self.dtype, cpu_offload=self.config.parallel.cpu_offload
            )

        if section.path:
            device = "cpu" if self.config.parallel.cpu_offload else str(ranks.device)
            model, tokenizer = load_model(section.path, device=device, dtype=None, build=build)
            reset_adapters(model, self.config.run.seed)
            if tokenizer is None:
                raise UserError(
                    f"{section.path}: no tokenizer.json; training needs the checkpoint's tokenizer beside its weights"
                )
            if is_quantised(model):
                raise UserError(
                    f"{section.path}: the checkpoint is quantised; training needs one in full precision"
                )
            return model, tokenizer
        if section.preset not in PRESETS:
            raise UserError(
                f"model.preset is {section.preset!r}; it must be one of {', '.join(PRESETS)}"
            )
        saved = self.run.path / "tokenizer"
        if (
            ranks.first and not (saved / "tokenizer.json").exists()
        ):  # the directory alone is what a killed run may have left
            train_bpe(self.practice.texts(section.tokenizer_tasks), section.vocab_size).save(saved)
        ranks.gather(None)  # the others wait for it
        tokenizer = Tokenizer.from_dir(saved)
        preset = PRESETS[section.preset]
        shape = dataclasses.replace(
            preset,
            max_position_embeddings=max(
                preset.max_position_embeddings, self.config.rollout.context_tokens
            ),
            vocab_size=max(preset.vocab_size, -(-tokenizer.vocab_size // 64) * 64),
            eos_token_ids=tuple(tokenizer.eos_ids),
        )
        return build(shape, self.config.run.seed), tokenizer

    def _attention(self, shape: ModelConfig) -> tuple[str, str]:
        """The kernels of training and prefill, as rank 0 finds them on a GPU; they are written into config.toml, so that a resumed run has the same."""
        config, ranks = self.config, self.ranks
        wanted = {"training": config.run.attention, "prefill": config.rollout.attention}
        if ranks.device.type != "cuda":
            asked = [
                f"{section}.attention"
                for section, name in zip(("run", "rollout"), wanted.values())
                if name == "flash-attn"
            ]
            if asked:
                raise UserError(
                    f"{asked[0]} is 'flash-attn', which needs a CUDA device; it must be auto or triton"
                )
            return "triton", "triton"
        from kernels.external import choose_prefill, choose_training

        heads = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
            self.dtype,
            ranks.device,
        )
        chosen = {}
        if ranks.first:
            try:
                chosen["training"] = choose_training(wanted["training"], *heads)
                chosen["prefill"] = choose_prefill(
                    wanted["prefill"], *heads, config.rollout.page_size
                )
            except ValueError as error:
                raise UserError(
                    f"run.attention, rollout.attention: {error}; each must be auto or triton here"
                ) from None
            for purpose, (name, why) in chosen.items():
                print(f"attention of {purpose}: {name} ({why})", flush=True)
        training, prefill = (name for name, _ in ranks.gather(chosen)[0].values())
        self.config = dataclasses.replace(
            config,
            run=dataclasses.replace(config.run, attention=training),
            rollout=dataclasses.replace(config.rollout, attention=prefill),
        )
        if ranks.first and self.config != config:
            self.run.write_text("config.toml", to_toml(self.config))
        return training, prefill

    def _examples(self) -> list[list[Trajectory]]:
        """What the warm start imitates instead of the teacher, task by task, if it does."""
        section = self.config.warm_start
        if not (section.steps and section.trajectories):
            return []
        kept, reasons = load_kept(
            [Path(name.strip()) for name in section.trajectories.split(",")],
            self.tokenizer,
            outcome=section.keep_outcome,
            reward=section.keep_reward,
            best=section.keep_best,
            longest=self.config.rollout.context_tokens,
        )
        if self.ranks.first:
            print(
                f"warm start on {sum(map(len, kept))} recorded trajectories of {len(kept)} tasks; not kept: {tally(reasons) or 'none'}",
                flush=True,
            )
        return kept

    # The three phases.

    def warm_start(self, stop: Stop) -> bool:
        """Supervised steps on the teacher's demonstrations. False if asked to stop."""
        section = self.config.warm_start
        schedule = Schedule(
            section.learning_rate, section.steps, section.warmup_steps, hold=section.hold
        )
        bar, stopped = self._bar(section.steps, "warm start"), False
        while self.step < section.steps and not stopped:
            start = time.monotonic()
            few = self.few_tools <= FEW_TOOLS
            if self.examples:
                examples = take(
                    self.examples,
                    self.step * section.prompts,
                    section.prompts,
                    self.config.run.seed,
                )
                groups = [self.practice.group(members) for members in examples]
            else:
                tasks = self.practice.lesson_tasks(
                    section.prompts, self.step * section.prompts, self.few_tools if few else 0
                )
                groups = self.ranks.map(
                    lambda mine: [
                        self.practice.demonstrations(task, self.tokenizer) for task in mine
                    ],
                    tasks,
                )
            shown = time.monotonic()
            metrics = self.trainer.supervised_step(groups, schedule.at(self.step))
            seconds = time.monotonic() - start
            times = {"demonstrations": shown - start, "train": seconds - (shown - start)}
            self.step += 1
            if few and (
                metrics["loss"] < section.few_loss
                or self.step - self.few_since >= section.few_steps
            ):
                self.few_tools, self.few_since = self.few_tools + 1, self.step
            self._append(
                "metrics",
                {
                    "phase": "warm_start",
                    "step": self.step,
                    **_plain(metrics),
                    "tokens_per_s": metrics["tokens"] / seconds,
                    "seconds": seconds,
                    "phase_seconds": times,
                    **self._use(metrics, times["train"]),
                },
            )
            if "skipped" in metrics and self.ranks.first:
                self.run.write_json(
                    "skipped.json",
                    {
                        "phase": "warm_start",
                        "step": self.step,
                        "texts": [
                            self.tokenizer.decode(group.prompt + sample.ids)
                            for group in groups
                            for sample in group.samples
                        ],
                    },
                )
            self._count_skipped(metrics, "skipped.json")
            bar.set_postfix_str(
                f"loss {metrics['loss']:.3f}, {metrics['tokens'] / seconds:,.0f} tokens/s"
            )
            if self.step % 20 == 0 and self.ranks.first:
                tqdm.write(
                    f"warm start step {self.step:4d}/{section.steps}  loss {metrics['loss']:.3f}  {metrics['tokens'] / seconds:,.0f} tokens/s"
                )
            bar.update()
            stopped = self._checkpoint_and_stop(stop)
        bar.close()
        return not stopped

    def grpo(self, stop: Stop) -> bool:
        """Rollout, reward, advantage, update, weights to the engine; again. False if asked to stop."""
        section = self.config.grpo
        schedule = Schedule(
            section.learning_rate, section.steps, section.warmup_steps, section.final_fraction
        )
        rollout, overlap = (
            self._rollout(self.config.rollout.temperature),
            self.config.rollout.overlap,
        )
        steps = section.steps
        later, threads = (
            copy.copy(self),
            torch.get_num_threads(),
        )  # this run, seen from the step to come
        if overlap:
            later.ranks = self.ranks.beside(self.config.parallel.timeout)
            torch.set_num_threads(max(1, threads // 2))  # half of them for the rollout
        bar, stopped = self._bar(steps, "GRPO"), False
        while self.step < steps and not stopped:
            start, later.step, coming = time.monotonic(), self.step + 1, None
            self.engine.wake()
            tasks, trajectories, kept, filtered, retried = self.ahead or self._sample(
                self._attempted(rollout)
            )
            if overlap and later.step < steps:
                coming = beside(lambda: later._sample(later._attempted(rollout)), self.ranks.device)
            elif self.ranks.device.type == "cuda":
                self.engine.sleep()  # its KV memory is the trainer's for a while
            rolled = time.monotonic()
            metrics, logprobs = {}, []
            if kept:
                result = self.trainer.policy_step(
                    [self.practice.group(members) for members in kept],
                    schedule.at(self.step),
                    section,
                    temperature=self.config.rollout.temperature,
                    length=self.config.rollout.context_tokens,
                )
                metrics, logprobs = result.metrics, result.logprobs
            elif self.ranks.first:
                reasons = ", ".join(f"{why} {share:.0%}" for why, share in filtered.items())
                tqdm.write(
                    f"step {self.step + 1}: no group is left to learn from ({reasons}); no update"
                )
            trained = time.monotonic()
            self.ahead = coming and coming.result()
            waited = time.monotonic() - trained
            # without tensors, too: no step finds pages of the one before, for a resumed run has none
            self.engine.update_weights(
                named_hf_tensors(self.trainer.model, self.dtype) if kept else None
            )
            done = time.monotonic()
            self.step += 1
            row = {
                **self._measured("grpo", tasks, trajectories, done - start),
                **_plain(metrics),
                "filtered": filtered,
                "phase_seconds": {
                    "rollout": rolled - start,
                    "train": trained - rolled,
                    "weights": done - trained - waited,
                }
                | ({"wait": waited} if overlap else {}),
                **self._use(metrics, trained - rolled),
            } | ({"retried": retried} if retried else {})
            self._append("metrics", row)
            recorded = (
                len(tasks)
                if "skipped" in metrics
                else self.config.run.record_groups * section.group_size
            )
            self._note_logprobs(kept, logprobs, trajectories[:recorded])
            for task, trajectory in list(zip(tasks, trajectories))[:recorded]:
                self._record("skipped" if "skipped" in metrics else "grpo", task, trajectory)
            self._count_skipped(metrics, 'trajectories.jsonl, phase "skipped"')
            if self.ranks.first:
                tqdm.write(
                    f"step {self.step:4d}/{steps}  {_in_words(row)}"
                    + (
                        ""
                        if len(kept) == section.prompts or not section.resample
                        else f"  {len(kept)} of {section.prompts} groups teach"
                    )
                )
            bar.update()
            self._evaluate_on_the_way()
            stopped = self._checkpoint_and_stop(stop)
        bar.close()
        torch.set_num_threads(threads)
        return not stopped

    def rollouts(self, stop: Stop) -> bool:
        """Steps of attempts as training would make them with these weights, all of them recorded. False if asked to stop."""
        steps, rollout = self.config.rollout.only, self._rollout(self.config.rollout.temperature)
        self.phase = "rollouts"
        with self._bar(steps, "rollouts") as bar:
            while self.step < steps:
                start = time.monotonic()
                tasks, trajectories, _, filtered, retried = self._sample(self._attempted(rollout))
                self.engine.update_weights()  # no step finds pages of the one before, as in training
                self.step, seconds = self.step + 1, time.monotonic() - start
                row = {
                    **self._measured("rollouts", tasks, trajectories, seconds),
                    "filtered": filtered,
                    "retried": retried,
                }
                for task, trajectory in zip(tasks, trajectories):
                    self._record("rollouts", task, trajectory)
                self._append("metrics", row)
                if self.ranks.first:
                    tqdm.write(f"step {self.step:4d}/{steps}  {_in_words(row)}")
                bar.update()
                self.save()
                if self.ranks.any(stop.asked):
                    return False
        if self.ranks.first:
            rows = list(self.run.rows("metrics"))
            means = {
                name: fmean(row[name] for row in rows if row[name] is not None)
                for name, value in rows[0].items()
                if isinstance(value, float)
            }
            self.run.write_json(
                "summary.json",
                {
                    "seconds": self._elapsed(),
                    "steps": steps,
                    "seed": self.config.run.seed,
                    "rollouts": means,
                },
            )
            write_report(self.run.path)
            print(
                f"means, of {self.config.rollout.model or self.config.model.path or 'random weights'}: {_in_words(means)}"
            )
        return True

    def _measured(
        self, phase: str, tasks: list[Task], trajectories: list[Trajectory], seconds: float
    ) -> dict[str, Any]:
        tokens = sum(len(t.ids) - t.prompt_length for t in trajectories)
        return {
            "phase": phase,
            "step": self.step,
            **self.practice.measure(tasks, trajectories),
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
        }

    def _use(self, metrics: dict[str, float], seconds: float) -> dict[str, Any]:
        """How well the machine was used: `mfu`, the share of what it can compute in `seconds` (plan.peak_flops) that the update asked for
        (plan.model_flops), null where that is not known; `memory_mb`, the peak so far of rank 0's process, or of its GPU."""
        known = self.peak and "flops" in metrics
        return {
            "mfu": metrics["flops"] / seconds / self.peak / self.ranks.world if known else None,
            "memory_mb": peak_memory_mb(self.ranks.device.type == "cuda"),
        }

    def _note_logprobs(
        self,
        kept: list[list[Trajectory]],
        logprobs: list[list[list[float] | None]],
        recorded: list[Trajectory],
    ) -> None:
        """Writes on the recorded trajectories the trainer's log-probabilities, one list per sample
        of each group, from the rank that computed it.
        """
        wanted = {id(trajectory) for trajectory in recorded}
        owners, mine = [], {}
        for members, samples in zip(kept, logprobs):
            order = [member for member in members for _ in contexts(member)]
            for member, values in zip(order, samples, strict=True):
                if id(member) in wanted:
                    if values is not None:
                        mine[len(owners)] = values
                    owners.append(member)
        found = {i: values for part in self.ranks.gather(mine) for i, values in part.items()}
        for i, member in enumerate(owners):
            member.trainer_logprobs += found.get(i, [])

    def _attempts(
        self, rollout: Rollout, tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[Trajectory], int]:
        """One attempt at each task, made by all ranks; those that the infrastructure failed are made again. Also how many were.

        UserError if too many fail in the end: to learn from what is left would be to learn when tools happen to be up.
        """

        def run(places: list[int]) -> list[Trajectory]:
            return rollout.run(
                [self.practice.environment(tasks[i], seeds[i]) for i in places],
                [seeds[i] for i in places],
            )

        trajectories = self.ranks.map(run, range(len(tasks)), self.config.grpo.group_size)
        retried = 0
        for again in range(self.config.rollout.retries + 1):
            failed = [
                i
                for i, trajectory in enumerate(trajectories)
                if trajectory.status == "infrastructure"
            ]
            if not failed or again == self.config.rollout.retries:
                break
            retried += len(failed)
            for i, trajectory in zip(failed, self.ranks.map(run, failed)):
                trajectories[i] = trajectory
        if len(failed) > self.config.rollout.failed_share * len(tasks):
            said = next(
                (
                    result.content
                    for turn in trajectories[failed[0]].turns
                    for result in turn.results
                    if result.infrastructure
                ),
                "",
            )
            raise UserError(
                f"step {self.step + 1}: {len(failed)} of {len(tasks)} attempts failed for reasons of the infrastructure, again after "
                f"{self.config.rollout.retries} retries (rollout.failed_share is {self.config.rollout.failed_share}); the first: {said[:200]}"
            )
        return trajectories, retried

    def _count_skipped(self, metrics: dict[str, float], where: str) -> None:
        """UserError after too many steps in a row whose loss or gradient was not finite."""
        self.skipped = self.skipped + 1 if "skipped" in metrics else 0
        if self.skipped >= self.config.run.skip_limit:
            raise UserError(
                f"{self.phase} step {self.step}: the loss or its gradient is not finite, {self.skipped} steps in a row; "
                f"what it was computed on is in {self.run.path / where}"
            )

    def _attempted(self, rollout: Rollout) -> Iterator[Batch]:
        """The step's attempts, then those of up to `resample` more rollouts of other tasks, each made when it is asked for."""
        section, start = (
            self.config.grpo,
            self.config.warm_start.steps * self.config.warm_start.prompts,
        )
        for again in range(section.resample + 1):
            if again:  # tasks that no step begins with
                first = (
                    start
                    + (section.steps + self.step * section.resample + again - 1) * section.prompts
                )
                if self.ranks.first:
                    tqdm.write(
                        f"step {self.step + 1}: too few groups teach; sampling {section.prompts} more ({again} of {section.resample} times)"
                    )
            else:
                first = start + self.step * section.prompts
            fresh = [
                task
                for task in self.practice.tasks(section.prompts, first)
                for _ in range(section.group_size)
            ]
            place = f"{self.step}/{again}" if again else f"{self.step}"
            seeds = [
                random.Random(f"{self.config.run.seed}/rollout/{place}/{i}").getrandbits(48)
                for i in range(len(fresh))
            ]
            attempts, retried = self._attempts(rollout, fresh, seeds)
            yield fresh, [score(task, attempt) for task, attempt in zip(fresh, attempts)], retried

    def _sample(self, portions: Iterable[Batch]) -> Sampled:
        """The step's attempts, those of each group that enter the loss, the share of attempts left out for each reason, and how many were retried. While
        groups are missing, further portions are taken (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2); groups beyond the step's size are
        not used."""
        section = self.config.grpo
        tasks, trajectories, kept, reasons, retried = [], [], [], Counter(), 0
        for fresh, attempts, failed in portions:
            more, why = self.practice.groups(fresh, attempts)
            tasks, trajectories, kept, reasons, retried = (
                tasks + fresh,
                trajectories + attempts,
                kept + more,
                reasons + why,
                retried + failed,
            )
            if len(kept) >= section.prompts:
                break
        return (
            tasks,
            trajectories,
            kept[: section.prompts],
            {reason: count / len(tasks) for reason, count in reasons.items()},
            retried,
        )

    # What they share.

    def _rollout(self, temperature: float) -> Rollout:
        section, price = self.config.rollout, PRICES[POLICY]
        limits = Limits(section.turns, section.turn_tokens, section.context_tokens)
        if section.endpoint:
            return EndpointRollout(section, self.tokenizer, limits)
        if not self.engine.weight_version:
            raise RuntimeError(
                "the engine's weights are not set: call engine.update_weights before the first rollout"
            )

        def params(seed: int, budget: int) -> SamplingParams:
            return SamplingParams(max_tokens=budget, temperature=temperature, seed=seed)

        return Rollout(
            self.engine,
            self.tokenizer,
            params,
            limits,
            PolicyPrice(price.input_per_million, price.output_per_million),
            lockstep=section.lockstep,
            rebuild=section.context == "rebuild",
        )

    def _bar(self, steps: int, what: str) -> tqdm:
        return tqdm(
            total=steps,
            initial=self.step,
            desc=what,
            unit="step",
            dynamic_ncols=True,
            disable=None if self.ranks.first else True,
        )

    def _append(self, log: str, row: dict[str, Any]) -> None:
        if self.ranks.first:
            self.run.append(log, row)
            if log == "metrics":
                self.watch.log(row)

    def evaluate(self, name: str) -> dict[str, Any]:
        """The held-out summary of the present weights; its trajectories are recorded under the phase `name`."""
        section, both = (
            self.config.evaluation,
            self.practice.domains and self.practice.has_miniature,
        )
        tasks, others = (
            self.practice.judged_by(section.tasks),
            self.practice.of_domains(section.domain_tasks) if both else [],
        )
        rollout, trajectories = self._held_out(tasks + others, name)
        for task, trajectory in zip(tasks + others, trajectories):
            self._record(name, task, trajectory)
        summary = summarise(tasks, trajectories[: len(tasks)])
        if others:
            summary["domains"] = summarise(others, trajectories[len(tasks) :])
        if name == "after":
            summary["price_x10"] = price_probe(rollout, tasks, self.config.run.seed, self.sandbox)
        return summary

    def _held_out(self, tasks: list[Task], name: str) -> tuple[_Divided, list[Trajectory]]:
        """One attempt at each task with the present weights, and the rollout that makes more of them."""
        self.engine.wake()
        self.engine.update_weights(named_hf_tensors(self.trainer.model, self.dtype))
        rollout = _Divided(self._rollout(self.config.evaluation.temperature), self.ranks)
        share = -(-len(tasks) // self.ranks.world)
        with tqdm(
            total=share,
            desc=f"held-out tasks, {name}",
            unit="task",
            dynamic_ncols=True,
            disable=None if self.ranks.first else True,
        ) as bar:
            return rollout, evaluate(
                rollout,
                tasks,
                self.config.run.seed,
                self.sandbox,
                on_done=lambda _: bar.update(),
                make=self.practice.environment,
            )

    def _evaluate_on_the_way(self) -> None:
        """After every so many steps and after the last: a row of phase "evaluation", and model-best/ if it is the best so far. Training goes on as if
        there had been none."""
        section, start = self.config.evaluation, time.monotonic()
        if not section.every or self.step % section.every and self.step < self.config.grpo.steps:
            return
        tasks = self.practice.judged_by(section.every_tasks, section.tasks)
        summary = summarise(tasks, self._held_out(tasks, f"step {self.step}")[1])
        self.engine.update_weights()  # the next step finds no pages of these attempts
        means = {name: value for name, value in summary.items() if not isinstance(value, dict)}
        self._append(
            "metrics",
            {
                "phase": "evaluation",
                "step": self.step,
                **means,
                "seconds": time.monotonic() - start,
            },
        )
        value, better = summary[section.best], BEST[section.best]
        if value is not None and (
            self.best is None or better * value > better * self.best["value"]
        ):
            self.best = {"measure": section.best, "step": self.step, "value": value}
            self.export(self.run.path / "model-best")
            if self.ranks.first:
                self.run.write_json("model-best.json", self.best)

    def _record(self, phase: str, task: Task, trajectory: Trajectory) -> None:
        if not self.ranks.first:
            return
        tools = [
            {
                "name": t["name"],
                "kind": t["what"],
                "description": t.get("description") or describe(t),
            }
            for t in task.data["tools"]
        ]
        row = to_row(task, trajectory) | {
            "step": self.step,
            "phase": phase,
            "question": task.question,
            "preference_text": task.preference.text,
            "kind": task.data["kind"],
            "tools": tools,
            "text": [],
        }
        for turn in trajectory.turns:
            row["text"].append(
                {
                    "role": "assistant",
                    "text": self.tokenizer.decode(
                        trajectory.ids[turn.start : turn.end], skip_special=True
                    ),
                }
            )
            row["text"] += [{"role": "tool", "text": result.content} for result in turn.results]
        self._append("trajectories", row)

    def _checkpoint_and_stop(self, stop: Stop) -> bool:
        """The end of a step. Whether to stop after it."""
        section = getattr(self.config, self.phase)
        self.watch.report()
        stopped = self.ranks.any(
            stop.asked
        )  # whichever rank was asked, all stop after the same step
        if (
            stopped
            or self.step % self.config.run.checkpoint_every == 0
            or self.step == section.steps
        ):
            self.save()
        return stopped

    def save(self) -> None:
        """Begins a checkpoint of this moment; it is written while training goes on."""
        notes = {
            "phase": self.phase,
            "step": self.step,
            "before": self.before,
            "seconds": self._elapsed(),
            "few_tools": [self.few_tools, self.few_since],
            "skipped": self.skipped,
            "best": self.best,
            "offsets": self.run.offsets() if self.ranks.first else {},
            "optimizer": self.trainer.optimizer_kind,
            "reference": self.trainer.reference is not None,
            "ahead": self.ahead
            and {
                "rows": [to_row(*pair) for pair in zip(*self.ahead[:2])],
                "retried": self.ahead[-1],
            },
        }
        self.checkpoints.save(
            f"{0 if self.phase == 'warm_start' else 1}-{self.phase}-{self.step:06d}",
            {} if self.config.rollout.only else self.trainer.tensors(),
            notes,
        )

    def restore(self) -> None:
        """Goes back to the newest checkpoint that can be read; without one the run starts from its beginning. The number of ranks is free."""
        notes = self.checkpoints.restore(
            lambda notes: (
                {}
                if self.config.rollout.only
                else self.trainer.prepare(notes["optimizer"], notes["reference"])
            )
        )
        if notes is not None:
            self.phase, self.step, self.before, self.seconds = (
                notes["phase"],
                notes["step"],
                notes["before"],
                notes["seconds"],
            )
            self.few_tools, self.few_since = notes["few_tools"]
            self.skipped, self.best = notes["skipped"], notes.get("best")
            if notes.get("ahead"):
                size = self.config.grpo.prompts * self.config.grpo.group_size
                self.ahead = self._sample(
                    batches(
                        [from_row(row) for row in notes["ahead"]["rows"]],
                        size,
                        notes["ahead"]["retried"],
                    )
                )
        if self.ranks.first:
            self.run.truncate(notes["offsets"] if notes else {"metrics": 0, "trajectories": 0})
            where = (
                f"at {self.phase} step {self.step}"
                if notes
                else "from its beginning: it has no checkpoint yet"
            )
            print(f"resuming {self.run.path} {where}", flush=True)

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started

    def __call__(self, stop: Stop) -> bool:
        """The whole run from where it stands; False if it was asked to stop on the way."""
        if self.config.rollout.only:
            self.engine.update_weights(named_hf_tensors(self.trainer.model, self.dtype))
            return self.rollouts(stop)
        if self.phase == "warm_start":
            if self.ranks.device.type == "cuda":
                self.engine.sleep()  # until the first evaluation
            if not self.warm_start(stop):
                return False
            self.before = self.evaluate("before")
            if (
                self.config.lora.rank
            ):  # what the warm start taught becomes the base, and so the reference
                save_adapter(
                    self.trainer.model,
                    self.run.path / "adapter" / "warm_start",
                    self.config.model.path,
                    write=self.ranks.first,
                )
                merge(self.trainer.model, self.config.run.seed + 1)
            self.trainer.new_optimizer(self.config.grpo.optimizer)
            if self.config.grpo.kl_coef:
                self.trainer.freeze_reference()
            self.phase, self.step = "grpo", 0
            self.save()
            if self.ranks.any(stop.asked):
                return False
        self.engine.update_weights(named_hf_tensors(self.trainer.model, self.dtype))
        if not self.grpo(stop):
            return False
        after = self.evaluate("after")
        self.export(self.run.path / "model")
        if self.config.lora.rank:  # of both phases, for the model that the run began with
            adapter = self.run.path / "adapter"
            save_adapter(
                self.trainer.model,
                adapter,
                self.config.model.path,
                before=adapter / "warm_start",
                write=self.ranks.first,
            )
        self.checkpoints.wait()
        if self.ranks.first:
            self._finish(after)
        return True

    def export(self, path: Path) -> None:
        """Write a checkpoint directory that transformers loads; all ranks call it together."""
        save_checkpoint(
            self.trainer.model,
            self.tokenizer,
            path,
            dtype=self.dtype,
            write=self.ranks.first,
        )

    def _finish(self, after: dict[str, Any]) -> None:
        """On rank 0: what the run comes to."""
        tasks = self.practice.judged_by(self.config.evaluation.tasks)
        routers = (
            evaluate_routers(tasks, self.config.run.seed, self.sandbox)
            if self.practice.has_miniature
            else {}
        )
        summary = {
            "seconds": self._elapsed(),
            "steps": self.step,
            "seed": self.config.run.seed,
            "peak_memory_mb": peak_memory_mb(cuda=False),
            "parameters": sum(p.numel() for p in self.trainer.model.parameters()),
            "best": self.best,
            "held_out": {
                "tasks": len(tasks),
                "before": self.before,
                "after": after,
                "routers": routers,
            },
        }
        self.run.write_json("summary.json", summary)
        self.watch.close()
        write_report(self.run.path)
        print(table(summary))


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed. By default it returns every large buffer to the system, and a step on the CPU, which frees and allocates
    the same sizes all the time, spends a tenth of its time on fresh pages. Elsewhere than on glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class _Divided:
    """A rollout whose attempts are divided over the ranks; each gets all trajectories."""

    def __init__(self, rollout: Rollout, ranks: Ranks):
        self.rollout, self.ranks = rollout, ranks

    def run(self, environments, seeds, on_done=None) -> list[Trajectory]:
        return self.ranks.map(
            lambda mine: self.rollout.run(
                [environments[i] for i in mine], [seeds[i] for i in mine], on_done
            ),
            range(len(environments)),
        )


def _in_words(row: dict[str, Any]) -> str:
    return (
        f"reward {row['reward']:.3f}  accuracy {row['accuracy']:.2f}  cost {row['cost_usd'] * 1e3:.2f} m$  latency {row['latency_s']:.1f} s  "
        f"preference {row['preference']:.2f}  {row['tokens_per_s']:,.0f} tokens/s"
    )


def _plain(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in ("tokens", "flops")}


def resolve(config: Config) -> tuple[str, str]:
    """The device and the dtype of computing that run.device and run.dtype stand for on this machine."""
    device = (
        ("cuda" if torch.cuda.is_available() else "cpu")
        if config.run.device == "auto"
        else config.run.device
    )
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "run.device is 'cuda', and there is no CUDA device here; it must be auto or cpu"
        )
    return device, (
        "bfloat16" if device == "cuda" else "float32"
    ) if config.run.dtype == "auto" else config.run.dtype


def open_run(
    config_file: Path | None, overrides: list[str], resume: Path | None, dry_run: bool
) -> tuple[Config, Run, bool]:
    """The config, the run's directory, made here by rank 0, and whether to go on with what is in it."""
    config = None
    if resume is None:
        config = load_config(config_file or DEFAULT_CONFIG, overrides)
        needed(config.run.log_to)
        check_endpoint(config.rollout)
        config = scaled_down(config, NANO) if dry_run else config
        resolve(config)  # says now what is wrong with it
        path = Path(config.run.root) / config.run.name
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and (path / "config.toml").exists():
            resume = path  # torchrun has started the same command again after a failure
        elif int(os.environ.get("RANK", 0)) == 0:
            return config, Run.create(path, to_toml(config)), False
        else:
            return config, Run(path), False
    elif config_file or overrides or dry_run:
        raise UserError(
            "--resume: goes on with the run's own config.toml; give no --config and no overrides"
        )
    run = Run.open(resume)
    if run.summary():
        raise UserError(
            f"{run.path}: this run is finished; its summary is in {run.path / 'summary.json'}"
        )
    return load_config(run.path / "config.toml", whole=True), run, True


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(
        description="Trains a tool orchestrator. Any setting of the config is also an option: --section.key value."
    )
    parser.add_argument(
        "--config",
        type=Path,
        help=f"a TOML file, or the name of one in configs/ (default: {DEFAULT_CONFIG.stem})",
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="a run directory to go on with")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="the run in small, on CPUs: nano's model, two steps, the same sharding and optimizers",
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        metavar="N",
        help="make N steps' rollouts with the weights as they are, write them in full, train nothing",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print memory by part and time by phase, and what to change if it does not fit; train nothing",
    )
    parser.add_argument("--gpus", type=int, default=1, help="for --plan: how many")
    parser.add_argument(
        "--memory", type=float, metavar="GB", help="for --plan: of one GPU (default: as sold)"
    )
    parser.add_argument(
        "--gpu", default="h100", help="for --plan: h100, h200, a100 or 4090 (default: h100)"
    )
    ranks, first = Ranks(), int(os.environ.get("RANK", 0)) == 0
    try:
        known, overrides = parser.parse_known_args(arguments)
        if known.plan:
            text, fits = plan(
                load_config(find_config(known.config) or DEFAULT_CONFIG, overrides),
                known.gpus,
                known.memory and known.memory * GB,
                known.gpu,
            )
            print(text)
            return 0 if fits else 1
        if known.rollouts is not None:
            if known.rollouts < 1:
                raise UserError(
                    f"--rollouts: {known.rollouts}; it must be the number of steps to make, at least 1"
                )
            overrides = ["--rollout.only", str(known.rollouts), *overrides]
        config, run, resumed = open_run(
            find_config(known.config), overrides, known.resume, known.dry_run
        )
        if first:
            run.lock()
        keep_freed_memory()
        torch.set_num_threads(
            config.run.threads
            or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        )
        stop = Stop()
        device, dtype = resolve(config)
        ranks = Ranks.start(
            device,
            shard=config.parallel.shard,
            sharded=device == "cuda" or dtype != "float32",
            timeout=config.parallel.timeout,
        )
        first, resumed = (
            ranks.first,
            ranks.gather(resumed)[0],
        )  # after a restart a slow rank may find the directory that rank 0 has just made
        with Sandbox() as sandbox:
            try:
                training = ranks.together(lambda: Training(config, run, sandbox, ranks))
            except UserError:
                if first and not resumed:
                    shutil.rmtree(
                        run.path, ignore_errors=True
                    )  # nothing has happened in it: its name is free for the corrected command
                raise
            if resumed:
                training.restore()
            if first:
                print(
                    f"writing to {run.path}: config.toml, metrics.jsonl, trajectories.jsonl, report.html, checkpoints/, model/"
                )
            finished = training(stop)
            training.checkpoints.wait()
            training.watch.close()
        if first:
            made = run.path / ("trajectories.jsonl" if config.rollout.only else "model")
            print(
                f"report: {run.path / 'report.html'}   {made.stem}: {made}   summary: {run.path / 'summary.json'}"
                if finished
                else f"stopped at {training.phase} step {training.step}; go on with: python train.py --resume {run.path}",
                flush=True,
            )
        ranks.close()
        return (
            0 if finished or ranks.world > 1 else 130
        )  # torchrun would start again what ends with another code than 0
    except UserError as error:
        return _give_up(ranks, 2, f"train.py: {error}" if first else "", str(error))
    except KeyboardInterrupt:
        return _give_up(
            ranks,
            130,
            "train.py: stopped at once; go on with --resume" if first else "",
            "stopped at once",
        )
    except Exception as error:
        if ranks.world == 1 and not running():
            raise
        if not isinstance(error, RuntimeError) or "peer" not in str(error):
            traceback.print_exc()
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return _give_up(
            ranks,
            1,
            f"rank {ranks.rank} ends ({reason}); if it is about a connection, another rank says why. Go on with --resume",
            reason,
        )


def _give_up(ranks: Ranks, code: int, line: str, reason: str) -> int:
    """Says why, here and to the other ranks. Among several, or under a rollout, the process ends at once: an orderly end could wait for a collective
    that never does."""
    if line:
        print(line, file=sys.stderr, flush=True)
    if ranks.world > 1 or running():
        ranks.fail(reason)
        sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
