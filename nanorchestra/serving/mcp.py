"""Offers the orchestrator as a tool of MCP: a question, a preference and limits; the answer.

The official package `mcp` speaks the protocol, 2026-07-28 or 2025-11-25 as the client does, on
stdin and stdout or at the path /mcp of the HTTP server. Here are the tool, and what its calls tell
of their progress. The SDK's MCPServer ignores arguments that a tool does not have, so that a
misspelt limit would not bind: the tool is one of its low-level Server, and its form is checked
here.
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Annotated, Any, BinaryIO, TextIO

import anyio
from mcp import MCPError, types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.threads import in_daemon
from nanorchestra.records import Limit, Preference
from nanorchestra.schemas import whole_characters
from nanorchestra.serving.http import REFUSED, problem_of
from nanorchestra.serving.loop import (
    REPORTED,
    REQUEST_S,
    Names,
    Questions,
    ServedAttempt,
    Service,
    Words,
)
from nanorchestra.units import bill
from nanorchestra.validation import validated

TOOL = "ask"
MOST_QUESTION = 100_000  # characters
SHOWN = 500  # characters of a message of progress
THOUGHT_S = 2.0  # between two messages while the policy thinks
SILENCE_S = 15.0  # after which a message says that it is at work; looked at every KEEP_S
SESSIONS = 1_000  # of clients at the address


class Question(BaseModel, extra="forbid"):
    """The arguments of the tool, as its schema shows them to a client."""

    question: Annotated[str, Field(max_length=MOST_QUESTION, pattern=r"\S")] = Field(
        description="The question, whole: earlier ones are not known."
    )
    preference: Words = Field(
        "", description="What counts, in words ('be cheap') or weights ('cost=1 latency=0.5')."
    )
    usd: Limit | None = Field(None, description="US dollars that the answer may cost at most.")
    seconds: Limit | None = Field(None, description="Seconds that the answer may take at most.")
    never: Names = Field(
        [], description="Names of tools, models or kinds of tools that may not be called."
    )

    def wish(self) -> Preference:
        """Returns the preference, with the limits beside it. UserError."""
        limits = Preference(usd=self.usd, seconds=self.seconds, never=self.never)
        return Preference.parse(self.preference, "preference").stricter(limits)


class Answer(BaseModel):
    """The structured content of a result."""

    answer: str
    status: str = Field(description="answered, or why there is no answer")
    cost_usd: float
    latency_s: float = Field(description="seconds, as the tools count them")
    calls: dict[str, int]


def tool_server(
    service: Service,
    rollout: Rollout,
    world: Questions,
    sampling: dict[str, float],
    name: str,
) -> Server:
    """Returns a server of MCP with one tool, which plays an attempt of `rollout` for each call.

    `world` is what it is asked, and `name` is the model's.
    """
    description = (
        f"{name} answers a question. It decides which tools and models it calls for that, under "
        f"a preference and limits. Tools: {world.names}. Questions such as: "
        f"{'; '.join(world.examples)}"
    )
    tool = types.Tool(
        name=TOOL,
        description=description,
        input_schema=Question.model_json_schema(),
        output_schema=Answer.model_json_schema(),
    )

    async def listed(context, params):
        return types.ListToolsResult(tools=[tool])

    async def called(context, params):
        if params.name != TOOL:
            raise MCPError(
                types.INVALID_PARAMS, f"{params.name[:80]!r} is not a tool; {TOOL} is one"
            )
        report = None
        try:
            asked = validated(Question, params.arguments or {}, TOOL)
            seed = secrets.randbits(62)
            env = world.open(asked.question, asked.wish(), seed)
            attempt = ServedAttempt(service, rollout, env, seed, sampling)
            await _follow(attempt, context.session.report_progress)
            t = attempt.trajectory
            answer = whole_characters(t.answer)
            report = {"answer": answer} | {name: getattr(t, name) for name in REPORTED}
            text, failed = answer or f"no answer: {t.status}", not answer
        except Exception as error:
            if not isinstance(error, REFUSED):
                logging.error("an answer failed", exc_info=error)
            _, line, _ = problem_of(error)
            text, failed = whole_characters(line), True
        return types.CallToolResult(
            content=[types.TextContent(text=text)], structured_content=report, is_error=failed
        )

    return Server(name, on_list_tools=listed, on_call_tool=called)


async def _follow(attempt: ServedAttempt, progress: Callable[..., Awaitable[None]]) -> None:
    """Plays an attempt to its end; thoughts, calls and results are told.

    progress(count, total, message) sends a message.
    """
    count, thought = 0, ""
    start = at = time.monotonic()

    async def tell(label: str, text: str) -> None:
        nonlocal count, at
        count, at = count + 1, time.monotonic()
        text = " ".join(whole_characters(text).split())
        text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        await progress(count, None, f"{label}: {text}")

    async with aclosing(attempt.follow()) as news:
        async for kind, payload in news:
            if kind == "reasoning":
                thought += payload
            is_news = kind in ("call", "result")
            if thought.strip() and (is_news or time.monotonic() - at > THOUGHT_S):
                await tell("thinks", thought)
                thought = ""
            if kind == "call":
                await tell("calls", payload)
            elif kind == "result":
                label = "error" if payload.error else "result"
                cost = bill(payload.cost_usd, payload.latency_s)
                await tell(f"{label} ({cost})", payload.content)
            elif time.monotonic() - at >= SILENCE_S:
                await tell("at work", f"{time.monotonic() - start:.0f} s so far")
    if thought.strip():
        await tell("thinks", thought)


@contextmanager
def protocol_pipes() -> Iterator[tuple[BinaryIO, TextIO]]:
    """Yields stdin and stdout; for all else stdin is empty and stdout is stderr.

    So neither a library nor a child process can write into the protocol. The SDK does so while it
    serves; a model and tools are loaded before.
    """
    sys.stdout.flush()
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    try:
        yield pipes
    finally:
        sys.stdout.flush()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe.fileno(), number)


def serve_pipes(server: Server, service: Service, pipes: tuple[BinaryIO, TextIO]) -> None:
    """Serves one client until it closes stdin, or SIGTERM; what runs then ends.

    Raises KeyboardInterrupt after Ctrl-C.
    """
    asyncio.run(_serve_pipes(server, service, *pipes))


async def _serve_pipes(server, service, stdin, stdout) -> None:
    try:
        async with stdio_server(_lines(stdin), anyio.wrap_file(stdout)) as streams:
            await server.run(*streams, server.create_initialization_options())
    except* BrokenPipeError:  # the client has gone
        pass
    finally:
        service.end()
        service.close()


async def _lines(stdin) -> AsyncIterator[str]:
    """Yields the lines of a pipe up to its end or SIGTERM; a thread of the SDK's could not stop."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue()
    loop.add_signal_handler(signal.SIGTERM, lines.put_nowait, b"")

    def read():
        for line in iter(stdin.readline, b""):
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, b"")

    in_daemon(read)
    while line := await lines.get():
        yield line.decode(errors="replace")


class McpEndpoint:
    """An ASGI application. `check(request)` raises HTTPException if it may not be answered.

    Clients of 2025-11-25 have a session each, in which they can cancel; it ends when it is idle.
    """

    def __init__(self, server: Server, check: Callable[[Request], Awaitable[None]]):
        self.manager = StreamableHTTPSessionManager(
            server, session_idle_timeout=REQUEST_S, max_sessions=SESSIONS
        )
        self.check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. HTTPException."""
        await self.check(Request(scope))
        await self.manager.handle_request(scope, receive, send)

    def lifespan(self, app: Any) -> AbstractAsyncContextManager[None]:
        """Returns the context in which requests can be answered."""
        return self.manager.run()


def http_route(server: Server, check: Callable[[Request], Awaitable[None]]) -> tuple[Route, Any]:
    """Returns the route /mcp of an HTTP server, and the lifespan that its application needs."""
    endpoint = McpEndpoint(server, check)
    return Route("/mcp", endpoint, methods=["POST", "DELETE"]), endpoint.lifespan
