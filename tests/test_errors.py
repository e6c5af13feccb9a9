"""A command ends with one line and an exit status, whatever its user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from nanorchestra.errors import ArgumentParser, UserError, command, require


@pytest.mark.parametrize(
    "error, status, line",
    [
        (UserError("x.json: bad"), 2, "prog: x.json: bad\n"),
        (KeyboardInterrupt(), 130, "\nprog: interrupted\n"),
    ],
)
def test_a_command_ends_with_a_line_and_a_status(capsys, error, status, line):
    @command("prog")
    def main(arguments):
        raise error

    assert main([]) == status and capsys.readouterr().err == line


def test_bad_arguments_are_user_errors():
    parser = ArgumentParser(prog="prog")
    parser.add_argument("--n", type=int)
    with pytest.raises(UserError, match="--n: invalid int value: 'x'"):
        parser.parse_args(["--n", "x"])
    require(True, "unused")
    with pytest.raises(UserError, match="^n is 3$"):
        require([], "n is 3")


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
