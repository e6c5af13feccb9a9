"""The errors that the user caused, and how a command ends: with one line and an exit status.

A command's file begins and ends like this, because torch takes seconds to import:

    if __name__ == "__main__":
        from nanorchestra.errors import end_on_interrupt

        end_on_interrupt("serve.py")

    import torch  # and the other imports

    @command("serve.py")
    def main(arguments: list[str]) -> int: ...

    if __name__ == "__main__":
        sys.exit(main(sys.argv[1:]))
"""

import argparse
import atexit
import difflib
import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

INTERRUPTED = 130  # exit status, as a shell reports a program that SIGINT ended


class UserError(Exception):
    """The user gave something wrong. The message is one line: file, field, value, what is right."""

    code: str | None = None  # the kind of error, in the server's answers


class WorldError(UserError):
    """A user's own world or reward is wrong, which ends a run: no failure of the infrastructure."""


class NotFiniteError(UserError, FloatingPointError):
    """A model computed NaN or infinity."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite: a weight is NaN or infinite, or an activation "
            "overflowed; another checkpoint is needed"
        )


def require(condition: object, message: str) -> None:
    """Raises UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" for the known name that a misspelt word is like, else ""."""
    found = difflib.get_close_matches(word, list(known), 1, 0.7)
    return f"; did you mean {found[0]}?" if found else ""


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that raises UserError in place of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError with argparse's message, and the option that is meant, if one is."""
        _, found, words = message.partition("unrecognized arguments: ")
        for word in words.split() if found else ():
            if word.startswith("--"):
                message += nearest(word.partition("=")[0], self._option_string_actions)
        raise UserError(f"{message} (--help shows the usage)")


def end_on_interrupt(program: str) -> None:
    """Makes Ctrl-C end the process at once with one line and status 130, but while `command` runs.

    After the exit handlers, while the interpreter frees its modules, a second or more with torch,
    Ctrl-C does nothing: the work is done, and Python would let it end the process without a word.
    """

    def end(*_):
        os.write(2, f"\n{program}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def command(program: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    """Decorates a command's `main(arguments) -> exit status`, so that it returns for every error.

    UserError is one line on stderr and status 2, memory that is refused one line and status 1,
    Ctrl-C status 130, a reader of the output that has gone away status 1. Other exceptions are
    bugs and keep their traceback.
    """

    def decorate(main):
        @functools.wraps(main)
        def run(arguments):
            before = signal.getsignal(signal.SIGINT)
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                status = main(arguments)
                print(end="", flush=True)
                return status
            except UserError as error:
                print(f"{program}: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print(f"\n{program}: interrupted", file=sys.stderr)
                return INTERRUPTED
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 1
            except (MemoryError, OSError, RuntimeError) as error:
                if not _memory_is_refused(error):
                    raise
                text = "no memory is left, or a limit such as ulimit -v is too low"
                print(f"{program}: {text} ({' '.join(str(error).split())})", file=sys.stderr)
                return 1
            finally:
                with suppress(BrokenPipeError):
                    print(end="", flush=True)  # as Ctrl-C may now end the process at once
                signal.signal(signal.SIGINT, before or signal.SIG_DFL)

        return run

    return decorate


def _memory_is_refused(error: Exception) -> bool:
    """Returns whether the system gave no memory: to Python, torch's CPU allocator or a thread."""
    told = ("can't allocate memory", "can't start new thread")
    no_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return no_memory or any(words in str(error) for words in told)
