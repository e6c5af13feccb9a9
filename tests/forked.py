"""Runs a function in a forked process: how a process ends is tested without an import of torch."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

RETURNED, RAISED = 98, 99  # statuses of a function that has not ended its process


def fork(function: Callable[[], int | None], printed: Path, **variables: str) -> int:
    """Starts `function` in a child with these variables of the environment; returns its id.

    What it prints is appended to the file `printed`. Its result is the exit status.
    """
    process = os.fork()
    if process:
        return process
    status = RAISED
    try:
        out = os.open(printed, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.environ |= variables
        result = function()
        status = RETURNED if result is None else result
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def statuses(*processes: int, seconds: float = 50) -> list[int | None]:
    """Returns how the children have ended: -signal or a status, None if one was not in time."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < len(processes):
        late = time.monotonic() > deadline
        for process in set(processes) - set(ended):
            if late:
                os.kill(process, signal.SIGKILL)
            done, status = os.waitpid(process, 0 if late else os.WNOHANG)
            if done and not late:
                ended[process] = os.waitstatus_to_exitcode(status)
        if late:
            break
        time.sleep(0.01)
    return [ended.get(process) for process in processes]
