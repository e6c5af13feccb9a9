"""Demonstrations for the warm start: of a world's teacher, or recorded attempts to imitate.

`load_kept` is rejection sampling (RFT: Yuan et al. 2023, arXiv 2308.01825): of recorded attempts it
keeps those that were right and well formed, and of each task the best paid.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.lessons import Lesson
from nanorchestra.agent.rebuild import Notes
from nanorchestra.agent.world import World, demonstrates
from nanorchestra.config import Config
from nanorchestra.errors import require
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Trajectory, Turn
from nanorchestra.report.run import Run
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.optimizers import scheduled
from nanorchestra.training.packing import Group
from nanorchestra.training.run import Progress
from nanorchestra.training.samples import as_group
from nanorchestra.training.trajectories import from_row, longest_context

BEST = 4  # recorded attempts at a task that are imitated, at most
WARMUP_STEPS = 20
HOLD = 0.5  # of the steps have the full learning rate: copying is learnt suddenly, sometimes late
# Lessons begin with one tool on offer, then two, then all. The next number follows a step with a
# loss below FEW_LOSS, or FEW_STEPS steps.
FEW_TOOLS, FEW_STEPS, FEW_LOSS = 2, 70, 0.12


class Demonstrations:
    """What the steps of a warm start learn from.

    UserError if there are steps, and neither a teacher nor recorded attempts.
    """

    def __init__(
        self, config: Config, world: World, tokenizer: Tokenizer, say: Callable[[str], Any]
    ):
        self.config, self.world, self.tokenizer = config, world, tokenizer
        self.recorded: list[list[Trajectory]] = []  # by task
        if config.warm_start.steps and config.warm_start.trajectories:
            self.recorded = load_kept(config, tokenizer, say)
        require(
            not config.warm_start.steps or self.recorded or demonstrates(world),
            f"task.world: nothing demonstrates {config.task.world!r}; set warm_start.steps = 0, or "
            "imitate recorded attempts with warm_start.trajectories",
        )

    def groups(self, progress: Progress, ranks: Ranks) -> list[Group]:
        """Returns the demonstrations of the next step; all ranks have all of them."""
        count = self.config.warm_start.prompts
        indices = range(progress.step * count, (progress.step + 1) * count)
        if self.recorded:
            return [as_group(self.recorded[i % len(self.recorded)]) for i in indices]
        most_tools = progress.lesson_tools if progress.lesson_tools <= FEW_TOOLS else 0
        shown = []
        for index in indices[ranks.rank :: ranks.world_size]:
            environment, turns = self.world.lesson(index, most_tools)
            shown.append((index, as_group([self._trajectory(environment, turns)])))
        everyone = [pair for part in ranks.all_gather(shown) for pair in part]
        return [group for _, group in sorted(everyone, key=lambda pair: pair[0])]

    def _trajectory(self, environment, turns) -> Trajectory:
        rollout = self.config.rollout
        prompt_tokens = 0
        if rollout.context == "rebuild":
            prompt_tokens = rollout.context_tokens - rollout.turn_tokens
        return demonstration(turns, environment, self.tokenizer, prompt_tokens)

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
    lessons: Iterable[Lesson], env: Environment, tokenizer: Tokenizer, prompt_tokens: int = 0
) -> Trajectory:
    """Returns a demonstration as the trajectory of a policy that writes the same.

    It is one growing session, or with `prompt_tokens` every turn has a prompt of its own of at most
    so many ids (agent/rebuild.py). `lessons` may act in `env` as they are iterated over.
    """
    notes = Notes(tokenizer, env, prompt_tokens) if prompt_tokens else None
    t, context = Trajectory(env.task.id, 0), 0
    given = chat.encode(tokenizer, (notes or env).messages, env.tools)
    t.prompt_length = len(given)
    for lesson in lessons:
        calls = [lesson.call] if lesson.call else []
        turn = chat.encode_assistant(tokenizer, lesson.thought, lesson.content, calls)
        t.ids += given + turn
        t.sampled += [False] * len(given) + [True] * len(turn)
        t.turns.append(Turn(len(t.ids) - len(turn), len(t.ids), "stop", context=context))
        if not lesson.result:
            break
        if notes:
            if calls:
                notes.evidence.add(lesson.call, lesson.result)
            else:
                notes.hear(lesson.content, lesson.result)
            context, given = len(t.ids), chat.encode(tokenizer, notes.messages, notes.tools)
        else:
            role = "tool" if calls else "user"
            given = chat.encode_reply(tokenizer, role, [lesson.result.content])
    t.logprobs = [0.0] * len(t.ids)
    return t


def load_kept(
    config: Config, tokenizer: Tokenizer, say: Callable[[str], Any]
) -> list[list[Trajectory]]:
    """Returns the recorded trajectories to imitate, by task, in random order.

    Kept are attempts at training tasks that are right and well formed, in contexts that fit: of
    each task the BEST by reward, no two alike. Says how many are not, by reason. UserError for rows
    that were not recorded with this tokenizer, or if none is kept.
    """
    settings = config.warm_start
    tasks: dict[Any, dict[Any, Trajectory]] = {}
    reasons = Counter()
    for phase, attempt in _recorded_attempts(settings.trajectories, tokenizer):
        ids = tuple(attempt.ids)
        task = tasks.setdefault((attempt.task_id, ids[: attempt.prompt_length]), {})
        if phase != "grpo":
            reasons["of an evaluation or a skipped step"] += 1
        elif not attempt.well_formed:
            reasons["cut or badly formed"] += 1
        elif attempt.outcome < 1:
            reasons["wrong"] += 1
        elif longest_context(attempt) > config.rollout.context_tokens:
            reasons["too long"] += 1
        elif ids in task:
            reasons["the same again"] += 1
        else:
            task[ids] = attempt
    kept = []
    for attempts in tasks.values():
        if attempts:
            ranked = sorted(attempts.values(), key=lambda attempt: -attempt.reward)
            kept.append(ranked[:BEST])
            reasons["not of the best of their task"] += len(ranked[BEST:])
    counts = [f"{count} {reason}" for reason, count in reasons.most_common() if count]
    tally = ", ".join(counts) or "none"
    require(kept, f"warm_start.trajectories: no trajectory is kept ({tally})")
    number = sum(len(attempts) for attempts in kept)
    say(f"warm start on {number} recorded trajectories of {len(kept)} tasks; not kept: {tally}")
    return random.Random(config.run.seed).sample(kept, len(kept))


def _recorded_attempts(runs, tokenizer) -> Iterator[tuple[str, Trajectory]]:
    """Yields phase and trajectory of each row of `runs`, a list with commas."""
    for name in runs.split(","):
        for row in Run.open(name.strip()).rows("trajectories"):
            _, attempt = from_row(row)
            texts = [part["text"] for part in row["text"] if part["role"] == "assistant"]
            turns = [attempt.ids[turn.start : turn.end] for turn in attempt.turns]
            require(
                max(attempt.ids) < tokenizer.vocab_size
                and texts == [tokenizer.decode(ids, skip_special=True) for ids in turns],
                f"{name}: its ids do not spell its text, so another tokenizer has written it; "
                "start from the model that recorded it, model.path = RUN/model, or one with its "
                "tokenizer",
            )
            yield row["phase"], attempt
