"""What every test of a kernel finds: NaN in fresh memory, and shuffled programs.

A launcher that returns what no program has written then returns NaN, or an id that does not exist.
Two runs of a test of equal bits have two orders.
"""

import pytest
import torch
from kernel_check import program_order
from torch.utils._device import _device_constructors

# torch.device(...) as a context remembers the functions that make tensors at its first use. If that
# were in a test here, it would remember the poisoned ones, and "meta" would not hold afterwards: a
# later test of an 8B model without memory would take 22 GB.
_device_constructors()


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch):
    def poisoning(make):
        def make_poisoned(*args, **options):
            out = make(*args, **options)
            if out.nbytes > 2**30:
                return out  # a test of 64-bit offsets, of which few pages take memory
            return out.fill_(float("nan") if out.is_floating_point() else 77)

        return make_poisoned

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


@pytest.fixture(autouse=True)
def _shuffled_programs():
    with program_order("shuffled"):
        yield
