"""A command ends with one line and an exit status, whatever its user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanorchestra.errors import ArgumentParser, command, require


def test_a_user_error_is_a_line_and_status_2(capsys):
    @command("prog")
    def main(arguments):
        ArgumentParser().parse_args(arguments)
        require(False, "n is 3")

    assert main(["--n"]) == 2 and "prog: unrecognized arguments: --n" in capsys.readouterr().err
    assert main([]) == 2 and capsys.readouterr().err == "prog: n is 3\n"


@pytest.mark.parametrize(
    "failure",
    [
        "torch.empty(1 << 40)",
        "mmap.mmap(-1, 1 << 40)",
        "bytearray(1 << 40)",
        "[threading.Thread(target=time.sleep, args=[9], daemon=True).start() for _ in range(999)]",
    ],
)
def test_no_memory_is_a_line_and_status_1(failure):
    program = f"""
import mmap, resource, sys, threading, time
import torch
from nanorchestra.errors import command

@command("prog")
def main(arguments):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)
    {failure}

sys.exit(main([]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "prog: no memory is left, or a limit such as ulimit -v is too low"
    )


PROGRAM = """
import atexit, os, sys, time
from nanorchestra.errors import command, end_on_interrupt
end_on_interrupt("prog")
phase = sys.argv[1]

def wait(*_, write=os.write, sleep=time.sleep):
    write(2, b"ready\\n")
    sleep(2)

class Late:
    __del__ = wait

if phase == "import":
    wait()

@command("prog")
def main(arguments):
    print("done")
    if phase == "run":
        wait()
    return 0

if phase == "atexit":
    atexit.register(wait)
if phase == "teardown":
    late = Late()
sys.exit(main([]))
"""


@pytest.mark.parametrize("phase", ["import", "run", "atexit", "teardown"])
def test_an_interrupt_at_any_time_is_no_traceback(phase):
    """It is one line and status 130, but while the interpreter frees its modules nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    printed, told = process.communicate(timeout=10)
    assert printed == ("" if phase == "import" else "done\n")
    assert told == ("" if phase == "teardown" else "\nprog: interrupted\n")
    assert process.returncode == (0 if phase == "teardown" else 130)


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", ["evaluate.py", "train.py", "serve.py", "tools.py"])
def test_an_interrupt_while_torch_is_imported_is_one_line_and_130(program):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, program, "--help"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, f"\n{program}: interrupted\n")


UNREAD = """
import sys
from nanorchestra.errors import command

@command("unread")
def main(arguments):
    print("a line", flush=sys.argv[1] == "flushed")
    return 0

sys.stdin.read()
sys.exit(main([]))
"""


@pytest.mark.parametrize("line", ["flushed", "buffered"])
def test_a_reader_that_has_gone_away_is_status_1_without_a_word(line):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    unread = [sys.executable, "-c", UNREAD, line]
    with subprocess.Popen(unread, env=buffered, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", 1)
