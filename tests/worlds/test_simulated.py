"""One simulator of experts: a function of its seed, right as often as its skill, paid by price."""

from __future__ import annotations

import hashlib

import pytest

from nanorchestra.records import Price
from nanorchestra.tools.simulated import Simulation
from worlds.miniature import world as miniature

REPLIES = "1bac7dce4a6b2663"


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


def test_the_miniatures_experts_reply_to_the_last_bit_as_they_did(sandbox):
    """The shipped model was trained on them: a hash over all experts of 40 tasks."""
    digest = hashlib.sha256()
    for index in range(40):
        world = miniature.Miniature(3, sandbox)
        task = world.task("train" if index % 2 else "held_out", index)
        environment = world.environment(task, 7 * index)
        for tool in environment.by_name.values():
            if tool.kind == "expert":
                result = tool.call({})
                tokens = result.input_tokens, result.output_tokens
                digest.update(repr((result.content, result.cost_usd, *tokens)).encode())
                digest.update(repr((result.latency_s, tool.most_usd({}))).encode())
    assert digest.hexdigest()[:16] == REPLIES
