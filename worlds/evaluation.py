"""Attempts at held-out tasks, scored and summarised alike for a policy and for fixed routers.

Bootstrap intervals over tasks, paired tests and pass^k say how sure a figure is. A world states in
`task.data` what the score needs: `bounds` of cost and latency, `kind` of question, and `wish`, the
name of the preference.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean, stdev

import numpy as np

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Rollout
from nanorchestra.errors import require
from nanorchestra.records import Bounds, Task, Trajectory
from nanorchestra.schemas import Json
from reward import preference_score, reward_parts, task_rewards

Pairs = Sequence[tuple[Task, Trajectory]]
FAILURE_CHARS = 200  # of what the infrastructure failed with
COSTS = ("cost_usd", "cost_per_correct_usd", "published")  # figures that need the policy's price
RETRIES = 2  # of attempts that failed for reasons of the infrastructure
DRAWS = 2000  # resamples of a bootstrap, and sign flips of a test


def task_bounds(task: Task) -> Bounds:
    """Returns the bounds of a task's cost and latency, known before any attempt."""
    return Bounds(*task.data["bounds"])


def score(task: Task, trajectory: Trajectory) -> Trajectory:
    """Fills in the trajectory's reward in its absolute form, and returns the trajectory."""
    trajectory.reward = _task_reward(task, trajectory)
    return trajectory


def _task_reward(task, trajectory) -> float:
    return float(task_rewards([trajectory], task.preference, task_bounds(task))[0])


def attempt(
    rollout: Rollout,
    tasks: Sequence[Task],
    seeds: Sequence[int],
    make: Callable[[Task, int], Environment],
) -> tuple[list[Trajectory], int]:
    """Returns one scored attempt of the policy at each task, and how many were repeated.

    make(task, seed) is the environment of an attempt. Attempts that the infrastructure failed are
    repeated, RETRIES times at most.
    """
    found, left, retried = {}, range(len(tasks)), 0
    for again in range(1 + RETRIES):
        retried += len(left) if again else 0
        environments = [make(tasks[i], seeds[i]) for i in left]
        tried = rollout.run(environments, [seeds[i] for i in left])
        found |= zip(left, tried, strict=True)
        left = [i for i in left if found[i].status == "infrastructure"]
        if not left:
            break
    return [score(task, found[i]) for i, task in enumerate(tasks)], retried


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    seed: int,
    make: Callable[[Task, int], Environment],
    start: int = 0,
) -> list[Trajectory]:
    """Returns one scored attempt at each task, all in environments of the same seed.

    `start` is the number of the first task.
    """
    seeds = [seed * 1_000_003 + start + i for i in range(len(tasks))]
    return attempt(rollout, tasks, seeds, lambda task, _: make(task, seed))[0]


