"""Figures of recorded attempts: means, tallies, bootstrap intervals, paired tests, pass^k.

A policy and a fixed router are measured alike. The reward of an attempt is read from its record;
`score` sets that of a held-out attempt, train.py those of a training step. Attempts that the
infrastructure failed enter no figure but the counts of them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from nanorchestra.errors import require
from nanorchestra.records import Task, Trajectory
from nanorchestra.schemas import Json
from reward import preference_score, reward_parts, task_rewards
from worlds.user_reward import UserReward

Pair = tuple[Task, Trajectory]  # an attempt with its task
Pairs = Sequence[Pair]
Figures = dict[str, float | None]  # by name; None: the attempt has no such figure
FAILURE_CHARS = 200  # of what the infrastructure failed with
COMPARED = ("reward", "accuracy", "exact", "cost_usd", "latency_s")  # figures paired by task
DRAWS = 2000  # resamples of a bootstrap, and sign flips of a test


class Interval(NamedTuple):
    """A mean over tasks and the ends of its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


class Difference(NamedTuple):
    """A mean paired difference, the ends of its 95% interval, and the p of a sign-flip test."""

    mean: float
    low: float
    high: float
    p: float


def score(task: Task, attempt: Trajectory, user_reward: UserReward | None = None) -> Trajectory:
    """Sets the attempt's reward to its absolute form (`task_rewards`), and returns the attempt.

    A reward of the user's own pays it in its place, as a group of one.
    """
    rewards = task_rewards([attempt], task.preference, task.bounds)
    if user_reward is not None and attempt.status != "infrastructure":
        rewards = user_reward(task, [attempt], rewards)
    (reward,) = rewards
    attempt.reward = float(reward)
    return attempt


@dataclass(frozen=True)
class Finished:
    """The attempts of a policy that the infrastructure did not fail, with their figures.

    rows[i] are the figures of pairs[i], `by_task` their means over the attempts at each task.
    """

    pairs: Pairs
    rows: list[Figures]
    by_task: dict[str, Figures]

    @property
    def means(self) -> Figures:
        """The mean of each figure over the attempts, None if none has it."""
        return _means(self.rows)

    @classmethod
    def of(cls, pairs: Pairs, priced: bool = True) -> "Finished":
        """Returns those of some attempts. Of a policy that is not `priced` no cost is known."""
        pairs = finished(pairs)
        rows = [_figures(task, attempt) for task, attempt in pairs]
        if not priced:
            rows = [row | {"cost_usd": None} for row in rows]
        return cls(pairs, rows, _means_by([task.id for task, _ in pairs], rows))


def summarise(tasks: Sequence[Task], attempts: Sequence[Trajectory]) -> Json:
    """Returns means per task: over all tasks, by preference, and by kind of question.

    attempts[i] is one at tasks[i]; a task may have several. `accuracy` is the mean outcome, `exact`
    the share of attempts whose outcome is 1; they are the same if each is 0 or 1. `pass_hat` is
    pass^1, pass^2, ... `intervals` are 95% bootstrap intervals over tasks. `failed` counts the
    attempts that the infrastructure failed, and `failure` says what the first one met. UserError if
    all failed.
    """
    pairs = list(zip(tasks, attempts, strict=True))
    return _summary(pairs, Finished.of(pairs))


def _summary(played: Pairs, done: Finished) -> Json:
    """Returns what `summarise` does of all attempts, and of those that are finished."""
    failures = [attempt.failure for _, attempt in played if attempt.failure]
    require(
        done.pairs,
        f"held-out tasks: all {len(played)} attempts failed for reasons of the infrastructure, "
        f"repeated ones too; the first: {''.join(failures[:1])[:FAILURE_CHARS]}",
    )
    means = done.means

    intervals = {}
    for name, values in _columns(done.by_task.values()).items():
        if len(values) > 1:
            _, low, high = interval(values)
            intervals[name] = (low, high)

    attempts_at = Counter(task.id for task, _ in done.pairs)
    successes = []
    for task_id, row in done.by_task.items():
        successes.append((round(row["exact"] * attempts_at[task_id]), attempts_at[task_id]))
    most_attempts = max(attempts_at.values())

    cost_per_correct_usd = None
    if means["exact"] and means["cost_usd"] is not None:
        cost_per_correct_usd = means["cost_usd"] / means["exact"]
    return {
        "tasks": len({task.id for task, _ in played}),
        "attempts": len(played),
        "failed": len(played) - len(done.pairs),
        "failure": failures[0][:FAILURE_CHARS] if failures else "",
        **means,
        "intervals": intervals,
        "pass_hat": [pass_hat(successes, k) for k in range(1, most_attempts + 1)],
        "cost_per_correct_usd": cost_per_correct_usd,
        "by_preference": _means_by([task.preference.name for task, _ in done.pairs], done.rows),
        "by_kind": _means_by([task.kind for task, _ in done.pairs], done.rows),
        "right_by_kind": _right_by_kind(done),
        "calls_by_preference": _calls_by_preference(done.pairs),
        "most_frequent_answer": _most_frequent_answer(done.pairs),
        **_tallies(done.pairs),
    }


