"""Numbers the requests of an attempt, so that a recording knows which one is asked again. No torch.

The k-th request of an attempt that is equal to earlier ones has a reply of its own. So which reply
an attempt reads is a function of its seed, never of timing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestCounts:
    """Numbers an attempt's requests: the k-th that is equal to earlier ones has the number k.

    `place` tells equal calls of one turn apart, which run side by side.
    """

    seed: int
    place: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def next(self, key: str) -> str:
        """Returns the name of the reply to a request with this digest."""
        k = self.counts[key]
        self.counts[key] += 1
        return f"{self.seed}{self.place}-{k}"


# Those of the attempt that is played.
REQUEST_COUNTS: ContextVar[RequestCounts | None] = ContextVar("request_counts", default=None)


@contextmanager
def in_attempt(seed: int) -> Iterator[None]:
    """Marks what runs inside as an attempt with this seed."""
    token = REQUEST_COUNTS.set(RequestCounts(seed))
    try:
        yield
    finally:
        REQUEST_COUNTS.reset(token)


@contextmanager
def side_by_side(calls: Sequence[Any]) -> Iterator[list[RequestCounts | None]]:
    """Yields the counts of each of a turn's calls, which run at once and so may not share them.

    Equal calls have places of their own. Afterwards the attempt counts on from the highest number.
    """
    counts = REQUEST_COUNTS.get()
    if counts is None:
        yield [None] * len(calls)
        return
    branches = []
    for number, call in enumerate(calls):
        equal = list(calls[:number]).count(call)
        place = counts.place + (f".{equal}" if equal else "")
        branches.append(RequestCounts(counts.seed, place, Counter(counts.counts)))
    yield branches
    for branch in branches:
        counts.counts |= branch.counts
