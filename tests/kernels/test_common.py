"""What launchers share: checks, the configuration of a GPU, and the GPU that a launch goes to."""

from types import SimpleNamespace

import pytest
import torch
from triton.runtime import driver

from kernels import common
from kernels.common import check, pick

ONES = torch.ones(4, 8)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"x": ONES.T}, r"x has shape \[8, 4\]; expected \[4, None\]"),
        ({"x": ONES[None]}, r"x has shape \[1, 4, 8\]"),
        ({"x": ONES, "y": ONES.double()}, "y is torch.float64; expected torch.bfloat16 or"),
        ({"x": torch.ones(8, 4).T}, r"x has strides \(1, 4\); it must be contiguous"),
        ({"x": torch.ones(4, 16)[:, :8]}, r"x has strides \(16, 1\); it must be contiguous"),
    ],
)
def test_shapes_dtypes_and_strides(given, message):
    check((4, None), x=ONES)
    check((4, None), strided=True, x=torch.ones(4, 16)[:, :8])
    with pytest.raises(ValueError, match=message):
        check((4, None), **given)


def test_a_gpu_has_the_configuration_of_its_architecture(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setitem(common.TILES, "kernel", {"80": "80", "89": "89", "90": "90", "32": "32"})
    target = SimpleNamespace(arch=80)
    active = SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(driver, "_active", active)
    picked = {}
    for target.arch in (80, 86, 89, 90, 100, 120, 121):
        picked[target.arch] = pick("kernel", torch.bfloat16)
        assert pick("kernel", torch.float32) == "32"
    assert picked == {80: "80", 86: "89", 89: "89", 90: "90", 100: "90", 120: "89", 121: "89"}
    monkeypatch.setitem(common.TILES["kernel"], "100", "100")
    target.arch = 100
    assert pick("kernel", torch.bfloat16) == "100"
    target.arch = 75
    with pytest.raises(ValueError, match="need a GPU of compute capability 8.0; it has 7.5"):
        pick("kernel")
