"""What untrusted code may and may not do, and that nothing of it stays behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nanorchestra.agent.threads import in_thread
from nanorchestra.errors import UserError
from nanorchestra.tools import sandbox as sandbox_module
from nanorchestra.tools.sandbox import Sandbox


@pytest.mark.parametrize(
    "code, stdout, error",
    [
        ("x = 4\nprint(x)\nx**2", "4\n16\n", ""),
        ("print(1)\n1/0", "1\n", "ZeroDivisionError: division by zero (line 2)"),
        ("import os; os.close(1); os.close(2); 1/0", "", "exit status 1"),
        ("import ctypes; ctypes.string_at(0)", "", "killed by SIGSEGV"),
    ],
)
def test_a_program_shows_what_it_prints_its_last_expression_and_its_error(
    sandbox, code, stdout, error
):
    result = sandbox.run(code)
    assert (result.stdout, result.error) == (stdout, error)


def test_numpy_is_there_in_every_run_and_its_neighbours_are_not(sandbox):
    draw = "import numpy\nnumpy.random.rand(1)"
    assert [sandbox.run(draw).stdout for _ in range(2)] == ["array([0.5488135])\n"] * 2
    assert "No module named 'pytest'" in sandbox.run("import pytest").error
    listed = sandbox.run("import os, numpy\nos.listdir(numpy.__path__[0] + '/..')")
    assert "PermissionError" in listed.error
    assert "MemoryError" in sandbox.run("import numpy\nx = bytearray(1 << 30)").error


IGNORE = """
import signal
print("begun")
for s in range(1, 32):
    try: signal.signal(s, signal.SIG_IGN)
    except OSError: pass
while True: pass
"""


def test_what_does_not_end_is_ended(sandbox):
    for code, stdout in ((IGNORE, "begun\n"), ("import time\ntime.sleep(60)", "")):
        result = sandbox.run(code, timeout_s=0.15)
        assert (result.error, result.stdout) == ("timed out after 0.15 s", stdout)
        assert 0.15 <= result.seconds < 1.0


def test_memory_output_and_file_sizes_are_bounded(sandbox):
    assert "MemoryError" in sandbox.run("x = bytearray(1 << 30)").error
    flood = sandbox.run("print('x' * 2_000_000)")
    assert flood.stdout == "x" * 8192 + "\n[cut after 8192 bytes]\n" and flood.error == ""
    endless = sandbox.run("while True: print('x' * 10_000)")
    assert "File too large" in endless.error and len(endless.stdout) < 8300
    many = "import os\npipes = [os.pipe() for i in range(100)]"
    assert "Too many open files" in sandbox.run(many).error


@pytest.mark.parametrize(
    "attempt",
    [
        "os.fork()",
        "__import__('socket').socket()",
        "os.kill(os.getppid(), 9)",
        "os.chmod('/', 0o777)",
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (-1, -1))",
        "open('/etc/passwd')",
        "open('/proc/%d/environ' % os.getppid())",
        "open('/tmp/written', 'w')",
        "os.rename(os.__file__, '/tmp/mine.py')",
        "os.unlink(os.__file__)",
    ],
)
def test_rights_that_were_given_up(sandbox, attempt):
    refused = "except (OSError, RuntimeError, ValueError) as e:\n    print('refused')"
    result = sandbox.run(f"import os\ntry:\n    {attempt}\n{refused}")
    assert (result.stdout, result.error) == ("refused\n", "")


def test_raw_system_calls_are_refused_as_well(sandbox):
    """The confinement is the kernel's: going round Python's own functions does not help."""
    code = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n[(c.{0}, ctypes.get_errno())]"
    for call in (
        "fork()",
        "socket(2, 1, 0)",
        "syscall(425, 8, 0)",
        "fcntl(1, 8, 1)",  # F_SETOWN
        "madvise(0, 4096, 12)",  # MADV_MERGEABLE
        "mmap(0, 4096, 3, 0x42022, -1, 0)",  # MAP_LOCKED, MAP_HUGETLB
        "pipe2(0, 128)",  # O_NOTIFICATION_PIPE
    ):
        assert sandbox.run(code.format(call)).stdout == "[(-1, 1)]\n", call


NATIVE = """
import ctypes, fcntl, os, struct
c = ctypes.CDLL(None, use_errno=True)
c.mmap.restype = c.sbrk.restype = ctypes.c_void_p
c.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
"""
ATTACKS = {  # each worked once. `victim` is a process, `book` a file that can be read
    "a pipe's owner is any process, and its signal is 9": """
