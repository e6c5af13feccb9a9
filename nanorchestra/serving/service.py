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
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanorchestra.engine.engine import Engine
from nanorchestra.errors import NotFiniteError, UserError

CHUNKS = 400  # a second, of all streams together: beyond that a chunk holds several tokens,
PACE_S = 0.2  # those of this time at most


class ApiError(UserError):
    """A request that is answered by an error with this HTTP status; `param` names its field."""

    def __init__(self, message: str, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param


@dataclass(frozen=True)
class Limits:
    """What clients may ask for: requests at a time, bytes and seconds of a body, seconds."""

    requests: int = 512
    body_bytes: int = 1 << 20
    body_s: float = 30.0
    request_s: float = 600.0
    drain_s: float = 20.0


class Service:
    """Runs an engine. `live` has the answer of each request that has not finished."""

    def __init__(self, engine: Engine, limits: Limits):
        self.engine, self.limits, self.draining = engine, limits, False
        self.live: dict[Any, Answer] = {}
        self.jobs = queue.SimpleQueue()  # calls for the thread; None ends it
        self.seconds = Counter()  # sums and counts of durations, for the metrics
        threading.Thread(target=self._work, daemon=True).start()

    def open(self, choices: list[tuple]) -> Answer:
        """Queues (ids, SamplingParams) of each choice of an answer.

        ApiError if there is no room, UserError if a prompt cannot be served.
        """
        if self.draining:
            raise ApiError("the server is shutting down", 503)
        if len(self.live) + len(choices) > self.limits.requests:
            raise ApiError(f"{len(self.live)} requests are open; try again later", 429)
        make, self.loop = self.engine.make_request, asyncio.get_running_loop()
        answer = Answer(self, [make(*choice) for choice in choices])
        for request in answer.requests:
            self.live[request] = answer
            self.jobs.put(partial(self.engine.scheduler.add, request))
        return answer

    def drain(self) -> None:
        """Refuses new requests; ends at the deadline those that still run."""
        self.draining, late = True, ApiError("the server is shutting down", 503)
        for answer in set(self.live.values()):
            self.loop.call_later(self.limits.drain_s, answer.close, late)

    def note(self, name: str, since: float) -> None:
        """Counts a duration up to now."""
        self.seconds[f"{name}_seconds_sum"] += time.monotonic() - since
        self.seconds[f"{name}_seconds_count"] += 1

    def _work(self):
        """The thread: a step if there is work, then what was asked for meanwhile."""
        job = self.jobs.get()
        while job:
            job()
            while self.jobs.empty() and self.engine.has_work:
                start = time.monotonic()
                try:
                    self.engine.step()
                except Exception:
                    logging.exception("a step of the engine failed: its requests end")
                    failed = ApiError("the engine failed", 500)
                    for answer in set(self.live.values()):
                        self.loop.call_soon_threadsafe(answer.close, failed)
                self.note("token_gap", start)
                self.loop.call_soon_threadsafe(self._look)
            self.loop.call_soon_threadsafe(self._look)
            job = self.jobs.get()

    def _look(self):
        """After a step: wakes the answers that have ended, or whose next chunk is due."""
        now = time.monotonic()
        for request, answer in list(self.live.items()):
            if request.finished:
                del self.live[request]
            if now >= answer.due or request.finished:
                answer.due = now + min(PACE_S, len(self.live) / CHUNKS)
                answer.ready.set()


class Answer:
    """The requests of one answer. Its owner closes it, whatever happens."""

    def __init__(self, service: Service, requests: list[Any]):
        self.service, self.requests, self.due = service, requests, 0.0
        self.ready, self.problem = asyncio.Event(), None
        late = ApiError("the request took too long", 504)
        self.timer = service.loop.call_later(service.limits.request_s, self.close, late)

    async def __aiter__(self) -> AsyncIterator[tuple[int, list[tuple], str | None]]:
        """Yields (index, new (id, logprob, most probable ones), why the choice ended or None).

        ApiError if the server ended it, or the model failed.
        """
        start, read = time.monotonic(), dict.fromkeys(self.requests, 0)
        while read:
            await self.ready.wait()
            self.ready.clear()
            for request, done in list(read.items()):
                reason = request.completion and request.completion.finish_reason
                if reason == "error":
                    self.problem = ApiError(str(NotFiniteError()), 500)
                if self.problem:
                    raise self.problem
                ids = request.ids[request.prompt_tokens + done :]
                columns = ids, request.logprobs[done:], request.top_logprobs[done:]
                tokens = list(zip(*columns, strict=False))
                if tokens and not done:
                    self.service.note("time_to_first_token", start)
                read[request] += len(tokens)
                if reason:
                    del read[request]
                yield self.requests.index(request), tokens, reason

    def close(self, problem: ApiError | None = None) -> None:
        """Ends what still runs; `problem` is the reason if it is the server's."""
        self.problem = problem
        self.timer.cancel()
        self.ready.set()
        for request in self.service.live.keys() & self.requests:
            self.abort(request)

    def abort(self, request: Any) -> None:
        """Ends a request that has not finished; its pages are free at once."""
        self.service.jobs.put(partial(self.service.engine.abort, request))
