"""Recorded replies: what a key is, what a replay reads, several processes, a kill."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from dataclasses import replace

import pytest
from openai_server import openai_server, said
from scripted import ANSWER, call, play

from nanorchestra.agent import numbering
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.numbering import RequestCounts, in_attempt
from nanorchestra.errors import UserError
from nanorchestra.records import Preference, Price, Task
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert, ExpertTool
from nanorchestra.tools.replies import store_of
from nanorchestra.tools.spending import Spending
from tools import PythonTool

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


@pytest.fixture
def any_order(monkeypatch):
    """Threads come to the store in any order, as on a busy machine."""
    number = RequestCounts.next

    def late(counts, key):
        time.sleep(random.random() * 0.02)
        return number(counts, key)

    monkeypatch.setattr(RequestCounts, "next", late)


def test_a_replay_is_the_recording_and_nothing_is_paid_for_it(server, tmp_path):
    word, money = f"record:{tmp_path / 'kept'}", spending(f"record:{tmp_path / 'kept'}")
    big = expert(server, money)
    recorded = {seed: ask(seed, "hi", big, big, big) for seed in (1, 2, 3)}
    said_texts = [result.content for results in recorded.values() for result in results]
    assert len(set(said_texts)) == 9, "sampling stays sampling"
    assert money.spent == pytest.approx(9 * 20e-6) and set(money.bill) == {"expert"}
    again = spending(word)
    assert ask(2, "hi", expert(server, again), expert(server, again)) == recorded[2][:2]
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
    "change",
    [
        {"model": "other"},
        {"temperature": 0.5},
        {"max_tokens": 99},
        {"reasoning": True},
        {"reasoning_effort": "high"},
        {"text": "ho"},
        {"endpoint": "http://127.0.0.1:9/v1"},
    ],
)
def test_what_matters_is_in_the_key_and_a_miss_names_the_request(server, tmp_path, change):
    ask(1, "hi", expert(server, spending(f"record:{tmp_path}")))
    money = spending(f"replay:{tmp_path}")
    text = change.pop("text", "hi")
    other = expert(server, money, **{k: v for k, v in change.items() if k != "endpoint"})
    if "endpoint" in change:
        other = replace(other, endpoint=Endpoint(change["endpoint"], "OPENAI_API_KEY"))
    (result,) = ask(1, text, other)
    assert result.infrastructure and result.cost_usd == 0 and len(server.bodies) == 1
    assert money.replies.missing.startswith(
        f"replay: no reply is recorded to {other.model} at http://"
    )
    assert f"{text!r}" in money.replies.missing and str(tmp_path) in money.replies.missing
    assert "\n" not in money.replies.missing and KEY not in money.replies.missing
    # What it costs, how long it may take and what the policy calls it are not.
    same = expert(server, spending(f"replay:{tmp_path}"), price=Price(9, 9), note="n")
    (known,) = ask(1, "hi", replace(same, endpoint=replace(same.endpoint, timeout_s=1.0)))
    assert known.content == "hi 0" and known.cost_usd == Price(9, 9).cost(10, 5)


def test_a_failure_is_replayed_and_a_recording_asks_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr("nanorchestra.tools.http.time.sleep", lambda seconds: None)
    for status, infrastructure in ((500, True), (400, False)):
        word = f"{tmp_path / str(status)}"
        server.status = status
        (failed,) = ask(1, "hi", expert(server, spending(f"record:{word}")))
        assert failed.error and failed.infrastructure is infrastructure
        server.status = 200
        asked = len(server.bodies)
        assert ask(1, "hi", expert(server, spending(f"replay:{word}"))) == [failed]
        assert len(server.bodies) == asked
        (again,) = ask(1, "hi", expert(server, spending(f"record:{word}")))
        assert again.error is not infrastructure, "a bad request stays one"
        assert ask(1, "hi", expert(server, spending(f"replay:{word}"))) == [again]


def test_a_whole_attempt_is_replayed_with_its_user_limits_and_tools(
    server, tmp_path, nano_tokenizer, sandbox, any_order
):
    def attempts(money):
        tools = [
            ExpertTool("expert", "d", expert(server, money)),
            PythonTool("python", "d", sandbox, usd_per_second=0.01, replies=money.replies),
        ]
        code = call("import time; print(time.time())", "python").replace('"text"', '"code"')
        asks = call("what?", "expert").replace('"text"', '"task"')
        twice = asks.replace("<|im_end|>", "\n") + asks.split("\n\n")[1]
        wants = Preference("be cheap", cost=1.0, usd=0.5, seconds=60.0)
        envs = [ToolEnvironment(Task("t", "?", wants), tools, lambda _: 1.0) for _ in range(3)]
        trajectories, _ = play(nano_tokenizer, *[[twice, asks, code, code, ANSWER]] * 3, envs=envs)
        return trajectories

    recorded = attempts(spending(f"record:{tmp_path}"))
    assert [t.status for t in recorded] == ["answered"] * 3
    said_texts = [each.content for t in recorded for turn in t.turns for each in turn.results]
    assert len(set(said_texts)) == 15, "equal calls have replies of their own, side by side too"
    assert len({t.latency_s for t in recorded}) == 3
    for _ in range(2):
        assert attempts(spending(f"replay:{tmp_path}")) == recorded
    assert len(server.bodies) == 9


def test_a_wrong_word_or_directory_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for word, says in (
        ("reel", "is 'reel'; it must be simulated, real, record:DIR or replay:DIR"),
        (f"replay:{tmp_path}", "holds no recorded replies"),
        (f"record:{tmp_path}/file", "no directory that can be made"),
    ):
        with pytest.raises(UserError, match=f"task.experts.*{says}"):
            store_of(word, "task.experts")


def test_a_kill_between_any_two_writes_leaves_a_store_that_replays_or_asks(
    server, tmp_path, monkeypatch
):
    """Each write to the store raises in turn, as if the process ended there."""
    for last in range(1, 5):
        directory, made = tmp_path / str(last), itertools.count(1)

        def stopped(original, last=last, made=made):
            def write(*arguments):
                if next(made) == last:
                    raise KeyboardInterrupt
                return original(*arguments)

            return write

        with monkeypatch.context() as patch:
            patch.setattr("nanorchestra.files.os.fsync", stopped(os.fsync))
            with pytest.raises(KeyboardInterrupt):
                ask(1, "hi", expert(server, spending(f"record:{directory}")))
        asked = len(server.bodies)
        (result,) = ask(1, "hi", expert(server, spending(f"record:{directory}")))
        assert not result.error and len(server.bodies) - asked in (0, 1)
        assert ask(1, "hi", expert(server, spending(f"replay:{directory}"))) == [result]


def test_threads_that_ask_the_same_at_once_pay_once_and_wait_only_so_long(server, tmp_path):
    server.answer = lambda body: time.sleep(0.5) or said("42")
    money = spending(f"record:{tmp_path}")
    threads = [threading.Thread(target=ask, args=(3, "hi", expert(server, money))) for _ in "abcd"]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    hasty = expert(server, money)
    (late,) = ask(3, "hi", replace(hasty, endpoint=replace(hasty.endpoint, timeout_s=0.1)))
    assert late.infrastructure and "had no reply within 0.1 s" in late.content
    for thread in threads:
        thread.join()
    assert len(server.bodies) == 1 and money.spent == pytest.approx(20e-6)
    assert not money.replies._asking and numbering.REQUEST_COUNTS.get() is None
