"""The confined side of sandbox.py, run as a script: it imports nothing of this project.

sandbox.py and this worker talk over one socket, whose descriptor is the first argument. For each
request, a JSON message {"timeout_s", "libraries"}, the worker imports the libraries, says "ready",
and forks a child, which gives up its rights, reads the program from stdin, runs it and exits. The
reply is the child's exit status, a JSON number, negative for a signal, null after a time-out.

The worker's stdin, stdout and stderr are three files in memory that sandbox.py writes and reads.
Only a child uses them: the worker never holds a program or its output, so that no later child can
find them in its copy of the worker's memory. A child that cannot give up its rights exits before it
reads the program.
"""

import ast
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import struct
import sys
import traceback
import types

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox.json")) as _file:
    TABLE = json.load(_file)
PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAX_ERROR = 500  # characters
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # <linux/prctl.h>
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Answers requests until sandbox.py closes its end of the socket."""
    control, site_packages = os.dup(int(sys.argv[1])), sys.argv[2]
    os.close(int(sys.argv[1]))  # its number may be high; dup takes the lowest that is free
    for name in TABLE["preload"]:  # so that importing them costs a run nothing
        importlib.import_module(name)
    os.chdir("/")
    drop_capabilities()
    ruleset = landlock_ruleset(site_packages)
    filter_program = seccomp_filter(with_files=ruleset >= 0)
    gc.collect()
    gc.freeze()  # collecting would write to, and so copy, pages shared with the children
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while message := os.read(control, 1 << 16):
            request = json.loads(message)
            load_libraries(request["libraries"], site_packages)
            os.write(control, b"ready")
            status = serve(control, request["timeout_s"], ruleset, filter_program)
            os.write(control, json.dumps(status).encode())


def drop_capabilities() -> None:
    """Gives up all capabilities, of root too. Raises OSError if one stays."""
    header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(libc.capset(header, bytes(24)))


def load_libraries(names: list[str], site_packages: str) -> None:
    """Imports libraries from the directory `site_packages` or the project, for later runs too.

    On one thread, since a child has no right to more. A library that cannot be imported stays away.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.path += [site_packages, PROJECT]
    for name in names:
        if name not in sys.modules:
            quiet = contextlib.redirect_stderr(None)  # stderr belongs to the run
            with contextlib.suppress(Exception), quiet:
                importlib.import_module(name)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            gc.freeze()
    del sys.path[-2:]


def serve(control: int, timeout_s: float, ruleset: int, filter_program) -> int | None:
    """Runs the program on stdin in a child. Returns its exit status, None after a time-out."""
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            confine(worker, ruleset, filter_program)
        except BaseException:
            os._exit(97)
        run_program()
    pidfd, poll = os.pidfd_open(pid), select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(control, 0)  # only its hang-up: the owner is gone
    timed_out = not poll.poll(timeout_s * 1000)
    os.kill(pid, signal.SIGKILL)  # a child that has ended is a zombie, its pid still its own
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(pidfd)
    return None if timed_out else status


def confine(worker: int, ruleset: int, filter_program) -> None:
    """Gives up, for good, every right but computing. Raises OSError if one stays."""
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != worker:
        raise OSError("the worker died before its child was bound to it")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))  # no core file, none for a core handler either
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if ruleset >= 0:
        check(libc.syscall(SYS_LANDLOCK_RESTRICT, ruleset, 0))
    os.closerange(3, 256)
    os.environ.clear()
    for limit, value in TABLE["limits"].items():
        resource.setrlimit(getattr(resource, limit), (value, value))
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(filter_program), 0, 0))