def measure(tasks: Sequence[Task], attempts: Sequence[Trajectory], group_size: int) -> Json:
    """Returns means over a training step's attempts, for its row of metrics.

    Each `group_size` attempts in a row are a group. `reward` is what the advantages are made of,
    `group_std` its mean spread within a group. `reward_parts` are those of the absolute form, in
    which steps can be compared. If the infrastructure failed all attempts, the means are of these.
    """
    pairs = list(zip(tasks, attempts, strict=True))
    spreads = []
    for start in range(0, len(pairs), group_size):
        members = finished(pairs[start : start + group_size])
        if len(members) > 1:
            spreads.append(stdev([_figures(task, attempt)["reward"] for task, attempt in members]))

    pairs = finished(pairs) or pairs
    parts = []
    for task, attempt in pairs:
        by_name = reward_parts([attempt], task.preference, task.bounds)
        parts.append({name: float(values[0]) for name, values in by_name.items()})
    return {
        **_means([_figures(task, attempt) for task, attempt in pairs]),
        "reward_parts": _means(parts),
        "group_std": fmean(spreads) if spreads else 0.0,
        "statuses": _shares(Counter(attempt.status for attempt in attempts), len(attempts)),
        **_tallies(pairs),
    }


def rewritten_share(attempts: Sequence[Trajectory]) -> float:
    """Returns the share of turns, after the first of an attempt, with a prompt of their own.

    With rebuilt context it is 1. An agent that rewrites what was said before raises it from 0.
    """
    following = sum(max(0, len(attempt.turns) - 1) for attempt in attempts)
    return sum(len(attempt.contexts()) - 1 for attempt in attempts) / max(1, following)


def compare(played: dict[str, Pairs], unpriced: Collection[str] = ()) -> dict[str, Json]:
    """Returns the summary of each policy by its name, with `behind`: what the first one has more.

    It is not known of some policies, `unpriced`, what their own tokens cost: their costs are None,
    and a difference of costs is left out.
    """
    first = next(iter(played))
    done = {name: Finished.of(pairs, name not in unpriced) for name, pairs in played.items()}
    summaries = {}
    for name, pairs in played.items():
        summary = _summary(pairs, done[name])
        summary["behind"] = differences(done[first], done[name])
        summaries[name] = summary
    return summaries


def differences(ours: Finished, theirs: Finished) -> dict[str, Difference]:
    """Returns what ours have more than theirs of each figure, over the tasks that both finished.

    A figure that one of them does not know is left out.
    """
    shared = [task_id for task_id in ours.by_task if task_id in theirs.by_task]
    results = {}
    for name in COMPARED:
        values = []
        for task_id in shared:
            our_mean, their_mean = ours.by_task[task_id][name], theirs.by_task[task_id][name]
            if our_mean is not None and their_mean is not None:
                values.append(our_mean - their_mean)
        if values:
            results[name] = Difference(*interval(values), p_value(values))
    return results


def finished(pairs: Iterable[Pair]) -> list[Pair]:
    """Returns the attempts that the infrastructure did not fail, with their tasks."""
    return [(task, attempt) for task, attempt in pairs if attempt.status != "infrastructure"]


# How sure a figure is.


def _right_by_kind(done: Finished) -> dict[str, Json]:
    """The share that is right of the tasks of each kind, with its 95% Wilson interval."""
    by_kind: dict[str, list[float]] = {}
    for task_id, kind in {task.id: task.kind for task, _ in done.pairs}.items():
        by_kind.setdefault(kind, []).append(done.by_task[task_id]["exact"])
    return {kind: wilson(fmean(right), len(right)) for kind, right in sorted(by_kind.items())}


