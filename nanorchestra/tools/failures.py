"""Tells failures of the infrastructure from those that the arguments of a call have caused.

An attempt is never held responsible for the former: training and evaluation repeat it, and then
leave it out.
"""

import errno

from nanorchestra.records import ToolResult
from nanorchestra.tools.http import EndpointError

# By name, so that neither torch nor a client of HTTP is imported to ask: torch, requests, httpx.
CLASSES = {"OutOfMemoryError", "AcceleratorError", "ConnectionError", "ConnectError"}
DEVICE = ("CUDA error", "CUDA out of memory", "HIP error", "NCCL error")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE}


def is_infrastructure(error: BaseException) -> bool:
    """Returns whether an exception of a tool is the fault of an endpoint, a device or a disk."""
    if isinstance(error, EndpointError):
        return not error.bad_request
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    names = {parent.__name__ for parent in type(error).__mro__}
    return bool(names & CLASSES) or any(text in str(error) for text in DEVICE)


def failed(name: str, error: Exception) -> ToolResult:
    """Returns the observation of a call of the tool `name` that has raised an exception."""
    problem = f"Error: {name} failed: {type(error).__name__}: {error}"
    return ToolResult(problem, error=True, infrastructure=is_infrastructure(error))
