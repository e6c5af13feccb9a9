"""Records the run that docs/walk.md follows: `python docs/walk_run.py` writes docs/walk.json.

The run is the first step of `python train.py`, seed 0: eight attempts at one of its 16 tasks, with
the seeds that train.py gives them, on its engine. Then one update is made on this group alone, by
train.py's `policy_update`. Every number in docs/walk.json is computed by the project's functions;
this file calls them and writes down what they return. walk_pictures.py draws from the file, and
tests/test_docs.py records the run again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

if not torch.cuda.is_available():  # the kernel of the last picture then runs in Python
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402
from torch import Tensor  # noqa: E402

import train  # noqa: E402
from kernels import logprob  # noqa: E402
from nanorchestra.agent.attempts import play  # noqa: E402
from nanorchestra.agent.loop import Rollout  # noqa: E402
from nanorchestra.config import Config  # noqa: E402
from nanorchestra.engine.engine import Engine  # noqa: E402
from nanorchestra.engine.scheduler import Batch  # noqa: E402
from nanorchestra.engine.sequence import Sequence as EngineSequence  # noqa: E402
from nanorchestra.engine.session import Session  # noqa: E402
from nanorchestra.errors import command  # noqa: E402
from nanorchestra.model.attention import PackedAttention, Segment  # noqa: E402
from nanorchestra.model.qwen3 import Qwen3  # noqa: E402
from nanorchestra.model.tokenizer import Tokenizer  # noqa: E402
from nanorchestra.records import Preference, Task, Trajectory  # noqa: E402
from nanorchestra.settings import load_config  # noqa: E402
from nanorchestra.tools.sandbox import Sandbox  # noqa: E402
from nanorchestra.training.advantages import group_advantages  # noqa: E402
from nanorchestra.training.build import (  # noqa: E402
    build_engine,
    build_rollout,
    build_trainer,
    load_policy,
    publish,
)
from nanorchestra.training.distributed import Ranks  # noqa: E402
from nanorchestra.training.objectives import objective_of  # noqa: E402
from nanorchestra.training.packing import Group, MicroBatch, number_samples  # noqa: E402
from nanorchestra.training.rollout import attempt_seeds  # noqa: E402
from nanorchestra.training.samples import as_group, gave_answer  # noqa: E402
from nanorchestra.training.trainer import Trainer  # noqa: E402
from reward import POLICY, PRICES, reward_parts, task_rewards  # noqa: E402
from worlds.load import open_world  # noqa: E402
from worlds.miniature.tables import PREFERENCES  # noqa: E402

RECORD = Path(__file__).with_name("walk.json")
PROMPT = 14  # of the 16 tasks of the first step
STEPS = (1, 2, 21, 67)  # of the engine, of which the block tables are kept
Json = dict[str, Any]


@dataclass
class Walk:
    """The parts of a run of the miniature, and a group of attempts at one of its tasks."""

    config: Config
    model: Qwen3
    tokenizer: Tokenizer
    trainer: Trainer
    engine: Engine
    player: Rollout
    task: Task
    attempts: list[Trajectory]
    steps: list[Json]  # of the engine, as `PageWatch` writes them

    @property
    def group(self) -> Group:
        """The samples that the attempts are to the trainer."""
        group = as_group(self.attempts)
        number_samples([group])
        return group


def play_group(config: Config | None = None) -> Walk:
    """Plays the group of the walk, and gives its attempts their rewards and advantages."""
    torch.set_num_threads(1)
    config = config or load_config(ROOT / "configs" / "nano.toml", {})
    config = config.replace({"model.path": str(ROOT / config.model.path)})
    grpo, ranks, dtype = config.grpo, Ranks(), torch.float32
    model, tokenizer = load_policy(config, ranks, dtype)
    trainer = build_trainer(config, model, tokenizer, ranks, dtype)
    trainer.prepare(grpo.optimizer, reference=True, weight_decay=grpo.weight_decay)
    engine = build_engine(config, model, tokenizer, ranks, dtype)
    publish(config, model, engine, dtype)
    player = build_rollout(config, engine, PRICES[POLICY], config.rollout.temperature)
    watch = PageWatch(engine)

    seeds = attempt_seeds(config.run.seed, 0, grpo.prompts * grpo.group_size)
    seeds = seeds[PROMPT * grpo.group_size : (PROMPT + 1) * grpo.group_size]
    with Sandbox() as sandbox:
        world = open_world(config.task, config.run.seed, sandbox, None)
        task = world.task("train", PROMPT)
        attempts, _ = play(player, lambda i: world.environment(task, seeds[i]), seeds)

    rewards = task_rewards(attempts, task.preference, task.bounds)
    for attempt, reward in zip(attempts, rewards, strict=True):
        attempt.reward = float(reward)
    advantages = group_advantages(
        [attempt.reward for attempt in attempts],
        [gave_answer(attempt) for attempt in attempts],
        objective_of(grpo),
        grpo.min_std,
    )
    for attempt, advantage in zip(attempts, advantages, strict=True):
        attempt.advantage = advantage.value
    return Walk(config, model, tokenizer, trainer, engine, player, task, attempts, watch.steps)


class PageWatch:
    """Writes down the block tables of an engine's sessions at the end of each of its steps."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.steps: list[Json] = []
        self._sequences: list[EngineSequence] = []
        self._open, self._commit = engine.session, engine.scheduler.commit
        engine.session, engine.scheduler.commit = self.session, self.commit

    def session(self, ids: Sequence[int] = ()) -> Session:
        """Opens a session, as the engine does."""
        session = self._open(ids)
        self._sequences.append(session._sequence)
        return session

    def commit(self, batch: Batch) -> None:
        """Records a computed step, as the scheduler does; requests that end still have pages."""
        self._commit(batch)
        tables = [list(sequence.block_table) for sequence in self._sequences]
        self.steps.append(
            {
                "step": len(self.steps) + 1,
                "tokens": len(batch.decodes) + batch.prefill_tokens,
                "copies": len(batch.page_copies),
                "held": len({page for table in tables for page in table}),
                "computed": [sequence.num_computed for sequence in self._sequences],
                "tables": tables,
            }
        )


