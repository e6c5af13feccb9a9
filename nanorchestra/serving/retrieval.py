"""Serves one index over HTTP: all ranks of a run, and other programs, search in one process.

    POST /search  {"query": "...", "k": 3}  ->  {"passages": [{"text", "source", "score"}, ...]}
    GET  /health  ->  {"status": "ok", "index": "...", "passages": 4, "waiting": 0, "searches": 9}

One search runs at a time. It answers the queries that wait together, so that the embedder computes
them in one batch. What is refused or fails has a status from 400 and one line in
{"error": "..."}. There is no key: whoever reaches the port may search.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException

from nanorchestra.agent.threads import in_thread
from nanorchestra.serving.http import (
    Application,
    Body,
    Whole,
    address,
    listen,
    problem_of,
    serve,
)
from nanorchestra.tools.index import Index, Passage

MOST_BYTES = 128 << 10  # of a body; a query of QUERY_CHARS has 96 KB at most
MOST_WAITING = 512  # queries; more are told to come again
BATCH = 32  # queries that are embedded together
ANSWER_S = 60.0  # that a query may wait
STOP_S = 5  # that answers may take once the server is to end


class Question(Body):
    """The body of a search: a query, and how many passages it may have."""

    model_config = ConfigDict(extra="forbid")

    query: str
    k: Whole = Field(3, ge=1, le=1000, description="passages to return")


@dataclass(frozen=True)
class Query:
    """A query that waits for its passages; they are cancelled once no client waits for them."""

    text: str
    k: int
    passages: asyncio.Future[list[Passage]]


class SearchServer(uvicorn.Server):
    """Answers queries from an index until it is told to end. `host` is where it listens."""

    def __init__(self, index: Index, host: str = "127.0.0.1"):
        self.index, self.searches, self._waiting = index, 0, 0
        self._queries: asyncio.Queue[Query] = asyncio.Queue()
        app = Application(refuse, host, MOST_BYTES, self._working)
        app.post("/search")(self._search)
        app.get("/health")(self._health)
        super().__init__(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=STOP_S))

    @asynccontextmanager
    async def _working(self, app: Any) -> AsyncIterator[None]:
        """Answers queries for as long as the application is served."""
        worker = asyncio.create_task(self._work())
        yield
        worker.cancel()

    async def _health(self) -> JSONResponse:
        """Answers while the server lives."""
        state = {"status": "ok", "index": self.index.about, "passages": self.index.count}
        return JSONResponse(state | {"waiting": self._waiting, "searches": self.searches})

    async def _search(self, question: Question) -> JSONResponse:
        """Finds passages."""
        if self._waiting >= MOST_WAITING:
            raise HTTPException(503, f"{MOST_WAITING} queries wait already", {"Retry-After": "1"})
        self._waiting += 1
        try:
            found = asyncio.get_running_loop().create_future()
            self._queries.put_nowait(Query(question.query, question.k, found))
            async with asyncio.timeout(ANSWER_S):
                passages = await found
        finally:
            self._waiting -= 1
        self.searches += 1
        return JSONResponse({"passages": [passage._asdict() for passage in passages]})

    async def _work(self) -> None:
        """Answers what waits, at most BATCH queries at a time."""
        while True:
            batch = [await self._queries.get()]
            while len(batch) < BATCH and not self._queries.empty():
                batch.append(self._queries.get_nowait())
            for k in {query.k for query in batch}:  # of which a result may depend
                await self._answer([query for query in batch if query.k == k], k)

    async def _answer(self, queries: list[Query], k: int) -> None:
        """Answers queries together, and each alone if that fails, so that one spoils no other."""
        queries = [query for query in queries if not query.passages.done()]
        if not queries:
            return
        try:
            results = await in_thread(self.index.search_all, [query.text for query in queries], k)
        except Exception as error:
            if len(queries) > 1:
                for query in queries:
                    await self._answer([query], k)
                return
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"a search failed: {problem}", file=sys.stderr, flush=True)
            results = [HTTPException(500, f"the search failed: {problem}")]
        for query, result in zip(queries, results, strict=True):
            if query.passages.done():  # its client has gone meanwhile
                continue
            if isinstance(result, HTTPException):
                query.passages.set_exception(result)
            else:
                query.passages.set_result(result)


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """Returns the response for an exception: its status, and one line."""
    status, line, _ = problem_of(error)
    return JSONResponse({"error": line}, status, getattr(error, "headers", None))


def serve_index(load: Callable[[], Index], host: str, port: int) -> None:
    """Serves the index that `load` returns until SIGTERM or SIGINT. UserError.

    It listens before it loads, so that an address that is taken costs no wait.
    """
    with listen(host, port) as listening:
        index = load()
        print(index.about)
        server, start = SearchServer(index, listening.getsockname()[0]), time.monotonic()
        told = f"served at {address(listening)}, the corpus of a catalogue's search tool"
        serve(server, listening, f"{told}\nCtrl-C ends it")
        print(f"ended after {server.searches} searches in {time.monotonic() - start:.0f} s")