r, w = os.pipe()
fcntl.fcntl(r, 8, {victim})
fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, 4, 0o20000)
os.write(w, b"x")
""",
    "a file becomes immutable for root": """
attributes = fcntl.ioctl(open({book!r}), 0x80086601, bytes(8))
fcntl.ioctl(open({book!r}), 0x40086602, attributes)
""",
    "a file opened to neither read nor write is emptied": "os.open({book!r}, 3 | os.O_TRUNC)",
    "root maps the page at 0": """
if c.mmap(ctypes.c_void_p(0), 4096, 3, 0x32, -1, 0) is not None and ctypes.get_errno():
    raise OSError
""",
    "the memory of the worker holds the run before": """
import re
r, w = os.pipe()
kinds = set()
for near, size in ((c.sbrk(0) - (16 << 20), 16 << 20), (id(c) - (48 << 20), 64 << 20)):
    start = near >> 12 << 12
    for page in range(start, start + size, 4096):
        if c.write(w, page, 4096) > 0:
            kinds.update(re.findall(rb"Q[X](CODE|PRINTED|RAISED)9", os.read(r, 4096)))
if not kinds:
    raise OSError
print(kinds)
""",
}
SECRETS = """
note = 'QXCODE9' * 9
print('-'.join(['Q', 'XPRINTED9' * 9]).replace('-', ''))
raise ValueError('Q' + 'XRAISED9' * 9)
"""


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_attacks_that_worked_once(attack, copied_sandbox, tmp_path):
    """Each was seen to work: with the rights of root, some with those of any user."""
    book = tmp_path / "readable" / "book"
    book.parent.mkdir()
    book.write_text("a library")
    copied_sandbox("sandbox.json", '"readable": [', f'"readable": ["{book.parent}", ')
    victim = subprocess.Popen(["sleep", "60"])
    with Sandbox(workers=1) as one:
        one.run(SECRETS)
        program = textwrap.indent(attack.format(victim=victim.pid, book=str(book)), "    ")
        refused = "except OSError:\n    print('held')"
        result = one.run(f"{NATIVE}\ntry:\n{program}\n    print('fell')\n{refused}", 30.0)
        assert (result.stdout, result.error) == ("held\n", "")
        assert book.read_text() == "a library" and victim.poll() is None
        result = one.run("1")
        assert result.stdout == "1\n" and result.seconds < 0.5
    victim.kill()
    victim.wait()


def test_no_secret_no_descriptor_and_no_capability_of_the_caller(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret-value")
    leak = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(leak, True)
    opened = "import os\nfor i in range(300):\n    try: os.fstat(i); print(i)\n"
    opened += "    except OSError: pass"
    with Sandbox(workers=1) as fresh:
        assert fresh.run("import os; dict(os.environ)").stdout == "{}\n"
        assert fresh.run(opened).stdout == "0\n1\n2\n"
        worker = Path(f"/proc/{fresh._idle.queue[-1].process.pid}")
        assert (worker / "environ").read_bytes() == b"PYTHONHASHSEED=0\0"
        assert "\nCapEff:\t0000000000000000\n" in (worker / "status").read_text()
    os.close(leak)


def test_a_run_sees_nothing_of_the_one_before_and_repeats_itself():
    change = "import math, builtins\nmath.pi = builtins.x = 3\n'changed'"
    look = "import math\n(math.pi > 3.1, 'x' in dir(__builtins__))"
    draw = "import random\n(random.random(), list({'a', 'b', 'c', 'd', 'e'}))"
    with Sandbox(workers=1) as first, Sandbox(workers=1) as second:
        assert first.run(change).stdout == "'changed'\n"
        assert first.run(look).stdout == "(True, False)\n"
        assert first.run(draw).stdout == first.run(draw).stdout == second.run(draw).stdout


def test_a_stopped_worker_is_ended_and_replaced_and_one_that_is_not_free_is_no_error_of_the_code(
    monkeypatch,
):
    """A deadline that the worker keeps alone would never come."""
    monkeypatch.setattr(sandbox_module, "GRACE_S", 0.2)
    with Sandbox(workers=1) as one:
        process = one._idle.queue[0].process
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr(sandbox_module, "START_S", 0.2)
        result = one.run("1+1", timeout_s=0.1)
        assert "it was not ready within 0.2 s" in result.error
        assert result.died and result.seconds < 1.0
        assert process.returncode == -signal.SIGKILL
        monkeypatch.undo()
        assert one.run("1+1").stdout == "2\n"
        monkeypatch.setattr(sandbox_module, "WAIT_S", 0.1)
        worker = one._idle.get()
        result = one.run("1+1")
        assert result.died and "no worker of the sandbox was free" in result.error
        one._idle.put(worker)


@pytest.mark.parametrize("killed", ["owner", "owner and worker"])
def test_nothing_is_left_when_the_owner_is_killed(killed):
    """The owner gets SIGKILL in the middle of a run: it cannot clean up, its worker must."""
    program = textwrap.dedent("""
        from nanorchestra.tools.sandbox import Sandbox
        sandbox = Sandbox(workers=1)
        print(sandbox._idle.queue[-1].process.pid, flush=True)
        sandbox.run("while True: pass", timeout_s=30)
    """)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", program]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(owner.stdout.readline())
    child = wait_for(lambda: child_of(worker))
    if killed == "owner and worker":
        owner.send_signal(signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: gone(child))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: gone(worker) and gone(child))


def test_what_the_machine_cannot_confine_is_not_allowed(copied_sandbox):
    """Without Landlock no file is opened, else nothing runs."""
    copied_sandbox("sandbox_child.py", "PR_SET_SECCOMP, 2,", "PR_SET_SECCOMP, 99,")
    with pytest.raises(UserError, match="cannot be confined here .exit status 97"):
        Sandbox(workers=1)
    copied_sandbox("sandbox_child.py", "capset(header", "capset(None")
    with pytest.raises(UserError, match="cannot be confined here .the sandbox process died"):
        Sandbox(workers=1)
    copied_sandbox("sandbox_child.py", "landlock_ruleset(site_packages)\n", "-1\n")
    with Sandbox(workers=1) as one:
        assert one.run("import math, statistics, json\nmath.factorial(5)").stdout == "120\n"
        for path, mode in (("/etc/passwd", "r"), ("/proc/1/environ", "r"), ("here", "w")):
            assert "PermissionError" in one.run(f"open({path!r}, {mode!r})").error


@pytest.fixture
def copied_sandbox(monkeypatch, tmp_path):
    """Makes sandboxes run a copy of the confined side, in which one text is replaced."""
    original = sandbox_module.CHILD
    monkeypatch.setattr(sandbox_module, "CHILD", tmp_path / original.name)

    def replace(name, old, new):
        for each in (original, original.with_name("sandbox.json")):
            text = each.read_text()
            assert each.name != name or old in text
            (tmp_path / each.name).write_text(text.replace(old, new))

    return replace


def child_of(pid) -> str | None:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return next(iter(file.read().split()), None)


def gone(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition):
    deadline = time.monotonic() + 1.8
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value


def test_a_run_whose_call_is_cancelled_ends_at_once(sandbox):
    """It held its worker for the rest of its time-out."""

    async def cancelled():
        call = asyncio.ensure_future(in_thread(sandbox.run, "while True: pass", 60.0))
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.wait([call])

    start = time.monotonic()
    asyncio.run(cancelled())
    assert sandbox.run("1").stdout == "1\n"
    assert time.monotonic() - start < 30
