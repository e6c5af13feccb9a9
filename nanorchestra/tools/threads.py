"""Runs calls in daemon threads, for which neither Ctrl-C nor the exit of the process waits."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


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


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Returns `call(*arguments)` from a daemon thread."""
    return await asyncio.wrap_future(in_daemon(lambda: call(*arguments)))