def record(walk: Walk) -> Json:
    """Returns what docs/walk.json holds. Makes an update on the model of the walk."""
    task, attempts, tokenizer = walk.task, walk.attempts, walk.tokenizer
    batch, entropy, before = scored(walk)
    kernel = kernel_tiles(walk, batch, entropy)
    update = make_update(walk)
    _, _, after = scored(walk)
    return {
        "task": {
            "id": task.id,
            "question": task.question,
            "preference": task.preference.text,
            "weights": [task.preference.outcome, task.preference.cost, task.preference.latency],
            "most_usd": task.bounds.cost_usd[1],
            "most_s": task.bounds.latency_s[1],
            "answer": task.data["answer"],
            "tools": task.data["tools"],
        },
        "attempts": [written(walk, i) for i in range(len(attempts))],
        "tokens": tokens_of(walk, entropy, before, after),
        "update": {
            "learning_rate": walk.config.grpo.learning_rate,
            "ids": int(update["tokens"]),
            "in_loss": len(batch.targets),
            "grad_norm": rounded(update["grad_norm"]),
        },
        "choice": choice_of(walk, before),
        "preferences": preferences(task, attempts),
        "page_size": walk.engine.blocks.page_size,
        "steps": [walk.steps[number - 1] for number in STEPS],
        "kernel": kernel,
        "prompt": tokenizer.decode(attempts[0].ids[: attempts[0].prompt_length]),
    }


def written(walk: Walk, index: int) -> Json:
    """Returns an attempt: its turns with their calls, and what it was paid for."""
    attempt = walk.attempts[index]
    parts = reward_parts([attempt], walk.task.preference, walk.task.bounds)
    turns = []
    for turn in attempt.turns:
        turns.append(
            {
                "text": walk.tokenizer.decode(attempt.ids[turn.start : turn.end]),
                "ids": turn.end - turn.start,
                "calls": [walk.task.offers[call.name] for call in turn.calls],
                "results": [
                    {"content": r.content, "usd": rounded(r.cost_usd), "s": rounded(r.latency_s)}
                    for r in turn.results
                ],
            }
        )
    return {
        "prompt_ids": attempt.prompt_length,
        "ids": len(attempt.ids),
        "sampled": sum(attempt.sampled),
        "turns": turns,
        "answer": attempt.answer,
        "outcome": attempt.outcome,
        "usd": rounded(attempt.cost_usd),
        "s": rounded(attempt.latency_s),
        "parts": {name: rounded(float(value[0])) for name, value in parts.items()},
        "reward": rounded(attempt.reward),
        "advantage": rounded(attempt.advantage),
    }


@torch.no_grad()
def scored(walk: Walk) -> tuple[MicroBatch, list[float], list[float]]:
    """Returns the group packed, and the entropy and log-probability of each id in the loss."""
    (batch,) = walk.trainer.micro_batches([walk.group])
    temperature = walk.config.rollout.temperature
    logprobs, entropy = walk.trainer.logprobs(walk.trainer.hidden(batch), batch, temperature)
    return batch, entropy.tolist(), logprobs.tolist()


def make_update(walk: Walk) -> dict[str, float]:
    """Makes one optimizer step on the group, as train.py does; returns its metrics."""
    grpo, rollout = walk.config.grpo, walk.config.rollout
    update, _ = train.policy_update(
        walk.trainer,
        [walk.group],
        objective_of(grpo),
        grpo.learning_rate,
        temperature=rollout.temperature,
        context_tokens=rollout.context_tokens,
    )
    return update


def tokens_of(
    walk: Walk, entropy: list[float], before: list[float], after: list[float]
) -> list[list[Json]]:
    """Returns for each attempt its sampled ids, as text, with entropy and log-probabilities."""
    tokens = []
    place = 0
    for sample in walk.group.samples:
        rows = []
        for token, in_loss in zip(sample.ids, sample.in_loss, strict=True):
            if in_loss:
                text = walk.tokenizer.decode([token])
                numbers = entropy[place], before[place], after[place]
                rows.append({"text": text} | dict(zip(NUMBERS, map(rounded, numbers), strict=True)))
                place += 1
        tokens.append(rows)
    return tokens


