"""Every test of a kernel finds NaN in fresh memory, and programs that run in a random order.

A launcher that returns what no program has written then returns NaN, or an id that does not exist.
Two runs of a test of equal bits have two orders.
"""

import pytest
import torch
from kernel_check import program_order


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch):
    def poisoning(make):
        def make_poisoned(*args, **options):
            out = make(*args, **options)
            return out.fill_(float("nan") if out.is_floating_point() else 77)

        return make_poisoned

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


@pytest.fixture(autouse=True)
def _shuffled_programs():
    with program_order("shuffled"):
        yield
