"""Grammars of clients: bounded, compiled once, and none that fails keeps the next one out."""

from __future__ import annotations

import asyncio
import time

import pytest
from starlette.exceptions import HTTPException

from nanorchestra.engine.guide import Form
from nanorchestra.errors import UserError
from nanorchestra.serving import grammars


@pytest.fixture
def compiled(nano_tokenizer):
    """compiled(*schemas) compiles all at once: a matcher, or the error, of each, and seconds."""
    made = grammars.Grammars(nano_tokenizer)

    def run(*schemas):
        texts = [Form([], schema, thinks=False).grammar(nano_tokenizer) for schema in schemas]

        async def main():
            return await asyncio.gather(*map(made.compiled, texts), return_exceptions=True)

        start = time.monotonic()
        return asyncio.run(main()), time.monotonic() - start

    run.of = made
    yield run
    made.close()


def test_equal_grammars_are_compiled_once_and_refused_ones_are_kept_too(compiled):
    good, bad = {"const": 1}, {"type": "nothing"}
    (first, second, error, again), _ = compiled(good, good, bad, bad)
    assert first is second and str(error) == str(again) and "nothing" in str(error)
    worker = compiled.of._worker
    compiled.of._worker = None  # nothing is asked again
    assert compiled(good, bad)[0][0] is first
    compiled.of._worker = worker


def test_a_worker_that_dies_is_replaced(compiled):
    compiled({"const": 1})
    compiled.of._worker.kill()
    compiled.of._worker.wait()
    (matcher,), _ = compiled({"const": 2})
    assert not isinstance(matcher, Exception)


def test_many_at_once_are_refused_and_what_is_kept_is_bounded(compiled, monkeypatch):
    monkeypatch.setattr(grammars, "WAITING", 3)
    monkeypatch.setattr(grammars, "KEPT", 2)
    results, _ = compiled(*({"const": i} for i in range(6)))
    refused = [r for r in results if isinstance(r, HTTPException)]
    assert len(refused) == 3 and {r.status_code for r in refused} == {429}
    assert len(compiled.of._kept) == 2


@pytest.mark.slow
def test_costly_grammars_end_at_their_limit_and_the_next_is_compiled(compiled):
    """Half a minute, gigabytes and 100,000 states without limits."""
    patterns = [{"type": "string", "pattern": f"(.*{chr(97 + i)}.*){{1}}"} for i in range(20)]
    numbers = [{"type": "integer", "multipleOf": p} for p in (7, 11, 13, 17, 19, 23, 29)]
    costly = [{"allOf": patterns}, {"allOf": numbers}, {"const": "x" * 100_000}]
    properties = {f"p{i}": {"type": "integer"} for i in range(3000)}
    costly.append({"type": "object", "properties": properties})
    (*errors, good), _ = compiled(*costly, {"const": 1})
    assert [type(error) for error in errors] == [UserError] * 4
    assert all(str(error).startswith("schema: ") for error in errors)
    assert not isinstance(good, Exception)
