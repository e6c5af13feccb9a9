"""Offers the orchestrator as a tool of MCP: a question, a preference and limits; the answer.

The official package `mcp` speaks the protocol, 2026-07-28 or 2025-11-25 as the client does, on
stdin and stdout or at the path /mcp of the HTTP server. Here are the tool, what its calls tell of
their progress, and the ends of a process that is served by pipes.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Any, BinaryIO

import anyio
from mcp import MCPError, types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.message import SessionMessage
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanorchestra.agent.loop import Rollout
from nanorchestra.errors import UserError, require
from nanorchestra.schemas import Json, check, whole_characters
from nanorchestra.serving.orchestrate import (
    MOST_CHARACTERS,
    REPORTED,
    MakeEnvironment,
    orchestrated,
)
from nanorchestra.serving.service import REQUEST_S, Service
from nanorchestra.tools.threads import in_thread

TOOL = "ask"
MOST_QUESTION = 100_000  # characters
SHOWN = 500  # characters of a message of progress
THOUGHT_S = 2.0  # between two messages while the policy thinks
SILENCE_S = 15.0  # after which a message says that a call is still at work
SESSIONS = 1_000  # of clients at the address
FLUSH_S = 1.0  # for the client to read the last messages

ARGUMENTS = {
    "type": "object",
    "properties": {
        "question": {
            "type": "string",
            "maxLength": MOST_QUESTION,
            "description": "The question, whole: earlier ones are not known.",
        },
        "preference": {
            "type": "string",
            "maxLength": MOST_CHARACTERS,
            "description": "What counts, in words ('be cheap') or weights ('cost=1 latency=0.5').",
        },
        "usd": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": 1e9,
            "description": "US dollars that the answer may cost at most.",
        },
        "seconds": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": 1e9,
            "description": "Seconds that the answer may take at most.",
        },
        "never": {
            "type": "array",
            "items": {"type": "string", "maxLength": 512},
            "maxItems": 64,
            "description": "Names of tools, models or kinds of tools that may not be called.",
        },
    },
    "required": ["question"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {
        "answer": {"type": "string"},
        "status": {"type": "string", "description": "answered, or why there is no answer"},
        "cost_usd": {"type": "number"},
        "latency_s": {"type": "number", "description": "seconds, as the tools count them"},
        "calls": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["answer", *REPORTED],
}


def tool_server(
    service: Service,
    rollout: Rollout,
    make: MakeEnvironment,
    sampling: dict[str, float],
    name: str,
    about: str,
) -> Server:
    """Returns a server of MCP with one tool, which plays an attempt of `rollout` for each call.

    make(question, preference, seed): the environment of an attempt. `name` is the model's, and
    `about` says what may be asked.
    """
    description = (
        f"{name} answers a question. It decides which tools and models it calls for that, under "
        f"a preference and limits. {about}"
    )
    tool = types.Tool(
        name=TOOL, description=description, input_schema=ARGUMENTS, output_schema=ANSWER
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
            body = _body(params.arguments or {}, sampling)
            chunks = orchestrated(service, rollout, make, body)
            report = await _followed(chunks, context.session.report_progress)
            text = report["answer"] or f"no answer: {report['status']}"
            failed = not report["answer"]
        except Exception as error:
            text, failed = whole_characters(_line(error)), True
        return types.CallToolResult(
            content=[types.TextContent(text=text)], structured_content=report, is_error=failed
        )

    return Server(name, on_list_tools=listed, on_call_tool=called)


def _body(arguments: Json, sampling: dict[str, float]) -> Json:
    """Returns the body of a request to NAME+tools. UserError if the arguments are wrong."""
    check(arguments, ARGUMENTS, TOOL)
    require(arguments["question"].strip(), f"{TOOL}: question: it is empty")
    metadata = {name: value for name, value in arguments.items() if name != "question"}
    messages = [{"role": "user", "content": arguments["question"]}]
    return {"messages": messages, "metadata": metadata, "ignore_eos": False, **sampling}


def _line(error: Exception) -> str:
    """Returns what the client is told of an exception, in one line."""
    if isinstance(error, UserError):
        return str(error).removeprefix("metadata.")
    if isinstance(error, HTTPException):
        return error.detail
    if isinstance(error, TimeoutError):
        return f"the answer took more than {REQUEST_S:g} s"
    logging.error("an answer failed", exc_info=error)
    return "internal error"


async def _followed(
    chunks: AsyncIterator[Json], progress: Callable[..., Awaitable[None]]
) -> dict[str, Any]:
    """Returns the report of an attempt, as ANSWER says; thoughts, calls and results are told.

    progress(count, total, message) sends a message.
    """
    count, thought, at = 0, "", time.monotonic()

    async def tell(label: str, text: str) -> None:
        nonlocal count, at
        count, at = count + 1, time.monotonic()
        text = " ".join(whole_characters(text).split())
        text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        await progress(count, None, f"{label}: {text}")

    async def break_silence() -> None:
        start = at
        while True:
            await asyncio.sleep(max(0.0, at + SILENCE_S - time.monotonic()))
            if time.monotonic() - at >= SILENCE_S:
                await tell("at work", f"{time.monotonic() - start:.0f} s so far")

    silence = asyncio.ensure_future(break_silence())
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                news = chunk.get("nanorchestra", {})
                for choice in chunk["choices"]:
                    thought += choice["delta"].get("reasoning_content", "")
                if thought.strip() and (news or time.monotonic() - at > THOUGHT_S):
                    await tell("thinks", thought)
                    thought = ""
                if "call" in news:
                    await tell("calls", news["call"])
                elif result := news.get("result"):
                    label = "error" if result["error"] else "result"
                    cost = f"(${result['cost_usd']:.4g}, {result['latency_s']:.1f} s)"
                    await tell(f"{label} {cost}", result["content"])
                elif "turns" in news:
                    answer = whole_characters(chunk["choices"][0]["delta"].get("content", ""))
                    report = {name: news[name] for name in REPORTED}
    finally:
        silence.cancel()
    return {"answer": answer, **report}


@contextmanager
def protocol_pipes() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yields stdin and stdout; for all else stdin is empty and stdout is stderr.

    So neither a library nor a child process can write into the protocol.
    """
    sys.stdout.flush()
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    try:
        yield pipes
    finally:
        sys.stdout.flush()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe.fileno(), number)


