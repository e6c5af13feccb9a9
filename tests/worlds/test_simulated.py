"""The experts of the desk are a function of their seed."""

from __future__ import annotations

import hashlib

from worlds.desk import EXPERTS, AskTool

REPLIES = "ac737757ba3bae8e"


def test_an_expert_replies_to_the_last_bit_as_it_did():
    """The shipped models were trained on such replies."""
    digest = hashlib.sha256()
    offers = {"ant": (3, 40), "bee": (17, 5), "cat": (40, 22)}
    for number in range(100):
        ask = AskTool(offers, {f"trial {number}": 42}, f"t/{number}")
        for expert in EXPERTS:
            for question in (f" trial  {number}", "queen 7"):
                arguments = {"expert": expert, "question": question}
                result = ask.call(arguments)
                tokens = result.input_tokens, result.output_tokens
                digest.update(repr((result.content, result.cost_usd, *tokens)).encode())
                digest.update(repr((result.latency_s, ask.most_usd(arguments))).encode())
                digest.update(repr(result.findings).encode())
    assert digest.hexdigest()[:16] == REPLIES