def summarise(tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> Json:
    """Returns means per task: over all tasks, by preference, and by kind of question.

    A task may have several attempts: `pass_hat` is pass^1, pass^2, ... `intervals` are 95%
    bootstrap intervals over tasks. `failed` counts the attempts that the infrastructure failed, and
    `failure` says what the first one met; no mean includes them. UserError if all attempts failed.
    """
    pairs = finished(zip(tasks, trajectories, strict=True))
    require(
        pairs,
        f"held-out tasks: all {len(tasks)} attempts failed for reasons of the infrastructure; "
        "see that the tools and endpoints answer",
    )
    scores, rows = means(pairs), _grouped(pairs)
    known = _columns([*rows.values()])
    right, tries = scores["accuracy"], Counter(task.id for task, _ in pairs)
    passed = [(round(row["accuracy"] * tries[n]), tries[n]) for n, row in rows.items()]
    return {
        "tasks": len({task.id for task in tasks}),
        "attempts": len(tasks),
        "failed": len(tasks) - len(pairs),
        "failure": next((t.failure for t in trajectories if t.failure), "")[:FAILURE_CHARS],
        **scores,
        "intervals": {n: interval(values)[1:] for n, values in known.items() if len(values) > 1},
        "pass_hat": [pass_hat(passed, k) for k in range(1, max(tries.values()) + 1)],
        "cost_per_correct_usd": scores["cost_usd"] / right if right else None,
        "by_preference": _grouped(pairs, lambda task: task.data["wish"]),
        "by_kind": _grouped(pairs, lambda task: task.data["kind"]),
        **_tallies(pairs),
    }


def compare(found: dict[str, Pairs], unpriced: Collection[str] = ()) -> dict[str, Json]:
    """Returns the summary of each policy, with `behind`: what the first one has more.

    `published` is the paper's preference score; its base is the second policy. Where a price is
    missing, of the policies named `unpriced`, a cost is None, and a difference of costs is left
    out.
    """
    first, base = [*found, *found][:2]  # a single policy is its own base
    compared = {}
    for name, pairs in found.items():
        summary = summarise(*zip(*pairs, strict=True))
        summary["published"] = published_preference(pairs, found[base])
        summary["behind"] = differences(found[first], pairs)
        if name in unpriced:
            summary |= dict.fromkeys(COSTS)
            summary["intervals"].pop("cost_usd", None)
            for group in (*summary["by_preference"].values(), *summary["by_kind"].values()):
                group["cost_usd"] = None
        if base in unpriced:
            summary["published"] = None
        if {name, first} & {*unpriced}:
            summary["behind"].pop("cost_usd", None)
        compared[name] = summary
    return compared


def differences(ours: Pairs, theirs: Pairs) -> dict[str, tuple[float, ...]]:
    """Returns (mean, low, high, p) of what ours have more than theirs, on tasks both finished."""
    a, b, found = _grouped(finished(ours)), _grouped(finished(theirs)), {}
    for name in ("reward", "reward_of_calls", "accuracy", "cost_usd", "latency_s"):
        if both := [a[task][name] - b[task][name] for task in a if task in b]:
            found[name] = (*interval(both), p_value(both))
    return found


def published_preference(ours: Pairs, base: Pairs) -> float | None:
    """Returns the score of the paper's appendix L, the mean over tasks that both finished.

        R = M . P if the answer is right, else 0
        M_k = m_k / max(1, m0_k) for outcome and tools, m0_k / max(1, m_k) for cost and latency

    m0 is the base's attempt. The paper leaves units open: here US cents and minutes.
    """
    first, scores = {task.id: t for task, t in reversed(finished(base))}, []
    for task, t in finished(ours):
        if old := first.get(task.id):
            wish = task.preference
            parts = [
                (wish.outcome, t.outcome, old.outcome),
                (wish.cost, 100 * old.cost_usd, 100 * t.cost_usd),
                (wish.latency, old.latency_s / 60, t.latency_s / 60),
                *((w, t.calls.get(n, 0), old.calls.get(n, 0)) for n, w in wish.tools.items()),
            ]
            score = sum(weight * above / max(1, below) for weight, above, below in parts)
            scores.append(score if t.outcome == 1 else 0.0)
    return fmean(scores) if scores else None


def measure(tasks: Sequence[Task], trajectories: Sequence[Trajectory], group_size: int) -> Json:
    """Returns means over a training step's attempts, for its row of metrics.

    Also `group_std`, the mean spread of reward within a group, and how attempts ended. No mean
    includes attempts that the infrastructure failed, unless there are no others.
    """
    pairs = list(zip(tasks, trajectories, strict=True))
    pairs = finished(pairs) or pairs
    groups = [
        [t.reward for t in trajectories[i : i + group_size] if t.status != "infrastructure"]
        for i in range(0, len(tasks), group_size)
    ]
    spreads = [stdev(group) for group in groups if len(group) > 1]
    parts = []
    for task, t in pairs:
        of_one = reward_parts([t], task.preference, task_bounds(task))
        parts.append({name: float(values[0]) for name, values in of_one.items()})
    return {
        **means(pairs),
        "reward_parts": _means(parts),
        "group_std": fmean(spreads) if spreads else 0.0,
        "statuses": _shares((t.status for t in trajectories), len(tasks)),
        **_tallies(pairs),
    }


def means(pairs: Pairs) -> dict[str, float | None]:
    """Returns the means: accuracy in 0..1, cost in US dollars, latency in seconds, and others.

    `avoided_rate` is the share of attempts that used a forbidden tool among the tasks that forbid
    one, None if there are none; `well_formed` the share without a malformed call;
    `reward_of_calls` the reward if the policy's own tokens cost nothing, as a router's.
    """
    return _means([_figures(*pair) for pair in pairs])


def finished(pairs: Iterable[tuple[Task, Trajectory]]) -> Pairs:
    """Returns the attempts that the infrastructure did not fail, with their tasks."""
    return [(task, t) for task, t in pairs if t.status != "infrastructure"]


def _means(rows):
    return {name: fmean(found) if found else None for name, found in _columns(rows).items()}


def _columns(rows):
    """The values of each name that are known."""
    return {name: [row[name] for row in rows if row[name] is not None] for name in rows[0]}


def _grouped(pairs, key=lambda task: task.id):
    """The means of the attempts whose tasks have the same key, by key."""
    groups = defaultdict(list)
    for pair in pairs:
        groups[key(pair[0])].append(pair)
    return {name: means(group) for name, group in sorted(groups.items())}


def _figures(task, t):
    avoided, turns = task.preference.avoided, [turn.results for turn in t.turns if turn.results]
    tokens_free = replace(
        t,
        cost_usd=sum(result.cost_usd for results in turns for result in results),
        latency_s=sum(max(result.latency_s for result in results) for results in turns),
    )
    return {
        "reward": t.reward,
        "reward_of_calls": _task_reward(task, tokens_free),
        "accuracy": t.outcome,
        "cost_usd": t.cost_usd,
        "latency_s": t.latency_s,
        "preference": preference_score(t, task.preference, task_bounds(task)),
        "avoided_rate": any(map(t.calls.get, avoided)) if avoided else None,
        "well_formed": t.well_formed,
        "turns": len(t.turns),
        "tokens": sum(t.sampled),
    }


def _tallies(pairs):
    """Calls, US dollars and seconds per attempt by what is behind the alias, shares of verdicts.

    The policy's own tokens and seconds are those of "policy". Of calls that run side by side the
    slowest counts.
    """
    called, usd, seconds = Counter(), Counter(), Counter()
    for task, t in pairs:
        known = {}
        for offer in task.data["tools"]:  # questions.py: experts of a tool that offers several
            known |= {offer["name"]: offer} | offer.get("models", {})
        own_usd, own_seconds = t.cost_usd, t.latency_s
        for name, count in t.calls.items():
            called[_what(name, known)] += count
        for turn in t.turns:
            made = []
            for call, result in zip(turn.calls, turn.results, strict=False):
                if result.refused:
                    continue
                what = _what(result.alias or call.name, known)
                usd[what] += result.cost_usd
                own_usd -= result.cost_usd
                made.append((result.latency_s, what))
            if made:
                slowest_s, what = max(made)
                seconds[what] += slowest_s
                own_seconds -= slowest_s
        usd["policy"] += own_usd
        seconds["policy"] += own_seconds
    verdicts = (t.verdict for _, t in pairs if t.verdict)
    return {
        "calls": _shares(called, len(pairs)),
        "costs_usd": _shares(usd, len(pairs)),
        "seconds_by": _shares(seconds, len(pairs)),
        "verdicts": _shares(verdicts, len(pairs)),
    }


def _what(name, known) -> str:
    return known[name]["what"] if name in known else "unknown"


def _shares(found, total):
    return {name: count / total for name, count in sorted(Counter(found).items())}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean of one value per task and its 95% bootstrap interval (percentiles)."""
    if len(values) < 2:
        return (fmean(values or [math.nan]), -math.inf, math.inf)
    means = np.asarray(values, float)[_picks(len(values))].mean(1)
    return (fmean(values), *map(float, np.quantile(means, (0.025, 0.975))))


@lru_cache(maxsize=2)
def _picks(count):
    """The tasks of each resample, [DRAWS, count]."""
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
