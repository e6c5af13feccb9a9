"""A command ends with one line and an exit status, whatever its user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from nanorchestra.errors import ArgumentParser, command, require


def test_a_user_error_is_a_line_and_status_2(capsys):
    @command("prog")
    def main(arguments):
        ArgumentParser().parse_args(arguments)
        require(False, "n is 3")

    assert main(["--n"]) == 2 and "prog: unrecognized arguments: --n" in capsys.readouterr().err
    assert main([]) == 2 and capsys.readouterr().err == "prog: n is 3\n"


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


@pytest.mark.parametrize("phase", ["import", "run"])
def test_an_interrupt_is_one_line_and_130_at_any_time(phase):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    if phase == "run":
        process.stdout.readline()
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=10)[1] == "\nprog: interrupted\n"
    assert process.returncode == 130


def test_a_closed_pipe_is_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    assert process.wait(timeout=10) == 1 and process.stderr.read() == b""
