"""Grammars of clients: what could be compiled without an end is refused before, the rest waits."""

from __future__ import annotations

import asyncio
import time

import pytest
from starlette.exceptions import HTTPException

from nanorchestra.engine.guide import Form
from nanorchestra.errors import UserError
from nanorchestra.serving import grammars

PATTERNS = [{"type": "string", "pattern": f"(.*{chr(97 + i)}.*){{1}}"} for i in range(20)]
LINKS = [{"$ref": f"#/$defs/{i + 1}"} for i in range(19)] + [{}]
LINKED = {str(i): PATTERNS[i] | LINKS[i] for i in range(20)}
HOSTILE = [  # minutes and gigabytes without the check
    {"allOf": PATTERNS},
    {"$ref": "#/$defs/0", "$defs": LINKED},
    {"allOf": [{"type": "integer", "multipleOf": p} for p in (7, 11, 13, 17, 19, 23, 29)]},
    {"type": "number", "multipleOf": 12345.678},
    {"type": "object", "properties": {f"p{i}": {} for i in range(5_000)}},
]
INNOCENT = [
    {"allOf": PATTERNS[:12]},
    {"type": "object", "properties": {f"p{i}": PATTERNS[i] for i in range(20)}},
]


def test_what_could_be_compiled_without_an_end_is_refused_at_once():
    for schema in HOSTILE:
        with pytest.raises(UserError, match="at most"):
            grammars.check_cost([schema])
    for schema in INNOCENT:
        grammars.check_cost([schema])


def test_too_many_at_once_and_one_that_does_not_end_are_refused(nano_tokenizer, monkeypatch):
    async def compiled(count):
        made = grammars.Grammars(nano_tokenizer)
        forms = [Form([], {"const": i}, thinks=False) for i in range(count)]
        return await asyncio.gather(*map(made.guide, forms), return_exceptions=True)

    monkeypatch.setattr(grammars, "WAITING", 3)
    refused = [each for each in asyncio.run(compiled(6)) if isinstance(each, HTTPException)]
    assert len(refused) == 3 and {each.status_code for each in refused} == {429}
    monkeypatch.setattr(grammars, "COMPILE_S", 0.2)
    monkeypatch.setattr(grammars, "Guide", lambda *_: time.sleep(2))
    late, later = asyncio.run(compiled(2))
    assert "more than 0.2 s to compile" in str(late) == str(later)
