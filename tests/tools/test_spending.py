"""One limit of dollars for all ranks of a run, whenever it is killed, and resumed by any number."""

from __future__ import annotations

import random
import re

import pytest

from nanorchestra.agent.failures import EndpointError
from nanorchestra.errors import UserError
from nanorchestra.tools.spending import Charge, Spending


def opened(folder, world, most):
    """What each rank of a start may spend."""
    ranks = [Spending.of_rank(folder, rank, world) for rank in range(world)]
    for spending in ranks:
        spending.bound(most)
    return ranks


def test_no_run_spends_more_than_its_limit_over_ranks_kills_and_resumes(tmp_path, monkeypatch):
    write = lambda path, text: path.write_text(text)  # noqa: E731  (no kill falls into it here)
    monkeypatch.setattr("nanorchestra.tools.spending.write_whole", write)
    rng = random.Random(0)
    for trial in range(30):
        most, paid, named = rng.uniform(0.1, 3), 0.0, 0.0
        for _ in range(4):  # starts, with any number of ranks
            ranks = opened(tmp_path / str(trial), rng.randint(1, 4), most)
            for spending in ranks:
                known = spending.spent + spending.others_usd
                assert known == pytest.approx(paid + named), "what was spent is known at the start"
            for _ in range(rng.randint(0, 36)):
                spending, bound = rng.choice(ranks), rng.uniform(0, 0.3)
                if spending.reserve(bound):
                    if rng.random() < 0.1:
                        named += bound  # killed during the call: it may have cost as much
                    else:
                        usd = rng.uniform(0, bound)
                        spending.settle(bound, usd, "strong")
                        paid += usd
            assert paid + named <= most + 1e-9
            assert ranks[0].total().get("strong", 0.0) == pytest.approx(paid)
    assert paid + named > 0.5 * most, "the money is used"


def test_the_bill_names_who_was_paid_and_outlives_the_process(tmp_path):
    (spending,) = opened(tmp_path, 1, 1.0)
    for payee, usd in (("gpt-5", 0.2), ("judge", 0.1)):
        with spending.reserved(Charge(payee, 0.5, None)) as bill:
            assert spending.spent >= 0.5, "an open request counts at its most"
            bill.usd = usd
    with pytest.raises(RuntimeError), spending.reserved(Charge("gpt-5", 0.5, None)):
        raise RuntimeError
    too_much = spending.reserved(Charge("big", 0.8, None))
    with pytest.raises(EndpointError, match="more than the run has left"), too_much:
        raise AssertionError("it is not asked")
    assert re.match("max_usd of the catalogue is 1 US dollars.*--resume", spending.problem)
    with pytest.raises(UserError, match="it must be US dollars, 0 or more$"):
        spending.bound(float("nan"))
    (again,) = opened(tmp_path, 1, 1.0)
    assert again.total() == pytest.approx({"gpt-5": 0.2, "judge": 0.1})
