r"""Runs untrusted Python in warm, confined worker processes: milliseconds a run, from any thread.

    with Sandbox() as sandbox:
        sandbox.run("17*23").stdout  # '391\n': a last bare expression is shown

A worker is one process of sandbox_child.py, which forks a fresh child for each run. Nothing passes
from one run to the next. Hashing and the `random` module start from the same seed every time.

Guaranteed on Linux, x86_64 or aarch64; elsewhere `Sandbox()` raises UserError:
- no network, no further process or thread, no signal to another process: a seccomp filter allows
  about eighty system calls and refuses all others, so this holds against native code too;
- no secret of the caller: an empty environment, no inherited descriptor, and the /proc of other
  processes is unreadable;
- no file outside the scratch directory is written; none is read but the standard library, numpy,
  sympy and pandas where they are installed, and the system's shared libraries (Landlock, Linux
  5.13). On an older kernel no file can be opened;
- an end after `timeout_s`; at most 768 MiB of memory, 16 MiB a file, 32 open files; output is cut
  at 8 KiB;
- nothing is left: children die with their worker, and a worker removes its directory and ends when
  its owner ends.

Not guaranteed: a defence against bugs of the kernel, or secrecy of file names and the clock.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nanorchestra.errors import UserError

CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class SandboxResult:
    """The text that a run printed, its error in one line ("" if none), and its wall seconds.

    `died`: the worker was gone, which is not the fault of the code.
    """

    stdout: str
    error: str
    seconds: float
    died: bool = False


class Sandbox:
    """A pool of `workers` confined processes; as many runs proceed at once, others wait.

    Thread-safe. Raises UserError if this machine cannot confine a process.
    """

    def __init__(self, workers: int = 2):
        self._size = workers
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # warm ones first
        for _ in range(workers):
            self._idle.put(_Worker())
        probe = self.run("1")
        if probe.stdout != "1\n":
            self.close()
            raise UserError(
                f"Sandbox: untrusted code cannot be confined here ({probe.error}); it needs Linux "
                "with seccomp on x86_64 or aarch64"
            )

    def run(self, code: str, timeout_s: float = 5.0) -> SandboxResult:
        """Runs `code` as a program of its own. What goes wrong is in the result."""
        worker = self._idle.get()
        try:
            return worker.run(code, timeout_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Waits for the runs in progress, then ends all workers; a later run starts one again."""
        workers = [self._idle.get() for _ in range(self._size)]
        for worker in workers:
            worker.stop()
            self._idle.put(worker)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process of sandbox_child.py, started when needed. One run at a time."""

    process: subprocess.Popen[str] | None = None
    directory = ""

    def run(self, code: str, timeout_s: float) -> SandboxResult:
        start, reply = time.perf_counter(), ""
        process = self.process or self._start()
        try:
            process.stdin.write(json.dumps({"code": code, "timeout_s": timeout_s}) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not reply:  # it has died, or an interrupt left its reply unread
                self.stop()
        seconds = time.perf_counter() - start
        if not reply:
            return SandboxResult("", "the sandbox process died", seconds, died=True)
        return SandboxResult(seconds=seconds, **json.loads(reply))

    def _start(self) -> subprocess.Popen[str]:
        self.directory = tempfile.mkdtemp(prefix="sandbox-")
        # As -I, which would ignore the hash seed.
        command = [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", str(CHILD)]
        command.append(sysconfig.get_path("purelib"))  # where numpy, sympy and pandas are
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self.directory,
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        return self.process

    def stop(self) -> None:
        """Ends the process and removes its directory; the child of a run dies with it."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()  # closes the pipes
            shutil.rmtree(self.directory, ignore_errors=True)
