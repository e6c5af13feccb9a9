"""What the ranks of a run spend on endpoints together, under one limit, also after a resume."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from nanorchestra.errors import require
from nanorchestra.tools.spending import Spending, read_spent
from nanorchestra.training.distributed import Ranks


@dataclass
class Bill:
    """This rank's `spending`, and what ranks of an earlier start had spent that are no more.

    The limit is that of `spending.most`. Before each rollout every rank gets an equal part of what
    is left, so that no rank has to ask the others before a call.
    """

    spending: Spending = field(default_factory=Spending)
    before_usd: float = 0.0
    before: Counter[str] = field(default_factory=Counter)

    @classmethod
    def open(cls, folder: Path, ranks: Ranks) -> Bill:
        """Returns the bill that the run's directory `folder` keeps.

        Every rank keeps a file of its own there. All ranks call it together.
        """
        known = {}
        for file in sorted(folder.glob("rank-*.json")):
            known[file.name] = read_spent(file)
        for others in ranks.all_gather(known):  # a node may have a directory of its own
            known |= others
        bill = cls(Spending(file=folder / _name(ranks.rank)))
        for name in known.keys() - {_name(rank) for rank in range(ranks.world_size)}:
            usd, parts = known[name]
            bill.before_usd += usd
            bill.before.update(parts)
        return bill

    def divide(self, ranks: Ranks) -> None:
        """Gives each rank an equal part of what the run has left. All ranks call it together."""
        self.spending.divide(ranks.all_gather(self.spending.spent), self.before_usd)

    def require_left(self, ranks: Ranks) -> None:
        """Raises UserError on every rank if one of them was refused a call for the limit.

        So it does if a recorded reply was missing.
        """
        broken = [problem for problem in ranks.all_gather(self.spending.broken) if problem]
        require(not broken, "".join(broken[:1]))
        require(
            not any(ranks.all_gather(self.spending.refused)),
            f"max_usd of the catalogue is {self.spending.most:g} US dollars, and what is left does "
            "not pay for the next call; raise it, and go on with --resume",
        )

    def total(self, ranks: Ranks) -> dict[str, float]:
        """Returns the US dollars that the run has spent by payee. All ranks call it together."""
        total = Counter(self.before)
        for parts in ranks.all_gather(dict(self.spending.bill)):
            total.update(parts)
        return dict(sorted(total.items()))


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.json"
