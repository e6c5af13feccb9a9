"""Compiles the grammars that clients send, one after the other, beside the event loop.

llguidance gives the interpreter free while it compiles, and bounds nearly all that a schema can
cost. A compilation cannot be stopped, so that what it does not bound is counted before.
"""

import asyncio
import math
from fractions import Fraction

from starlette.exceptions import HTTPException

from nanorchestra.agent.threads import in_thread
from nanorchestra.engine.guide import Form, Guide
from nanorchestra.errors import UserError, require
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.schemas import Json, levels

WAITING = 16  # grammars that may wait to be compiled
COMPILE_S = 30.0  # in which a grammar is waited for, the tokenizer of the first one included
# Keywords by which several schemas hold for one text: llguidance intersects their automata.
JOINING = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
PATTERNS = 12  # that may be intersected: 12 take 0.1 s, 16 take 2 s, 20 take minutes
VALUES = 5_000  # of all kinds: 5,000 optional properties take 2 s, 20,000 half a minute
MULTIPLE = 100_000  # states of the automata of `multipleOf`: 100,000 take 0.4 s, a million 15 s


class Grammars:
    """Makes the guides of one server. Grammars that were compiled are kept by engine/guide.py."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._waiting, self._turn = tokenizer, 0, asyncio.Lock()

    async def guide(self, form: Form) -> Guide:
        """Returns the guide of a form.

        UserError if a schema is wrong or costs too much. HTTPException if too many wait.
        """
        check_cost([form.schema, *(tool["function"].get("parameters") for tool in form.tools)])
        if self._waiting >= WAITING:
            raise HTTPException(429, "too many schemas wait to be compiled; try again")
        self._waiting += 1
        try:
            async with self._turn, asyncio.timeout(COMPILE_S):
                return await in_thread(Guide, self._tokenizer, form)
        except TimeoutError:
            raise UserError(f"schema: it takes more than {COMPILE_S:g} s to compile") from None
        finally:
            self._waiting -= 1


def check_cost(schemas: list[Json | None]) -> None:
    """Raises UserError for the schemas of a request that llguidance might compile without an end.

    Counted is what stands anywhere in a schema: a `$ref` may lead to it.
    """
    values = states = 0
    for schema in schemas:
        keywords, patterns, multiples = set(), 0, set()
        for level in levels(schema):
            values += len(level)
            for each in level:
                if isinstance(each, dict):
                    keywords.update(each)
                    patterns += isinstance(each.get("pattern"), str)
                    if type(each.get("multipleOf")) in (int, float):
                        multiples.add(abs(Fraction(str(each["multipleOf"]))))
        joins = not keywords.isdisjoint(JOINING)
        require(
            patterns <= PATTERNS or not joins,
            f"schema: it has {patterns} patterns; beside {', '.join(sorted(JOINING & keywords))} "
            f"{PATTERNS} at most can be enforced",
        )
        unit = math.lcm(*(multiple.denominator for multiple in multiples))
        whole = [int(multiple * unit) for multiple in multiples]
        states += max(sum(whole), math.lcm(*whole) if joins else 0)
    require(values <= VALUES, f"schema: it has {values:,} values, {VALUES:,} at most")
    require(states <= MULTIPLE, f"schema: multipleOf: {MULTIPLE:,} in sum at most can be enforced")
