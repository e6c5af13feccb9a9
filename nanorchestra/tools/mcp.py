"""Offers the tools of MCP servers: processes that are started here, and addresses.

The official package `mcp` speaks the protocol, 2026-07-28 or 2025-11-25 as the server does. This
file has what it leaves open: bounds for every wait, a new start of a server that has died or
hangs, names and schemas that the policy can use, and results as text.

All servers of a process live on one event loop in a daemon thread. A server that is a process gets
the variables HOME, LOGNAME, PATH, SHELL, TERM and USER, and those that its entry names. Its stderr
is kept for messages, the last 2,000 characters.
"""

import asyncio
import atexit
import functools
import json
import logging
import os
import re
import shutil
import signal
import ssl
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.request import getproxies, proxy_bypass

import anyio
import httpx2
from mcp import Client, MCPError, types
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from nanorchestra.errors import UserError, require
from nanorchestra.records import RESULT_WORDS, ToolResult
from nanorchestra.schemas import Json, argument_error, levels, schema_fault, whole_characters
from nanorchestra.tools.http import (
    CONNECT_S,
    MOST_BYTES,
    MOST_CHARS,
    SECRET_CHARS,
    masked,
    secret,
)
from nanorchestra.tools.limits import Tool
from nanorchestra.tools.spending import Spending

START_S = 60.0  # for a server to start and to list its tools; npx and uvx may install it first
PROBE_S = 5.0  # for a server to list its tools again, after a call that took too long
STOP_S = 1.0  # for a process to end by itself, and again after SIGTERM
MOST_WAIT_S = 60.0  # between two starts, if they fail
MOST_TOOLS = 128  # of a server that are offered
SERVER_SETTINGS = ("name", "command", "url", "env", "key_variable", "headers")
SAMPLES = ("", 0, [], {}, None)  # values with which a schema is tried
TOLD: set[str] = set()  # lines on stderr, each told once
PROCESSES: set[int] = set()  # that run; each leads a process group

for name in ("mcp", "client"):  # what a server does wrong is an observation, no log
    logging.getLogger(name).setLevel(logging.CRITICAL)


class ServerFailure(Exception):  # noqa: N818
    """A server cannot be used now: the infrastructure has failed. The message is one line."""


@dataclass
class McpTool(Tool):
    """A tool of an MCP server, which knows it as `remote`. A call ends after `timeout_s` seconds.

    `latency_s` None: measured.
    """

    name: str
    description: str
    parameters: Json
    server: "McpServer"
    remote: str
    usd_per_call: float = 0.0
    latency_s: float | None = None
    timeout_s: float = 60.0
    result_words: int = RESULT_WORDS
    spending: Spending = field(default_factory=Spending)  # for its recorded results
    kind, blocking = "mcp", True

    def ban_names(self, arguments: Json | None = None) -> set[str]:
        """Returns the name of its server, under which all its tools can be banned."""
        return super().ban_names(arguments) | {self.server.name}

    def call(self, arguments: Json) -> ToolResult:
        """Returns the result as text.

        A server that is down or hangs is a failure of the infrastructure and costs nothing. An
        error that the tool reports is the policy's, as is a call that takes too long at a server
        that still answers.
        """
        body = {"tool": self.remote, "arguments": arguments, "usd": self.usd_per_call}
        request = {"url": f"mcp {self.server.name}", "body": body}
        return self.spending.measured(request, lambda: self._ask(arguments))

    def _ask(self, arguments) -> ToolResult:
        start = time.monotonic()
        try:
            text, error = self.server.call(self, arguments)
        except ServerFailure as failure:
            problem = f"Error: {self.name}: {failure}"
            seconds = time.monotonic() - start
            return ToolResult(problem, latency_s=seconds, error=True, infrastructure=True)
        seconds = time.monotonic() - start if self.latency_s is None else self.latency_s
        return ToolResult(text, self.usd_per_call, seconds, error=error)


