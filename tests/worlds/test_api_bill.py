"""The bill of a run's calls, from a probe of a few tasks."""

from __future__ import annotations

import re

import pytest

from nanorchestra.agent.load import NANO
from nanorchestra.errors import UserError
from nanorchestra.settings import load_config
from worlds.api_bill import api_bill


def test_a_probe_estimates_the_bill_of_the_calls(sandbox):
    config = load_config("nano", {"model.path": str(NANO), "grpo.steps": 10})
    lines = api_bill(config, 8, sandbox).splitlines()
    assert "from a probe of 8 tasks (experts simulated" in lines[0]
    assert "2,240 attempts (1,280 of training, 960 held out)" in lines[1]
    one, low, high = (float(text) for text in re.findall(r"[\d.]+(?= an|,|])", lines[1])[:3])
    total = float(re.search(r"\$([\d.]+) in all", lines[2])[1])
    assert 0 < low < one < high < 0.02 and total == pytest.approx(2240 * one, rel=0.01)
    with pytest.raises(UserError, match="--probe is 1; it must be 2 tasks or more"):
        api_bill(config, 1, sandbox)
    with pytest.raises(UserError, match="model.path is 'nowhere'; it must be a checkpoint"):
        api_bill(config.replace({"model.path": "nowhere"}), 8, sandbox)
    with pytest.raises(UserError, match="grpo.epochs is 2, but task.world, 'miniature', has tasks"):
        api_bill(config.replace({"grpo.epochs": 2}), 2, sandbox)
