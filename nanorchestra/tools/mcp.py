"""Offers the tools of MCP servers: processes that are started here, and addresses.

The official package `mcp` speaks the protocol, starts a server's process and ends it with its
children (pip install mcp==2.3.0, which brings anyio and httpx2). A process gets the variables HOME,
LOGNAME, PATH, SHELL, TERM and USER, and those that its entry names. Of its stderr the last line is
told, where it does not start.
"""

import asyncio
import atexit
import logging
import math
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock

import anyio
import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, MCPError, types
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from nanorchestra.agent.failures import failed
from nanorchestra.agent.threads import abandoned
from nanorchestra.agent.tool import Tool
from nanorchestra.errors import UserError, require
from nanorchestra.records import ToolResult
from nanorchestra.schemas import Json
from nanorchestra.tools.http import CONNECT_S, SECRET_CHARS, masked, secret
from nanorchestra.tools.replies import UNRECORDED, Replies

START_S = 60.0  # for a server to start and to list its tools; npx and uvx may install it first
PROBE_S = 5.0  # for a server to list its tools again, after a call that took too long
LOOK_S = 0.1  # between two looks whether a call is abandoned
SETTINGS = "only", "usd_per_call", "timeout_s"
ENDED = types.CONNECTION_CLOSED, types.INVALID_REQUEST  # the latter of a session that is over

for name in ("mcp", "client"):  # what a server does wrong is an observation, no log
    logging.getLogger(name).setLevel(logging.CRITICAL)


@dataclass
class McpTool(Tool):
    """A tool of an MCP server, which knows it as `remote`; a call has `timeout_s` seconds."""

    name: str
    description: str
    parameters: Json
    server: "McpServer"
    remote: str
    usd_per_call: float = 0.0
    timeout_s: float = 60.0
    replies: Replies = UNRECORDED
    kind, blocking = "mcp", True

    def ban_names(self, arguments: Json | None = None) -> set[str]:
        """Returns the names under which a call can be banned, its server's among them."""
        return super().ban_names(arguments) | {self.server.name}

    def call(self, arguments: Json) -> ToolResult:
        """Returns the result as text.

        A server that is down or hangs is a failure of the infrastructure and costs nothing. An
        error that the tool reports is the policy's, as is a call that takes too long at a server
        that still answers.
        """
        body = {"tool": self.remote, "arguments": arguments, "usd": self.usd_per_call}
        request = {"url": f"mcp {self.server.name}", "body": body}
        return self.replies.result(request, lambda: self._ask(arguments))

    def _ask(self, arguments) -> ToolResult:
        start = time.monotonic()
        try:
            text, error = self.server.call(self.remote, arguments, self.timeout_s)
        except Exception as problem:
            seconds = time.monotonic() - start
            return failed(self.name, problem, infrastructure=True, seconds=seconds)
        text = masked(text, self.server.secrets(), SECRET_CHARS)
        text = f"Error: {self.name}: {text}" if error else text
        return ToolResult(text, self.usd_per_call, time.monotonic() - start, error=error)