def open_servers(path: str, entries: list[Json], spending: Spending) -> list[McpTool]:
    """Returns the tools of the entries of a catalogue, whose form is checked.

    The servers start side by side; entries with the same server share it. `spending` has their
    recorded results. UserError.
    """
    servers: dict[str, McpServer] = {}
    chosen = []
    for entry in entries:
        own = {name: entry[name] for name in SERVER_SETTINGS if name in entry}
        others = {name: value for name, value in entry.items() if name not in ("kind", *own)}
        where = f"{path}: {entry['name']}"
        key = json.dumps(own, sort_keys=True)
        if key not in servers:
            servers[key] = McpServer(where=where, **own)
        chosen.append((servers[key], where, others))
    try:
        return [
            tool
            for server, where, others in chosen
            for tool in _offered(server, where, spending=spending, **others)
        ]
    except UserError:
        for server in servers.values():
            server.end()
        raise


def _offered(server, where, only=None, **settings) -> list[McpTool]:
    """Returns the tools of a server under names of their own: NAME_TOOL.

    `only`: names at the server. One line on stderr tells of a tool that cannot be offered; in
    `only` it is a UserError, as is a server that cannot be used. `settings` are those of McpTool.
    """
    try:
        listed = server.listed()
    except ServerFailure as failure:
        raise UserError(f"{where}: {failure}") from None
    unknown = sorted({*(only or ())} - {*listed})
    require(
        not unknown,
        f"{where}: only names {', '.join(unknown)}; the server lists {', '.join(listed)}"[:1000],
    )
    wanted = [remote for remote in listed if not only or remote in only]
    require(
        len(wanted) <= MOST_TOOLS,
        f"{where}: the server lists {len(listed):,} tools; {MOST_TOOLS} at most are offered, name "
        "those that are wanted in only",
    )
    tools, names = [], _names(server.name, listed)
    for remote in wanted:
        tool = listed[remote]
        if problem := _schema_problem(tool.input_schema):
            problem = f"{where}: the schema of {remote} is not served: {problem}"
            require(not only, problem)
            _tell(f"{problem}; it is not offered")
            continue
        text = whole_characters(tool.description or tool.title or remote)
        tools.append(McpTool(names[remote], text, tool.input_schema, server, remote, **settings))
    require(tools, f"{where}: the server has no tool that can be offered")
    return tools


