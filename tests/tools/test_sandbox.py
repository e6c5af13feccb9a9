"""What untrusted code may and may not do, and that nothing of it stays behind."""

import glob
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from nanorchestra.errors import UserError
from nanorchestra.tools import sandbox as sandbox_module
from nanorchestra.tools.sandbox import Sandbox


@pytest.mark.parametrize(
    "code, stdout",
    [
        ("17*23", "391\n"),
        ("x = 4\nprint(x)\nx**2", "4\n16\n"),
        ("print(1)\nNone", "1\n"),
        ("'é😀'", "'é😀'\n"),
        ("from __future__ import annotations\nfrom math import comb\ncomb(10, 3)", "120\n"),
        ("import sys; sys.exit()", ""),
    ],
)
def test_programs_run_and_a_last_expression_is_shown(sandbox, code, stdout):
    result = sandbox.run(code)
    assert (result.stdout, result.error) == (stdout, "")


@pytest.mark.parametrize(
    "library, code, stdout",
    [
        ("numpy", "import numpy as np\nnp.linalg.inv(np.eye(1) * 2)", "array([[0.5]])\n"),
        ("numpy", "import numpy\nnumpy.random.rand(1)", "array([0.5488135])\n"),
        (
            "sympy",
            "from sympy.abc import x\nimport sympy\nsympy.factor(x**2 - 1)",
            "(x - 1)*(x + 1)\n",
        ),
        ("pandas", "import pandas as pd\npd.Timestamp('2020-01-03').day_name()", "'Friday'\n"),
    ],
)
def test_libraries_are_there_in_every_run_and_their_neighbours_are_not(
    sandbox, library, code, stdout
):
    pytest.importorskip(library)
    assert [sandbox.run(code).stdout for _ in range(2)] == [stdout] * 2
    assert "No module named 'pytest'" in sandbox.run("import pytest").error
    listed = sandbox.run(f"import os, {library}\nos.listdir({library}.__path__[0] + '/..')")
    assert "PermissionError" in listed.error
    assert "MemoryError" in sandbox.run(f"import {library}\nx = bytearray(1 << 30)").error


@pytest.mark.parametrize(
    "code, error",
    [
        ("print('so far')\n1/0", "ZeroDivisionError: division by zero (line 2)"),
        ("x = = 1", "SyntaxError: invalid syntax (line 1)"),
        ("raise ValueError('a\\nb')", "ValueError: a b (line 1)"),
        ("import sys; sys.exit('bad input')", "SystemExit: bad input"),
        ("import os; os.close(1); os.close(2); 1/0", "exit status 1"),
        ("input()", "EOFError"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    ],
)
def test_failures_are_one_line_and_the_next_run_is_unharmed(sandbox, code, error):
    result = sandbox.run(code)
    assert error in result.error
    assert "\n" not in result.error
    assert result.stdout == ("so far\n" if "so far" in code else "")
    assert sandbox.run("2+2").stdout == "4\n"


@pytest.mark.parametrize(
    "code",
    [
        "print('begun')\nimport time\ntime.sleep(60)",
        "while True: pass",
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: pass",
    ],
)
def test_what_does_not_end_is_ended(sandbox, code):
    result = sandbox.run(code, timeout_s=0.15)
    assert result.error == "timed out after 0.15 s"
    assert 0.15 <= result.seconds < 1.0
    assert result.stdout == ("begun\n" if "begun" in code else "")


def test_memory_output_and_file_sizes_are_bounded(sandbox):
    assert "MemoryError" in sandbox.run("x = bytearray(1 << 30)").error
    flood = sandbox.run("print('x' * 2_000_000)")
    assert flood.stdout == "x" * 8192 + "\n[cut after 8192 bytes]\n" and flood.error == ""
    endless = sandbox.run("while True: print('x' * 10_000)")
    assert "File too large" in endless.error and len(endless.stdout) < 8300
    assert sandbox.run("raise ValueError('x' * 10**6)").error == "ValueError: " + "x" * 488
    many = "fs = [open(str(i), 'w') for i in range(100)]"
    assert "Too many open files" in sandbox.run(many).error


@pytest.mark.parametrize(
    "attempt",
    [
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "__import__('threading').Thread(target=print).start()",
        "__import__('socket').socket()",
        "os.kill(os.getppid(), 9)",
        "os.chmod('/', 0o777)",
        "os.mkdir('/tmp/made')",
        "os.symlink('/etc', 'link')",
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (-1, -1))",
        "open('/etc/passwd')",
        "open('/proc/%d/environ' % os.getppid())",
        "open('/tmp/written', 'w')",
        "os.listdir('..')",
        "os.rename(os.__file__, 'mine.py')",
    ],
)
def test_rights_that_were_given_up(sandbox, attempt):
    refused = "except (OSError, RuntimeError, ValueError) as e:\n    print('refused')"
    result = sandbox.run(f"import os\ntry:\n    {attempt}\n{refused}")
    assert (result.stdout, result.error) == ("refused\n", "")


