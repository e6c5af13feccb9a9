"""The device that a tool computes on, from whichever thread it is called.

A rank makes its tools in the thread whose current GPU is the rank's. Their calls run in other
threads, where the first GPU is current, and kernels are launched on the current one. So a tool
keeps its device, by number, and computes `with current(device)`.
"""

from contextlib import AbstractContextManager

import torch


def own_device() -> torch.device:
    """Returns this thread's GPU, else the CPU.

    The GPU has its number from here on: another thread has another current GPU.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU that has a number the thread's current one for a while; a CPU changes nothing."""
    return torch.cuda.device(-1 if device.index is None else device.index)
