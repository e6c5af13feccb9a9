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
from collections.abc import AsyncIterator, Callable

from starlette.exceptions import HTTPException

from nanorchestra.engine.engine import Engine
from nanorchestra.engine.sequence import Request
from nanorchestra.errors import NotFiniteError, UserError, require
from nanorchestra.records import Task, Trajectory

# What keeps an attempt that has ended.
Record = Callable[[Task, Trajectory], None]
CHUNKS = 256  # a second, of all streams together: beyond that a chunk holds several tokens,
PACE_S = 0.25  # those of this time at most
REQUESTS = 512  # that may be open at a time
REQUEST_S = 600.0  # that an answer may take
CLOSE_S = 30.0  # that the last step may take
ENDING = 503, "the server is shutting down"


class Reader(asyncio.Event):
    """Wakes what reads the requests of one answer: at `due`, or when one of them has ended."""

    due = 0.0


class Service:
    """Runs an engine. `live` has the reader of each request that has not finished.

    Without an engine attempts ask an endpoint: `remote` are those that have not ended. `record` is
    called with each attempt that has ended, one that was stopped too.
    """

    def __init__(self, engine: Engine | None, record: Record | None = None):
        self.engine, self.due = engine, 0.0  # `due`: when a reader wants to know of a step
        self._record = record
        self.aborted = 500, "the engine failed"  # the status and the reason of an abort
        self.live: dict[Request, Reader] = {}
        self.remote: set[asyncio.Future] = set()
        self.jobs = queue.SimpleQueue()  # (call, request) for the thread; None ends it
        self.seconds = Counter()  # sums and counts of durations
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    async def sample(self, choices: list[tuple]) -> AsyncIterator[list[tuple]]:
        """Samples (ids, SamplingParams) of each choice of an answer; closed, it ends what runs.

        Yields all (request, why it ended or None) when there is more to read, until all have ended.
        HTTPException if there is no room, the server ends, or a request failed. TimeoutError.
        UserError if a prompt or a grammar cannot be served.
        """
        self.loop, start = asyncio.get_running_loop(), time.monotonic()
        deadline = start + REQUEST_S
        self.check_room(len(choices))
        requests = await asyncio.to_thread(self._make, choices)
        self.check_room(len(choices))  # others came meanwhile
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
                for request in requests:
                    self._check(request)
                yield list(zip(requests, reasons, strict=True))
        finally:
            self._do(self.engine.abort, requests)

    def check_room(self, choices: int) -> None:
        """Raises UserError for more choices than may ever be open, HTTPException if now too many.

        It costs nothing: call it before anything is computed for them.
        """
        require(choices <= REQUESTS, f"n: {choices} choices of all prompts, at most {REQUESTS}")
        if self.aborted == ENDING:
            raise HTTPException(*ENDING)
        is_open = len(self.live) + len(self.remote)
        if is_open + choices > REQUESTS:
            raise HTTPException(429, f"{is_open} requests are open; try again later")

    def follow(self, attempt: asyncio.Future) -> None:
        """Counts an attempt that asks an endpoint as an open request until it ends."""
        self.remote.add(attempt)
        attempt.add_done_callback(self.remote.discard)

    def record(self, task: Task, trajectory: Trajectory) -> None:
        """Records an attempt, if there is a place for it. A failure of that ends no answer."""
        try:
            if self._record is not None:
                self._record(task, trajectory)
        except UserError as error:
            logging.error("an attempt is not recorded: %s", error)

    def end(self) -> None:
        """Ends what still runs."""
        self.aborted = ENDING
        for attempt in [*self.remote]:
            attempt.cancel()
        if self.engine is not None:
            self._do(self.engine.abort, self.live)

    def close(self) -> None:
        """Ends the thread, after the step that it computes: torch must not outlive the process."""
        self.jobs.put(None)
        self.thread.join(CLOSE_S)

    def _make(self, choices) -> list[Request]:
        return [self.engine.make_request(*choice) for choice in choices]

    def _check(self, request):
        """Raises what ended a request, if it did not end by its text."""
        error = request.error
        if isinstance(error, NotFiniteError):
            raise HTTPException(500, str(error))
        if isinstance(error, UserError):
            raise UserError(str(error))
        if error is not None:
            logging.error("a request failed", exc_info=error)
            raise HTTPException(500, "the request failed by an error of the server")
        if request.finished and request.completion.finish_reason == "abort":
            raise HTTPException(*self.aborted)

    def _do(self, call, requests):
        """Has the thread call it with each of the requests that have not ended."""
        for request in requests:
            if not request.finished:
                self.jobs.put((call, request))

    def _note(self, name: str, since: float) -> None:
        """Counts a duration up to now, for the metrics."""
        self.seconds[f"{name}_seconds_sum"] += time.monotonic() - since
        self.seconds[f"{name}_seconds_count"] += 1

    def _work(self):
        """The thread: what was asked for, then a step if there is work."""
        while True:
            news = True
            if self.jobs.empty() and self.engine is not None and self.engine.has_work:
                start = time.monotonic()
                news = self._step()
                self._note("token_gap", start)
            elif (job := self.jobs.get()) is None:
                return
            else:
                call, request = job
                try:
                    call(request)
                except Exception as error:
                    self.engine.fail(request, error)
            if self.jobs.empty() and (news or time.monotonic() >= self.due):
                self.loop.call_soon_threadsafe(self._look)

    def _step(self) -> bool:
        """Computes a step. Returns whether requests have ended; all do if it fails."""
        queues = self.engine.scheduler
        try:
            return bool(self.engine.step())
        except Exception:
            logging.exception("the engine failed: its requests end")
            for request in queues.waiting + queues.running:
                self.engine.abort(request)
            return True

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
