"""Recorded replies: what a key is, what a replay reads, a kill."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
from openai_server import openai_server, said

from nanorchestra.agent.numbering import in_attempt
from nanorchestra.records import Price
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert
from nanorchestra.tools.replies import store_of
from nanorchestra.tools.spending import Spending

KEY = "sk-secret-of-a-user"


@pytest.fixture
def server(monkeypatch):
    """A server whose replies are all different."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    numbers = itertools.count()
    with openai_server() as served:
        served.answer = lambda body: said(f"{body['messages'][-1]['content']} {next(numbers)}")
        yield served


def spending(word):
    return Spending(replies=store_of(word, "--experts"))


def expert(server, money, **settings):
    host = Endpoint(server.url, "OPENAI_API_KEY", timeout_s=20.0)
    settings = {"model": "big", "price": Price(1.0, 2.0), "max_tokens": 100} | settings
    return Expert("expert", host, settings.pop("model"), settings.pop("price"), money, **settings)


def ask(seed, text, *experts):
    """The replies of one attempt's calls, in order."""
    with in_attempt(seed):
        return [each.ask(text, "expert") for each in experts]


def test_a_replay_is_the_recording_and_nothing_is_paid_for_it(server, tmp_path):
    word, money = f"record:{tmp_path / 'kept'}", spending(f"record:{tmp_path / 'kept'}")
    big = expert(server, money)
    recorded = {seed: ask(seed, "hi", big, big, big) for seed in (1, 2, 3)}
    said_texts = [result.content for results in recorded.values() for result in results]
    assert len(set(said_texts)) == 9, "sampling stays sampling"
    assert money.spent == pytest.approx(9 * 20e-6) and set(money.bill) == {"expert"}
    again = spending(word)
    assert ask(2, "hi", expert(server, again)) == recorded[2][:1]
    assert again.spent == 0 and len(server.bodies) == 9, "a recording that goes on pays once"
    server.http.shutdown()
    server.http.server_close()
    replay = spending(f"replay:{tmp_path / 'kept'}")
    replay.bound(0.0)  # US dollars
    for seed in (3, 1, 2):
        dead = expert(server, replay)
        assert ask(seed, "hi", dead, dead, dead) == recorded[seed]
    assert replay.spent == 0 and not replay.exhausted and not replay.replies.missing
    kept = [file.read_text() for file in (tmp_path / "kept").glob("*/*/*")]
    assert len(kept) == 10 and KEY not in "".join(kept) and "Authorization" not in "".join(kept)


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"temperature": 0.5}, {"text": "ho"}, {"url": "http://x/v1"}]
)
def test_what_matters_is_in_the_key_and_a_miss_names_the_request(server, tmp_path, change):
    """What it costs, how long it may take and what the policy calls it are not in it."""
    ask(1, "hi", expert(server, spending(f"record:{tmp_path}")))
    money, given = spending(f"replay:{tmp_path}"), {"text": "hi", "url": server.url} | change
    text, url = given.pop("text"), given.pop("url")
    other = replace(expert(server, money, **given), endpoint=Endpoint(url, "OPENAI_API_KEY"))
    (result,) = ask(1, text, other)
    assert result.infrastructure and result.cost_usd == 0 and len(server.bodies) == 1
    missing = money.replies.missing
    assert missing.startswith(f"replay: no reply is recorded to {other.model} at http://")
    assert f"{text!r}" in missing and str(tmp_path) in missing and KEY not in missing
    same = expert(server, spending(f"replay:{tmp_path}"), price=Price(9, 9), note="n")
    (known,) = ask(1, "hi", replace(same, endpoint=replace(same.endpoint, timeout_s=1.0)))
    assert known.content == "hi 0" and known.cost_usd == Price(9, 9).cost(10, 5)


@pytest.mark.parametrize("last", range(1, 5))
def test_a_kill_between_any_two_writes_leaves_a_store_that_replays_or_asks(
    server, tmp_path, monkeypatch, last
):
    """Each write to the store raises in turn, as if the process ended there."""
    made, fsync = itertools.count(1), os.fsync

    def stopped(file):
        if next(made) == last:
            raise KeyboardInterrupt
        fsync(file)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("nanorchestra.files.os.fsync", stopped)
        ask(1, "hi", expert(server, spending(f"record:{tmp_path}")))
    asked = len(server.bodies)
    (result,) = ask(1, "hi", expert(server, spending(f"record:{tmp_path}")))
    assert not result.error and len(server.bodies) - asked in (0, 1)
    assert ask(1, "hi", expert(server, spending(f"replay:{tmp_path}"))) == [result]
