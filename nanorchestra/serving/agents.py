"""Agents that are not ours: a Python function, or a program, that plays an attempt.

Both are told where to ask the policy, and what the task is; agent_rollout.py answers them. They
report a reward, an answer, or nothing.
"""

import asyncio
import inspect
import json
import os
import re
import shlex
import signal
import tempfile
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nanorchestra.errors import UserError, require
from nanorchestra.files import import_file
from nanorchestra.schemas import Json
from nanorchestra.tools.http import SECRET_CHARS, masked
from nanorchestra.tools.threads import in_daemon

MODEL = "policy"  # its name for agents
STOP_S = 2.0  # for a program to end by itself after SIGTERM
KEPT = 2_000  # bytes of the end of stdout, and of stderr
SHOWN = 300  # characters of the last line of each
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)  # names of such variables
CALLS_S = 3600.0  # that a function waits for its calls


class AgentFailure(Exception):  # noqa: N818
    """The agent itself failed, not the policy. The message is one line."""


@dataclass(frozen=True)
class AttemptHandle:
    """What an agent's function is given: where it asks the policy, and the task.

    `task` has id, question, messages, tools (OpenAI's function objects), seed and split. `printed`
    is what a program has written last, for a message about it.
    """

    base_url: str
    api_key: str
    task: Json
    model: str = MODEL
    printed: list[str] = field(default_factory=list, compare=False)

    @property
    def url(self) -> str:
        """The address of the attempt."""
        return f"{self.base_url}/attempts/{self.api_key}"

    def call(self, calls: list[Json]) -> list[Json]:
        """Runs calls of the task's tools side by side; returns their results, in order.

        A call has "name" and "arguments", a result "content", "error", "cost_usd", "latency_s".
        """
        return self._post("calls", {"calls": calls})["results"]

    def _post(self, path, body) -> Json:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=CALLS_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            with suppress(ValueError, KeyError, TypeError):
                raise AgentFailure(json.load(error)["error"]["message"]) from None
            raise AgentFailure(f"{path}: status {error.code}") from None


class Agent(Protocol):
    """What plays an attempt."""

    async def run(self, attempt: AttemptHandle) -> Json:
        """Returns {"reward": R}, {"answer": TEXT}, or {}. AgentFailure."""


@dataclass(frozen=True)
class AgentFunction:
    """A function, or coroutine function, of an AttemptHandle, in a thread of its own.

    It returns a reward from 0 to 1, an answer, one of these as {"reward": ...} or
    {"answer": ...}, or None.
    """

    name: str
    function: Callable[[AttemptHandle], Any]

    async def run(self, attempt: AttemptHandle) -> Json:
        """Returns what the function says."""

        def call():
            said = self.function(attempt)
            return asyncio.run(said) if inspect.isawaitable(said) else said

        try:
            said = await asyncio.wrap_future(in_daemon(call))
        except asyncio.CancelledError:
            raise
        except (Exception, SystemExit) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            file, lines = self.name.partition(":")[0], []
            for frame in traceback.extract_tb(error.__traceback__):
                if Path(frame.filename).name == file:
                    lines.append(frame.lineno)
            line = f", line {lines[-1]}" if lines else ""
            raise AgentFailure(f"{self.name}{line}: {text}"[:500]) from None
        return _report_of(said)


@dataclass(frozen=True)
class AgentProgram:
    """A program, one process for each attempt.

    It finds the policy by OPENAI_BASE_URL and OPENAI_API_KEY, the attempt by
    NANORCHESTRA_ATTEMPT_URL, and may write a reward, or {"answer": ...}, to the file
    NANORCHESTRA_REWARD_FILE.
    """

    command: list[str]

    async def run(self, attempt: AttemptHandle) -> Json:
        """Returns what the program wrote to its file of the reward."""
        with tempfile.TemporaryDirectory(prefix="attempt-") as folder:
            file = Path(folder) / "reward.json"
            environment = os.environ | {
                "OPENAI_BASE_URL": attempt.base_url,
                "OPENAI_API_KEY": attempt.api_key,
                "NANORCHESTRA_ATTEMPT_URL": attempt.url,
                "NANORCHESTRA_REWARD_FILE": str(file),
            }
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise AgentFailure(f"{self.command[0]}: {error.strerror}") from None
            try:
                ends = await asyncio.gather(_last_of(process.stderr), _last_of(process.stdout))
                status = await process.wait()
            finally:
                await _stop(process)
            attempt.printed.append(_last_lines(*ends, environment))
            if status:
                command = shlex.join(self.command)[:SHOWN]
                raise AgentFailure(f"{command} ended with status {status}: {attempt.printed[0]}")
            if not file.exists():
                return {}
            try:
                said = json.loads(file.read_text())
            except ValueError as error:
                raise AgentFailure(f"{file.name}: not JSON: {error}"[:200]) from None
            return _report_of(said)


def _report_of(said: Any) -> Json:
    """Returns what an agent said of its attempt as {"reward": ...}, {"answer": ...} or {}."""
    if isinstance(said, dict):
        return said
    if said is None:
        return {}
    return {"answer": said} if isinstance(said, str) else {"reward": said}


async def _last_of(stream) -> str:
    """Returns the end of what a process writes, until it closes the stream."""
    kept = b""
    while part := await stream.read(1 << 16):
        kept = (kept + part)[-KEPT:]
    return kept.decode(errors="replace")


def _last_lines(stderr: str, stdout: str, environment: dict[str, str]) -> str:
    """Returns the last lines that a program has written, without the values of secret variables."""
    secrets = [value for name, value in environment.items() if SECRET.search(name) and value]
    lines = []
    for text in (stderr, stdout):
        line = masked(text, secrets, SECRET_CHARS).strip().splitlines()[-1:]
        lines.append(line[0][-SHOWN:] if line else "")
    said = lines[0] or "it wrote nothing to stderr"
    return f"{said}; the last line of stdout: {lines[1]}" if lines[1] else said


async def _stop(process) -> None:
    """Ends a process and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
            break
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # children that it has left


def load_agent(text: str) -> Agent:
    """Returns the agent that FILE.py:FUNCTION or a command names. UserError."""
    file, colon, name = text.rpartition(":")
    if not (colon and file.endswith(".py") and name.isidentifier()):
        try:
            command = shlex.split(text)
        except ValueError as error:
            raise UserError(f"task.agent: {text!r}: {error}") from None
        require(command, "task.agent: no command; give one, or FILE.py:FUNCTION")
        return AgentProgram(command)
    path = Path(file).resolve()
    require(path.is_file(), f"task.agent: {file}: no such file")
    try:
        module = import_file(path, "agent")
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"task.agent: {file}: {text}") from None
    function = getattr(module, name, None)
    require(callable(function), f"task.agent: {file}: it has no function {name!r}")
    return AgentFunction(f"{path.name}:{name}", function)
