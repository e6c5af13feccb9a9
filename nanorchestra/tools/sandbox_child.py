"""The confined side of sandbox.py, run as a script: it imports nothing of ours, and nothing imports it.

It reads requests (length, time-out, source) from descriptor 0 until that ends, and for each forks a child that gives up its rights,
runs the source and exits. The parent part never runs what it was sent; it collects bounded output, keeps the time and answers.
Confinement is all or nothing: a child that cannot give up its rights exits before it looks at the source.
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
import time
import traceback
import types

PRELOAD = (  # imported once here, so that importing them costs a run nothing
    "__future__ abc array base64 binascii bisect calendar cmath collections collections.abc contextlib copy csv dataclasses datetime "
    "_strptime decimal difflib enum fractions functools hashlib heapq io itertools json math numbers operator pprint queue random re "
    "statistics string textwrap time typing unicodedata uuid encodings.ascii encodings.idna encodings.latin_1 encodings.utf_8"
).split()
LIMITS = {
    resource.RLIMIT_AS: 512 << 20,
    resource.RLIMIT_FSIZE: 16 << 20,
    resource.RLIMIT_NOFILE: 32,
    resource.RLIMIT_CORE: 0,
}
MAX_OUTPUT = 8192  # bytes
MAX_ERROR = 500  # characters
UNCONFINED = 97  # exit status of a child that could not be confined

# System call numbers: (x86_64, aarch64), None where the architecture lacks the call.
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "ioctl": (16, 29), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "mremap": (25, 216),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "alarm": (37, None), "setitimer": (38, 103),
    "getitimer": (36, 102), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "exit": (60, 93), "exit_group": (231, 94), "uname": (63, 160), "fcntl": (72, 25),
    "getcwd": (79, 17), "sysinfo": (99, 179), "futex": (202, 98), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "set_robust_list": (273, 99), "rseq": (334, 293), "sigaltstack": (131, 132), "getrandom": (318, 278), "pipe": (22, None),
    "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "fsync": (74, 82),
    "ftruncate": (77, 46), "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "chdir": (80, 49), "getdents64": (217, 61),
}  # fmt: skip
FILE_CALLS = {  # allowed only under Landlock, which judges them by path
    "open": (2, None), "openat": (257, 56), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
}  # fmt: skip
ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # column in the tables, AUDIT_ARCH of <linux/audit.h>

libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38  # <linux/prctl.h>


def main() -> None:
    directory = os.getcwd()  # this worker's own: the scratch directory of its runs, one at a time
    for name in PRELOAD:
        importlib.import_module(name)
    ruleset = landlock_ruleset(directory)
    filter_program = seccomp_filter(with_files=ruleset >= 0)
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, every page shared with the children
    try:
        while True:
            length, timeout_s = struct.unpack("<Id", read_exactly(12))
            reply = json.dumps(
                serve(read_exactly(length), timeout_s, ruleset, filter_program)
            ).encode()
            with os.scandir(directory) as entries:
                for entry in entries:
                    os.unlink(entry.path)  # Landlock lets a run make plain files only
            write_all(1, struct.pack("<I", len(reply)) + reply)
    except (EOFError, BrokenPipeError):  # the owner closed us, or died
        shutil.rmtree(directory, ignore_errors=True)


def serve(source, timeout_s, ruleset, filter_program) -> dict:
    """Fork a child for `source`, collect what it writes until it ends or its time is over."""
    deadline = time.monotonic() + timeout_s
    zygote = os.getpid()
    out_read, out_write = os.pipe()
    error_read, error_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            confine(zygote, out_write, error_write, timeout_s, ruleset, filter_program)
        except BaseException:
            os._exit(UNCONFINED)
        run_source(source)
    os.close(out_write)
    os.close(error_write)
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(0, 0)  # only its hang-up: the owner is gone
    texts = {out_read: b"", error_read: b""}
    for descriptor in (pidfd, out_read, error_read):
        poll.register(descriptor, select.POLLIN)
        os.set_blocking(descriptor, False)
    ended = timed_out = cut = False
    while not ended:
        ready = [
            descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        ]
        timed_out = time.monotonic() >= deadline and pidfd not in ready
        ended = timed_out or pidfd in ready or 0 in ready
        if ended:
            os.kill(
                pid, signal.SIGKILL
            )  # if it has ended by itself it is a zombie until waited for, so the pid is still its own
            ready = list(texts)  # what is left in the pipes: at most 64 KiB each, one read
        for descriptor in ready:
            try:
                piece = os.read(descriptor, 65536)
            except BlockingIOError:
                continue
            if descriptor == out_read:
                cut = cut or len(texts[out_read]) + len(piece) > MAX_OUTPUT
                texts[out_read] = (texts[out_read] + piece)[:MAX_OUTPUT]
            else:
                texts[error_read] = (texts[error_read] + piece)[
                    -MAX_OUTPUT:
                ]  # the end of a traceback is what counts
            if not piece and not ended:
                poll.unregister(descriptor)  # the program closed it and goes on
    _, status = os.waitpid(pid, 0)
    for descriptor in (out_read, error_read, pidfd):
        os.close(descriptor)
    stdout = texts[out_read].decode("utf-8", "ignore" if cut else "replace") + (
        f"\n[cut after {MAX_OUTPUT} bytes]\n" if cut else ""
    )
    lines = texts[error_read].decode("utf-8", "replace").strip().splitlines()
    error = (
        f"timed out after {timeout_s:g} s"
        if timed_out
        else explain(status, lines[-1][:MAX_ERROR] if lines else "")
    )
    return {"stdout": stdout, "error": error, "timed_out": timed_out}


def explain(status: int, last_line: str) -> str:
    """One line for how a child ended, "" if well."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    if code == UNCONFINED and not last_line:
        return "the process could not be confined"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return last_line or f"exit status {code}"