def check(result: int) -> int:
    """Returns the result of a system call; raises OSError if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def landlock_ruleset(site_packages: str) -> int:
    """Returns a descriptor of the file rules, -1 on a kernel without Landlock.

    Python's library, shared libraries and the packages of TABLE["packages"] in `site_packages` can
    be read, but no package beside them, of which names alone can be listed. The access bits are
    those of <linux/landlock.h>; all thirteen of its first version are denied unless granted.
    """
    if libc.syscall(SYS_LANDLOCK_CREATE, None, 0, 1) < 1:  # asked for its version
        return -1
    read_file, read_dir = 1 << 2, 1 << 3
    attributes = struct.pack("<Q", (1 << 13) - 1)
    ruleset = check(libc.syscall(SYS_LANDLOCK_CREATE, attributes, len(attributes), 0))
    library = os.path.dirname(os.path.abspath(os.__file__))
    packages = (os.path.join(site_packages, name) for name in TABLE["packages"])
    rules = {library: read_dir}  # importing lists it
    for folder in (library, sys.base_prefix + "/lib", *TABLE["readable"]):
        for entry in entries(folder):
            is_folder = entry.is_dir(follow_symlinks=False)
            rules[entry.path] = read_file | read_dir if is_folder else read_file
    zones = "/usr/share/zoneinfo"  # whole, for it has no packages and is listed
    rules |= dict.fromkeys(filter(os.path.isdir, (zones, *packages)), read_file | read_dir)
    for path, access in rules.items():
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        beneath = struct.pack("<Qi", access, descriptor)
        check(libc.syscall(SYS_LANDLOCK_ADD, ruleset, 1, beneath, 0))
        os.close(descriptor)
    return ruleset


def entries(folder: str) -> list[os.DirEntry]:
    """Returns the files and directories of a folder, without those that hold Python's packages.

    Links are left out: what they lead to has an entry of its own. [] if there is no such folder.
    """
    if not os.path.isdir(folder):
        return []
    return [
        entry
        for entry in os.scandir(folder)
        if (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))
        and not entry.name.startswith("python")
        and entry.name not in ("site-packages", "dist-packages")
    ]


class Program(ctypes.Structure):
    """struct sock_fprog of <linux/filter.h>."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def seccomp_filter(with_files: bool) -> Program:
    """Returns classic BPF that allows the calls of sandbox.json and refuses others with EPERM.

    It kills on a foreign architecture. KeyError on a machine that the file does not know.
    """
    machine = TABLE["architectures"][os.uname().machine]
    calls = TABLE["calls"] | (TABLE["file_calls"] if with_files else {})
    load, jump_equal, bits_and, ret = 0x20, 0x15, 0x54, 0x06  # LD|W|ABS, JMP|JEQ, ALU|AND, RET
    allow = (ret, 0, 0, 0x7FFF0000)
    refuse = (ret, 0, 0, 0x00050000 | errno.EPERM)
    kill = (ret, 0, 0, 0x80000000)
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, machine["audit"]), kill]
    program.append((load, 0, 0, 0))  # the number of the call
    for name, numbers in calls.items():
        number = numbers[machine["column"]]
        if number is None:
            continue
        verdict = [allow]
        if name in TABLE["arguments"]:
            position, mask, values = TABLE["arguments"][name]
            verdict = [(load, 0, 0, 16 + 8 * position), (bits_and, 0, 0, mask)]  # its low half
            for value in values:
                verdict += [(jump_equal, 0, 1, value), allow]
            verdict.append(refuse)
        program.append((jump_equal, 0, len(verdict), number))
        program += verdict
    program.append(refuse)
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    return Program(len(program), code)


def run_program() -> None:
    """Runs the program on stdin as __main__, shows the value of a last expression, and exits.

    An exception becomes the last line of stderr.
    """
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed(0)
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    status = 0
    try:
        code = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), module.__dict__)
        if last is not None:
            exec(compile(ast.Interactive([last]), "<code>", "single"), module.__dict__)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            status = 1
            with contextlib.suppress(BaseException):  # the program may have closed stderr
                os.write(2, b"\n" + describe(error).encode("utf-8", "backslashreplace"))
    finally:
        with contextlib.suppress(BaseException):  # or stdout
            sys.stdout.flush()
        os._exit(status)


def describe(error: BaseException) -> str:
    """Returns an exception in one line, with the line of the program."""
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<code>"]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text += f" (line {line})" if line else ""
    return " ".join(text[:MAX_ERROR].splitlines())


if __name__ == "__main__":
    main()
