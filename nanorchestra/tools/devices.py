"""The device that a tool computes on, from whichever thread it is called.

A rank makes its tools in the thread whose current GPU is the rank's. Their calls run in other
threads, where the first GPU is current, and kernels are launched on the current one. So a tool
keeps its device, by number, and computes `with current(device)`.
"""

import re
from contextlib import AbstractContextManager

import torch

from nanorchestra.errors import require


def device_named(name: str | None = None) -> torch.device:
    """Returns the device of a name, "cpu" or "cuda:0"; None: this thread's GPU, else the CPU.

    A GPU has its number from here on: another thread has another current GPU. UserError if the
    device is not there.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    matched = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    require(matched, f"--device {name}: it must be cpu or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    require(count, f"--device {name}: torch finds no GPU; it must be cpu")
    number = torch.cuda.current_device() if matched[1] is None else int(matched[1])
    require(
        number < count, f"--device {name}: there are {count} GPUs; the last is cuda:{count - 1}"
    )
    return torch.device("cuda", number)


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU that has a number the thread's current one for a while; a CPU changes nothing."""
    return torch.cuda.device(-1 if device.index is None else device.index)