class McpServer:
    """The server of an entry of a catalogue; `where` is for messages.

    It starts at once, and again at the first call after it has ended. `life` is the task that
    holds it open, `client` follows once it has listed its tools.
    """

    def __init__(self, where: str, entry: Json):
        self.where, self.entry, self.name = where, entry, entry["name"]
        self.lock = Lock()
        self._start()

    def tools(self, only: list[str] | None = None, **settings) -> list[McpTool]:
        """Returns its tools, or those that `only` names, under the names NAME_TOOL. UserError."""
        try:
            self.client.result()
        except ConnectionError as error:
            raise UserError(f"{self.where}: the server does not start: {error}") from None
        listed = {tool.name: tool for tool in self.listed}
        unknown = sorted({*(only or ())} - {*listed})
        right = f"only names {', '.join(unknown)}; the server lists {', '.join(listed)}"
        require(not unknown, f"{self.where}: {right}")
        tools = []
        for remote in only or listed:
            name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{self.name}_{remote}")[:64]
            about, schema = listed[remote].description, listed[remote].input_schema
            tools.append(McpTool(name, about or remote, schema, self, remote, **settings))
        return tools

    def secrets(self) -> list[str]:
        """Returns the values of the environment's variables that the server is given."""
        headers = self.entry.get("headers", {}).values()
        names = [*self.entry.get("env", ()), *(value.removeprefix("$") for value in headers)]
        return [secret(name) for name in [*names, self.entry.get("key_variable", "")]]

    def call(self, remote: str, arguments: Json, seconds: float) -> tuple[str, bool]:
        """Returns the text of a call's result, and whether it is an error of the call.

        Raises what else goes wrong. A call that is abandoned is cancelled at the server.
        """
        with self.lock:
            if self.life.done():
                self._start()
            life, client = self.life, self.client
        asked = _loop().start_task_soon(_called, life, client, remote, arguments, seconds)
        while not asked.done():
            if abandoned():
                asked.cancel()
            wait([asked], LOOK_S)
        return asked.result()

    def _start(self) -> None:
        self.client: Future[Client] = Future()
        self.life = _loop().start_task_soon(self._live, self.client)

    async def _live(self, connected) -> None:
        with TemporaryFile("w+", errors="replace") as stderr:
            try:
                with anyio.fail_after(START_S) as limit:
                    async with self._client(stderr) as client:
                        self.listed = await _listing(client)
                        connected.set_result(client)
                        limit.deadline = math.inf
                        await anyio.sleep_forever()
            except Exception as error:
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                stderr.seek(0)
                last = "".join(stderr.readlines()[-1:])
                problem = " ".join(f"{type(error).__name__}: {error} {last}".split())
                if not connected.done():
                    connected.set_exception(ConnectionError(problem))

    @asynccontextmanager
    async def _client(self, stderr) -> AsyncIterator[Client]:
        """Yields a client of the program or of the address."""
        if "command" in self.entry:
            async with Client(stdio_client(self._process(), stderr), cache=None) as client:
                yield client
        else:
            async with self._http() as http:
                where = streamable_http_client(
                    self.entry["url"], http_client=http, max_sse_event_size=None
                )
                async with Client(where, cache=None) as client:
                    yield client

    def _process(self) -> StdioServerParameters:
        """Returns how the program starts: one on the PATH, or beside this Python."""
        program, *arguments = self.entry["command"]
        places = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
        named = [name for name in self.entry.get("env", ()) if name in os.environ]
        variables = {"PATH": os.pathsep.join(places)} | {name: os.environ[name] for name in named}
        return StdioServerParameters(command=program, args=arguments, env=variables)

    def _http(self) -> httpx2.AsyncClient:
        """Returns a client that sends the headers and the key. UserError if one is not set."""
        named = self.entry.get("headers", {})
        headers = {name: _variable(value.removeprefix("$")) for name, value in named.items()}
        if key := self.entry.get("key_variable"):
            headers["Authorization"] = f"Bearer {_variable(key)}"
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        tunnels = self.entry["url"].startswith("https:")  # a proxy can read what goes to http://
        return httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=tunnels)


def open_servers(path: str, entries: list[Json], replies: Replies) -> list[McpTool]:
    """Returns the tools of the entries of a catalogue. UserError.

    The servers start side by side. `replies` are their recorded results.
    """
    servers = [McpServer(f"{path}: {entry['name']}", entry) for entry in entries]
    tools = []
    for server in servers:
        settings = {name: server.entry[name] for name in SETTINGS if name in server.entry}
        tools += server.tools(replies=replies, **settings)
    return tools


@cache
def _loop() -> BlockingPortal:
    """Returns the event loop of all servers, in a thread; they end when this process does."""
    stack = ExitStack()
    loop = stack.enter_context(start_blocking_portal())
    stack.callback(loop.call, loop.stop, True)
    atexit.register(stack.close)
    return loop


def _variable(name) -> str:
    """Returns the value of an environment variable. UserError."""
    require(value := secret(name), f"the environment variable {name} is not set")
    return value


async def _listing(client) -> list[types.Tool]:
    """Returns all tools that a server lists."""
    page = await client.list_tools()
    tools = page.tools
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


async def _called(life, client, remote, arguments, seconds) -> tuple[str, bool]:
    """Returns what `McpServer.call` does; a server that has ended or hangs loses its life."""
    client = await asyncio.shield(asyncio.wrap_future(client))  # others wait for it, too
    try:
        with anyio.move_on_after(seconds):
            result = await client.call_tool(remote, arguments)
            return "\n".join(map(_text, result.content)) or "(no output)", result.is_error
        with anyio.fail_after(PROBE_S):
            await _listing(client)
        return f"it took more than {seconds:g} s", True
    except MCPError as error:
        if error.code == types.INVALID_PARAMS:
            return str(error), True
        if error.code in ENDED:
            life.cancel()
        raise
    except TimeoutError:
        life.cancel()
        raise TimeoutError("the server answers nothing any more") from None


def _text(part) -> str:
    """Returns a part of a result as text; of an image, a sound or another file what it is."""
    match part:
        case types.TextContent():
            return part.text
        case types.EmbeddedResource(resource=types.TextResourceContents()):
            return part.resource.text
        case types.ResourceLink():
            return f"[{part.name}: {part.uri}]"
    return f"[{part.type}]"