def _names(prefix: str, listed: dict[str, Any]) -> dict[str, str]:
    """Returns a name for each tool of a server: ASCII letters, digits, _ and -, 64 at most."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    start = re.sub(r"[^A-Za-z0-9_-]", "_", prefix)
    for remote in listed:
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", remote)
        whole = plain if plain.startswith(f"{start}_") else f"{start}_{plain}"
        name, count = whole[:64], 1
        while name in taken:
            count += 1
            name = f"{whole[: 63 - len(str(count))]}_{count}"
        names[remote] = name
        taken.add(name)
    return names


def _schema_problem(schema: Json) -> str:
    """Returns why arguments cannot be checked by a schema, in one line; "" if they can.

    No reference may lead out of the schema: following it would open an address.
    """
    if fault := schema_fault(schema):
        return f"it is no JSON schema of 2020-12: {fault}"
    for level in levels(schema):
        for each in level:
            for word in ("$ref", "$dynamicRef"):
                target = each.get(word, "#") if isinstance(each, dict) else "#"
                if isinstance(target, str) and not target.startswith("#"):
                    return f"{word} is {target[:80]!r}; it must begin with #"
    properties = schema.get("properties", {})
    try:
        for value in SAMPLES:
            argument_error(dict.fromkeys(properties, value), schema)
    except Exception as error:  # a reference without an end or a target, a broken pattern
        return f"it cannot be applied ({type(error).__name__}: {error})"[:MOST_CHARS]
    return ""


def _tell(line: str) -> None:
    """Prints a line on stderr once, on the first rank."""
    if line not in TOLD and os.environ.get("RANK", "0") == "0":
        TOLD.add(line)
        print(line, file=sys.stderr)


@dataclass(eq=False)
class McpServer:
    """A server, started at once, and again at a call after it died. UserError for its settings.

    `command` is a program with its arguments, or `url` an address. `env` names environment
    variables that the program gets. `headers` ("$NAME") and `key_variable` are as those of an
    Endpoint.
    """

    name: str
    where: str
    command: list[str] = field(default_factory=list)
    url: str = ""
    env: list[str] = field(default_factory=list)
    key_variable: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        right = f"{self.where}: it must have either a command or a url"
        require(bool(self.command) != bool(self.url), right)
        wrong = "headers and key_variable are" if self.command else "env is"
        one = "a url" if self.command else "a command"
        given = (self.headers or self.key_variable) if self.command else self.env
        require(not given, f"{self.where}: {wrong} for a server with {one}")
        variables = [*self.env, self.key_variable, *self.header_variables.values()]
        variables = [variable for variable in variables if variable]
        for variable in variables:
            if not secret(variable):
                _tell(f"{self.name} needs {variable}, which is not set")
        self.secrets = [os.environ.get(variable, "") for variable in variables]
        self.connection: McpConnection | None = None
        self.failures, self.not_before = 0, 0.0  # of starts in a row; when the next may be
        self.lock = asyncio.Lock()
        self.begun = asyncio.run_coroutine_threadsafe(self._connected(), _loop())

    @property
    def header_variables(self) -> dict[str, str]:
        """The environment variable of each header."""
        return {name: value.removeprefix("$") for name, value in self.headers.items()}

    def listed(self) -> dict[str, types.Tool]:
        """Returns the tools that the server lists at its first start, by name. ServerFailure."""
        return self._wait(self.begun, START_S).listed

    def end(self) -> None:
        """Ends the server's process, or the connection to its address."""
        _loop().call_soon_threadsafe(lambda: self.connection and self.connection.end("ended"))

    def call(self, tool: McpTool, arguments: Json) -> tuple[str, bool]:
        """Returns the text of a call's result, and whether it is an error. ServerFailure."""
        asked = asyncio.run_coroutine_threadsafe(self._call(tool, arguments), _loop())
        return self._wait(asked, START_S + tool.timeout_s + PROBE_S)

    def _wait(self, future: Future, seconds: float) -> Any:
        """Returns the result of what runs on the servers' event loop. ServerFailure."""
        try:
            return future.result(seconds + 5 * STOP_S)
        except TimeoutError:
            future.cancel()
            raise ServerFailure(f"no answer within {seconds:g} s") from None
        except ServerFailure as failure:
            text = masked(" ".join(str(failure).split()), self.secrets, SECRET_CHARS)
            raise ServerFailure(text[:MOST_CHARS]) from None

    async def _connected(self) -> "McpConnection":
        """Returns a connection, a new one if the last has ended. ServerFailure."""
        async with self.lock:
            connection = self.connection
            if connection and connection.closing.is_set():
                await asyncio.wait({connection.task}, timeout=5 * STOP_S)
            if connection and not connection.task.done():
                return connection
            left = self.not_before - time.monotonic()
            if left > 0:
                raise ServerFailure(f"{connection.problem}; it is started again in {left:.0f} s")
            self.connection = connection = McpConnection(self)
            await asyncio.wait(
                {connection.task, connection.ready}, return_when=asyncio.FIRST_COMPLETED
            )
            if not connection.ready.done():
                self.failures += 1
                self.not_before = time.monotonic() + min(2.0**self.failures, MOST_WAIT_S)
                raise ServerFailure(connection.problem)
            self.failures = 0
            return connection

    async def _call(self, tool: McpTool, arguments: Json) -> tuple[str, bool]:
        connection = await self._connected()
        asked = asyncio.ensure_future(connection.client.call_tool(tool.remote, arguments))
        await asyncio.wait(
            {asked, connection.task},
            timeout=tool.timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not asked.done():
            asked.cancel()
            if connection.task.done():
                raise ServerFailure(connection.problem)
            await connection.probe()
            text, is_error = f"Error: {tool.name} took more than {tool.timeout_s:g} s", True
        else:
            text, is_error = await self._answer(tool, connection, asked)
        return whole_characters(masked(text, self.secrets, SECRET_CHARS)), is_error

    async def _answer(self, tool, connection, asked) -> tuple[str, bool]:
        """Returns the text of a call that has ended, and whether it is an error. ServerFailure."""
        try:
            result = asked.result()
        except MCPError as error:
            if error.code == types.INVALID_PARAMS:
                return f"Error: {tool.name}: {error}"[:MOST_CHARS], True
            if error.code == types.CONNECTION_CLOSED:
                await asyncio.wait({connection.task}, timeout=5 * STOP_S)
                raise ServerFailure(connection.problem or str(error)) from None
            if error.message == "Session terminated":  # the server at an address was restarted
                connection.end("the server has ended the session")
            raise ServerFailure(connection.explained(str(error))) from None
        except Exception as error:
            raise ServerFailure(f"its result cannot be used: {_reason(error)}") from None
        text = _text(result)
        return f"Error: {text}" if result.is_error else text, result.is_error


class McpConnection:
    """One life of a server, on the servers' event loop: `task` ends with it.

    `ready` is settled once `listed` has its tools. `problem` says why it ended.
    """

    def __init__(self, server: McpServer):
        self.server = server
        self.client: Client | None = None
        self.listed: dict[str, types.Tool] = {}
        self.problem, self.stderr, self.status = "", "", 0
        self.closing = asyncio.Event()
        self.ready = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(self._live())

    async def probe(self) -> None:
        """Lists the tools again; ends a server that does not answer. ServerFailure."""
        try:
            with anyio.fail_after(PROBE_S):
                await _listing(self.client)
        except Exception as error:
            self.end("it answers nothing any more")
            raise ServerFailure(f"{self.problem} ({_reason(error)})") from None

    def end(self, problem: str) -> None:
        """Ends the connection."""
        self.problem = self.problem or problem
        self.closing.set()

    def explained(self, problem: str) -> str:
        """Returns a problem with what else is known: a status of HTTP, a line of the process."""
        if self.server.url:
            problem = f"{self.server.url.partition('?')[0]}: {problem}"
        if self.status:
            problem += f" (HTTP {self.status})"
        if self.stderr.strip():
            problem += f"; its stderr says: {self.stderr.strip().splitlines()[-1]}"
        return problem

    async def _live(self) -> None:
        """Holds the connection open until `closing` is set."""
        transport = self._process() if self.server.command else self._address()
        try:
            with anyio.fail_after(START_S) as limit:
                async with Client(transport, cache=None) as client:
                    self.client = client
                    self.listed = await _listing(client)
                    limit.deadline = float("inf")
                    self.ready.set_result(None)
                    await self.closing.wait()
        except TimeoutError:
            self.problem = self.problem or self.explained(f"not ready within {START_S:g} s")
        except BaseException as error:
            self.problem = self.problem or self.explained(_reason(error))
        finally:
            self.closing.set()

    @asynccontextmanager
    async def _process(self):
        """Starts the program; yields streams of the messages from it and to it."""
        environment = get_default_environment()
        for variable in self.server.env:
            if variable in os.environ:
                environment[variable] = os.environ[variable]
        pipe, (program, *rest) = asyncio.subprocess.PIPE, self.server.command
        beside = os.path.dirname(sys.executable)  # where pip puts the scripts of packages
        command = [shutil.which(program) or shutil.which(program, path=beside) or program, *rest]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment,
                limit=MOST_BYTES,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServerFailure(f"cannot start {program[:80]!r}: {reason}") from None
        PROCESSES.add(process.pid)
        to_session, from_server = anyio.create_memory_object_stream(0)
        from_session, to_server = anyio.create_memory_object_stream(0)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read, process, to_session)
                group.start_soon(_write, process, to_server)
                group.start_soon(self._keep_stderr, process)
                try:
                    yield from_server, from_session
                finally:
                    with anyio.CancelScope(shield=True):
                        await _stop(process)
                    group.cancel_scope.cancel()
        finally:
            PROCESSES.discard(process.pid)
            for stream in (to_session, from_server, from_session, to_server):
                stream.close()

    async def _read(self, process, to_session) -> None:
        """Hands on the messages of a process. Lines that are none are skipped."""
        async with to_session:  # its end tells the session
            while line := await process.stdout.readline():
                try:
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    continue
                try:
                    await to_session.send(SessionMessage(message))
                except anyio.BrokenResourceError:
                    return
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
            status = "" if process.returncode is None else f" with status {process.returncode}"
            self.end(self.explained(f"it has ended{status}"))

    async def _keep_stderr(self, process) -> None:
        while text := await process.stderr.read(4096):
            self.stderr = (self.stderr + text.decode("utf-8", "replace"))[-2000:]

    @asynccontextmanager
    async def _address(self):
        """Yields streams of the messages from an address and to it."""
        server = self.server
        headers = {name: secret(var) for name, var in server.header_variables.items()}
        headers = {name: value for name, value in headers.items() if value}
        if key := secret(server.key_variable).replace(" ", ""):
            headers["Authorization"] = f"Bearer {key}"
        proxy = getproxies().get("https") if server.url.startswith("https:") else None
        if proxy and proxy_bypass(httpx2.URL(server.url).host):
            proxy = None
        client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(CONNECT_S, read=None, pool=None),
            verify=ssl.create_default_context(),
            proxy=proxy,
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
            event_hooks={"response": [self._note_status]},
        )
        opened = streamable_http_client(
            server.url, http_client=client, max_sse_event_size=MOST_BYTES
        )
        async with client, opened as streams:
            yield streams

    async def _note_status(self, response: httpx2.Response) -> None:
        self.status = response.status_code if response.status_code >= 400 else 0


