"""Turns trajectories into samples for the trainer and into rows of JSON, and reads rows back.

`load_kept` is rejection sampling (RFT: Yuan et al. 2023, arXiv 2308.01825): of recorded attempts it
keeps those that were right and well formed, and of each task the best paid.
"""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from os.path import commonprefix  # of any lists, not of paths alone
from typing import Any

from nanorchestra.config import Config
from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import require
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.report.run import Run
from nanorchestra.schemas import MOST_DEPTH, Json, check, levels
from nanorchestra.training.packing import Group, Sample

BEST = 4  # attempts at a task that are imitated, at most


def to_row(task: Task, trajectory: Trajectory) -> Json:
    """Returns the task and the trajectory as one JSON object, which shares the lists of ids."""
    turns = list(map(dataclasses.asdict, trajectory.turns))
    return vars(trajectory) | {"turns": turns, "task": dataclasses.asdict(task)}


def check_row(row: Any, where: str) -> None:
    """UserError, which begins with `where`, unless `row` is what `to_row` makes of an attempt."""
    for depth, level in enumerate(levels(row), 1):
        require(depth <= MOST_DEPTH, f"{where}: nested deeper than {MOST_DEPTH} levels")
        finite = all(math.isfinite(value) for value in level if isinstance(value, float))
        require(finite, f"{where}: has a number that is not finite")
    check(row, "attempt", where)
    ids = row["ids"]  # too long for a schema, which takes microseconds for each
    known = all(type(number) is int and number >= 0 for number in ids)
    require(known, f"{where}: ids: expected integers from 0")
    for name in ("sampled", "logprobs", "weight_versions"):
        same = len(row.get(name, ())) == len(ids)
        require(same, f"{where}: {name}: expected one for each of the {len(ids)} ids")
    for turn in row["turns"]:
        inside = turn.get("context", 0) <= turn["start"] <= turn["end"] <= len(ids)
        require(inside, f"{where}: a turn is not within the {len(ids)} ids")
        # A judge, a user or an engine that failed is the one result of a turn without calls.
        fitting = (0, len(turn["calls"]) or 1)
        require(len(turn["results"]) in fitting, f"{where}: a turn has other results than calls")


def from_row(row: Json) -> tuple[Task, Trajectory]:
    """Returns the arguments of the `to_row` that made `row`; ignores other keys."""
    task = row["task"] | {"preference": Preference(**row["task"]["preference"])}
    values = {field.name: row[field.name] for field in dataclasses.fields(Trajectory)}
    values["turns"] = []
    for turn in row["turns"]:
        calls = [ToolCall(**call) for call in turn["calls"]]
        results = [ToolResult(**result) for result in turn["results"]]
        values["turns"].append(Turn(**turn | {"calls": calls, "results": results}))
    return Task(**task), Trajectory(**values)


def replay(
    trajectory: Trajectory, tokenizer: Tokenizer, on_event: Callable[[str, Any], None]
) -> None:
    """Repeats the events of `Rollout.run` from the record; nothing is sampled or called."""
    on_event("start", trajectory)
    for turn in trajectory.turns:
        stream = TurnStream(tokenizer)
        on_event("text", stream.feed(*trajectory.ids[turn.start : turn.end]))
        on_event("turn", stream.finish())
        if turn.results:
            on_event("results", turn)


def contexts(trajectory: Trajectory) -> list[tuple[int, int, int]]:
    """Returns (begin, start, end) of each context: one, or one per turn.

    ids[begin:start] is its prompt, ids[start:end] all that follows.
    """
    starts = {}
    for turn in trajectory.turns:
        starts.setdefault(turn.context, turn.start)
    starts = starts or {0: trajectory.prompt_length}
    ends = [*list(starts)[1:], len(trajectory.ids)]
    return [(begin, start, end) for (begin, start), end in zip(starts.items(), ends, strict=True)]


def longest_context(trajectory: Trajectory) -> int:
    """Returns the ids of the longest context."""
    return max(end - begin for begin, _, end in contexts(trajectory))


def in_loss(t: Trajectory, by_turn: bool = False) -> list[bool]:
    """Returns which ids enter the loss: sampled ones, with `by_turn` of well-formed turns only."""
    mask = list(t.sampled)
    for turn in t.turns:
        if by_turn and not turn.well_formed:
            mask[turn.start : turn.end] = [False] * (turn.end - turn.start)
    return mask


def as_group(members: Sequence[Trajectory], by_turn: bool = False) -> Group:
    """Returns attempts at one task as the trainer takes them.

    A context that has ids in the loss is a sample.
    """
    prompts, samples = [], []
    for t in members:
        mask = in_loss(t, by_turn)
        for begin, start, end in contexts(t):
            ids, used, logprobs = (x[begin:end] for x in (t.ids, mask, t.logprobs))
            if any(used):
                prompts.append(t.ids[begin:start])
                samples.append(Sample(ids, used, logprobs, t.advantage, sum(mask)))
    return Group(samples, len(commonprefix(prompts)))


def load_kept(
    config: Config, tokenizer: Tokenizer, say: Callable[[str], Any]
) -> list[list[Trajectory]]:
    """Returns the recorded trajectories to imitate, by task, in random order; [] without them.

    Kept are attempts at training tasks that are right and well formed, in contexts that fit: of
    each task the BEST by reward, no two alike. Says how many are not, by reason. UserError for rows
    that were not recorded with this tokenizer, or if none is kept.
    """
    settings, tasks, reasons = config.warm_start, {}, Counter()
    if not (settings.steps and settings.trajectories):
        return []
    for phase, trajectory in _recorded(settings.trajectories, tokenizer):
        ids = tuple(trajectory.ids)
        task = tasks.setdefault((trajectory.task_id, ids[: trajectory.prompt_length]), {})
        faults = {
            "of an evaluation or a skipped step": phase != "grpo",
            "cut or badly formed": not trajectory.well_formed,
            "wrong": trajectory.outcome < 1,
            "too long": longest_context(trajectory) > config.rollout.context_tokens,
            "the same again": ids in task,
        }
        why = next((fault for fault, holds in faults.items() if holds), None)
        if why:
            reasons[why] += 1
        else:
            task[ids] = trajectory
    kept = []
    for attempts in filter(None, tasks.values()):
        ranked = sorted(attempts.values(), key=lambda t: -t.reward)
        kept.append(ranked[:BEST])
        reasons["not of the best of their task"] += len(ranked[BEST:])
    tally = ", ".join(f"{count} {why}" for why, count in reasons.most_common() if count) or "none"
    require(kept, f"warm_start.trajectories: no trajectory is kept ({tally})")
    count = sum(map(len, kept))
    say(f"warm start on {count} recorded trajectories of {len(kept)} tasks; not kept: {tally}")
    return random.Random(config.run.seed).sample(kept, len(kept))


def _recorded(runs, tokenizer) -> Iterator[tuple[str, Trajectory]]:
    """Yields phase and trajectory of each row of `runs`, a list with commas."""
    for name in runs.split(","):
        for row in Run.open(name.strip()).rows("trajectories"):
            _, t = from_row(row)
            said = [part["text"] for part in row["text"] if part["role"] == "assistant"]
            spoken = [t.ids[turn.start : turn.end] for turn in t.turns]
            require(
                max(t.ids) < tokenizer.vocab_size
                and said == [tokenizer.decode(ids, skip_special=True) for ids in spoken],
                f"{name}: its ids do not spell its text, so another tokenizer has written it; "
                "start from the model that recorded it, model.path = RUN/model, or one with its "
                "tokenizer",
            )
            yield row["phase"], t
