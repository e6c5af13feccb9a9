"""Rewards of your own: functions that pay the attempts at one task.

    python train.py --task.reward examples/my_reward.py:frugal
    python evaluate.py --reward examples/my_reward.py:frugal

docs/worlds.md says what a group holds.
"""

import numpy as np


def frugal(group):
    """A right answer is worth 1, and a cent costs a tenth, so a wrong attempt can earn below 0."""
    return group.outcomes - 10.0 * group.costs_usd


def one_call(group):
    """The project's own reward, less 0.1 for each call after the first."""
    calls = np.array([sum(counts.values()) for counts in group.calls])
    return group.rewards - 0.1 * np.maximum(calls - 1, 0)
