"""The errors that the user caused, and how a command ends: with one line and an exit status."""

import argparse
import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable
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


def command(program: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    """Decorates a command's `main(arguments) -> exit status`, so that it returns for every error.

    UserError is one line on stderr and status 2, Ctrl-C status 130, a reader of the output that has
    gone away status 1. Other exceptions keep their traceback.
    """

    def decorate(main):
        @functools.wraps(main)
        def run(arguments):
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

        return run

    return decorate
