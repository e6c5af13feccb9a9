"""Runs a rollout in a thread beside the update, on a GPU on a CUDA stream of its own.

PyTorch releases the interpreter's lock while it computes, so both make progress in one process.
They share only what neither writes: the engine has weights of its own, which are replaced after
the rollout has ended.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

NAME = "rollout"
R = TypeVar("R")


def in_background(device: torch.device, function: Callable[..., R], *arguments: Any) -> Future[R]:
    """Starts function(*arguments) in a thread; it sees what `device` has computed so far.

    The thread cannot be interrupted. A process that does not wait for `result()` must end by
    os._exit, because the interpreter waits for the thread at its end.
    """
    computed = None
    if device.type == "cuda":
        computed = torch.cuda.current_stream(device).record_event()

    def run():
        if computed is None:
            return function(*arguments)
        stream = _stream(device)
        stream.wait_event(computed)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            value = function(*arguments)
        stream.synchronize()  # steps launched ahead still read the engine's weights
        return value

    pool = ThreadPoolExecutor(1, thread_name_prefix=NAME)
    future = pool.submit(run)
    pool.shutdown(wait=False)  # the thread ends with its work
    return future


@cache
def _stream(device):
    """The one stream of all rollouts: torch keeps freed memory and workspaces for each stream."""
    return torch.cuda.Stream(device)


def running() -> bool:
    """Returns whether such a thread is at work."""
    return any(thread.name.startswith(NAME) for thread in threading.enumerate())
