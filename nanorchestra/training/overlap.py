"""A computation beside the main one: in a thread of its own, and on a GPU on a stream of its own.

PyTorch lets go of the interpreter's lock while it computes, so a rollout and an update go on at the same time in one process. What the two
share they must only read: the engine has weights of its own, and whoever copies new ones into it waits for the rollout first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

NAME = "beside"
R = TypeVar("R")


def beside(function: Callable[[], R], device: torch.device) -> Future[R]:
    """Begins function(), which sees what was computed on `device` so far; `result()` waits for it, and raises what it raised.

    It cannot be broken off: who does not wait for it ends by os._exit, for the interpreter aborts when it ends under a thread that computes.
    """
    future: Future[R] = Future()

    def run() -> None:
        try:
            if device.type == "cuda":
                stream = torch.cuda.Stream(device)
                stream.wait_stream(torch.cuda.default_stream(device))
                with torch.cuda.stream(stream):
                    value = function()
                stream.synchronize()  # what it computed ahead for nothing reads the weights, too
            else:
                value = function()
            future.set_result(value)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=NAME).start()
    return future


def running() -> bool:
    """Whether such a computation goes on."""
    return any(thread.name == NAME for thread in threading.enumerate())