def confine(zygote, out_write, error_write, timeout_s, ruleset, filter_program) -> None:
    """Give up, for good, every right this process has beyond computing and its scratch directory. Raises OSError if one stays."""
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != zygote:
        raise OSError("the worker died before its child could be bound to it")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out_write, 1)
    os.dup2(error_write, 2)
    if ruleset >= 0:
        check(libc.syscall(446, ruleset, 0))  # landlock_restrict_self
    os.closerange(3, 256)
    os.environ.clear()
    for limit, value in {**LIMITS, resource.RLIMIT_CPU: int(timeout_s) + 2}.items():
        hard = resource.getrlimit(limit)[1]  # one that is lower already must stay
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(filter_program), 0, 0))


def check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def landlock_ruleset(directory: str) -> int:
    """A descriptor of the rules: read Python's library and shared libraries, use plain files in `directory`. -1 without Landlock.

    The access bits are those of <linux/landlock.h>; the thirteen of its first version are ruled, and all denied unless granted.
    """
    if libc.syscall(444, None, 0, 1) < 1:  # landlock_create_ruleset, asked for its version
        return -1
    write_file, read_file, read_dir, remove_file, make_file = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
    attributes = struct.pack("<Q", (1 << 13) - 1)
    ruleset = check(libc.syscall(444, attributes, len(attributes), 0))
    library = os.path.dirname(os.path.dirname(os.path.abspath(os.__file__)))
    readable = [
        library,
        sys.base_prefix + "/lib",
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/usr/share/zoneinfo",
    ]
    rules = {path: read_file | read_dir for path in readable if os.path.isdir(path)}
    rules[directory] = write_file | read_file | read_dir | remove_file | make_file
    for path, access in rules.items():
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        check(
            libc.syscall(445, ruleset, 1, struct.pack("<Qi", access, descriptor), 0)
        )  # landlock_add_rule, path beneath
        os.close(descriptor)
    return ruleset


class _Program(ctypes.Structure):  # struct sock_fprog of <linux/filter.h>
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def seccomp_filter(with_files: bool) -> _Program:
    """Classic BPF: kill on a foreign architecture, allow what the tables name, refuse all else with EPERM. Raises KeyError elsewhere."""
    column, architecture = ARCHITECTURES[os.uname().machine]
    tables = [CALLS, FILE_CALLS] if with_files else [CALLS]
    numbers = [
        pair[column] for table in tables for pair in table.values() if pair[column] is not None
    ]
    load, jump_equal, ret = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    program = [
        (load, 0, 0, 4),
        (jump_equal, 1, 0, architecture),
        (ret, 0, 0, kill),
        (load, 0, 0, 0),
    ]
    program += [(jump_equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(ret, 0, 0, refuse), (ret, 0, 0, allow)]
    return _Program(
        len(program), b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    )


def run_source(source: bytes) -> None:
    """In the child: run the program as __main__, show the value of a last expression, report an exception on descriptor 2, exit."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed(0)
    status = 0
    try:
        sys.stdout.reconfigure(
            errors="backslashreplace", line_buffering=True
        )  # what was printed before a time-out is kept
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.argv = [""]
        tree = ast.parse(source.decode("utf-8", "surrogatepass"), "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), module.__dict__)
        if last is not None:
            exec(compile(ast.Interactive([last]), "<code>", "single"), module.__dict__)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status and not isinstance(stop.code, int):
            report(str(stop.code))
    except BaseException as exception:
        status = 1
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(exception.__traceback__)
            if frame.filename == "<code>"
        ]
        line = (
            exception.lineno if isinstance(exception, SyntaxError) else lines[-1] if lines else None
        )
        report(
            traceback.format_exception_only(exception)[-1].strip()
            + (f" (line {line})" if line else "")
        )
    finally:
        with contextlib.suppress(BaseException):  # the program may have closed or replaced it
            sys.stdout.flush()
        os._exit(status & 255)


def report(text: str) -> None:
    """Make `text` the last line on descriptor 2. Where the program closed that, the exit status alone says that it failed."""
    with contextlib.suppress(BaseException):
        os.write(
            2, ("\n" + " ".join(text[:MAX_ERROR].splitlines())).encode("utf-8", "backslashreplace")
        )


def read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
