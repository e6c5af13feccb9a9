"""Tells failures of the infrastructure from those that the arguments of a call have caused.

An attempt is never held responsible for the former: training and evaluation repeat it, and then
leave it out. `is_infrastructure` judges an exception that a tool raises: a function or a class of
the user's. Our own tools say themselves, in their results, what the infrastructure has failed.
"""

import errno
from collections.abc import Iterator

from nanorchestra.errors import UserError
from nanorchestra.records import ToolResult

RETRIED = (408, 409, 429)  # statuses of HTTP, and every one from 500
# By name, so that neither torch nor a client of HTTP is imported to ask: torch, requests, httpx,
# aiohttp, openai, http.client; asyncio and anyio, whose clients are cancelled with a connection.
CLASSES = {
    "CancelledError",
    "OutOfMemoryError",
    "AcceleratorError",
    "ConnectionError",
    "TimeoutError",
    "Timeout",
    "TimeoutException",
    "NetworkError",
    "ProtocolError",
    "SSLError",
    "IncompleteRead",
    "ClientConnectionError",
    "APIConnectionError",
}
DEVICE = (
    "CUDA error",
    "CUDA out of memory",
    "cudaMalloc",
    "HIP error",
    "NCCL error",
    "to be on the same device",
    "cannot be accessed from Triton",
)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
UNREACHABLE = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
NO_RESOLVER = -3  # EAI_AGAIN of getaddrinfo: no name can be looked up now


class EndpointError(Exception):
    """A server has not answered as it should, after all attempts; the message never has the key.

    `bad_request` says that the server refuses this request itself, so that its text is at fault;
    else the infrastructure is.
    """

    def __init__(self, problem: str, bad_request: bool = False):
        super().__init__(problem)
        self.bad_request = bad_request


def is_infrastructure(error: BaseException) -> bool:
    """Returns whether an exception is the fault of an endpoint, a device, a disk or a setting.

    What an exception was raised from (`raise ... from`) counts where it does not say itself.
    """
    verdicts = map(_verdict, _causes(error))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def failed(
    name: str, error: BaseException, infrastructure: bool, seconds: float = 0.0
) -> ToolResult:
    """Returns the observation of a call of the tool `name` that has raised after `seconds`."""
    problem = f"Error: {name} failed: {type(error).__name__}: {error}"
    return ToolResult(problem, latency_s=seconds, error=True, infrastructure=infrastructure)


def is_temporary(status: int) -> bool:
    """Returns whether an HTTP status says that the same request may be accepted later."""
    return status in RETRIED or status >= 500


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception, what it was raised from, and so on; the reason of a URLError, too."""
    met = []
    while isinstance(error, BaseException) and error not in met:
        met.append(error)
        yield error
        error = error.__cause__ or getattr(error, "reason", None)


def _verdict(error: BaseException) -> bool | None:
    """Returns whether one exception is the infrastructure's fault; None if it does not say."""
    if isinstance(error, EndpointError):
        return not error.bad_request
    if isinstance(error, UserError):  # a file or a setting, which no argument of a call names
        return True
    if status := _http_status(error):
        return is_temporary(status)
    if isinstance(error, OSError) and error.errno in FULL | UNREACHABLE | {NO_RESOLVER}:
        return True
    names = {parent.__name__ for parent in type(error).__mro__}
    if names & CLASSES or any(text in str(error) for text in DEVICE):
        return True
    return None


def _http_status(error: BaseException) -> int:
    """Returns the status of a reply that a client of HTTP raises as an error; 0 if it is none.

    requests and httpx keep it in `response`, openai, aiohttp and urllib in the error itself.
    """
    if not isinstance(error, Exception):  # SystemExit has a `code`, too
        return 0
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            status = getattr(holder, name, None)
            if type(status) is int and 400 <= status < 600:
                return status
    return 0
