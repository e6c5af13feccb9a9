"""Serves one index over HTTP: all ranks of a run, and other programs, search in one process.

    POST /search  {"query": "...", "k": 3}  ->  {"passages": [{"text", "source", "score"}, ...]}
    GET  /health  ->  {"status": "ok", "index": "...", "passages": 4, "waiting": 0, "searches": 9}

One thread holds the index and its embedder. It answers the queries that wait together, so that the
embedder computes them in one batch. What is refused or fails has a status from 400 and one line in
{"error": "..."}. There is no key: whoever reaches the port may search.
"""

import asyncio
import json
import queue
import socket
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanorchestra.schemas import SHAPES, Json, schema_error
from nanorchestra.serving.listening import address, application, read_raw, serve
from nanorchestra.tools.index import Index, Passage

MOST_BYTES = 128 << 10  # of a body; a query of QUERY_CHARS has 96 KB at most
MOST_WAITING = 512  # queries; more are told to come again
BATCH = 32  # queries that are embedded together
ANSWER_S = 60.0  # that a query may wait
STOP_S = 5  # that answers may take once the server is to end
PASSAGES = 3  # where a body does not say k


@dataclass(frozen=True)
class Query:
    """A query that waits for its passages; they are cancelled once no client waits for them."""

    text: str
    k: int
    passages: Future[list[Passage]]


class SearchServer(uvicorn.Server):
    """Answers queries from an index until it is told to end. `host` is where it listens."""

    def __init__(self, index: Index, host: str = "127.0.0.1"):
        self.index, self.host, self.searches = index, host, 0
        self._queries: queue.SimpleQueue[Query | None] = queue.SimpleQueue()
        self._waiting = 0
        routes = [
            Route("/search", self._search, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        app = application(routes, refuse, host)
        super().__init__(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=STOP_S))

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is told to end, and ends the thread that searches."""
        worker = threading.Thread(target=self._work, daemon=True)
        worker.start()
        super().run(sockets)
        self._queries.put(None)
        worker.join(STOP_S)

    async def _health(self, request: Request) -> Response:
        state = {"status": "ok", "index": self.index.about, "passages": self.index.count}
        return reply(state | {"waiting": self._waiting, "searches": self.searches})

    async def _search(self, request: Request) -> Response:
        body = read(await read_raw(request, MOST_BYTES))
        if self._waiting >= MOST_WAITING:
            raise HTTPException(503, f"{MOST_WAITING} queries wait already", {"Retry-After": "1"})
        self._waiting += 1
        try:
            query = Query(body["query"], int(body.get("k", PASSAGES)), Future())
            self._queries.put(query)
            async with asyncio.timeout(ANSWER_S):
                passages = await asyncio.wrap_future(query.passages)
        finally:
            self._waiting -= 1
        self.searches += 1
        return reply({"passages": [passage._asdict() for passage in passages]})

    def _work(self) -> None:
        """Answers what waits, at most BATCH queries at a time, until None comes."""
        while (query := self._queries.get()) is not None:
            batch = defaultdict(list)  # by k, of which a result may depend
            batch[query.k].append(query)
            for _ in range(BATCH - 1):
                try:
                    query = self._queries.get_nowait()
                except queue.Empty:
                    break
                if query is None:
                    self._queries.put(None)
                    break
                batch[query.k].append(query)
            for k, queries in batch.items():
                awaited = [q for q in queries if q.passages.set_running_or_notify_cancel()]
                self._answer(awaited, k)

    def _answer(self, queries, k) -> None:
        """Answers queries together, and each alone if that fails, so that one spoils no other."""
        if not queries:
            return
        try:
            results = self.index.search_all([query.text for query in queries], k)
        except Exception as error:
            if len(queries) > 1:
                for query in queries:
                    self._answer([query], k)
                return
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"a search failed: {problem}", file=sys.stderr, flush=True)
            refusal = HTTPException(500, f"the search failed: {problem}")
            queries[0].passages.set_exception(refusal)
            return
        for query, passages in zip(queries, results, strict=True):
            query.passages.set_result(passages)


def read(raw: bytes) -> Json:
    """Returns the body of a request. HTTPException names what is wrong with it."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if problem := schema_error(body, SHAPES["search_request"]):
        raise HTTPException(400, problem)
    return body


def reply(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response of JSON, in ASCII."""
    return Response(json.dumps(value), status, headers, "application/json")


def refuse(request: Request, error: Exception) -> Response:
    """Returns the response for an exception: its status, and one line."""
    if isinstance(error, HTTPException):
        return reply({"error": error.detail}, error.status_code, error.headers)
    if isinstance(error, TimeoutError):
        return reply({"error": f"no answer within {ANSWER_S:g} s"}, 504)
    return reply({"error": "internal error"}, 500)


def serve_index(index: Index, listening: socket.socket) -> None:
    """Serves an index on a socket until SIGTERM or SIGINT."""
    print(index.about)
    print(f"served at {address(listening)}, the corpus of a catalogue's search tool")
    print("Ctrl-C ends it", flush=True)
    server, start = SearchServer(index, listening.getsockname()[0]), time.monotonic()
    serve(server, listening)
    print(f"ended after {server.searches} searches in {time.monotonic() - start:.0f} s")
