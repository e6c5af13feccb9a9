"""One simulator for all experts: equal for the same task, seed and name, paid as it is priced."""

from __future__ import annotations

import hashlib

from worlds.miniature import world as miniature

RESULTS = "0860b411ebdb709d"


def test_the_miniatures_experts_reply_to_the_last_bit_as_they_did(sandbox):
    """The shipped model was trained on them: a hash over all experts of 40 tasks."""
    digest = hashlib.sha256()
    for index in range(40):
        task = miniature.World(3).task("train" if index % 2 else "held_out", index)
        environment = miniature.environment(task, 7 * index, sandbox)
        for tool in environment.by_name.values():
            if tool.kind == "expert":
                result = tool.call({})
                tokens = result.input_tokens, result.output_tokens
                digest.update(repr((result.content, result.cost_usd, *tokens)).encode())
                digest.update(repr((result.latency_s, tool.most_usd({}))).encode())
    assert digest.hexdigest()[:16] == RESULTS