def test_raw_system_calls_are_refused_as_well(sandbox):
    """The confinement is the kernel's: going round Python's own functions does not help."""
    code = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n[(c.{0}, ctypes.get_errno())]"
    for call in ("fork()", "socket(2, 1, 0)", "prctl(1, 0, 0, 0, 0)", "syscall(425, 8, 0)"):
        assert sandbox.run(code.format(call)).stdout == "[(-1, 1)]\n", call


def test_no_secret_and_no_descriptor_of_the_caller(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret-value")
    leak = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(leak, True)
    opened = (
        "import os\nopened = []\nfor i in range(300):\n"
        "    try: os.fstat(i); opened.append(i)\n    except OSError: pass\nopened"
    )
    with Sandbox(workers=1) as fresh:
        assert fresh.run("import os; dict(os.environ)").stdout == "{}\n"
        assert fresh.run(opened).stdout == "[0, 1, 2]\n"
        with open(f"/proc/{fresh._idle.queue[-1].process.pid}/environ", "rb") as environment:
            assert environment.read() == b"PYTHONHASHSEED=0\0"
    os.close(leak)


def test_a_run_sees_nothing_of_the_one_before_and_repeats_itself():
    change = "import math, builtins\nmath.pi = builtins.x = 3\nopen('note', 'w').write('hello')"
    look = "import math, os\n(math.pi > 3.1, 'x' in dir(__builtins__), os.listdir('.'))"
    draw = "import random\n(random.random(), list({'a', 'b', 'c', 'd', 'e'}))"
    with Sandbox(workers=1) as first, Sandbox(workers=1) as second:
        assert first.run(change).stdout == "5\n"
        assert first.run(look).stdout == "(True, False, [])\n"
        assert first.run(draw).stdout == first.run(draw).stdout == second.run(draw).stdout


def test_a_killed_worker_is_reported_and_replaced_and_a_closed_sandbox_leaves_nothing():
    one = Sandbox(workers=1)
    (worker,) = one._idle.queue
    directory = worker.directory
    os.kill(worker.process.pid, signal.SIGKILL)
    assert one.run("1+1").error == "the sandbox process died" and not os.path.exists(directory)
    assert one.run("1+1").stdout == "2\n"
    process, directory = worker.process, worker.directory
    one.close()
    one.close()
    assert process.returncode is not None and not os.path.exists(directory)


def test_nothing_is_left_when_the_owner_is_killed(tmp_path):
    """The owner gets SIGKILL in the middle of a run: it cannot clean up, its worker must."""
    program = textwrap.dedent("""
        from nanorchestra.tools.sandbox import Sandbox
        sandbox = Sandbox(workers=1)
        print(sandbox._idle.queue[-1].process.pid, flush=True)
        sandbox.run("open('f', 'w').write('x')\\nwhile True: pass", timeout_s=30)
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", program]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(owner.stdout.readline())
    child = wait_for(lambda: child_of(worker))
    wait_for(lambda: glob.glob(str(tmp_path / "sandbox-*" / "f")))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: gone(worker) and gone(child) and not os.listdir(tmp_path))


def test_without_landlock_no_file_can_be_opened_and_without_seccomp_nothing_runs(
    monkeypatch, tmp_path
):
    """An older kernel computes without files; if seccomp says no, the source is not looked at."""
    child, table = sandbox_module.CHILD, sandbox_module.CHILD.with_name("sandbox.json")
    (tmp_path / table.name).write_text(table.read_text())
    monkeypatch.setattr(sandbox_module, "CHILD", tmp_path / "child.py")

    def alter(old, new):
        assert old in child.read_text()
        (tmp_path / "child.py").write_text(child.read_text().replace(old, new))

    alter("PR_SET_SECCOMP, 2,", "PR_SET_SECCOMP, 99,")
    with pytest.raises(UserError, match="cannot be confined here .exit status 97"):
        Sandbox(workers=1)
    alter("landlock_ruleset(directory, sys.argv[1])\n", "-1\n")
    with Sandbox(workers=1) as one:
        assert one.run("import math, statistics, json\nmath.factorial(5)").stdout == "120\n"
        for path, mode in (("/etc/passwd", "r"), ("/proc/1/environ", "r"), ("here", "w")):
            assert "PermissionError" in one.run(f"open({path!r}, {mode!r})").error


def child_of(pid) -> str | None:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return next(iter(file.read().split()), None)


def gone(pid) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition):
    deadline = time.monotonic() + 1.8
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value
