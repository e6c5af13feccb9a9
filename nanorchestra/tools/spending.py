"""What a run spends on paid endpoints: one limit for all its processes, and a bill.

A process reserves the most that a call can cost before the call, and settles it afterwards. What it
has spent is kept in a file, open calls at their most, so that a run which is killed and resumed
goes on from what it has really spent. No torch.
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanorchestra.agent.failures import EndpointError
from nanorchestra.errors import require
from nanorchestra.files import read_json, write_whole
from nanorchestra.records import ToolResult
from nanorchestra.schemas import Json
from nanorchestra.tools.replies import ReplayError, Reply, ReplyStore
from nanorchestra.units import dollars

WAIT_S = 600.0  # for the same call of a tool, that is made already


class Spending:
    """US dollars that the endpoints of a run may cost together; thread-safe.

    most: of all processes of the run. replies: what endpoints have said, which costs nothing again.
    file: where this process keeps what it has spent; what it says is counted from the start.

    `limit` is this process's part of `most`: what it has spent, and an equal part of what was left
    when `bound` was called. `bill` is what was spent, by payee. `refused` says whether a call was
    refused, `broken` why the recorded replies do not do, "" if they do: either ends a run.

    Invariant: `spent`, which counts an open call at its most, is never above `limit`. UserError if
    `most` is no limit.
    """

    def __init__(
        self, most: float = math.inf, replies: ReplyStore | None = None, file: Path | None = None
    ):
        self.most, self.limit, self.replies = math.inf, math.inf, replies
        self.spent, self.refused, self.broken = 0.0, False, ""
        self.bill: Counter[str] = Counter()
        self.processes, self.others_usd = 1, 0.0  # what the other processes had spent at the start
        self._lock = threading.Lock()
        self.keep_in(file)
        self.bound(most)

    @classmethod
    def of_rank(cls, folder: Path, rank: int, ranks: int) -> "Spending":
        """Returns the spending of one of the ranks of a run; each keeps a file in `folder`.

        Ranks of an earlier start, with no successor in this one, have spent what their files say.
        """
        spending = cls(file=folder / f"rank-{rank:05d}.json")
        spending.processes = ranks
        for file in _files_of_ranks(folder):
            if file != spending.file:
                spending.others_usd += read_spent(file)[0]
        return spending

    def keep_in(self, file: Path | None) -> None:
        """Keeps what is spent in `file`, from what it says on; before the first call."""
        self.file = file
        if file is not None and file.exists():
            self.spent, self.bill = read_spent(file)

    def bound(self, most: float) -> None:
        """Lowers the limit of the run to `most` US dollars, if it is above. UserError."""
        right = f"the limit max_usd is {most:g}; it must be US dollars, 0 or more"
        require(most >= 0, right)  # not so for NaN
        self.most = min(self.most, most)
        left = max(0.0, self.most - self.spent - self.others_usd)
        self.limit = self.spent + left / self.processes

    @property
    def problem(self) -> str:
        """Why a training run has to end: the limit, or a recorded reply; "" if it has not."""
        if self.refused and not self.broken:
            return (
                f"max_usd of the catalogue is {self.most:g} US dollars, and a rank's part of what "
                "is left does not pay for the next call; raise it, and go on with --resume"
            )
        return self.broken

    def total(self) -> dict[str, float]:
        """Returns the US dollars that all ranks of the run have spent by payee, at any start."""
        total = Counter()
        for file in _files_of_ranks(self.file.parent):
            total.update(read_spent(file)[1])
        return dict(sorted(total.items()))

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

    def recorded(
        self, request: Json, ask: Callable[[], Reply], wait_s: float, shared: bool = False
    ) -> Reply:
        """Returns the reply to a request that is recorded, or else that of `ask`.

        An EndpointError of `ask` is a reply with a problem. Without recorded replies that is all;
        with them see `ReplyStore.reply`. UserError if a reply cannot be recorded.
        """
        try:
            if self.replies is None:
                return ask()
            return self.replies.reply(request, ask, wait_s, shared)
        except EndpointError as error:
            return Reply.of_error(error)
        except ReplayError as error:
            self.broken = self.broken or str(error)
            return Reply(problem=str(error))

    def measured(self, request: Json, call: Callable[[], ToolResult]) -> ToolResult:
        """Returns `call()`, or its recorded result: of a tool whose seconds are measured here.

        Without its seconds a replay would not be the run that was recorded.
        """
        if self.replies is None or not self.replies.tools:
            return call()

        def ask() -> Reply:
            result = call()
            problem = result.content if result.infrastructure else ""
            return Reply(asdict(result), seconds=result.latency_s, problem=problem)

        reply = self.recorded(request, ask, WAIT_S)
        if reply.content is None:
            return ToolResult(f"Error: {reply.problem}", error=True, infrastructure=True)
        return ToolResult(**reply.content)

    def pay(
        self,
        ask: Callable[[], Reply],
        most_usd: float,
        bill: Callable[[Reply], float],
        payee: str,
    ) -> Reply:
        """Returns the reply of `ask`, or its EndpointError as one, and bills it.

        It may cost `most_usd` US dollars, and costs `bill(reply)`. EndpointError if the run has
        fewer left.
        """
        if not self.reserve(most_usd):
            problem = f"it could cost {dollars(most_usd)}, more than the run has left to spend"
            raise EndpointError(problem)
        usd = 0.0  # of a call that raises something else, as far as is known
        try:
            try:
                reply = ask()
            except EndpointError as error:
                reply = Reply.of_error(error)
            usd = bill(reply)
        finally:
            self.settle(most_usd, usd, payee)
        return replace(reply, usd=usd)

    def complete(
        self,
        endpoint: Any,
        body: Json,
        most_usd: float,
        bill: Callable[[Reply], float],
        payee: str,
    ) -> Reply:
        """Returns the reply of an Endpoint to a chat, with its message as content.

        It is a recorded one, or is paid as by `pay`. UserError if it cannot be recorded.
        """

        def ask() -> Reply:
            message, tokens = endpoint.complete(body)
            return Reply(message, tokens, *message.pop("spent"))

        def paid() -> Reply:
            return self.pay(ask, most_usd, bill, payee)

        request = {"url": endpoint.base_url.rstrip("/"), "body": body}
        return self.recorded(request, paid, endpoint.timeout_s)

    def _keep(self) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps({"spent_usd": self.spent, "bill_usd": self.bill}))


def _files_of_ranks(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.json"))


def read_spent(file: Path) -> tuple[float, Counter[str]]:
    """Returns the US dollars that a process has kept in a file, and its bill."""
    kept = read_json(file)
    return kept["spent_usd"], Counter(kept["bill_usd"])
