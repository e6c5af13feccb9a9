"""What a run spends on paid endpoints: one limit for all its processes, and a bill.

A process reserves the most that a request can cost before it is sent, and settles it afterwards.
What it has spent is kept in a file, open requests at their most, so that a run which is killed and
resumed goes on from what it has really spent. An attempt's own bill is another one, in its results:
a recorded reply has its price there, and costs the run nothing. No torch.
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nanorchestra.agent.failures import EndpointError
from nanorchestra.errors import require
from nanorchestra.files import read_json, write_whole
from nanorchestra.tools.http import Reply
from nanorchestra.tools.replies import UNRECORDED, Replies
from nanorchestra.units import dollars


class Charge(NamedTuple):
    """What a request can cost, and to whom: `most_usd` US dollars, and `price_of(reply)`."""

    payee: str
    most_usd: float
    price_of: Callable[[Reply], float]


class UnpaidError(EndpointError):
    """A request was not sent, since the run has fewer dollars left than it can cost."""


@dataclass
class Bill:
    """What a request has cost: 0 US dollars, as far as is known, if it has raised."""

    usd: float = 0.0


class Spending:
    """US dollars that the endpoints of a run may cost together; thread-safe.

    max_usd: of all processes of the run. replies: those that are recorded, which cost nothing
    again. file: where this process keeps what it has spent; what it says is counted from the start.
    others_usd: what the other processes of the run had spent by then. processes: of the run.

    `own_max_usd` is this process's part of `max_usd`: what it has spent, and an equal part of what
    was left when `bound` was called. `bill` is what was spent, by payee. `exhausted` says whether a
    request was not paid for, as it could have cost more than is left: the run has to end.

    Invariant: `spent`, which counts an open request at its most, is never above `own_max_usd`.
    UserError if `max_usd` is no limit.
    """

    def __init__(
        self,
        max_usd: float = math.inf,
        replies: Replies = UNRECORDED,
        file: Path | None = None,
        others_usd: float = 0.0,
        processes: int = 1,
    ):
        self.max_usd, self.own_max_usd, self.replies = math.inf, math.inf, replies
        self.spent, self.exhausted = 0.0, False
        self.bill: Counter[str] = Counter()
        self.others_usd, self.processes = others_usd, processes
        self._lock = threading.Lock()
        self.keep_in(file)
        self.bound(max_usd)

    @classmethod
    def of_rank(cls, folder: Path, rank: int, ranks: int) -> "Spending":
        """Returns the spending of one of the ranks of a run; each keeps a file in `folder`.

        Ranks of an earlier start, with no successor in this one, have spent what their files say.
        """
        own = folder / f"rank-{rank:05d}.json"
        others = [read_spent(file)[0] for file in _files_of_ranks(folder) if file != own]
        return cls(file=own, others_usd=sum(others), processes=ranks)

    def keep_in(self, file: Path | None) -> None:
        """Keeps what is spent in `file`, from what it says on; before the first call."""
        self.file = file
        if file is not None and file.exists():
            self.spent, self.bill = read_spent(file)

    def bound(self, max_usd: float) -> None:
        """Lowers the limit of the run to `max_usd` US dollars, if it is above. UserError."""
        right = f"the limit max_usd is {max_usd:g}; it must be US dollars, 0 or more"
        require(max_usd >= 0, right)  # not so for NaN
        self.max_usd = min(self.max_usd, max_usd)
        left = max(0.0, self.max_usd - self.spent - self.others_usd)
        self.own_max_usd = self.spent + left / self.processes

    @property
    def problem(self) -> str:
        """Why a training run has to end: the limit, or a missing reply; "" if it has not."""
        if self.exhausted and not self.replies.missing:
            return (
                f"max_usd of the catalogue is {self.max_usd:g} US dollars, and a rank's part of "
                "what is left does not pay for the next call; raise it, and go on with --resume"
            )
        return self.replies.missing

    def total(self) -> dict[str, float]:
        """Returns the US dollars that all ranks of the run have spent by payee, at any start."""
        total = Counter()
        for file in _files_of_ranks(self.file.parent):
            total.update(read_spent(file)[1])
        return dict(sorted(total.items()))

    def reserve(self, most_usd: float) -> bool:
        """Counts a request at its most; False if that is more than is left."""
        with self._lock:
            fits = self.spent + most_usd <= self.own_max_usd
            if not fits:
                self.exhausted = True
            elif most_usd:
                self.spent += most_usd
                self._keep()
        return fits

    def settle(self, most_usd: float, usd: float, payee: str) -> None:
        """Counts a request that was reserved at what it has cost."""
        with self._lock:
            self.spent += usd - most_usd
            if usd:
                self.bill[payee] += usd
            if usd or most_usd:
                self._keep()

    @contextmanager
    def reserved(self, charge: Charge) -> Iterator[Bill]:
        """Reserves the most that a request can cost, while it is made; its bill is then counted.

        UnpaidError, and nothing is made, if the run has fewer dollars left than it can cost.
        """
        if not self.reserve(charge.most_usd):
            problem = (
                f"it could cost {dollars(charge.most_usd)}, more than the run has left to spend"
            )
            raise UnpaidError(problem)
        bill = Bill()
        try:
            yield bill
        finally:
            self.settle(charge.most_usd, bill.usd, charge.payee)

    def _keep(self) -> None:
        """Writes what is spent, before anything else may be: a kill at any time finds it there."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps({"spent_usd": self.spent, "bill_usd": self.bill}))


def _files_of_ranks(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.json"))


def read_spent(file: Path) -> tuple[float, Counter[str]]:
    """Returns the US dollars that a process has kept in a file, and its bill."""
    kept = read_json(file)
    return kept["spent_usd"], Counter(kept["bill_usd"])
