"""The engine in a thread of its own, and its requests as the event loop of the server sees them.

Only the thread changes the engine. The loop hands requests over, is told of each step, and reads
the ids that have come. Nothing waits without end: requests have a time limit, draining a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from nanorchestra.engine.engine import Engine
from nanorchestra.errors import NotFiniteError

CHUNKS = 320  # a second, of all streams together: beyond that a chunk holds several tokens,
PACE_S = 0.2  # those of this time at most
REQUESTS = 512  # that may be open at a time
REQUEST_S = 600.0  # that an answer may take
DRAIN_S = 20.0  # until what runs is ended, once the server is
ENDING = HTTPException(503, "the server is shutting down")


@dataclass
class Reader:
    """Wakes what reads the requests of one answer: at `due`, at an end, or for a problem."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    due: float = 0.0
    problem: Exception | None = None

    def end(self, problem: Exception) -> None:
        """Makes what reads raise the problem."""
        self.problem = problem
        self.ready.set()


class Service:
    """Runs an engine. `live` has the reader of each request that has not finished."""

    def __init__(self, engine: Engine):
        self.engine, self.draining = engine, False
        self.live: dict[Any, Reader] = {}
        self.jobs = queue.SimpleQueue()  # calls for the thread; None ends it
        self.seconds = Counter()  # sums and counts of durations, for the metrics
        threading.Thread(target=self._work, daemon=True).start()

    async def sample(self, choices: list[tuple]) -> AsyncIterator[tuple]:
        """Samples (ids, SamplingParams) of each choice of an answer; closed, it ends what runs.

        Yields (index, request, new (id, logprob, most probable ones), why it ended or None).
        HTTPException if there is no room, the server ends it, or the model failed. TimeoutError.
        UserError if a prompt cannot be served.
        """
        if self.draining:
            raise ENDING
        if len(self.live) + len(choices) > REQUESTS:
            raise HTTPException(429, f"{len(self.live)} requests are open; try again later")
        self.loop, start = asyncio.get_running_loop(), time.monotonic()
        requests = [self.engine.make_request(*choice) for choice in choices]
        reader, read = Reader(), dict.fromkeys(requests, 0)
        self.live |= dict.fromkeys(requests, reader)
        timer = self.loop.call_later(REQUEST_S, reader.end, TimeoutError())
        for request in requests:
            self.jobs.put(partial(self.engine.scheduler.add, request))
        try:
            while read:
                await reader.ready.wait()
                reader.ready.clear()
                for request, done in list(read.items()):
                    reason = request.completion and request.completion.finish_reason
                    if reason == "error":
                        reader.problem = HTTPException(500, str(NotFiniteError()))
                    if reader.problem:
                        raise reader.problem
                    ids = request.ids[request.prompt_tokens + done :]
                    columns = ids, request.logprobs[done:], request.top_logprobs[done:]
                    tokens = list(zip(*columns, strict=False))
                    if tokens and not done:
                        self.note("time_to_first_token", start)
                    read[request] += len(tokens)
                    if reason:
                        del read[request]
                    yield requests.index(request), request, tokens, reason
        finally:
            timer.cancel()
            for request in requests:
                self.abort(request)

    def abort(self, request: Any) -> None:
        """Ends a request that has not finished; its pages are free at once."""
        self.jobs.put(partial(self.engine.abort, request))

    def drain(self) -> None:
        """Refuses new requests; ends at the deadline those that still run."""
        self.draining = True
        asyncio.get_running_loop().call_later(DRAIN_S, self._fail, ENDING)

    def note(self, name: str, since: float) -> None:
        """Counts a duration up to now."""
        self.seconds[f"{name}_seconds_sum"] += time.monotonic() - since
        self.seconds[f"{name}_seconds_count"] += 1

    def _fail(self, problem):
        for reader in self.live.values():
            reader.end(problem)

    def _work(self):
        """The thread: a step if there is work, then what was asked for meanwhile."""
        while job := self.jobs.get():
            job()
            while self.jobs.empty() and self.engine.has_work:
                start = time.monotonic()
                try:
                    self.engine.step()
                except Exception:
                    logging.exception("a step of the engine failed: its requests end")
                    failed = HTTPException(500, "the engine failed")
                    self.loop.call_soon_threadsafe(self._fail, failed)
                self.note("token_gap", start)
                self.loop.call_soon_threadsafe(self._look)
            if self.jobs.empty():
                self.loop.call_soon_threadsafe(self._look)

    def _look(self):
        """After a step: wakes the readers of requests that have ended, or whose time has come."""
        now = time.monotonic()
        for request, reader in list(self.live.items()):
            if ended := request.completion:
                del self.live[request]
            if ended or now >= reader.due:
                reader.due = now + min(PACE_S, len(self.live) / CHUNKS)
                reader.ready.set()
