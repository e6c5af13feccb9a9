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
SIBLINGS, LINKED, NESTED = {}, {"$ref": "#/$defs/0", "$defs": {}}, {"type": "string"}
for i, pattern in enumerate(PATTERNS):
    SIBLINGS = pattern | ({"anyOf": [SIBLINGS]} if SIBLINGS else {})
    LINKED["$defs"][str(i)] = pattern | ({"$ref": f"#/$defs/{i + 1}"} if i < 19 else {})
    inner = {"properties": {"a": NESTED}, "patternProperties": {"^a$": pattern}}
    NESTED = {"type": "object"} | inner
HOSTILE = [
    {"allOf": PATTERNS},
    SIBLINGS,
    LINKED,
    NESTED,
    {"allOf": [{"type": "integer", "multipleOf": p} for p in (7, 11, 13, 17, 19, 23, 29)]},
    {"type": "integer", "multipleOf": 2_000_003},
    {"type": "number", "multipleOf": 12345.678},
    {"properties": {f"p{i}": {"type": "integer", "multipleOf": 99_990 - i} for i in range(12)}},
    {"type": "object", "properties": {f"p{i}": {} for i in range(5_000)}},
]
SLOW = [  # compiled, or refused by llguidance, within seconds
    {"allOf": PATTERNS[:12]},
    {"const": "x" * 100_000},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}},
]
INNOCENT = [
    {"const": 1},
    {"type": "object", "properties": {f"p{i}": PATTERNS[i] for i in range(20)}},
    {"anyOf": [{"type": "number", "multipleOf": 0.01}, {"type": "integer", "multipleOf": 60}]},
]


@pytest.fixture
def guides(nano_tokenizer):
    """guides(*schemas) compiles all at once: a guide, or the error, of each, and seconds."""

    def run(*schemas):
        made = grammars.Grammars(nano_tokenizer)
        forms = [Form([], schema, thinks=False) for schema in schemas]

        async def main():
            return await asyncio.gather(*map(made.guide, forms), return_exceptions=True)

        start = time.monotonic()
        return asyncio.run(main()), time.monotonic() - start

    return run


def test_what_could_be_compiled_without_an_end_is_refused_at_once(guides):
    """Minutes and gigabytes without the check."""
    errors, seconds = guides(*HOSTILE)
    assert [type(error) for error in errors] == [UserError] * len(HOSTILE)
    assert all("at most" in str(error) for error in errors) and seconds < 0.1


def test_what_is_innocent_is_compiled_beside_what_is_slow(guides):
    results, seconds = guides(*SLOW, *INNOCENT, *HOSTILE)
    innocent = results[len(SLOW) : len(SLOW) + len(INNOCENT)]
    assert not [each for each in innocent if isinstance(each, Exception)] and seconds < 20
    wrong, _ = guides({"type": "nothing"})
    assert "nothing" in str(wrong[0])


def test_too_many_at_once_and_one_that_does_not_end_are_refused(guides, monkeypatch):
    monkeypatch.setattr(grammars, "WAITING", 3)
    results, _ = guides(*({"const": i} for i in range(6)))
    refused = [each for each in results if isinstance(each, HTTPException)]
    assert len(refused) == 3 and {each.status_code for each in refused} == {429}
    monkeypatch.setattr(grammars, "COMPILE_S", 0.2)
    monkeypatch.setattr(grammars, "Guide", lambda *_: time.sleep(2))
    (late, later), seconds = guides({"const": 1}, {"const": 2})
    assert "more than 0.2 s to compile" in str(late) == str(later) and seconds < 1
