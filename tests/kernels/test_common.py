"""What launchers share: checks, the configuration of a GPU, and the GPU that a launch goes to."""

from types import SimpleNamespace

import pytest
import torch
from triton.runtime import driver, interpreter

from kernels import common
from kernels.common import check, on_device, pick
from kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_store
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.swiglu import swiglu

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


def test_a_check_that_holds_makes_no_message():
    """A step makes hundreds of checks, and messages were a quarter of its host time."""

    class Loud(int):
        def __repr__(self):
            raise AssertionError("a message was made")

    check((Loud(4), None), x=ONES)
    with pytest.raises(AssertionError, match="a message was made"):
        check((Loud(5), None), x=ONES)


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
    target.arch = 75
    with pytest.raises(ValueError, match="need a GPU of compute capability 8.0; it has 7.5"):
        pick("kernel")


class OnSecondGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on the second GPU."""

    @property
    def device(self):
        return torch.device("cuda:1")


def on_second_gpu(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype).as_subclass(OnSecondGpu)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, the first of which is current; `launches` gets the one current at each launch."""

    class Gpus:
        current = 0
        switches = 0
        launches: list[int] = []

    class Current:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, Gpus.current = Gpus.current, self.device.index
            Gpus.switches += 1

        def __exit__(self, *error):
            Gpus.current = self.before

    def launch(grid, *arguments, **constants):
        Gpus.launches.append(Gpus.current)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: Gpus.current)
    monkeypatch.setattr(torch.cuda, "device", Current)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    common.multiprocessors.cache_clear()
    Gpus.launches.clear()
    yield Gpus
    common.multiprocessors.cache_clear()


def test_every_launch_goes_to_the_gpu_of_its_tensors(gpus):
    """Forward and backward, though another GPU is current, which it is again afterwards."""

    def differentiate(run, *tensors):
        leaves = [x.requires_grad_() for x in tensors]
        outputs = run(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])

    x, weight, head = on_second_gpu(5, 64), on_second_gpu(64), on_second_gpu(16)
    rotation = on_second_gpu(5, 8), on_second_gpu(5, 8)
    cache, slots = on_second_gpu(3, 1, 4, 16), on_second_gpu(5, dtype=torch.int32)
    differentiate(lambda x, weight: rms_norm(x, weight, 1e-6), x, weight)
    differentiate(
        lambda x, residual, weight: add_rms_norm(x, residual, weight, 1e-6), x, x + 0, weight
    )
    differentiate(
        lambda x, q_norm, k_norm: qk_norm_rope(x, q_norm, k_norm, *rotation, 1, 1e-6),
        *(x, head, head + 0),
    )
    differentiate(swiglu, x)
    qk_norm_rope_store(x, None, None, *rotation, cache, cache, slots, 1e-6)
    assert gpus.launches == [1] * 9 and gpus.current == 0


def test_the_guard_changes_the_gpu_only_if_another_one_is_current(gpus):
    launcher = on_device(lambda number, x=None: gpus.current)
    here = on_second_gpu(4)
    assert launcher(2, here) == launcher(2, x=here) == 1 and gpus.switches == 2
    assert launcher(2) == launcher(2, torch.ones(4)) == 0 and gpus.switches == 2
    gpus.current = 1
    assert launcher(2, here) == 1 and gpus.switches == 2
