"""A command ends with one line and an exit status, whatever its user does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.model import quantise
from nanorchestra.serving import options as serve_options
from nanorchestra.tools import options as tools_options
from nanorchestra.tools import vectors


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
import sys, time
from nanorchestra.errors import command, end_on_interrupt
end_on_interrupt("prog")
print("ready", flush=True)
if sys.argv[1] == "import":
    time.sleep(20)

@command("prog")
def main(arguments):
    print("x" * 100_000, flush=True)
    time.sleep(20)

sys.exit(main([]))
"""


def start(code, phase):
    """A program that is told the phase in which it waits."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, phase], **pipes)


@pytest.mark.parametrize("phase", ["import", "run"])
def test_an_interrupt_is_one_line_and_130_at_any_time(phase):
    process = start(PROGRAM, phase)
    assert process.stdout.readline() == "ready\n"
    if phase == "run":
        process.stdout.readline()
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=10)[1] == "\nprog: interrupted\n"
    assert process.returncode == 130


SLOW_END = """
import atexit, os, sys, time
from nanorchestra.errors import command, end_on_interrupt
end_on_interrupt("prog")

def wait(*_, write=os.write, sleep=time.sleep):
    write(2, b"ready\\n")
    sleep(1)

class Late:
    __del__ = wait

@command("prog")
def main(arguments):
    print("done")
    return 0

if sys.argv[1] == "atexit":
    atexit.register(wait)
else:
    late = Late()
sys.exit(main([]))
"""


@pytest.mark.parametrize(
    "phase, says, status", [("atexit", "\nprog: interrupted\n", 130), ("teardown", "", 0)]
)
def test_an_interrupt_while_the_interpreter_ends_is_no_traceback(phase, says, status):
    process = start(SLOW_END, phase)
    assert process.stderr.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=10) == ("done\n", says)
    assert process.returncode == status


def test_a_command_without_stdout_ends_as_any():
    shell = 'exec "$0" -c "$1" teardown >&-'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, SLOW_END], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "ready\n")


UNREAD = """
import sys
from nanorchestra.errors import command

@command("unread")
def main(arguments):
    print("a line that stays in the buffer")
    return 0

sys.stdin.read()
sys.exit(main([]))
"""


def test_a_reader_that_has_gone_away_is_status_1_without_a_word():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with subprocess.Popen([sys.executable, "-c", UNREAD], env=buffered, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", 1)


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(name, *_):
        if name.endswith("options"):
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", ["evaluate.py", "train.py", "serve.py", "tools.py"])
def test_an_interrupt_while_options_are_imported_is_one_line_and_130(program):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, program, "--help"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, f"\n{program}: interrupted\n")


def test_a_closed_pipe_is_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    assert process.wait(timeout=10) == 1 and process.stderr.read() == b""


@pytest.mark.parametrize("program", ["serve.py", "tools.py", "train.py", "evaluate.py"])
def test_help_and_wrong_options_do_not_wait_for_torch(program):
    """`python -X importtime` writes a line for each module that is imported."""
    for word, status in (("--help", 0), ("--nonsense", 2)):
        command = [sys.executable, "-X", "importtime", program, word]
        root = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert done.returncode == status and not re.search(r"\| +torch$", done.stderr, re.M)
        assert "argparse" in done.stderr


def test_the_options_know_what_the_modules_with_torch_can_do():
    assert (*quantise.MODES,) == serve_options.MODES and tools_options.KINDS == vectors.KINDS