async def _listing(client: Client) -> dict[str, types.Tool]:
    """Returns all tools that a server lists, by name."""
    page = await client.list_tools()
    tools = {tool.name: tool for tool in page.tools}
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools |= {tool.name: tool for tool in page.tools}
    return tools


async def _write(process, to_server) -> None:
    """Writes the messages of the session to a process, until it reads no more."""
    async with to_server:
        with suppress(OSError):
            async for sent in to_server:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(f"{text}\n".encode(errors="replace"))
                await process.stdin.drain()


async def _stop(process) -> None:
    """Ends a process and its children: by the end of its stdin, SIGTERM, SIGKILL."""
    process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number:
            _signal(process.pid, number)
        for _ in range(int(STOP_S / 0.01)):
            if process.returncode is not None:
                break
            await asyncio.sleep(0.01)
        if process.returncode is not None:
            break
    _signal(process.pid, signal.SIGKILL)  # children that it has left
    process._transport.close()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all servers, in a daemon thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    atexit.register(_end_all)
    return loop


def _end_all() -> None:
    """Ends the processes that still run, when this one ends."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in list(PROCESSES):
            _signal(group, number)
        end = time.monotonic() + STOP_S
        while PROCESSES and time.monotonic() < end:
            time.sleep(0.01)


def _reason(error: BaseException) -> str:
    """Returns the first reason of an exception, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__


def _text(result: types.CallToolResult) -> str:
    """Returns a result as text; of an image, a sound or another file it says what it is."""
    parts = []
    for block in result.content:
        if isinstance(block, types.TextContent):
            parts.append(block.text)
        elif isinstance(block, types.ImageContent | types.AudioContent):
            parts.append(f"[{block.type}: {block.mime_type}, {_bytes(block.data)}]")
        elif isinstance(block, types.ResourceLink):
            told = ", ".join(filter(None, [block.name, block.description, block.mime_type]))
            parts.append(f"[resource {block.uri}: {told}]")
        else:
            file = block.resource
            if isinstance(file, types.TextResourceContents):
                parts.append(f"[resource {file.uri}]\n{file.text}")
            else:
                kind = file.mime_type or "no text"
                parts.append(f"[resource {file.uri}: {kind}, {_bytes(file.blob)}]")
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts) or "(no output)"


def _bytes(base64: str) -> str:
    return f"{len(base64) * 3 // 4:,} bytes"