NUMBERS = ("entropy", "before", "after")


def choice_of(walk: Walk, before: list[float]) -> Json:
    """Returns what the model thinks at the id that names the tool, before and after the update.

    The place is the first at which the attempts differ. What they read up to there is the same, so
    they drew from one distribution. "group" has what each attempt drew and its advantage.
    """
    samples = walk.group.samples
    place = first_difference([sample.ids for sample in samples])
    ids = samples[0].ids[:place]
    model, limit = walk.model, walk.trainer.vocab_limit
    temperature = walk.config.rollout.temperature
    now = probabilities(model, ids, temperature)[:limit]
    reference = probabilities(walk.trainer.reference, ids, temperature)[:limit]
    drawn = sorted({sample.ids[place] for sample in samples}, key=lambda i: -float(reference[i]))
    return {
        "before": walk.tokenizer.decode(ids[-5:]),
        "words": [walk.tokenizer.decode([i]) for i in drawn],
        "old": [rounded(float(reference[i])) for i in drawn],
        "new": [rounded(float(now[i])) for i in drawn],
        "group": [
            {
                "word": walk.tokenizer.decode([sample.ids[place]]),
                "advantage": rounded(sample.advantage),
            }
            for sample in samples
        ],
    }


@torch.no_grad()
def probabilities(model: Qwen3, ids: list[int], temperature: float) -> Tensor:
    """Returns the probability of every id after `ids`, [vocab]."""
    attention = PackedAttention([Segment(0, len(ids))])
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), attention)
    return (model.logits(hidden[-1:])[0] / temperature).softmax(-1)


def preferences(task: Task, attempts: list[Trajectory]) -> Json:
    """Returns the rewards of the attempts, had the user another preference: by its name."""
    rewards = {}
    for name, (_, weights) in PREFERENCES.items():
        preference = Preference("", *weights)
        values = task_rewards(attempts, preference, task.bounds)
        rewards[name] = {"weights": list(weights), "rewards": [rounded(float(v)) for v in values]}
    return rewards


@torch.no_grad()
def kernel_tiles(walk: Walk, batch: MicroBatch, entropy: list[float]) -> Json:
    """Returns what the kernel of the log-probabilities writes for each tile of one row.

    The launch is that of kernels/logprob.py, of the tile of rows that has the row. It is the line
    break after a thought at which the policy was least sure: to answer, or to go on.
    """
    line_break = walk.tokenizer.encode("\n")[0]
    breaks = [i for i, target in enumerate(batch.targets.tolist()) if target == line_break]
    row = max(breaks, key=lambda i: entropy[i])
    counts = [sample.count for sample in walk.group.samples]
    attempt = next(i for i in range(len(counts)) if row < sum(counts[: i + 1]))

    weight, limit = walk.model.output_weight, walk.trainer.vocab_limit
    tile = logprob.pick("logprob_forward", torch.float32)
    rows, width = tile["BLOCK_T"], tile["BLOCK_V"]
    place = slice(row // rows * rows, row // rows * rows + rows)
    hidden = walk.trainer.hidden(batch)[place].contiguous()
    targets = batch.targets[place].contiguous()
    chunks = -(-limit // width)
    partials = hidden.new_zeros(4, len(hidden), chunks)
    scale = 1 / walk.config.rollout.temperature
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=hidden.device))
    logprob._logprob_chunks[(chunks,)](
        hidden, weight, targets, partials, scale, len(hidden), limit, hidden.shape[1], 1, **tile
    )
    row_in_tile = row - place.start
    one = slice(row_in_tile, row_in_tile + 1)
    whole, _ = logprob.naive_linear_logprob(hidden[one], weight, targets[one], 1 / scale, limit)
    top, total, _, target = partials[:, row_in_tile].tolist()
    return {
        "attempt": attempt + 1,
        "rows": rows,
        "width": width,
        "vocab": limit,
        "in_loss": len(batch.targets),
        "row": row,
        "target": int(targets[row_in_tile]),
        "word": "\\n",
        "top": [rounded(value) for value in top],
        "sum": [rounded(value) for value in total],
        "logit": [rounded(value) for value in target],
        "logprob": rounded(float(whole[0])),
    }


def first_difference(lists: list[list[int]]) -> int:
    """Returns the first place at which the lists are not the same."""
    return next(i for i in range(len(lists[0])) if len({each[i] for each in lists}) > 1)


def rounded(value: float) -> float:
    """Returns a number with five digits, as walk.json holds them."""
    return float(f"{value:.5g}")


@command("docs/walk_run.py")
def main(arguments: list[str]) -> int:
    """Writes docs/walk.json."""
    lines = [f'"{name}": {json.dumps(value)}' for name, value in record(play_group()).items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
