"""Which ids may be drawn, so that calls can be run and an answer fits a JSON schema. No torch.

llguidance compiles the grammar and makes the masks. A call has the form that chat.py renders, with
at most one space in a gap, and its arguments fit the tool's parameters. A grammar that meets one of
llguidance's limits ends its request by an error, never the text before its end.
"""

from __future__ import annotations

import copy
import json
from collections import abc
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import UserError
from nanorchestra.model.parser import CALL, CALL_END, THINK, THINK_END
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.schemas import Json

CACHED = 32  # compiled grammars
# A state of the lexer takes one or two kilobytes.
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}


@dataclass(frozen=True)
class Form:
    """What a turn is held to: calls to `tools` (OpenAI's function objects), wherever one begins.

    Nothing outside of calls is forbidden. With `required` the turn is one call, after its reasoning
    if it `thinks`; with a `schema` it is JSON of that, or a call. Keywords that cannot be
    enforced are ignored, but refused in a `strict` schema and for a function that says so.
    """

    tools: abc.Sequence[Json]
    schema: Json | None = None
    required: bool = False
    strict: bool = False
    thinks: bool = True

    @property
    def free(self) -> bool:
        """Whether a turn may hold anything beside its calls."""
        return not self.required and self.schema is None

    def grammar(self, tokenizer: Tokenizer) -> str:
        """Returns the grammar in llguidance's Lark."""
        begin, end, call, call_end = (
            _tag(tokenizer, tag) for tag in (THINK, THINK_END, CALL, CALL_END)
        )
        bodies = [] if self.schema is None else ["%json " + _json(self.schema, self.strict)]
        call = "" if self.free else call  # else the parser has seen it
        for tool in self.tools:
            function = tool["function"]
            schema = _json(_call(function), bool(function.get("strict")))
            bodies.append(f"{call} /\\n?/ %json {schema} /\\n?/ {call_end}")
        think = rf"think: {begin} /(.|\n)*/ {end} /\n?\n?/"
        thinks = self.thinks and not self.free and tokenizer.markers
        return f"start: {'think? ' if thinks else ''}({' | '.join(bodies)})\n{think}"


class Guide:
    """A form, and where a turn stands in it: each request takes a copy of SamplingParams.guide.

    UserError if a schema is wrong. So do `allowed` and `advance` raise it if they meet a limit of
    llguidance.
    """

    def __init__(self, tokenizer: Tokenizer, form: Form):
        self.tokenizer, self.free = tokenizer, form.free
        self._matcher = _compiled(tokenizer, form.grammar(tokenizer))
        self.holds = not self.free

    def copy(self) -> Guide:
        """Returns the guide of one turn, at its beginning."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._stream, other._unread = TurnStream(self.tokenizer), []
        return other

    def advance(self, token: int) -> None:
        """Takes a sampled id."""
        if self.holds and not self._matcher.consume_token(token):
            raise UserError(problem_of(self._matcher))
        self._unread.append(token)
        if self.free and b">" in self.tokenizer.bytes_of(token):  # a tag may end here
            self._stream.feed(*self._unread)
            self._unread.clear()
            call = self._stream.parser.call
            if call is not None and not self.holds:  # what follows the tag may be in the same id
                self._matcher.reset()
                rest = self.tokenizer.encode(call)
                self.holds = self._matcher.try_consume_tokens(rest) == len(rest)
                if self._matcher.is_error():
                    raise UserError(problem_of(self._matcher))
            elif call is None:
                self.holds = False

    def allowed(self) -> np.ndarray | None:
        """Returns the ids that may be drawn, bool [vocab_size]; None: all of them.

        At the end of the grammar it is the id that ends the turn.
        """
        if not self.holds:
            return None
        mask = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise UserError(problem_of(self._matcher))
        return np.frombuffer(mask, np.uint8) > 0


@cache
def _llguidance_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    """Returns llguidance's form of a tokenizer, built once."""
    backend, size = tokenizer.backend.to_str(), tokenizer.vocab_size
    return LLTokenizer(backend, n_vocab=size, eos_token=tokenizer.end_of_turn)


@lru_cache(CACHED)
def _compiled(tokenizer: Tokenizer, lark: str) -> LLMatcher:
    """Returns what follows a grammar. UserError if it is wrong, or if no text can begin it."""
    grammar, limits = LLMatcher.grammar_from_lark(lark), LLParserLimits(**LIMITS)
    matcher = LLMatcher(_llguidance_tokenizer(tokenizer), grammar, log_level=0, limits=limits)
    matcher.compute_logit_bias()
    if matcher.is_error():
        raise UserError(problem_of(matcher))
    return matcher


def problem_of(matcher: LLMatcher) -> str:
    """Returns why a matcher has failed, in one line."""
    problem = matcher.get_error()
    _, is_schema, reason = problem.partition("JSON schema: ")
    reason = (reason if is_schema else problem).partition("\n")[0]
    if reason.startswith("NoExtension"):
        reason = "no JSON fits it; a $ref may lead back to itself"
    return f"schema: {reason[:300] or 'the grammar cannot be followed'}"


def _tag(tokenizer, tag) -> str:
    """Returns a tag of a turn in Lark: its id, or its text in a tokenizer that lacks it."""
    token = tokenizer.backend.token_to_id(tag)
    return json.dumps(tag) if token is None else f"<[{token}]>"


def _json(schema, strict) -> str:
    """Returns a schema as llguidance reads it; `strict`: it refuses what it cannot enforce."""
    return json.dumps(
        schema | {"x-guidance": {"whitespace_pattern": "[ ]?", "lenient": not strict}}
    )


def _call(function) -> Json:
    """Returns the schema of a call's JSON object. A $ref of the parameters begins at their root."""
    arguments = {"$id": "urn:arguments"} | function.get("parameters", {"type": "object"})
    properties = {"name": {"const": function["name"]}, "arguments": arguments}
    exact = {"required": ["name", "arguments"], "additionalProperties": False}
    return {"type": "object", "properties": properties} | exact
