"""Holds an answer to calls of given tools or to a JSON schema, which llguidance compiles.

Reasoning stays free; after it only what the grammar derives may be drawn. engine/guide.py is for
calls that may come or not. No torch.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from nanorchestra.errors import require
from nanorchestra.model.parser import CALL, CALL_END, THINK, THINK_END
from nanorchestra.model.tokenizer import Tokenizer


class Form:
    """The grammar of one request, as the engine asks a guide; the matcher is the state.

    It derives calls of `tools` (OpenAI's function objects), or JSON of `schema` if there is one.
    Reasoning may come before it if it `thinks`. Not `strict`: keywords that cannot be enforced are
    ignored. UserError if a schema is wrong.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Any, schema: Any, strict: Any, thinks: Any):
        options = {"x-guidance": {"whitespace_pattern": "[ ]?", "lenient": not strict}}
        begin, end, call, call_end = (
            f"<[{tokenizer.token_id(name)}]>" for name in (THINK, THINK_END, CALL, CALL_END)
        )
        bodies = [] if schema is None else ["%json " + json.dumps(schema | options)]
        for tool in tools:
            wanted = json.dumps(_call(tool["function"]) | options)
            bodies.append(f'{call} "\\n" %json {wanted} "\\n" {call_end}')
        think = rf"think: {begin} /(.|\n)*/ {end} /\n?\n?/"
        start = "think? " if thinks else ""
        lark = f"start: {start}({' | '.join(bodies)})\n{think}"
        grammar = LLMatcher.grammar_from_lark(lark)
        self.matcher = LLMatcher(_compiled(tokenizer), grammar)
        self.allowed()
        problem = self.matcher.get_error()
        require(not problem, "schema: " + problem.partition("JSON schema: ")[2][:300])

    def start(self, tools: tuple[str, ...]) -> None:
        """Has no state of its own."""

    def advance(self, state: None, token: int) -> None:
        """Takes a sampled id."""
        self.matcher.consume_token(token)

    def allowed(self, state: None = None) -> np.ndarray:
        """Returns the ids that may be drawn, bool [vocab_size]; at the end that of the end."""
        return np.frombuffer(self.matcher.compute_logit_bias(), np.uint8) > 0


@cache
def _compiled(tokenizer):
    backend, size = tokenizer.backend.to_str(), tokenizer.vocab_size
    return LLTokenizer(backend, n_vocab=size, eos_token=tokenizer.im_end)


def _call(function):
    """The schema of a call's JSON object."""
    arguments = function.get("parameters", {"type": "object"})
    properties = {"name": {"const": function["name"]}, "arguments": arguments}
    exact = {"required": ["name", "arguments"], "additionalProperties": False}
    return {"type": "object", "properties": properties} | exact
