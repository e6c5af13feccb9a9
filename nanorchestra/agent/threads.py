"""Runs calls in daemon threads, for which neither Ctrl-C nor the exit of the process waits.

A call whose result is no longer waited for is told so, and may end early: see `abandoned`.
"""

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

S, T = TypeVar("S"), TypeVar("T")
_ABANDONED: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("abandoned")


def in_daemon(call: Callable[[], T]) -> Future[T]:
    """Runs `call` in a daemon thread, in the caller's context; returns the future of its result."""
    future, context = Future(), contextvars.copy_context()
    future.set_running_or_notify_cancel()  # so that a cancelled attempt leaves it alone

    def work():
        try:
            future.set_result(context.run(call))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def in_daemons(call: Callable[[S], T], items: Iterable[S], most: int) -> Iterator[T]:
    """Yields the result of `call` of each item, in order; at most `most` of them run at a time.

    If the results are no longer asked for, as after Ctrl-C, no further call begins. If a call
    raises, those that run are waited for: they may be paid for.
    """
    begun: deque[Future[T]] = deque()
    try:
        for item in items:
            if len(begun) == most:
                yield begun.popleft().result()
            begun.append(in_daemon(partial(call, item)))
        while begun:
            yield begun.popleft().result()
    except Exception:
        wait(begun)
        raise


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Returns `call(*arguments)` from a daemon thread; if cancelled, the call is `abandoned`."""
    event = threading.Event()

    def work() -> T:
        _ABANDONED.set(event)
        return call(*arguments)

    try:
        return await asyncio.wrap_future(in_daemon(work))
    except asyncio.CancelledError:
        event.set()
        raise


def abandoned() -> bool:
    """Returns whether the call of this thread is one that nothing waits for any more."""
    event = _ABANDONED.get(None)
    return event is not None and event.is_set()


def pause(seconds: float) -> bool:
    """Waits so many seconds; returns False, at once, if the call of this thread is abandoned."""
    event = _ABANDONED.get(None)
    if event is not None:
        return not event.wait(seconds)
    time.sleep(seconds)
    return True
