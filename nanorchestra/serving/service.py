"""The engine in a thread of its own, and its requests as the event loop of the server sees them.

Only the thread changes the engine. The loop hands requests over, is told of what has come, and
reads it from the requests. Requests have a time limit.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial

from starlette.exceptions import HTTPException

from nanorchestra.engine.engine import Engine
from nanorchestra.engine.request import Request
from nanorchestra.errors import NotFiniteError

CHUNKS = 256  # a second, of all streams together: beyond that a chunk holds several tokens,
PACE_S = 0.25  # those of this time at most
REQUESTS = 512  # that may be open at a time
REQUEST_S = 600.0  # that an answer may take
ENDING = 503, "the server is shutting down"


class Reader(asyncio.Event):
    """Wakes what reads the requests of one answer: at `due`, or when one of them has ended."""

    due = 0.0


class Service:
    """Runs an engine. `live` has the reader of each request that has not finished."""

    def __init__(self, engine: Engine):
        self.engine, self.due = engine, 0.0  # `due`: when a reader wants to know of a step
        self.failures = {"error": (500, str(NotFiniteError())), "abort": (500, "the engine failed")}
        self.live: dict[Request, Reader] = {}
        self.jobs = queue.SimpleQueue()  # calls for the thread; None ends it
        self.seconds = Counter()  # sums and counts of durations
        threading.Thread(target=self._work, daemon=True).start()

    async def sample(self, choices: list[tuple]) -> AsyncIterator[list[tuple]]:
        """Samples (ids, SamplingParams) of each choice of an answer; closed, it ends what runs.

        Yields all (request, why it ended or None) when there is more to read, until all have ended.
        HTTPException if there is no room, the server ends, or the model failed. TimeoutError.
        UserError if a prompt cannot be served.
        """
        if ENDING in self.failures.values():
            raise HTTPException(*ENDING)
        if len(self.live) + len(choices) > REQUESTS:
            raise HTTPException(429, f"{len(self.live)} requests are open; try again later")
        self.loop, start = asyncio.get_running_loop(), time.monotonic()
        deadline = start + REQUEST_S
        requests = [self.engine.make_request(*choice) for choice in choices]
        reader, reasons = Reader(), [None]
        self.live |= dict.fromkeys(requests, reader)
        self._do(self.engine.scheduler.add, requests)
        try:
            while not all(reasons):
                await asyncio.wait_for(reader.wait(), deadline - time.monotonic())
                reader.clear()
                if start:
                    start = self._note("time_to_first_token", start)
                reasons = [each.completion and each.completion.finish_reason for each in requests]
                for reason in self.failures.keys() & reasons:
                    raise HTTPException(*self.failures[reason])
                yield list(zip(requests, reasons, strict=True))
        finally:
            self._do(self.engine.abort, requests)

    def end(self) -> None:
        """Ends what still runs."""
        self.failures["abort"] = ENDING
        self._do(self.engine.abort, self.live)

    def _do(self, call, requests):
        """Has the thread call it with each of the requests that have not ended."""
        for request in requests:
            if not request.finished:
                self.jobs.put(partial(call, request))

    def _note(self, name: str, since: float) -> None:
        """Counts a duration up to now, for the metrics."""
        self.seconds[f"{name}_seconds_sum"] += time.monotonic() - since
        self.seconds[f"{name}_seconds_count"] += 1

    def _work(self):
        """The thread: what was asked for, then a step if there is work."""
        queues, step = self.engine.scheduler, self.engine.step
        while job := step if self.jobs.empty() and self.engine.has_work else self.jobs.get():
            start, news = time.monotonic(), True
            try:
                news = job() or job is not step  # none: a step that ended no request
            except Exception:
                logging.exception("the engine failed: its requests end")
                for request in queues.waiting + queues.running:
                    self.engine.abort(request)
            if job is step:
                self._note("token_gap", start)
            if self.jobs.empty() and (news or time.monotonic() >= self.due):
                self.loop.call_soon_threadsafe(self._look)

    def _look(self):
        """Wakes the readers of requests that have ended, or whose time has come."""
        now, pace = time.monotonic(), min(PACE_S, len(self.live) / CHUNKS)
        for request, reader in list(self.live.items()):
            if ended := request.finished:
                del self.live[request]
            if ended or (now >= reader.due and request.logprobs):
                reader.due = (now // pace + 1) * pace  # all at one time: one wake of the loop
                reader.set()
        self.due = min((reader.due for reader in self.live.values()), default=0.0)
