"""Listens, and bounds what connections take: their number, the time and the size of a request.

uvicorn waits without an end for the rest of a request, and for a client that does not read. Here a
connection that answers nothing is closed after a time. If too many are open, the oldest that wait
for their client are closed for a new one, so that half-sent requests keep no client out.
"""

import asyncio
import resource
import signal
import socket
import time
from asyncio import Transport
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanorchestra.errors import UserError

LOCAL = ["localhost", "127.0.0.1", "[::1]"]
REFUSED = HTTPException, UserError, TimeoutError  # what a client is told of
BACKLOG = 512  # connections that the system keeps until they are accepted
CONNECTIONS = 1024  # at most; fewer if the process may open few files
FILES = 64  # that the process opens beside them
HEADER_BYTES = 32 << 10  # of one request
WAIT_S = 10.0  # until the headers of a request have come
WRITE_S = 60.0  # in which a client reads nothing of what is sent


def most_connections() -> int:
    """Returns how many connections may be open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(CONNECTIONS, files - FILES))


class Connection(HttpToolsProtocol):
    """A connection of a client. `since`: when it last began to wait for a request."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.since = self._read = time.monotonic()
        self._unsent = 0  # bytes, when the client was last seen to have read
        self._in_headers, self._header_bytes = False, 0

    @property
    def answering(self) -> bool:
        """True between the headers of a request and the end of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waiting(self) -> bool:
        """True while the client has to go on: to send its request, or to read."""
        return not self.answering or self.cycle.more_body or self.flow.write_paused

    def overdue(self, now: float) -> bool:
        """Says whether the client has taken longer than it may, by the monotonic clock."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._read = unsent, now
        if unsent:
            return now - self._read > WRITE_S
        return not self.answering and now - max(self.since, self._read) > WAIT_S

    def connection_made(self, transport: Transport) -> None:
        """Makes room for it, or refuses it if all others have their answers under way."""
        most = most_connections()
        if len(self.connections) >= most:
            waiting = [each for each in self.connections if each.waiting]
            waiting.sort(key=lambda each: each.since)
            for oldest in waiting[: max(1, most // 16)]:
                oldest.transport.abort()
                self.connections.discard(oldest)
        if len(self.connections) >= most:
            transport.abort()
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what it was asked for, unless it was refused."""
        if self.transport is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on, unless the headers become too long."""
        super().data_received(data)
        self._header_bytes = self._header_bytes + len(data) if self._in_headers else 0
        if self._header_bytes > HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        """Begins the headers of a request."""
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begins the answer."""
        self._in_headers = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self.since = time.monotonic()
        super().on_response_complete()


def application(
    routes: Sequence[Route],
    refuse: Callable[[Request, Exception], Response],
    host: str,
    lifespan: Any = None,
) -> ASGIApp:
    """Returns an application whose errors `refuse` answers; on loopback it has local names alone.

    A web page of another name then cannot reach it by a name that leads to 127.0.0.1. `lifespan` is
    starlette's: what holds while it is served.
    """
    refusals = dict.fromkeys((*REFUSED, ClientDisconnect, Exception), refuse)
    app = Starlette(routes=routes, exception_handlers=refusals, lifespan=lifespan)
    return TrustedHostMiddleware(app, LOCAL if host in (*LOCAL, "::1") else ["*"])


async def read_raw(request: Request, most: int, seconds: float) -> bytes:
    """Returns the bytes of a body. HTTPException if they are more than `most`, or too slow."""
    raw = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise HTTPException(413, f"the body has more than {most} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body did not come in time: {seconds:g} s") from None
    return bytes(raw)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that clients can connect to already. UserError if it cannot listen there."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        # without the words that Python adds
        problem = problem.partition(" (while ")[0].removeprefix("bind(): ").rstrip(".")
        raise UserError(f"--host {host} --port {port}: {problem}; give another") from None


def address(listening: socket.socket) -> str:
    """Returns the address of a socket as clients write it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serves on a socket until SIGTERM or SIGINT, after which the process goes on."""
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again at its end
        signal.signal(number, lambda *_: None)
    server.run([listening])


def close_overdue(connections: set[Connection]) -> None:
    """Closes the connections whose clients take too long."""
    now = time.monotonic()
    for connection in [each for each in connections if each.overdue(now)]:
        connection.transport.abort()
