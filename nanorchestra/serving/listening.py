"""What the servers of the project share: where they listen, whom they answer, how large a body is.

The connections are uvicorn's. A reverse proxy in front bounds their number and their time
(docs/serve.md).
"""

import signal
import socket
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

from nanorchestra.errors import UserError

LOCAL = ["localhost", "127.0.0.1", "[::1]"]
REFUSED = HTTPException, UserError, TimeoutError  # what a client is told of
BACKLOG = 512  # connections that the system keeps until they are accepted


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


async def read_raw(request: Request, most: int) -> bytes:
    """Returns the bytes of a body. HTTPException if they are more than `most`."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > most:
            raise HTTPException(413, f"the body has more than {most} bytes")
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
