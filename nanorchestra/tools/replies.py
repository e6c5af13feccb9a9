"""Records what endpoints reply, and replays it: a directory of files, one for each reply.

A reply lies under the SHA-256 of its request, so DIR/ab/abcd.../ has `request.json` and the replies
to it. A request may have several, since sampling is sampling: the k-th request of an attempt that
is equal to earlier ones has a reply of its own, and its name is the attempt's seed and k. So which
reply an attempt reads is a function of its seed, never of timing. No key reaches a file. No torch.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from nanorchestra.agent.numbering import REQUEST_COUNTS, RequestCounts
from nanorchestra.errors import require
from nanorchestra.files import read_json, write_whole, writing
from nanorchestra.records import ToolResult
from nanorchestra.schemas import Json
from nanorchestra.tools.http import Reply

SHARED = "shared"  # the one reply to all equal requests, where nothing is sampled
FAILED = "failed"  # how the name of a failure ends
EXCERPT = 100  # characters of a request, in a message
WAIT_S = 600.0  # for the same call of a tool, that is made already


class Replies:
    """What is replied to requests: each is asked. `ReplyStore` keeps what is said.

    asks: whether a request without a recorded reply is asked. missing: the line about the first
    reply that a replay lacks, "" if it has all; it ends a run.
    """

    asks, missing = True, ""

    def get(
        self, request: Json, ask: Callable[[], Reply], wait_s: float, shared: bool = False
    ) -> Reply:
        """Returns the reply of `ask` to a request."""
        return ask()

    def result(self, request: Json, call: Callable[[], ToolResult]) -> ToolResult:
        """Returns `call()`: of a tool that runs here, whose seconds are measured."""
        return call()


UNRECORDED = Replies()


class ReplyStore(Replies):
    """The recorded replies of a directory; thread-safe, for any number of processes.

    asks: whether a request without a reply is asked, and its reply recorded; else that is an error.
    tools: whether it holds the results of tools that run here, too.
    """

    def __init__(self, directory: str | Path, asks: bool = True, tools: bool = True):
        self.directory, self.asks, self.tools = Path(directory), asks, tools
        self._asking: dict[Path, threading.Lock] = {}
        self._outside = RequestCounts(0)  # of requests that no attempt makes

    def get(
        self, request: Json, ask: Callable[[], Reply], wait_s: float, shared: bool = False
    ) -> Reply:
        """Returns the recorded reply to a request, or that of `ask`, which is then recorded.

        A failure is recorded for a replay alone, and asked again by a recording. What `ask` raises
        is not recorded. A request that is open already is waited for, `wait_s` seconds at most.
        shared: all equal requests have the same reply. UserError if none can be written.
        """
        key = hashlib.sha256(_canonical(request).encode()).hexdigest()
        folder = self.directory / key[:2] / key
        name = SHARED if shared else (REQUEST_COUNTS.get() or self._outside).next(key)
        file = folder / f"{name}.json"
        if file.exists():
            return _read(file)
        if not self.asks:
            failure = _failure(file)
            return _read(failure) if failure.exists() else self._missed(request, key)
        lock = self._asking.setdefault(file, threading.Lock())
        if not lock.acquire(timeout=wait_s):
            return Reply(problem=f"the same request had no reply within {wait_s:g} s")
        try:
            return _read(file) if file.exists() else _recorded(file, request, ask())
        finally:
            self._asking.pop(file, None)
            lock.release()

    def _missed(self, request, key) -> Reply:
        problem = (
            f"replay: no reply is recorded to {_excerpt(request)} (request {key[:12]} of "
            f"{self.directory}); record it with record:DIR"
        )
        self.missing = self.missing or problem
        return Reply(problem=problem)

    def result(self, request: Json, call: Callable[[], ToolResult]) -> ToolResult:
        """Returns `call()`, or its recorded result: of a tool that runs here.

        Without its measured seconds a replay would not be the run that was recorded.
        """
        if not self.tools:
            return call()

        def ask() -> Reply:
            result = call()
            problem = result.content if result.infrastructure else ""
            return Reply(asdict(result), seconds=result.latency_s, problem=problem)

        reply = self.get(request, ask, WAIT_S)
        if reply.content is None:
            return ToolResult(f"Error: {reply.problem}", error=True, infrastructure=True)
        return ToolResult(**reply.content)


def store_of(word: str, where: str, usual: Replies = UNRECORDED) -> Replies:
    """Returns the store that "record:DIR" or "replay:DIR" names; `usual` for the words without one.

    UserError, which begins with `where`, for another word.
    """
    kind, _, directory = word.partition(":")
    if word in ("simulated", "real"):
        return usual
    require(
        kind in ("record", "replay") and directory,
        f"{where} is {word!r}; it must be simulated, real, record:DIR or replay:DIR",
    )
    if kind == "record":
        with writing(directory):  # a wrong one is known at the start
            Path(directory).mkdir(parents=True, exist_ok=True)
        return ReplyStore(directory)
    require(
        any(Path(directory).glob("??/*/*.json")),
        f"{where}: {directory} holds no recorded replies; record:DIR writes them",
    )
    return ReplyStore(directory, asks=False)


def _recorded(file, request, reply) -> Reply:
    """Writes a reply, whole or not at all, and returns it."""
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file.parent / "request.json", _canonical(request))
    write_whole(file if reply.final else _failure(file), json.dumps(asdict(reply), indent=1))
    return reply


def _failure(file) -> Path:
    """Returns where the failure of the request that has its reply in `file` is kept."""
    return file.with_suffix(f".{FAILED}.json")


def _read(file) -> Reply:
    """Returns the reply of a file; ignores other keys."""
    row = read_json(file)
    row["tokens"] = tuple(row["tokens"])
    return Reply(**{each.name: row[each.name] for each in fields(Reply) if each.name in row})


def _canonical(value) -> str:
    return json.dumps(value, sort_keys=True)


def _excerpt(request) -> str:
    """Returns who is asked and the end of what, in one line."""
    body = request["body"]
    said = body["messages"][-1].get("content") if body.get("messages") else None
    text = " ".join(str(said or body.get("query") or "").split())
    who = f"{body['model']} at {request['url']}" if "model" in body else request["url"]
    return f"{who}: {text[:EXCERPT]!r}"
