"""Trains a tool orchestrator: warm start on demonstrations, GRPO in the world, evaluation before and after on held-out tasks.

    python train.py                                        the miniature on a CPU (configs/nano.toml)
    python train.py --config FILE --grpo.steps 300 --run.name longer
    python train.py --resume runs/nano                     goes on exactly where a run was stopped or killed

Everything drawn at random is a function of (run.seed, step, place), so a step can be computed again from the weights before it.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from data_gen import World, demonstrate, describe, environment, texts
from evaluate import evaluate, evaluate_routers, price_probe, score, summarise, task_bounds
from nanorchestra import Engine, SamplingParams, load_model
from nanorchestra.agent import Limits, PolicyPrice, Rollout
from nanorchestra.config import Config, load_config, to_toml
from nanorchestra.grpo import group_advantages, moments, over_batch, overlong_punishment, per_objective, turn_shares
from nanorchestra.lora import add_adapters, merge
from nanorchestra.metrics import Run, table
from nanorchestra.model import PRESETS, Qwen3
from nanorchestra.plan import GB, plan
from nanorchestra.quantise import is_quantised
from nanorchestra.report import write_report
from nanorchestra.sandbox import Sandbox
from nanorchestra.tokenizer import Tokenizer, train_bpe
from nanorchestra.trainer import Group, Sample, Schedule, Trainer
from nanorchestra.types import Task, Trajectory, UserError
from nanorchestra.weights import named_hf_tensors, save_checkpoint
from reward import POLICY, PRICES, group_rewards, preference_score, reward_columns

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "nano.toml"
FEW_TOOLS = 2               # lessons of the warm start begin with warm_start.first_tools and go up to so many; then they offer all that a task has


def find_config(named: Path | None) -> Path:
    """The file, or the one in configs/ that is called so."""
    if named is None:
        return DEFAULT_CONFIG
    inside = DEFAULT_CONFIG.with_name(f"{named}.toml")
    return inside if not named.exists() and named.name == str(named) and inside.exists() else named


class Stop:
    """Turns SIGINT and SIGTERM into a flag that is read between steps; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.asked = True
        tqdm.write("stopping after this step (once more: at once, losing the steps since the last checkpoint)", file=sys.stderr)


