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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.numbering import REQUESTS, RequestCounts
from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, write_whole
from nanorchestra.schemas import Json

SHARED = "shared"  # the one reply to all equal requests, where nothing is sampled
FAILED = "failed"  # how the name of a failure ends
EXCERPT = 100  # characters of a request, in a message


@dataclass(frozen=True)
class Reply:
    """What was replied to a request, as JSON, or the `problem` that there was.

    tokens: input and output, as the server counts them. retries: requests that were repeated.
    seconds: of all. waited: of these seconds, those before the last request. usd: US dollars that
    were paid. bad_request: the request is at fault; else a problem is the infrastructure's.
    """

    content: Any = None
    tokens: tuple[int, int] = (0, 0)
    retries: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    usd: float = 0.0
    problem: str = ""
    bad_request: bool = False

    @classmethod
    def of_error(cls, error: EndpointError) -> "Reply":
        """Returns the reply that an error is."""
        retries, seconds, waited = error.spent
        return cls(
            tokens=error.tokens,
            retries=retries,
            seconds=seconds,
            waited=waited,
            problem=str(error),
            bad_request=error.bad_request,
        )

    @property
    def begun(self) -> bool:
        """Whether there is a reply to bill: one that is whole, or was begun and is another."""
        return not self.problem or any(self.tokens)

    @property
    def final(self) -> bool:
        """Whether the same request would be answered alike: no failure of the infrastructure."""
        return not self.problem or self.bad_request


class ReplayError(UserError):
    """A reply is not recorded, so the run cannot be what was recorded."""


class ReplyStore:
    """The recorded replies of a directory; thread-safe, for any number of processes.

    asks: whether a request without a reply is asked, and its reply recorded; else that is an error.
    tools: whether it holds the results of tools that run here, too.
    """

    def __init__(self, directory: str | Path, asks: bool = True, tools: bool = True):
        self.directory, self.asks, self.tools = Path(directory), asks, tools
        self._asking: dict[Path, threading.Lock] = {}
        self._outside = RequestCounts(0)  # of requests that no attempt makes

    def reply(
        self, request: Json, ask: Callable[[], Reply], wait_s: float, shared: bool = False
    ) -> Reply:
        """Returns the recorded reply to a request, or that of `ask`, which is then recorded.

        What `ask` raises is not recorded. A failure of the infrastructure is recorded for a replay
        alone, and asked again by a recording. A request that is open already is waited for,
        `wait_s` seconds at most. shared: all equal requests have the same reply. Raises
        EndpointError, ReplayError for a reply that is missing, and UserError if none can be
        written.
        """
        key = hashlib.sha256(_canonical(request).encode()).hexdigest()
        folder = self.directory / key[:2] / key
        name = SHARED if shared else (REQUESTS.get() or self._outside).next(key)
        file = folder / f"{name}.json"
        if file.exists():
            return _read(file)
        if not self.asks:
            failure = _failure(file)
            if failure.exists():
                return _read(failure)
            raise ReplayError(
                f"replay: no reply is recorded to {_excerpt(request)} (request {key[:12]} of "
                f"{self.directory}); record it with record:DIR"
            )
        lock = self._asking.setdefault(file, threading.Lock())
        if not lock.acquire(timeout=wait_s):
            raise EndpointError(f"the same request had no reply within {wait_s:g} s")
        try:
            return _read(file) if file.exists() else _recorded(file, request, ask())
        finally:
            self._asking.pop(file, None)
            lock.release()


def store_of(word: str, where: str) -> ReplyStore | None:
    """Returns the store that "record:DIR" or "replay:DIR" names; None for the words without one.

    UserError, which begins with `where`, for another word.
    """
    kind, _, directory = word.partition(":")
    if word in ("simulated", "real"):
        return None
    require(
        kind in ("record", "replay") and directory,
        f"{where} is {word!r}; it must be simulated, real, record:DIR or replay:DIR",
    )
    if kind == "record":
        try:  # a wrong one is known at the start
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{directory}, no directory that can be made ({error.strerror})"
            raise UserError(f"{where}: DIR is {problem}") from None
        return ReplyStore(directory)
    require(
        any(Path(directory).glob("??/*/*.json")),
        f"{where}: {directory} holds no recorded replies; record:DIR writes them",
    )
    return ReplyStore(directory, asks=False)


def _recorded(file, request, reply) -> Reply:
    """Writes a reply, whole or not at all, and returns it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{file.parent}: cannot be made ({error.strerror})") from None
    write_whole(file.parent / "request.json", _canonical(request))
    write_whole(file if reply.final else _failure(file), json.dumps(asdict(reply), indent=1))
    return reply


def _failure(file) -> Path:
    """Returns where the failure of the request that has its reply in `file` is kept."""
    return file.with_suffix(f".{FAILED}.json")


def _read(file) -> Reply:
    """Returns the reply of a file."""
    row = read_json(file)
    return Reply(**row | {"tokens": tuple(row["tokens"])})


def _canonical(value) -> str:
    return json.dumps(value, sort_keys=True)


def _excerpt(request) -> str:
    """Returns who is asked and the end of what, in one line."""
    body = request["body"]
    said = body["messages"][-1].get("content") if body.get("messages") else None
    text = " ".join(str(said or body.get("query") or "").split())
    who = f"{body['model']} at {request['url']}" if "model" in body else request["url"]
    return f"{who}: {text[:EXCERPT]!r}"
