"""The simulator of experts is a function of its seed."""

from __future__ import annotations

import hashlib

from nanorchestra.records import Price
from nanorchestra.tools.simulated import SimulatedExpert, Skill

REPLIES = "d96ecaae1ff8a8c9"


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
