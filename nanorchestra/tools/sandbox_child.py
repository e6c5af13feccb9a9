"""The confined side of sandbox.py, run as a script: it imports nothing of this project.

For each request on stdin, a JSON line {"code", "timeout_s"}, it forks a child, which gives up its
rights, runs the code and exits; the reply on stdout is a JSON line {"stdout", "error"}.
This process never runs what it was sent. A child that cannot give up its rights exits before it
looks at the code.
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
import shutil
import signal
import struct
import sys
import traceback
import types

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox.json")) as _file:
    TABLE = json.load(_file)
MAX_OUTPUT = 8192  # bytes
MAX_ERROR = 500  # characters
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38  # <linux/prctl.h>
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Answers requests until stdin ends, then removes the scratch directory."""
    directory = os.getcwd()
    for name in TABLE["preload"]:  # so that importing them costs a run nothing
        importlib.import_module(name)
    ruleset = landlock_ruleset(directory, sys.argv[1])
    filter_program = seccomp_filter(with_files=ruleset >= 0)
    gc.collect()
    gc.freeze()  # collecting would write to, and so copy, pages shared with the children
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            request = json.loads(line)
            load_libraries(request["code"], sys.argv[1])
            print(json.dumps(serve(**request, confinement=(ruleset, filter_program))))
            sys.stdout.flush()
            for entry in os.scandir(directory):
                os.unlink(entry.path)  # Landlock lets a run make plain files only
    shutil.rmtree(directory, ignore_errors=True)


def load_libraries(code: str, place: str) -> None:
    """Imports the libraries that the code names, from the directory `place`, for later runs too.

    On one thread, since a child has no right to more. A library that cannot be imported stays away.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.path.append(place)
    for name in TABLE["libraries"]:
        if name in code and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            gc.freeze()
    sys.path.pop()


def serve(code: str, timeout_s: float, confinement: tuple) -> dict:
    """Runs `code` in a child and returns what it printed, and how it ended."""
    worker, out, err = os.getpid(), os.memfd_create("stdout"), os.memfd_create("stderr")
    pid = os.fork()
    if pid == 0:
        try:
            confine(worker, out, err, *confinement)
        except BaseException:
            os._exit(97)
        run_source(code)
    pidfd, poll = os.pidfd_open(pid), select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(0, 0)  # only its hang-up: the owner is gone
    timed_out = not poll.poll(timeout_s * 1000)
    os.kill(pid, signal.SIGKILL)  # a child that has ended is a zombie, its pid still its own
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    printed = os.pread(out, MAX_OUTPUT + 1, 0)
    stdout = printed[:MAX_OUTPUT].decode("utf-8", "replace")
    if len(printed) > MAX_OUTPUT:
        stdout += f"\n[cut after {MAX_OUTPUT} bytes]\n"
    end = os.pread(err, MAX_OUTPUT, max(0, os.fstat(err).st_size - MAX_OUTPUT))
    for descriptor in (out, err, pidfd):
        os.close(descriptor)
    error = f"timed out after {timeout_s:g} s" if timed_out else explain(status, end)
    return {"stdout": stdout, "error": error}


def explain(status: int, stderr: bytes) -> str:
    """Returns one line on how a child ended, "" if well."""
    if status == 0:
        return ""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {status}"


def confine(worker: int, out: int, err: int, ruleset: int, filter_program) -> None:
    """Gives up, for good, every right but computing and the scratch directory.

    Raises OSError if one stays.
    """
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != worker:
        raise OSError("the worker died before its child was bound to it")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for descriptor, place in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(descriptor, place)
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


def landlock_ruleset(directory: str, place: str) -> int:
    """Returns a descriptor of the file rules, -1 on a kernel without Landlock.

    Python's library, shared libraries and the packages of TABLE["packages"] in `place` can be read,
    plain files in `directory` made and changed.
    The access bits are those of <linux/landlock.h>; all thirteen of its first version are denied
    unless granted.
    """
    if libc.syscall(SYS_LANDLOCK_CREATE, None, 0, 1) < 1:  # asked for its version
        return -1
    write_file, read_file, read_dir, remove_file, make_file = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
    attributes = struct.pack("<Q", (1 << 13) - 1)
    ruleset = check(libc.syscall(SYS_LANDLOCK_CREATE, attributes, len(attributes), 0))
    library = os.path.dirname(os.path.dirname(os.path.abspath(os.__file__)))
    packages = (os.path.join(place, name) for name in TABLE["packages"])
    folders = (library, sys.base_prefix + "/lib", *TABLE["readable"], *packages)
    readable = filter(os.path.isdir, folders)
    rules = dict.fromkeys(readable, read_file | read_dir)
    rules[directory] = write_file | read_file | read_dir | remove_file | make_file
    for path, access in rules.items():
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        beneath = struct.pack("<Qi", access, descriptor)
        check(libc.syscall(SYS_LANDLOCK_ADD, ruleset, 1, beneath, 0))
        os.close(descriptor)
    return ruleset


class Program(ctypes.Structure):
    """struct sock_fprog of <linux/filter.h>."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def seccomp_filter(with_files: bool) -> Program:
    """Returns classic BPF that allows the calls of sandbox.json and refuses others with EPERM.

    It kills on a foreign architecture. KeyError on a machine that the file does not know.
    """
    machine = TABLE["architectures"][os.uname().machine]
    calls = TABLE["calls"] | (TABLE["file_calls"] if with_files else {})
    column = machine["column"]
    numbers = [call[column] for call in calls.values() if call[column] is not None]
    load, jump_equal, ret = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, machine["audit"]), (ret, 0, 0, kill)]
    program += [(load, 0, 0, 0)]
    program += [(jump_equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(ret, 0, 0, refuse), (ret, 0, 0, allow)]
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    return Program(len(program), code)


def run_source(code: str) -> None:
    """Runs the program as __main__ in the child, shows the value of a last expression, and exits.

    An exception becomes the last line of stderr.
    """
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed(0)
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    status = 0
    try:
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
