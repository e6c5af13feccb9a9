"""What the HTTP servers of the project share: bodies, whom they answer, errors, where they listen.

The connections are uvicorn's. A reverse proxy in front bounds their number and their time
(docs/serve.md).
"""

import json
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from nanorchestra.errors import UserError
from nanorchestra.validation import one_line

LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d*)?", re.IGNORECASE)
REFUSED = HTTPException, RequestValidationError, UserError, TimeoutError  # clients are told of
BACKLOG = 512  # connections that the system keeps until they are accepted
COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

# Answers an exception.
Refuse = Callable[[Request, Exception], Awaitable[Response]]


def dumps(value: Any, errors: str = "replace") -> bytes:
    """Returns compact JSON in UTF-8. ValueError for NaN, infinity, "strict" also for surrogates."""
    return COMPACT.encode(value).encode(errors=errors)


def whole(value: Any) -> Any:
    """Returns 1 for 1.0, which is an integer in JSON; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]


class Body(BaseModel):
    """The body of a request. A text is no number; a field that is null has its default."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_json(cls, body):
        """Leaves out what is null. ValueError for NaN, infinity or half a surrogate pair."""
        try:
            dumps(body, "strict")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if value is not None}
        return body


class Application(FastAPI):
    """An application whose errors `refuse` answers; on loopback it has local names alone.

    A web page of another name then cannot reach it by a name that leads to 127.0.0.1. `most_bytes`
    are those of a body. `lifespan` is FastAPI's: what holds while it is served.
    """

    def __init__(self, refuse: Refuse, host: str, most_bytes: int, lifespan: Any = None):
        self.refuse, self.most_bytes = refuse, most_bytes
        self.is_local = host in ("localhost", "127.0.0.1", "::1", "[::1]")
        super().__init__(
            title="nanorchestra",
            description="An orchestrator, and the model beneath it, as OpenAI's API.",
            docs_url=None,
            redoc_url=None,
            exception_handlers=dict.fromkeys((*REFUSED, Exception), refuse),
            lifespan=lifespan,
            max_body_size=most_bytes,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, which is refused by its head where that is wrong."""
        if scope["type"] == "http":
            request = Request(scope)
            problem = self._problem(request.headers)
            if problem is not None:
                response = await self.refuse(request, problem)
                await response(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _problem(self, headers) -> HTTPException | None:
        if self.is_local and not LOCAL.fullmatch(headers.get("host", "")):
            return HTTPException(400, "the Host header must name this machine, as localhost does")
        length = headers.get("content-length", "0")  # of a body in chunks FastAPI counts the bytes
        if int(length) > self.most_bytes:
            return HTTPException(413, f"Content Too Large: {self.most_bytes} bytes at most")
        return None


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


def serve(server: uvicorn.Server, listening: socket.socket, told: str) -> None:
    """Says what is served, and serves until SIGTERM or SIGINT, after which the process goes on."""

    def end(*_):  # before uvicorn has its own handlers, and when it raises the signal again
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    print(told, flush=True)
    server.run([listening])
