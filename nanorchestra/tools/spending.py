"""What a run spends on paid endpoints: one limit for all its processes, and a bill.

A process reserves the most that a call can cost before the call, and settles it afterwards. What it
has spent is kept in a file, open calls at their most, so that a run which is killed and resumed
goes on from what it has really spent. No torch.
"""

import hashlib
import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanorchestra.files import read_json, write_whole
from nanorchestra.records import ToolResult
from nanorchestra.schemas import Json, check
from nanorchestra.tools.http import EndpointError


class Spending:
    """US dollars that the endpoints of a run may cost together; thread-safe.

    most: of all processes of the run. replies: a directory that keeps what endpoints say, so that
    nothing is asked twice; `trial` is part of a reply's key, so that a repeated trial asks anew.
    file: where this process keeps what it has spent; what it says is counted from the start.

    `limit` is this process's part of `most`. `bill` is what was spent, by payee. `refused` says
    whether a call was refused.

    Invariant: `spent`, which counts an open call at its most, is never above `limit`.
    """

    def __init__(
        self, most: float = math.inf, replies: Path | None = None, file: Path | None = None
    ):
        self.most, self.limit, self.replies, self.file = most, most, replies, file
        self.spent, self.refused, self.trial = 0.0, False, 0
        self.bill: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._asking: dict[Path, threading.Lock] = {}
        if file is not None and file.exists():
            self.spent, self.bill = read_spent(file)

    def bound(self, most: float) -> None:
        """Lowers the limit of the run to `most` US dollars, if it is above."""
        self.most = min(self.most, most)
        self.limit = min(self.limit, self.most)

    def divide(self, spent: list[float], before: float) -> None:
        """Gives this process an equal part of what the run has left.

        `spent` is that of each process now, `before` what processes of an earlier start, with no
        successor in this one, had spent.
        """
        left = max(0.0, self.most - sum(spent) - before)
        with self._lock:
            self.limit = self.spent + left / len(spent)

    def reserve(self, most_usd: float) -> bool:
        """Counts a call at its most; False if that is more than is left."""
        with self._lock:
            fits = self.spent + most_usd <= self.limit
            if not fits:
                self.refused = True
            elif most_usd:
                self.spent += most_usd
                self._keep()
        return fits

    def settle(self, most_usd: float, usd: float, payee: str) -> None:
        """Counts a call that was reserved at what it has cost."""
        with self._lock:
            self.spent += usd - most_usd
            if usd:
                self.bill[payee] += usd
            if usd or most_usd:
                self._keep()

    def charge(
        self, name: str, most_usd: float, call: Callable[[], ToolResult], payee: str = ""
    ) -> ToolResult:
        """Returns `call()`, or an error if that could cost more than the run has left.

        The bill names `payee`, or else `name`.
        """
        if not self.reserve(most_usd):
            problem = f"{name} could cost ${most_usd:.2g}, more than the run has left to spend"
            return ToolResult(f"Error: {problem}", error=True, infrastructure=True, alias=name)
        usd = 0.0  # of a call that raises, as far as is known
        try:
            result = call()
            usd = result.cost_usd
        finally:
            self.settle(most_usd, usd, payee or name)
        return result

    def complete(self, endpoint: Any, body: Json) -> Any:
        """Returns what `endpoint.complete(body)` does, or has returned to the same request.

        A request that is open already is waited for, `endpoint.timeout_s` seconds at most. A reply
        that is stored keeps its own seconds. Raises EndpointError.
        """
        if self.replies is None:
            return endpoint.complete(body)
        stored = reply_file(self.replies, [endpoint.base_url, self.trial, body])
        asking = self._asking.setdefault(stored, threading.Lock())
        if not asking.acquire(timeout=endpoint.timeout_s):
            raise EndpointError(f"the same request had no reply within {endpoint.timeout_s:g} s")
        try:
            if stored.exists():
                return read_json(stored)
            reply = endpoint.complete(body)
            self.replies.mkdir(parents=True, exist_ok=True)
            write_whole(stored, json.dumps(reply))
            return reply
        finally:
            asking.release()

    def _keep(self) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps({"spent_usd": self.spent, "bill_usd": self.bill}))


def read_spent(file: Path) -> tuple[float, Counter[str]]:
    """Returns the US dollars that a process has kept in a file, and its bill. UserError."""
    kept = read_json(file)
    check(kept, "spent", str(file))
    return kept["spent_usd"], Counter(kept["bill_usd"])


def reply_file(directory: str | Path, request: Any) -> Path:
    """Returns the file of a directory that keeps the reply to a request, which is JSON."""
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    return Path(directory) / f"{digest}.json"
