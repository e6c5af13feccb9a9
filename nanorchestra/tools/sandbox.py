"""Runs untrusted Python for real: warm, confined worker processes, a few milliseconds a run, any number of calling threads.

    with Sandbox() as sandbox:
        sandbox.run("17*23").stdout            # '391\n': a last bare expression is shown, as an interactive Python does

A worker is one process of `sandbox_child.py`, started once, which forks a fresh child for each run. Nothing survives from one run to
the next. Runs are repeatable: string hashing and the `random` module start from the same seed every time.

Guaranteed, on Linux (x86_64 or aarch64; elsewhere `Sandbox()` raises UserError and nothing runs):
- no network, no further process or thread, no signal to anything, no change of limits, owners or modes: a seccomp filter lets about
  eighty system calls through and refuses all others, so this holds against native code (ctypes) too;
- no secret of the caller: an empty environment, no inherited descriptor, another address space, and other processes' /proc unreadable;
- no file outside the scratch directory is written, and none read but the standard library and the system's shared libraries
  (Landlock, Linux 5.13+). On an older kernel no file can be opened at all, and only what `sandbox_child.PRELOAD` names can be imported;
- an end: killed at `timeout_s` of wall clock, at 512 MiB of address space, 16 MiB a file, 32 open files; output bounded by 8 KiB;
- nothing left behind: children die with their worker, and a worker ends and removes its scratch directory when its owner dies.

Not guaranteed: a defence against bugs of the kernel; a bound on the scratch directory's total size other than time and 16 MiB a file
(it is flat and emptied after each run); hiding which files exist, their sizes and the machine's clock; fairness of CPU use among runs.
Only the standard library is importable: there are no site-packages.
"""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from nanorchestra.errors import UserError

_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_child.py")
_GRACE_S = (
    5.0  # a worker enforces the time-out itself; one that is this much late is taken for dead
)
_MAX_CODE_BYTES = 1 << 20
_MAX_TIMEOUT_S = 3600


@dataclass(frozen=True)
class SandboxResult:
    """What a run left: text of at most 8 KiB, `error` ("" if none; one line, the exception or why it was killed), wall seconds."""

    stdout: str
    error: str
    seconds: float
    timed_out: bool


class Sandbox:
    """A pool of `workers` confined processes; that many runs proceed at once and further callers wait for their turn.

    Thread-safe. Raises UserError at construction if this machine cannot confine a process.
    """

    def __init__(self, workers: int = 2):
        if workers < 1:
            raise UserError(f"Sandbox: workers is {workers}, it must be at least 1")
        self._owner = os.getpid()
        self._closed = False
        self._size = workers
        self._idle: queue.LifoQueue[_Worker] = (
            queue.LifoQueue()
        )  # last in, first out: the warm ones work, others may never start
        for _ in range(workers):
            self._idle.put(_Worker())
        probe = self.run("1")
        if probe.stdout != "1\n":
            self.close()
            needs = "it needs Linux with seccomp on x86_64 or aarch64"
            raise UserError(
                f"Sandbox: untrusted code cannot be confined here ({probe.error}); {needs}"
            )

    def run(self, code: str, timeout_s: float = 5.0) -> SandboxResult:
        """Run `code` as a program of its own. What the code does wrong is in the result; it never raises into the caller.

        Raises ValueError for a time-out out of range (0 to one hour), RuntimeError after close() or in a fork of the owner.
        """
        if not 0 < timeout_s <= _MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout_s is {timeout_s}, it must be above 0 and at most {_MAX_TIMEOUT_S} seconds"
            )
        if os.getpid() != self._owner:
            raise RuntimeError(
                "a Sandbox belongs to the process that made it; make another one after a fork"
            )
        source = code.encode("utf-8", "surrogatepass")
        if len(source) > _MAX_CODE_BYTES:
            return SandboxResult(
                "",
                f"the code has {len(source)} bytes, at most {_MAX_CODE_BYTES} are accepted",
                0.0,
                False,
            )
        worker = self._idle.get()
        try:
            if self._closed:
                raise RuntimeError("this Sandbox is closed")
            return worker.run(source, timeout_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Let the runs in progress end, then end all workers. May be called twice."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        workers = [self._idle.get() for _ in range(self._size)]
        for worker in workers:
            worker.stop()
            self._idle.put(
                worker
            )  # so that a thread which waits for one wakes up and learns that it is closed

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _WorkerDied(Exception):
    pass


class _Worker:
    """One process of sandbox_child.py, started when first needed and again whenever it is found dead. One run at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = ""

    def run(self, source: bytes, timeout_s: float) -> SandboxResult:
        start = time.perf_counter()
        for _ in range(
            2
        ):  # the worker may have been killed since its last run; one that dies twice has another reason
            if self._process is None:
                self._start()
            try:
                reply = json.loads(self._exchange(source, timeout_s))
                return SandboxResult(
                    reply["stdout"], reply["error"], time.perf_counter() - start, reply["timed_out"]
                )
            except _WorkerDied:
                self.stop()
            except BaseException:  # an interrupt halfway: the next reply would be this run's
                self.stop()
                raise
        return SandboxResult("", "the sandbox process died", time.perf_counter() - start, False)

    def _start(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="sandbox-")
        # -P -s -S and an environment of ours are what -I gives, except that -I would ignore the hash seed.
        command = [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", _CHILD]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            cwd=self._directory, env={"PYTHONHASHSEED": "0"}, start_new_session=True,
        )  # fmt: skip

    def _exchange(self, source: bytes, timeout_s: float) -> bytes:
        """Send one request, return the body of its reply. Raises _WorkerDied when the worker is gone or far too late."""
        process = self._process
        deadline = time.monotonic() + timeout_s + _GRACE_S
        request = memoryview(struct.pack("<Id", len(source), timeout_s) + source)
        try:
            while request:
                request = request[process.stdin.write(request) :]
        except OSError:
            raise _WorkerDied from None
        (length,) = struct.unpack("<I", self._read(4, deadline))
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        data = b""
        while len(data) < count:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _WorkerDied
            piece = os.read(descriptor, count - len(data))
            if not piece:
                raise _WorkerDied
            data += piece
        return data

    def stop(self) -> None:
        """End the process, gently if it listens (end of input), and remove its directory. The child of a run dies with it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.stdin.close()
        try:
            process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        shutil.rmtree(self._directory, ignore_errors=True)