def serve_pipes(server: Server, service: Service, pipes: tuple[BinaryIO, BinaryIO]) -> None:
    """Serves one client until it closes stdin, or SIGTERM; what runs then ends.

    Raises KeyboardInterrupt after Ctrl-C.
    """
    asyncio.run(_serve_pipes(server, service, *pipes))


async def _serve_pipes(server, service, stdin, stdout) -> None:
    to_session, from_client = anyio.create_memory_object_stream(0)
    to_client, from_session = anyio.create_memory_object_stream(0)
    reading = anyio.CancelScope()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, reading.cancel)

    async def read():
        async with to_session:
            with reading:
                while line := await in_thread(stdin.readline):
                    try:
                        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        shown = line[:80].decode(errors="replace").strip()
                        print(f"stdin: {shown!r} is not a message of MCP", file=sys.stderr)
                    else:
                        await to_session.send(SessionMessage(message))

    async def write():
        async with from_session:
            async for each in from_session:
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    await in_thread(_write_whole, stdout, f"{text}\n".encode())
                except OSError:  # the client has gone
                    reading.cancel()
                    return

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(write)
            await server.run(from_client, to_client, server.create_initialization_options())
            group.cancel_scope.deadline = anyio.current_time() + FLUSH_S
    finally:
        service.end()
        service.close()


def _write_whole(pipe: BinaryIO, data: bytes) -> None:
    while data:
        data = data[pipe.write(data) :]


class McpEndpoint:
    """An ASGI application. `read(request)` returns the bytes of a body that may be served.

    Clients of 2025-11-25 have a session each, in which they can cancel; it ends when it is idle.
    """

    def __init__(self, server: Server, read: Callable[[Request], Awaitable[bytes]]):
        self.manager = StreamableHTTPSessionManager(
            server, session_idle_timeout=REQUEST_S, max_sessions=SESSIONS
        )
        self.read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. HTTPException."""
        bodies = []
        if scope["method"] == "POST":  # the other, DELETE, needs the secret name of a session
            raw = await self.read(Request(scope, receive))
            bodies.append({"type": "http.request", "body": raw, "more_body": False})

        async def receive_again():
            return bodies.pop() if bodies else await receive()

        await self.manager.handle_request(scope, receive_again, send)

    def lifespan(self, app: Any) -> AbstractAsyncContextManager[None]:
        """Returns the context in which requests can be answered."""
        return self.manager.run()


def http_route(server: Server, read: Callable[[Request], Awaitable[bytes]]) -> tuple[Route, Any]:
    """Returns the route /mcp of an HTTP server, and the lifespan that its application needs."""
    endpoint = McpEndpoint(server, read)
    return Route("/mcp", endpoint, methods=["POST", "DELETE"]), endpoint.lifespan