class Training:
    """One run: its parts, wired. `step` counts the finished steps of `phase`; both, and the weights, are what a checkpoint holds."""

    def __init__(self, config: Config, run: Run, sandbox: Sandbox):
        self.config, self.run, self.sandbox = config, run, sandbox
        self.world = World(config.run.seed, config.world.avoid_share)
        self.lessons = World(config.run.seed, config.world.avoid_share, lessons=True)
        self.habits = {"sensible": config.warm_start.sensible, "heedful": config.warm_start.heedful, "quits": config.warm_start.quits}
        model, self.tokenizer = self._model()
        settings, rollout = config.grpo, config.rollout
        if config.lora.rank:
            add_adapters(model, config.lora.rank, config.lora.alpha, config.run.seed)
        self.trainer = Trainer(model, vocab_limit=self.tokenizer.vocab_size, optimizer=config.warm_start.optimizer,
                               weight_decay=settings.weight_decay, grad_clip=settings.grad_clip, token_budget=settings.token_budget)
        engine_model = Qwen3(model.config).to(model.embed_tokens.weight)          # the engine's own copy, updated in place after each step
        rows = max(settings.prompts * settings.group_size, 1)
        pages = rollout.pages or rows * -(-rollout.context_tokens // rollout.page_size) + 64
        self.engine = Engine(engine_model, self.tokenizer, num_pages=pages, page_size=rollout.page_size, max_batch_tokens=rollout.max_batch_tokens,
                             max_running=rows, max_context=rollout.context_tokens)
        self.phase, self.step, self.before, self.seconds = "warm_start", 0, None, 0.0
        self.few_tools, self.few_since = config.warm_start.first_tools, 0         # how many the lessons of the warm start offer, and since which step
        self.started = time.monotonic()

    def _model(self) -> tuple[Qwen3, Tokenizer]:
        section, run = self.config.model, self.config.run
        device = ("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device
        dtype = ("bfloat16" if device == "cuda" else "float32") if run.dtype == "auto" else run.dtype
        if section.path:
            model, tokenizer = load_model(section.path, device=device, dtype=dtype)
            if tokenizer is None:
                raise UserError(f"{section.path}: no tokenizer.json; training needs the checkpoint's tokenizer beside its weights")
            if is_quantised(model):
                raise UserError(f"{section.path}: the checkpoint is quantised; training needs one in full precision")
            return model, tokenizer
        if section.preset not in PRESETS:
            raise UserError(f"model.preset is {section.preset!r}; it must be one of {', '.join(PRESETS)}")
        saved = self.run.path / "tokenizer"
        if not saved.exists():
            train_bpe(texts(self.lessons, section.tokenizer_tasks, self.sandbox, **self.habits), section.vocab_size).save(saved)
        tokenizer = Tokenizer.from_dir(saved)
        shape = dataclasses.replace(PRESETS[section.preset], vocab_size=-(-tokenizer.vocab_size // 64) * 64, eos_token_ids=tuple(tokenizer.eos_ids))
        model = Qwen3(shape)
        model.init_weights(run.seed)
        return model.to(device=device, dtype=getattr(torch, dtype)), tokenizer

    # The three phases.

    def warm_start(self, stop: Stop) -> bool:
        """Supervised steps on the teacher's demonstrations. False if asked to stop."""
        section = self.config.warm_start
        schedule = Schedule(section.learning_rate, section.steps, section.warmup_steps, hold=section.hold)
        bar = tqdm(total=section.steps, initial=self.step, desc="warm start", unit="step", dynamic_ncols=True, disable=None)
        while self.step < section.steps:
            start = time.monotonic()
            groups = []
            few = self.few_tools <= FEW_TOOLS
            lessons = dataclasses.replace(self.lessons, most_tools=self.few_tools if few else 0)
            for task in lessons.tasks("train", section.prompts, start=self.step * section.prompts):
                samples = []
                for seed in range(section.samples):
                    prompt, ids, sampled = demonstrate(environment(task, seed, self.sandbox), self.tokenizer, seed, **self.habits)
                    samples.append(Sample(ids, sampled))
                groups.append(Group(prompt, samples))
            metrics = self.trainer.supervised_step(groups, schedule.at(self.step))
            seconds = time.monotonic() - start
            self.step += 1
            if few and (metrics["loss"] < section.few_loss or self.step - self.few_since >= section.few_steps):
                self.few_tools, self.few_since = self.few_tools + 1, self.step
            self.run.append("metrics", {"phase": "warm_start", "step": self.step, **_plain(metrics), "tokens_per_s": metrics["tokens"] / seconds, "seconds": seconds})
            bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {metrics['tokens'] / seconds:,.0f} tokens/s")
            if self.step % 20 == 0:
                tqdm.write(f"warm start step {self.step:4d}/{section.steps}  loss {metrics['loss']:.3f}  {metrics['tokens'] / seconds:,.0f} tokens/s")
            bar.update()
            if not self._checkpoint_and_go_on(stop):
                bar.close()
                return False
        bar.close()
        return True

    def grpo(self, stop: Stop) -> bool:
        """Rollout, reward, advantage, update, weights to the engine; again. False if asked to stop."""
        section = self.config.grpo
        schedule = Schedule(section.learning_rate, section.steps, section.warmup_steps, section.final_fraction)
        rollout = self._rollout(self.config.rollout.temperature)
        bar = tqdm(total=section.steps, initial=self.step, desc="GRPO", unit="step", dynamic_ncols=True, disable=None)
        while self.step < section.steps:
            start = time.monotonic()
            tasks, trajectories, groups, filtered = self._sample(rollout)
            rolled = time.monotonic()
            metrics = {}
            if groups:
                metrics = self.trainer.policy_step(groups, schedule.at(self.step), temperature=self.config.rollout.temperature, clip_low=section.clip_low,
                                                   clip_high=section.clip_high, kl_coef=section.kl_coef, kl=section.kl, dual_clip=section.dual_clip or None,
                                                   surrogate=section.surrogate, aggregation=section.aggregation, length=self.config.rollout.context_tokens,
                                                   importance_cap=section.importance_cap or None)
                self.engine.update_weights(named_hf_tensors(self.trainer.model))
            done = time.monotonic()
            self.step += 1
            row = {"phase": "grpo", "step": self.step, **self._measure(tasks, trajectories), **_plain(metrics), "filtered": filtered,
                   "tokens_per_s": (sum(len(t.ids) - t.prompt_length for t in trajectories)) / (done - start), "seconds": done - start,
                   "phase_seconds": {"rollout": rolled - start, "train": done - rolled}}
            self.run.append("metrics", row)
            for task, trajectory in list(zip(tasks, trajectories))[: self.config.run.record_groups * section.group_size]:
                self._record("grpo", task, trajectory)
            tqdm.write(f"step {self.step:4d}/{section.steps}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.2f}  cost {row['cost_usd'] * 1e3:.2f} m$  "
                       f"latency {row['latency_s']:.1f} s  preference {row['preference']:.2f}  {row['tokens_per_s']:,.0f} tokens/s"
                       + ("" if len(groups) == section.prompts or not section.resample else f"  {len(groups)} of {section.prompts} groups teach"))
            bar.update()
            if not self._checkpoint_and_go_on(stop):
                bar.close()
                return False
        bar.close()
        return True

    def _sample(self, rollout: Any) -> tuple[list[Task], list[Trajectory], list[Group], dict[str, float]]:
        """The step's attempts, the groups that enter the loss, and the share of attempts left out for each reason. While groups are missing, up to
        `resample` more rollouts of other tasks (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2); groups beyond the step's size are not used."""
        section, start = self.config.grpo, self.config.warm_start.steps * self.config.warm_start.prompts
        tasks, trajectories, groups, reasons = [], [], [], Counter()
        for again in range(section.resample + 1):
            if again:                                        # tasks that no step begins with
                first = start + (section.steps + self.step * section.resample + again - 1) * section.prompts
                tqdm.write(f"step {self.step + 1}: {len(groups)} of {section.prompts} groups teach; sampling {section.prompts} more ({again} of {section.resample} times)")
            else:
                first = start + self.step * section.prompts
            fresh = [task for task in self.world.tasks("train", section.prompts, start=first) for _ in range(section.group_size)]
            place = f"{self.step}/{again}" if again else f"{self.step}"
            seeds = [random.Random(f"{self.config.run.seed}/rollout/{place}/{i}").getrandbits(48) for i in range(len(fresh))]
            attempts = rollout.run([environment(task, seed, self.sandbox) for task, seed in zip(fresh, seeds)], seeds)
            more, why = self._groups(fresh, attempts)
            tasks, trajectories, groups, reasons = tasks + fresh, trajectories + attempts, groups + more, reasons + why
            if len(groups) >= section.prompts:
                break
        return tasks, trajectories, groups[: section.prompts], {reason: count / len(tasks) for reason, count in reasons.items()}

    def _groups(self, tasks: list[Task], trajectories: list[Trajectory]) -> tuple[list[Group], Counter[str]]:
        """Rewards and advantages of each group; the samples that enter the loss, and how many are left out for each reason."""
        section, size, limit = self.config.grpo, self.config.grpo.group_size, self.config.rollout.context_tokens
        reasons: Counter[str] = Counter()
        kept: list[list[Trajectory]] = []
        for start in range(0, len(tasks), size):
            members, task = trajectories[start: start + size], tasks[start]
            valid = [member.status != "infrastructure" for member in members]
            cut = [section.drop_overlong and member.status in ("token_limit", "turn_limit") for member in members]
            if section.per_objective:
                columns = reward_columns(members, task.preference, valid, task_bounds(task) if section.bounds == "task" else None)
                rewards = per_objective(columns, [ok and not long for ok, long in zip(valid, cut)])
            elif section.bounds == "task":
                rewards = [member.reward for member in members]
            else:
                rewards = group_rewards(members, task.preference, valid)
            if section.overlong_share:
                rewards = [reward + (-1.0 if member.status == "token_limit" else overlong_punishment(len(member.ids), limit, round(section.overlong_share * limit)))
                           for reward, member in zip(rewards, members)]
            advantages, why = group_advantages(rewards, valid, well_formed=[member.well_formed for member in members], overlong=cut, min_std=section.min_std,
                                               drop_invalid_format=section.drop_invalid_format, std=section.normalise_std and not section.per_objective,
                                               leave_one_out=section.leave_one_out, clip=None if section.per_objective else section.advantage_clip)
            for member, advantage in zip(members, advantages):
                member.advantage = advantage
            reasons.update(reason for reason in why if reason)
            kept.append([member for member, reason in zip(members, why) if reason is None])
        if section.per_objective:
            members = [member for group in kept for member in group]
            over = over_batch([member.advantage for member in members], moments(member.advantage for member in members))
            for member, advantage in zip(members, over):
                member.advantage = max(-section.advantage_clip, min(section.advantage_clip, advantage))
        return [Group(members[0].ids[: members[0].prompt_length], [self._trained(member) for member in members]) for members in kept if members], reasons

    def _trained(self, trajectory: Trajectory) -> Sample:
        """What enters the loss: all ids after the prompt, with the attempt's advantage or every turn's share of it."""
        p, advantage = trajectory.prompt_length, trajectory.advantage
        if self.config.grpo.credit == "turn":
            spans = [(turn.start - p, turn.end - p) for turn in trajectory.turns]
            advantage = [0.0] * (len(trajectory.ids) - p)
            for (start, end), share in zip(spans, turn_shares(trajectory.advantage, [end - start for start, end in spans])):
                advantage[start:end] = [share] * (end - start)
        return Sample(trajectory.ids[p:], trajectory.sampled[p:], trajectory.logprobs[p:], advantage)

    def _measure(self, tasks: list[Task], trajectories: list[Trajectory]) -> dict[str, Any]:
        """Means over the rollout, rewards in their absolute form; calls by what stands behind the alias."""
        size, calls = self.config.grpo.group_size, Counter()
        for task, trajectory in zip(tasks, trajectories):
            behind = {t["name"]: t["what"] for t in task.data["tools"]}
            for name, count in trajectory.calls.items():
                calls[behind.get(name, "unknown")] += count
        groups = [[t.reward for t in trajectories[i: i + size]] for i in range(0, len(tasks), size)]
        asked = [any(t.calls.get(name) for name in task.preference.avoided) for task, t in zip(tasks, trajectories) if task.preference.avoided]
        return {name: fmean(getattr(t, field) for t in trajectories) for name, field in
                (("reward", "reward"), ("accuracy", "outcome"), ("cost_usd", "cost_usd"), ("latency_s", "latency_s"), ("well_formed", "well_formed"))} | {
            "preference": fmean(preference_score(t.cost_usd, t.latency_s, t.calls, task.preference, task_bounds(task)) for task, t in zip(tasks, trajectories)),
            "avoided_rate": fmean(asked) if asked else None, "turns": fmean(len(t.turns) for t in trajectories),
            "group_std": fmean(torch.tensor(g).std().item() for g in groups), "calls": {k: v / len(tasks) for k, v in sorted(calls.items())}}

    # What they share.

    def _rollout(self, temperature: float) -> Rollout:
        section, price = self.config.rollout, PRICES[POLICY]

        def params(seed: int, budget: int) -> SamplingParams:
            return SamplingParams(max_tokens=budget, temperature=temperature, seed=seed)

        rollout = Rollout(self.engine, self.tokenizer, params, Limits(section.turns, section.turn_tokens, section.context_tokens),
                          PolicyPrice(price.input_per_million, price.output_per_million), lockstep=section.lockstep)
        return _Scored(rollout)

    def evaluate(self, name: str) -> dict[str, Any]:
        """The held-out summary of the present weights; its trajectories are recorded under the phase `name`."""
        section = self.config.evaluation
        tasks = self.world.tasks("held_out", section.tasks)
        self.engine.update_weights(named_hf_tensors(self.trainer.model))
        rollout = self._rollout(section.temperature).rollout
        with tqdm(total=len(tasks), desc=f"held-out tasks, {name}", unit="task", dynamic_ncols=True, disable=None) as bar:
            trajectories = evaluate(rollout, tasks, self.config.run.seed, self.sandbox, on_done=lambda _: bar.update())
        for task, trajectory in list(zip(tasks, trajectories)):
            self._record(name, task, trajectory)
        summary = summarise(tasks, trajectories)
        summary["price_x10"] = price_probe(rollout, tasks, self.config.run.seed, self.sandbox)
        return summary

    def _record(self, phase: str, task: Task, trajectory: Trajectory) -> None:
        row = dataclasses.asdict(trajectory) | {
            "step": self.step, "phase": phase, "question": task.question, "preference_text": task.preference.text, "kind": task.data["kind"],
            "tools": [{"name": t["name"], "kind": t["what"], "description": describe(t)} for t in task.data["tools"]], "text": []}
        for turn in trajectory.turns:
            row["text"].append({"role": "assistant", "text": self.tokenizer.decode(trajectory.ids[turn.start:turn.end], skip_special=True)})
            row["text"] += [{"role": "tool", "text": result.content} for result in turn.results]
        self.run.append("trajectories", row)

    def _checkpoint_and_go_on(self, stop: Stop) -> bool:
        section = getattr(self.config, self.phase)
        if stop.asked or self.step % self.config.run.checkpoint_every == 0 or self.step == section.steps:
            self.save()
        return not stop.asked

    def save(self) -> None:
        """A checkpoint aside, then renamed; the oldest beyond `keep_checkpoints` go."""
        folder = self.run.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        state = {"phase": self.phase, "step": self.step, "before": self.before, "seconds": self._elapsed(), "offsets": self.run.offsets(),
                 "few_tools": (self.few_tools, self.few_since), "trainer": self.trainer.state_dict()}
        order = 0 if self.phase == "warm_start" else 1
        final = folder / f"{order}-{self.phase}-{self.step:06d}.pt"
        aside = final.with_suffix(".part")
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, final)
        for old in sorted(folder.glob("*.pt"))[: -self.config.run.keep_checkpoints]:
            old.unlink()

    def restore(self) -> None:
        """Goes back to the newest checkpoint that can be read; without one the run starts from its beginning."""
        for path in sorted((self.run.path / "checkpoints").glob("*.pt"), reverse=True):
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file, whatever is wrong with it: the one before it is as good
                print(f"{path}: damaged ({type(error).__name__}); trying the one before", file=sys.stderr)
                continue
            self.phase, self.step, self.before, self.seconds = state["phase"], state["step"], state["before"], state["seconds"]
            self.few_tools, self.few_since = state["few_tools"]
            self.trainer.load_state_dict(state["trainer"])
            self.run.truncate(state["offsets"])
            print(f"resuming {self.run.path} at {self.phase} step {self.step}")
            return
        self.run.truncate({"metrics": 0, "trajectories": 0})
        print(f"resuming {self.run.path} from its beginning: it has no checkpoint yet")

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started

    def __call__(self, stop: Stop) -> bool:
        """The whole run from where it stands; False if it was asked to stop on the way."""
        if self.phase == "warm_start":
            if not self.warm_start(stop):
                return False
            self.before = self.evaluate("before")
            if self.config.lora.rank:                        # what the warm start taught becomes the base, and so the reference
                merge(self.trainer.model, self.config.run.seed + 1)
            self.trainer.new_optimizer(self.config.grpo.optimizer)
            if self.config.grpo.kl_coef:
                self.trainer.freeze_reference()
            self.phase, self.step = "grpo", 0
            self.save()
            write_report(self.run.path)
            if stop.asked:
                return False
        self.engine.update_weights(named_hf_tensors(self.trainer.model))
        if not self.grpo(stop):
            return False
        after = self.evaluate("after")
        tasks = self.world.tasks("held_out", self.config.evaluation.tasks)
        routers = evaluate_routers(tasks, self.config.run.seed, self.sandbox)
        save_checkpoint(self.trainer.model, self.tokenizer, self.run.path / "model")      # merged
        summary = {"seconds": self._elapsed(), "steps": self.step, "seed": self.config.run.seed,
                   "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                   "parameters": sum(p.numel() for p in self.trainer.model.parameters()),
                   "held_out": {"tasks": len(tasks), "before": self.before, "after": after, "routers": routers}}
        self.run.write_json("summary.json", summary)
        write_report(self.run.path)
        print(table(summary))
        return True


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed. By default it returns every large buffer to the system, and a step on the CPU, which frees and allocates
    the same sizes all the time, spends a tenth of its time on fresh pages. Elsewhere than on glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-3, 32 << 20)                    # M_MMAP_THRESHOLD, at its maximum
        mallopt(-1, 2**31 - 1)                   # M_TRIM_THRESHOLD


class _Scored:
    """A rollout whose trajectories carry their absolute reward."""

    def __init__(self, rollout: Rollout):
        self.rollout = rollout

    def run(self, environments, seeds) -> list[Trajectory]:
        return [score(env.task, trajectory) for env, trajectory in zip(environments, self.rollout.run(environments, seeds))]


def _plain(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "tokens"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Trains a tool orchestrator. Any setting of the config is also an option: --section.key value.")
    parser.add_argument("--config", type=Path, help=f"a TOML file, or the name of one in configs/ (default: {DEFAULT_CONFIG.stem})")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="a run directory to go on with")
    parser.add_argument("--plan", action="store_true", help="print memory by part and time by phase, and what to change if it does not fit; train nothing")
    parser.add_argument("--gpus", type=int, default=1, help="for --plan: how many")
    parser.add_argument("--memory", type=float, metavar="GB", help="for --plan: of one GPU (default: as sold)")
    parser.add_argument("--gpu", default="h100", help="for --plan: h100, h200, a100 or 4090 (default: h100)")
    known, overrides = parser.parse_known_args(arguments)
    try:
        if known.plan:
            text, fits = plan(load_config(find_config(known.config), overrides), known.gpus, known.memory and known.memory * GB, known.gpu)
            print(text)
            return 0 if fits else 1
        if known.resume:
            if known.config or overrides:
                raise UserError("--resume: goes on with the run's own config.toml; give no --config and no overrides")
            run = Run.open(known.resume)
            config = load_config(run.path / "config.toml")
            if (run.path / "summary.json").exists():
                raise UserError(f"{run.path}: this run is finished; its summary is in {run.path / 'summary.json'}")
        else:
            config = load_config(find_config(known.config), overrides)
            run = Run.create(Path(config.run.root) / config.run.name, to_toml(config))
        run.lock()
        keep_freed_memory()
        torch.set_num_threads(config.run.threads or len(os.sched_getaffinity(0)))
        stop = Stop()
        with Sandbox() as sandbox:
            training = Training(config, run, sandbox)
            if known.resume:
                training.restore()
            print(f"writing to {run.path}: config.toml, metrics.jsonl, trajectories.jsonl, report.html, checkpoints/, model/")
            if not training(stop):
                print(f"stopped at {training.phase} step {training.step}; go on with: python train.py --resume {run.path}")
                return 130
        print(f"report: {run.path / 'report.html'}   model: {run.path / 'model'}   summary: {run.path / 'summary.json'}")
        return 0
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train.py: stopped at once; go on with --resume", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
