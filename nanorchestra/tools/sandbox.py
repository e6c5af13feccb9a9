r"""Runs untrusted Python in warm, confined worker processes: milliseconds a run, from any thread.

    with Sandbox() as sandbox:
        sandbox.run("17*23").stdout  # '391\n': a last bare expression is shown

A worker is one process of sandbox_child.py, which forks a fresh child for each run. Hashing and the
`random` module start from the same seed every time. Nothing passes from one run to the next but
which of the libraries are imported already.

Guaranteed on Linux, x86_64 or aarch64; elsewhere `Sandbox()` raises UserError:
- no network, no further process or thread, no signal to another process, no capability, even for
  root: a seccomp filter allows about eighty system calls and refuses all others, so this holds
  against native code too;
- no secret of the caller: an empty environment, no inherited descriptor, and the /proc of other
  processes is unreadable;
- no file is written; none is read but the standard library, numpy, sympy and pandas where they
  are installed, and the system's shared libraries (Landlock, Linux 5.13). On an older kernel no
  file can be opened;
- an end after `timeout_s`, whatever the code does, and at once where the call is abandoned; at most
  768 MiB of memory, 32 open files; output is cut at 8 KiB;
- nothing is left: children die with their worker, and a worker ends when its owner ends.

Not guaranteed: a defence against bugs of the kernel, or secrecy of file names and the clock.
"""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from nanorchestra.agent.threads import abandoned
from nanorchestra.errors import UserError

CHILD = Path(__file__).with_name("sandbox_child.py")
LIBRARIES = json.loads(CHILD.with_name("sandbox.json").read_text())["libraries"]
MAX_OUTPUT = 8192  # bytes
MAX_ERROR = 500  # characters
ABANDONED = "the run was abandoned"
MOST_WORKERS = 16  # of a process
WAIT_S = 300.0  # of a run, for a worker; of `close`, for the runs in progress
START_S = 60.0  # for a worker to start and to import libraries
LOOK_S = 0.1  # between two looks whether a run is abandoned
GRACE_S = 2.0  # for a worker to report the end of a run; then it counts as stuck


@dataclass(frozen=True)
class SandboxResult:
    """The text that a run printed, its error in one line ("" if none), and its wall seconds.

    `died`: there is no worker for the code, or it is gone, which is not the fault of the code.
    `waited_s` are the seconds until a worker was free, which `seconds` leaves out.
    """

    stdout: str
    error: str
    seconds: float
    died: bool = False
    waited_s: float = 0.0


def workers_of_rank() -> int:
    """Returns how many workers a process has: one a core of its share of the machine, 2 to 16.

    The ranks of a machine (LOCAL_WORLD_SIZE) share its cores.
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min(max(cores, 2), MOST_WORKERS)


class Sandbox:
    """A pool of confined processes; as many runs proceed at once, others wait WAIT_S at most.

    workers: how many processes, each started when it is first needed; None: `workers_of_rank`.
    modules: of this project, which each run finds imported; it may not read their files.
    Thread-safe. Raises UserError if this machine cannot confine a process.
    """

    def __init__(self, workers: int | None = None, modules: Sequence[str] = ()):
        self._size = workers or workers_of_rank()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # warm ones first
        for _ in range(self._size):
            self._idle.put(_Worker(modules))
        probe = self.run("1")
        if probe.stdout != "1\n":
            self.close()
            raise UserError(
                f"Sandbox: untrusted code cannot be confined here ({probe.error}); it needs Linux "
                "with seccomp on x86_64 or aarch64"
            )

    def run(self, code: str, timeout_s: float = 5.0) -> SandboxResult:
        """Runs `code` as a program of its own. What goes wrong is in the result."""
        start = time.perf_counter()
        try:
            worker = self._idle.get(timeout=WAIT_S)
        except queue.Empty:
            problem = f"no worker of the sandbox was free within {WAIT_S:g} s"
            return SandboxResult("", problem, 0.0, died=True, waited_s=WAIT_S)
        waited_s = time.perf_counter() - start
        try:
            if abandoned():
                return SandboxResult("", ABANDONED, 0.0, waited_s=waited_s)
            return replace(worker.run(code, timeout_s), waited_s=waited_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Waits for the runs in progress, then ends all workers; a later run starts one again.

        After WAIT_S seconds it leaves a run alone. Its worker ends when this process does.
        """
        end, workers = time.monotonic() + WAIT_S, []
        with suppress(queue.Empty):
            while len(workers) < self._size:
                workers.append(self._idle.get(timeout=max(end - time.monotonic(), 0.0)))
        for worker in workers:
            worker.stop()
            self._idle.put(worker)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AbandonedError(Exception):
    """Nothing waits for a run any more: its call was cancelled, or came to the user's limit."""