def wilson(right: float, tasks: int) -> Json:
    """Returns a share of so many tasks, and the ends of its 95% interval (Wilson 1927)."""
    z = 1.96
    centre = (right + z * z / (2 * tasks)) / (1 + z * z / tasks)
    spread = math.sqrt(right * (1 - right) / tasks + (z / (2 * tasks)) ** 2)
    half = z * spread / (1 + z * z / tasks)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return {"tasks": tasks, "right": right, "low": min(low, right), "high": max(high, right)}


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of one value per task and its 95% bootstrap interval (percentiles)."""
    if len(values) < 2:
        return Interval(fmean(values or [math.nan]), -math.inf, math.inf)
    resampled = np.asarray(values, float)[_resamples(len(values))].mean(1)  # [DRAWS]
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(fmean(values), float(low), float(high))


@lru_cache(maxsize=2)
def _resamples(count: int) -> np.ndarray:
    """Returns the tasks of each resample, [DRAWS, count]."""
    return np.random.default_rng(0).integers(count, size=(DRAWS, count))


def p_value(differences: Sequence[float]) -> float:
    """Returns the p of a paired test: how often random signs give as large a mean difference."""
    values = np.asarray(differences, float)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(DRAWS, len(values)))
    extreme = np.abs(signs @ values) >= abs(values.sum()) - 1e-9
    return float((1 + extreme.sum()) / (1 + DRAWS))


def pass_hat(successes: Sequence[tuple[int, int]], k: int) -> float:
    """Returns pass^k: the probability that k attempts at a task are all right.

    `successes` are (right attempts, attempts) by task; the estimate is that of tau-bench (Yao et
    al. 2024, arXiv 2406.12045), the mean of C(right, k) / C(attempts, k).
    """
    return fmean(math.comb(c, k) / math.comb(n, k) for c, n in successes if n >= k)


# The figures of one attempt, and means of them.


def _figures(task: Task, attempt: Trajectory) -> Figures:
    """Returns the figures of an attempt: accuracy in 0..1, cost in US dollars, latency in seconds.

    `exact` is 1 if the accuracy is, else 0: it is not the same where a world gives partial credit.
    `avoided_rate` is 1 if it used a tool to avoid, None if the task has none; `well_formed` 1 if no
    call was malformed; `tokens` are those that the policy sampled.
    """
    avoided = None
    if task.preference.avoided:
        avoided = float(any(attempt.calls.get(name) for name in task.preference.avoided))
    return {
        "reward": attempt.reward,
        "accuracy": attempt.outcome,
        "exact": float(attempt.outcome == 1),
        "cost_usd": attempt.cost_usd,
        "latency_s": attempt.latency_s,
        "preference": preference_score(attempt, task.preference, task.bounds),
        "avoided_rate": avoided,
        "well_formed": float(attempt.well_formed),
        "turns": len(attempt.turns),
        "tokens": sum(attempt.sampled),
    }


def _means_by(names: Sequence[str], rows: Sequence[Figures]) -> dict[str, Figures]:
    """Returns the means of the rows of each name; names[i] is that of rows[i]."""
    groups = defaultdict(list)
    for name, row in zip(names, rows, strict=True):
        groups[name].append(row)
    return {name: _means(group) for name, group in sorted(groups.items())}


def _means(rows: Collection[Figures]) -> Figures:
    """Returns the mean of each figure over the rows that have it, None if none has."""
    return {name: fmean(values) if values else None for name, values in _columns(rows).items()}


def _columns(rows: Collection[Figures]) -> dict[str, list[float]]:
    """Returns the known values of each figure; all rows have the same names."""
    columns = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values = columns[name]
            if value is not None:
                values.append(value)
    return columns


def _tallies(pairs: Pairs) -> Json:
    """Returns calls, US dollars and seconds per attempt by what is behind the name, and verdicts.

    The policy's own tokens and seconds are those of "policy". Of calls that run side by side the
    slowest counts; the seconds that it waited for an endpoint or a worker are those of "waiting".
    """
    usd, seconds = Counter(), Counter()
    for task, attempt in pairs:
        usd["policy"] += attempt.policy_usd
        own_seconds = attempt.latency_s
        for turn in attempt.turns:
            made = []
            for call, result in zip(turn.calls, turn.results, strict=False):
                if result.refused:
                    continue
                behind = task.offers.get(result.alias or call.name, "unknown")
                usd[behind] += result.cost_usd
                made.append((result.latency_s, behind, min(result.waited_s, result.latency_s)))
            if made:
                slowest_s, behind, waited_s = max(made)
                seconds[behind] += slowest_s - waited_s
                if waited_s:
                    seconds["waiting"] += waited_s
                own_seconds -= slowest_s
        seconds["policy"] += own_seconds
    verdicts = Counter(attempt.verdict for _, attempt in pairs if attempt.verdict)
    return {
        "calls": _calls(pairs),
        "costs_usd": _shares(usd, len(pairs)),
        "seconds_by": _shares(seconds, len(pairs)),
        "verdicts": _shares(verdicts, len(pairs)),
    }


def _calls(pairs: Pairs) -> dict[str, float]:
    """Returns the calls per attempt by what is behind the name."""
    calls = Counter()
    for task, attempt in pairs:
        for name, count in attempt.calls.items():
            calls[task.offers.get(name, "unknown")] += count
    return _shares(calls, len(pairs))


def _calls_by_preference(pairs: Pairs) -> dict[str, dict[str, float]]:
    """Returns `_calls` of each preference, in which a policy shows that heeds none."""
    groups = defaultdict(list)
    for task, attempt in pairs:
        groups[task.preference.name].append((task, attempt))
    return {name: _calls(group) for name, group in sorted(groups.items())}


def _most_frequent_answer(pairs: Pairs) -> Json:
    """Returns the answer that most attempts give, "" for none, and their share.

    A policy that says the same whatever is asked shows here.
    """
    answers = Counter(attempt.answer.strip() for _, attempt in pairs)
    ((answer, count),) = answers.most_common(1)
    return {"answer": answer, "share": count / len(pairs)}


def _shares(counts: Counter, total: int) -> dict[str, float]:
    """Returns each count over the total, by name."""
    return {name: count / total for name, count in sorted(counts.items())}
