"""Brings a model to all nodes of a training before its ranks load it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanorchestra import formats

DOWNLOAD_S = 24 * 3600.0  # that ranks wait for the download of another one


def fetch(word: str, ranks: Any) -> str:
    """Returns the word, a hub id with its commit, once the model is on every node. UserError.

    One rank of a node downloads it, or converts a GGUF file. All ranks, of the class
    training.distributed.Ranks, call this.
    """
    name = ranks.broadcast(formats.pinned(word) if ranks.first else "")
    waiting = ranks.with_own_group(DOWNLOAD_S)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with _interrupted_at_once():
            formats.directory_of(name)
    waiting.barrier()
    return name


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Lets SIGINT and SIGTERM end a download; train.py takes them as a wish to end after a step."""
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as a shell starts a job in background
            handlers[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
