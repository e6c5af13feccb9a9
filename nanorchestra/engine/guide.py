"""Which ids may be drawn, so that calls can be run and an answer fits a JSON schema. No torch.

llguidance compiles the grammar and makes the masks. A call has the form that chat.py renders, with
at most one space in a gap, and its arguments fit the tool's parameters.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import require
from nanorchestra.model.parser import CALL, CALL_END, THINK, THINK_END
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.schemas import Json

CACHED = 32  # compiled grammars


class Guide:
    """A grammar, and where a turn stands in it: each request takes a copy of SamplingParams.guide.

    It holds calls to those of `tools` (OpenAI's function objects), wherever parser.py sees one
    begin, and forbids nothing outside of them. With `required` the turn is one call, after its
    reasoning if it `thinks`; with a `schema` it is JSON of that, or a call. Not `strict`: keywords
    that cannot be enforced are ignored. UserError if a schema is wrong.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Json],
        schema: Json | None = None,
        *,
        required: bool = False,
        strict: bool = False,
        thinks: bool = True,
    ):
        self.tokenizer, self.free = tokenizer, not required and schema is None
        options = {"x-guidance": {"whitespace_pattern": "[ ]?", "lenient": not strict}}
        begin, end, call, call_end = (
            f"<[{tokenizer.token_id(name)}]>" for name in (THINK, THINK_END, CALL, CALL_END)
        )
        bodies = [] if schema is None else ["%json " + json.dumps(schema | options)]
        call = "" if self.free else call  # else the parser has seen it
        for tool in tools:
            wanted = json.dumps(_call(tool["function"]) | options)
            bodies.append(f"{call} /\\n?/ %json {wanted} /\\n?/ {call_end}")
        think = rf"think: {begin} /(.|\n)*/ {end} /\n?\n?/"
        start = "think? " if thinks and not self.free else ""
        lark = f"start: {start}({' | '.join(bodies)})\n{think}"
        self._matcher, self.holds = _compiled(tokenizer, lark), not self.free

    def copy(self) -> Guide:
        """Returns the guide of one turn, at its beginning."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._stream, other._unread = TurnStream(self.tokenizer), []
        return other

    def advance(self, token: int) -> None:
        """Takes a sampled id."""
        if self.holds:
            self._matcher.consume_token(token)
        self._unread.append(token)
        if self.free and b">" in self.tokenizer.bytes_of(token):  # a tag may end here
            self._stream.feed(*self._unread)
            self._unread.clear()
            begun = self._stream.parser.call
            if begun is not None and not self.holds:  # what follows the tag may be in the same id
                self._matcher.reset()
                rest = self.tokenizer.encode(begun)
                self.holds = self._matcher.try_consume_tokens(rest) == len(rest)
            elif begun is None:
                self.holds = False

    def allowed(self) -> np.ndarray | None:
        """Returns the ids that may be drawn, bool [vocab_size]; None: all of them.

        At the end of the grammar it is the id that ends the turn.
        """
        if not self.holds:
            return None
        return np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0


@cache
def _known(tokenizer) -> LLTokenizer:
    backend, size = tokenizer.backend.to_str(), tokenizer.vocab_size
    return LLTokenizer(backend, n_vocab=size, eos_token=tokenizer.im_end)


@lru_cache(CACHED)
def _compiled(tokenizer, lark) -> LLMatcher:
    matcher = LLMatcher(_known(tokenizer), LLMatcher.grammar_from_lark(lark))
    matcher.compute_logit_bias()
    problem = matcher.get_error()
    require(not problem, "schema: " + problem.partition("JSON schema: ")[2][:300])
    return matcher


def _call(function) -> Json:
    """Returns the schema of a call's JSON object."""
    arguments = function.get("parameters", {"type": "object"})
    properties = {"name": {"const": function["name"]}, "arguments": arguments}
    exact = {"required": ["name", "arguments"], "additionalProperties": False}
    return {"type": "object", "properties": properties} | exact
