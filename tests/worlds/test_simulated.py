"""One simulator of experts: a function of its seed, right as often as its skill, paid by price."""

from __future__ import annotations

import hashlib

import pytest

from nanorchestra.records import Price
from nanorchestra.tools.simulated import SimulatedExpert, Simulation, Skill

REPLIES = "d96ecaae1ff8a8c9"


def right(rng):
    return "right"


def wrong(rng):
    return rng.choice(("wrong", "false"))


def test_a_simulation_is_right_as_often_as_its_skill_and_costs_what_its_price_says():
    simulation = Simulation(0.7, Price(1.0, 10.0), output_tokens=800, latency_s=10.0)
    replies = [simulation.reply(f"task/{n}/large", 100, right, wrong) for n in range(600)]
    assert replies[5] == simulation.reply("task/5/large", 100, right, wrong)
    assert abs(sum(reply == "right" for reply, _ in replies) / 600 - 0.7) < 0.06
    assert {reply for reply, _ in replies} == {"right", "wrong", "false"}
    for number, (reply, bill) in enumerate(replies):
        assert not bill.error and 160 <= bill.output_tokens <= simulation.most_output_tokens()
        assert bill.cost_usd == pytest.approx((100 + 10 * bill.output_tokens) / 1e6)
        assert 7.0 <= bill.latency_s <= 13.0
        again, cut = simulation.reply(f"task/{number}/large", 100, right, wrong, 400)
        assert (again, cut.latency_s) == (reply, bill.latency_s)
        assert cut.output_tokens == min(bill.output_tokens, 400)
        assert cut.error == (bill.output_tokens > 400)


def test_an_expert_replies_to_the_last_bit_as_it_did():
    """The shipped models were trained on such replies."""
    digest = hashlib.sha256()
    for number in range(200):
        skill, price = Skill(0.7, 0.1, 0.4), Price(0.3, 0.2 * number)
        wrong = ("11", "12", "13")
        expert = SimulatedExpert("ant", "d", skill, "42", wrong, price, 9, 800, 7.0, f"t/{number}")
        result = expert.call({})
        tokens = result.input_tokens, result.output_tokens
        digest.update(repr((result.content, result.cost_usd, *tokens)).encode())
        digest.update(repr((result.latency_s, expert.most_usd({}))).encode())
    assert digest.hexdigest()[:16] == REPLIES
