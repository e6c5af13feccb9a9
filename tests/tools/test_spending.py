"""One limit of dollars for all ranks of a run, whenever it is killed, and resumed by any number."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from openai_server import openai_server, said

from nanorchestra.agent.attempts import play
from nanorchestra.agent.failures import EndpointError
from nanorchestra.errors import UserError
from nanorchestra.records import Price, Trajectory
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert
from nanorchestra.tools.spending import Charge, Spending
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.rollout import play_on_ranks


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
    (again,) = opened(tmp_path, 1, 1.0)
    assert again.total() == pytest.approx({"gpt-5": 0.2, "judge": 0.1})


@pytest.mark.parametrize("most", [-1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(most):
    """--max-usd -1 was taken, and with free endpoints nothing said so."""
    assert Spending().reserve(1e9), "without a limit no call is refused"
    for bound in (Spending, Spending().bound):
        with pytest.raises(UserError, match="it must be US dollars, 0 or more$"):
            bound(most)


def test_attempts_are_not_repeated_once_the_dollars_of_the_run_are_spent(tmp_path):
    """Those that failed were played twice more, and calls that did fit were paid for again."""
    for most, played in ((0.3, 1), (9.0, 3)):
        (spending,), runs = opened(tmp_path / str(most), 1, most), []

        def run(environments, seeds, spending=spending, runs=runs):
            spending.reserve(0.5)
            runs.append(seeds)
            return [Trajectory("t", seed, status="infrastructure") for seed in seeds]

        play(SimpleNamespace(run=run), lambda i: None, [1, 2], lambda spent=spending: spent.problem)
        assert len(runs) == played


def test_a_reply_that_is_not_recorded_ends_the_run_on_every_rank(tmp_path):
    spending = Spending.of_rank(tmp_path, 0, 2)
    world = SimpleNamespace(task=lambda *place: "task", environment=lambda *start: "environment")
    player = SimpleNamespace(run=lambda environments, seeds: [])

    class FirstOfTwo(Ranks):
        def all_gather(self, value):
            return [value, "replay: no reply is recorded to big" if value == "" else value]

    options = {"seeds": [], "environment_seeds": [], "ranks": FirstOfTwo(0, 2)}
    with pytest.raises(UserError, match="no reply is recorded to big"):
        play_on_ranks(player, world, "train", [], problem=lambda: spending.problem, **options)


def test_a_call_that_waits_for_its_turn_takes_no_dollars_from_those_that_are_open():
    """Each was counted at its most while it waited, and a run ended that had spent nothing."""
    with openai_server() as server:
        server.answer = lambda body: time.sleep(0.05) or said("42")
        spending = Spending(max_usd=0.03)
        endpoint = Endpoint(server.url, concurrency=1)
        expert = Expert("e", endpoint, "m", Price(1, 10), spending, max_tokens=1000)
        assert 0.01 < expert.most_usd("hi") < 0.015
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(expert.ask, ["hi"] * 8, ["e"] * 8))
    assert [result.content for result in results] == ["42"] * 8 and not spending.exhausted
    assert server.most_open == 1