class _Worker:
    """One process of sandbox_child.py, started when needed. One run at a time.

    `files` are its stdin, stdout and stderr, in memory: the program of a run and what it prints.
    They are empty between runs.
    """

    process: subprocess.Popen[bytes] | None = None
    control: socket.socket  # a message each way is a whole message
    files: list[io.FileIO]

    def __init__(self, modules: Sequence[str]):
        self.modules = modules

    def run(self, code: str, timeout_s: float) -> SandboxResult:
        start = time.perf_counter()
        stdout, error, answered, died = "", "", False, False
        try:
            if self.process is None:
                self._start()
            status = self._ask(code, timeout_s)
            answered = True
            stdout, error = self._printed(), self._explain(status, timeout_s)
            self._empty_files()
        except TimeoutError:  # the worker is stopped, or waits for a kernel that does not answer
            stdout, error = self._printed(), self._explain(None, timeout_s)
        except AbandonedError:
            error = ABANDONED
        except ConnectionError:
            error, died = "the sandbox process died", True
        except OSError as problem:  # such as too many open files
            error, died = f"the sandbox process cannot be used: {problem}", True
        finally:
            if not answered:  # it is lost, or an interrupt left its reply unread
                self.stop()
        return SandboxResult(stdout, error, time.perf_counter() - start, died)

    def _start(self) -> None:
        # As -I, which would ignore the hash seed.
        command = [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", str(CHILD)]
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.files = []
        for name in ("program", "stdout", "stderr"):
            self.files.append(io.FileIO(os.memfd_create(name), "r+"))
        with other:
            command.append(str(other.fileno()))
            command.append(sysconfig.get_path("purelib"))  # where numpy, sympy and pandas are
            self.process = subprocess.Popen(
                command,
                stdin=self.files[0],
                stdout=self.files[1],
                stderr=self.files[2],
                pass_fds=[other.fileno()],
                env={"PYTHONHASHSEED": "0"},
                start_new_session=True,
            )

    def _ask(self, code: str, timeout_s: float) -> int | None:
        """Returns the exit status of the program, None if the worker ended it at its time-out.

        Raises TimeoutError if the worker does not answer in time, ConnectionError if it died,
        another OSError if it does not come to run the program, AbandonedError.
        """
        self._empty_files()
        os.pwrite(self.files[0].fileno(), code.encode("utf-8", "surrogatepass"), 0)
        libraries = [*self.modules, *(name for name in LIBRARIES if name in code)]
        self.control.send(json.dumps({"timeout_s": timeout_s, "libraries": libraries}).encode())
        try:
            self._receive(START_S)  # "ready"
        except TimeoutError:
            raise OSError(f"it was not ready within {START_S:g} s") from None
        return json.loads(self._receive(timeout_s + GRACE_S))

    def _receive(self, seconds: float) -> bytes:
        """Returns the worker's next message. Raises as `_ask` does."""
        end = time.monotonic() + seconds
        while not abandoned():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.control.settimeout(min(left, LOOK_S))
            with suppress(TimeoutError):
                message = self.control.recv(64)
                if not message:
                    raise ConnectionResetError
                return message
        raise AbandonedError

    def _empty_files(self) -> None:
        for file in self.files:
            file.truncate(0)
            file.seek(0)

    def _printed(self) -> str:
        """Returns what the program wrote to stdout, cut."""
        written = os.pread(self.files[1].fileno(), MAX_OUTPUT + 1, 0)
        text = written[:MAX_OUTPUT].decode("utf-8", "replace")
        if len(written) > MAX_OUTPUT:
            text += f"\n[cut after {MAX_OUTPUT} bytes]\n"
        return text

    def _explain(self, status: int | None, timeout_s: float) -> str:
        """Returns one line on how a program ended, "" if well."""
        if status is None:
            return f"timed out after {timeout_s:g} s"
        if status == 0:
            return ""
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        stderr = self.files[2].fileno()
        start = max(0, os.fstat(stderr).st_size - MAX_OUTPUT)
        end = os.pread(stderr, MAX_OUTPUT, start).decode("utf-8", "replace")
        lines = end.strip().splitlines()
        return lines[-1][-MAX_ERROR:] if lines else f"exit status {status}"

    def stop(self) -> None:
        """Ends the process and with it the child of a run, and forgets what that has printed."""
        process, self.process = self.process, None
        if process is not None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            for each in (self.control, *self.files):
                each.close()
