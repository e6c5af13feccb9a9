"""Computes rewards with the equations of ToolOrchestra; reads the table of prices.

The paper (arXiv 2511.21689, section 3) describes an attempt tau of a group T by its features, and
normalises each feature over the group:

    M(tau)  = [m_t1, ..., m_tn, r_out, r_cost, r_lat]
              m_t = calls of tool t, r_cost = -USD, r_lat = -seconds
    Mn[k]   = (M[k] - min_T M[k]) / (max_T M[k] - min_T M[k]),   0 where max = min
    R(tau)  = r_out(tau) * Mn(tau) . P                           P = the preference, 0 <= p <= 1

The paper's outcome is 0 or 1; here an environment may also give partial credit in between.

`group_rewards` is that. `task_reward` is the same projection with extrema known before any attempt,
so that it can be compared across groups, steps and policies. Numbers are trusted: worlds and tools
produce them.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanorchestra.files import read_toml
from nanorchestra.records import Preference, Price, Trajectory

POLICY = "Qwen/Qwen3-8B"

# The published system's prices. A task may quote others in its prompt, and then charges those.
_LISTED = read_toml(Path(__file__).parent / "assets" / "experts.toml")
PRICES = {name: Price(*settings["usd"]) for name, settings in _LISTED["experts"].items()}


class Bounds(NamedTuple):
    """The least and the most that an attempt at a task can cost (US dollars) and last (seconds)."""

    cost_usd: tuple[float, float]
    latency_s: tuple[float, float]


def group_rewards(members: Sequence[Trajectory], preference: Preference) -> list[float]:
    """Returns the paper's reward of each attempt at one task.

    Extrema are taken over all members, wrong ones included, but for those that the infrastructure
    failed, which get 0. A tool that an attempt did not use counts 0, a tool that the preference
    does not name weighs 0.

    The paper has no negative weights. Here a tool to avoid (p_t < 0) enters M as -m_t with the
    weight |p_t|. Two right attempts differ by the same amount as with p_t * Mn[m_t], and no right
    attempt falls below a wrong one's 0.
    """
    counted = [member for member in members if member.status != "infrastructure"]
    features = [
        (preference.outcome, [m.outcome for m in counted]),
        (preference.cost, [-m.cost_usd for m in counted]),
        (preference.latency, [-m.latency_s for m in counted]),
    ]
    for tool, weight in preference.tools.items():
        sign = math.copysign(1.0, weight)
        features.append((abs(weight), [sign * m.calls.get(tool, 0) for m in counted]))
    rewards = [0.0] * len(counted)
    for weight, values in features:
        for i, value in enumerate(_min_max(values)):
            rewards[i] += weight * value * counted[i].outcome
    paid = iter(rewards)
    return [next(paid) if m.status != "infrastructure" else 0.0 for m in members]


def task_reward(attempt: Trajectory, preference: Preference, bounds: Bounds) -> float:
    """Returns the reward of one attempt in absolute form, 0 to 1.

        R = r_out * max(0, p_out + p_cost * cheap + p_lat * fast + sum_t p_t * [t was called]) / W
        cheap = clip((high - USD) / (high - low), 0, 1), 1 within bounds of no width
        fast likewise, W = p_out + p_cost + p_lat + sum of the positive p_t

    A tool counts once however often it was called. A tool to avoid (p_t < 0) subtracts |p_t| if
    called.
    """
    return min(1.0, max(0.0, sum(_parts(attempt, preference, bounds).values())))


def _parts(attempt: Trajectory, preference: Preference, bounds: Bounds) -> dict[str, float]:
    """Returns what outcome, cost, latency and tools add to `task_reward`."""
    called = [weight for tool, weight in preference.tools.items() if attempt.calls.get(tool, 0)]
    parts = {
        "outcome": preference.outcome,
        "cost": preference.cost * _saved(attempt.cost_usd, bounds.cost_usd),
        "latency": preference.latency * _saved(attempt.latency_s, bounds.latency_s),
        "tools": sum(called),
    }
    favoured = sum(weight for weight in preference.tools.values() if weight > 0)
    most = preference.outcome + preference.cost + preference.latency + favoured
    return {name: attempt.outcome * part / most for name, part in parts.items()}


def task_rewards(attempts, preference, bounds):
    return np.array([task_reward(attempt, preference, bounds) for attempt in attempts])


def reward_parts(attempts, preference, bounds):
    rows = [_parts(attempt, preference, bounds) for attempt in attempts]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def preference_score(attempt: Trajectory, preference: Preference, bounds: Bounds) -> float:
    """Returns the share of the preference that was honoured, 0 to 1, for wrong answers too.

        S = sum_k |p_k| s_k / sum_k |p_k|      over cost, latency and the tools named
        s_cost = cheap, s_lat = fast           as in `task_reward`
        s_t = [t was called] if p_t > 0, [t was not called] if p_t < 0

    1 if the user has no preference.
    """
    parts = [
        (preference.cost, _saved(attempt.cost_usd, bounds.cost_usd)),
        (preference.latency, _saved(attempt.latency_s, bounds.latency_s)),
    ]
    for tool, weight in preference.tools.items():
        called = attempt.calls.get(tool, 0) > 0
        parts.append((abs(weight), called == (weight > 0)))
    total = sum(weight for weight, _ in parts)
    return sum(weight * honoured for weight, honoured in parts) / total if total > 0 else 1.0


def _saved(spent, bounds) -> float:
    """The saved share of what could be spent."""
    low, high = bounds
    if high == low:
        return 1.0 if spent <= high else 0.0
    return min(1.0, max(0.0, (high - spent) / (high - low)))


def _min_max(values) -> list[float]:
    """Mn of one feature. A spread that rounding alone can explain counts as none."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return [0.0] * len(values)
    return [(value - low) / (high - low) for value in values]
