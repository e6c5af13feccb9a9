"""Computes rewards with the equations of ToolOrchestra; reads the table of prices.

The paper (arXiv 2511.21689, section 3) describes the attempts at one task by their features M
[n, k], a row for each attempt, and normalises each feature over the group:

    M  = [r_out, r_cost, r_lat, m_t1, m_t2, ...]     r_cost = -USD, r_lat = -seconds,
                                                     m_t = calls of tool t
    Mn = (M - low) / (high - low)                    0 where high = low; low and high [k] are the
                                                     extrema of the group
    R  = r_out * (Mn @ P)                            P [k] = the weights of the preference

The paper has the tools first; the order makes no difference. Its outcome is 0 or 1; here an
environment may also give partial credit in between.

`group_rewards` is that. `task_rewards` has low and high known before any attempt, so that it can be
compared across groups, steps and policies; its docstring says what else differs. Numbers are
trusted: worlds and tools produce them. So is the choice of attempts: the caller leaves out those
that the infrastructure failed, which would move the extrema.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanorchestra.files import read_toml
from nanorchestra.records import Bounds, Preference, Price, Trajectory

POLICY = "Qwen/Qwen3-8B"  # whose price is that of any policy's own tokens, of a small one too

# The published system's prices. A task may quote others in its prompt, and then charges those.
_LISTED = read_toml(Path(__file__).parent / "assets" / "experts.toml")
PRICES = {name: Price(*settings["usd"]) for name, settings in _LISTED["experts"].items()}

# The columns of M, and the entries of P.
COLUMNS = {
    "outcome": slice(0, 1),
    "cost": slice(1, 2),
    "latency": slice(2, 3),
    "tools": slice(3, None),
}


def features(attempts: Sequence[Trajectory], preference: Preference) -> np.ndarray:
    """Returns M [n, k]: outcome, -USD, -seconds, and the calls of each tool of the preference.

    A tool that an attempt did not use counts 0. A tool that the preference does not name weighs 0,
    and has no column.
    """
    columns = [
        [attempt.outcome for attempt in attempts],
        [-attempt.cost_usd for attempt in attempts],
        [-attempt.latency_s for attempt in attempts],
    ]
    for tool in preference.tools:
        columns.append([attempt.calls.get(tool, 0) for attempt in attempts])
    return np.array(columns, dtype=float).T


def weights(preference: Preference) -> np.ndarray:
    """Returns P [k]. Only weights of tools may be below 0."""
    tools = preference.tools.values()
    return np.array([preference.outcome, preference.cost, preference.latency, *tools], dtype=float)


def normalise(M: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns Mn [n, k] = (M - low) / (high - low), 0 where high = low. low and high are [k]."""
    width = high - low
    return np.divide(M - low, width, out=np.zeros_like(M), where=width > 0)


def project(Mn: np.ndarray, P: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """Returns R [n] = r_out * (Mn @ P): a wrong attempt earns 0. `outcomes` is r_out [n]."""
    return outcomes * (Mn @ P)


def group_rewards(attempts: Sequence[Trajectory], preference: Preference) -> np.ndarray:
    """Returns the paper's reward [n] of each attempt at one task.

    Extrema are taken over all attempts, wrong ones included.

    The paper has no negative weights. Here a tool to avoid (p_t < 0) enters M as -m_t with the
    weight |p_t|. Two right attempts differ by the same amount as with p_t * Mn[m_t], and no right
    attempt falls below a wrong one's 0.
    """
    if not attempts:
        return np.zeros(0)
    M = features(attempts, preference)
    P = weights(preference)
    outcomes = M[:, 0]
    M = np.where(P < 0, -M, M)
    low = M.min(axis=0)
    high = M.max(axis=0)
    # A spread that rounding alone can explain counts as none.
    rounding = 1e-12 * np.maximum(np.abs(low), np.abs(high))
    high = np.where(high - low > rounding, high, low)
    return project(normalise(M, low, high), np.abs(P), outcomes)


def task_rewards(
    attempts: Sequence[Trajectory], preference: Preference, bounds: Bounds
) -> np.ndarray:
    """Returns the reward [n] of each attempt in absolute form, 0 to 1.

        R = clip(r_out * (Mn @ P) / W, 0, 1)         W = the sum of the positive weights

    Mn is that of `within_bounds`. Division by W makes the best attempt possible worth 1 under any
    preference, so that tasks with larger weights do not count more.

    A tool to avoid (p_t < 0) subtracts |p_t| if it was called. Its absence earns nothing: it would
    be paid to every attempt that has no use for the tool. The clip keeps a right attempt from
    falling below a wrong one's 0.
    """
    return np.clip(sum(reward_parts(attempts, preference, bounds).values()), 0.0, 1.0)


def reward_parts(
    attempts: Sequence[Trajectory], preference: Preference, bounds: Bounds
) -> dict[str, np.ndarray]:
    """Returns what outcome, cost, latency and tools add to `task_rewards` before its clip.

    Each is [n]. All are 0 if no weight is above 0, as there is nothing to earn.
    """
    Mn = within_bounds(attempts, preference, bounds)
    P = weights(preference)
    most = P[P > 0].sum()
    P = P / most if most > 0 else np.zeros_like(P)
    outcomes = np.array([attempt.outcome for attempt in attempts], dtype=float)
    return {name: project(Mn[:, k], P[k], outcomes) for name, k in COLUMNS.items()}


def within_bounds(
    attempts: Sequence[Trajectory], preference: Preference, bounds: Bounds
) -> np.ndarray:
    """Returns Mn [n, k] for low and high known before any attempt, 0 to 1.

    outcome          1: r_out is a factor of R already, and partial credit would enter squared.
    -USD, -seconds   low and high are those of the bounds; the clip is for attempts beyond them.
                     Bounds of no width: 1 within, 0 beyond. No attempt can save anything there,
                     and the paper's 0 would take the best attempt possible below 1.
    calls of a tool  low 0, high 1: by the clip a tool counts once however often it was called,
                     since no highest number of calls is known before.
    """
    least_usd, most_usd = bounds.cost_usd
    least_s, most_s = bounds.latency_s
    M = features(attempts, preference)
    low = np.array([0.0, -most_usd, -most_s] + [0.0] * len(preference.tools))
    high = np.array([1.0, -least_usd, -least_s] + [1.0] * len(preference.tools))
    Mn = np.clip(normalise(M, low, high), 0.0, 1.0)
    within = np.where(low > M, 0.0, 1.0)  # where more was spent, 0
    Mn = np.where(high > low, Mn, within)
    Mn[:, COLUMNS["outcome"]] = 1.0
    return Mn


def preference_score(attempt: Trajectory, preference: Preference, bounds: Bounds) -> float:
    """Returns the share of the preference that was honoured, 0 to 1, for wrong answers too.

        S = sum_k |p_k| s_k / sum_k |p_k|            over cost, latency and the tools named
        s_k = Mn_k, 1 - Mn_k if p_k < 0              Mn is that of `within_bounds`

    1 if the user has no preference.
    """
    Mn = within_bounds([attempt], preference, bounds)[0, 1:]
    P = weights(preference)[1:]
    honoured = np.where(P < 0, 1.0 - Mn, Mn)
    total = np.abs(P).sum()
    return float(honoured @ np.abs(P) / total) if total > 0 else 1.0
