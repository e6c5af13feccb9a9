"""Bounds what connections take: their number, their headers, and the time until a whole request.

uvicorn waits without an end for the rest of a request, and for a client that does not read. Here a
connection that answers nothing is closed after a time. If too many are open, the oldest that wait
for their client are closed for a new one, so that half-sent requests keep no client out.
"""

import resource
import time
from asyncio import Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


def close_overdue(connections: set[Connection]) -> None:
    """Closes the connections whose clients take too long."""
    now = time.monotonic()
    for connection in [each for each in connections if each.overdue(now)]:
        connection.transport.abort()
