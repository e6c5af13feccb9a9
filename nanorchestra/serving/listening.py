"""What the servers of the project share: where they listen, whom they answer, how large a body is.

The connections are uvicorn's. A reverse proxy in front bounds their number and their time
(docs/serve.md).
"""

import re
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from starlette.exceptions import HTTPException

from nanorchestra.errors import UserError
from nanorchestra.validation import one_line

LOCAL = ["localhost", "127.0.0.1", "[::1]"]
REFUSED = HTTPException, RequestValidationError, UserError, TimeoutError  # clients are told of
BACKLOG = 512  # connections that the system keeps until they are accepted


def application(
    refuse: Callable[[Request, Exception], Awaitable[Response]],
    host: str,
    most_bytes: int,
    lifespan: Any = None,
) -> FastAPI:
    """Returns an application whose errors `refuse` answers; on loopback it has local names alone.

    A web page of another name then cannot reach it by a name that leads to 127.0.0.1. `most_bytes`
    are those of a body. `lifespan` is FastAPI's: what holds while it is served.
    """
    app = FastAPI(
        title="nanorchestra",
        description="An orchestrator, and the model beneath it, as OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        exception_handlers=dict.fromkeys((*REFUSED, Exception), refuse),
        lifespan=lifespan,
        max_body_size=most_bytes,
    )
    local = host in (*LOCAL, "::1")
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL if local else ["*"])
    return app


def problem_of(error: Exception) -> tuple[int, str, str | None]:
    """Returns the status of an exception, the line that a client is told, and the wrong field."""
    if isinstance(error, RequestValidationError):
        first, *_ = errors = error.errors()
        if isinstance(error.body, bytes):
            return 415, "the Content-Type must be application/json", None
        if first["type"] == "json_invalid":
            return 400, f"body is not JSON: {first['ctx']['error']}", "body"
        inside = [each | {"loc": each["loc"][1:]} for each in errors]  # without "body"
        field, line = one_line(inside, error.body, whole="body")
        return 400, line[:500], field
    if isinstance(error, HTTPException):
        status, line = error.status_code, error.detail
    elif isinstance(error, UserError):
        status, line = 400, str(error)
    elif isinstance(error, TimeoutError):
        status, line = 504, "the request took too long"
    else:
        status, line = 500, "internal error"
    field = re.match(r"[\w.[\]]+(?=: )", line)  # a line of ours begins with it
    return status, line, field and field[0]


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
