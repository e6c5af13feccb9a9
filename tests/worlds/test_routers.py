"""The routers: billed like a policy; other worlds have orders of experts, or controls."""

from __future__ import annotations

import threading
import time

import pytest

from nanorchestra.agent.threads import in_daemons
from worlds.desk import Desk
from worlds.desk_programs import PROGRAMS
from worlds.programs import play_program


def test_an_attempt_is_billed_for_every_call(sandbox):
    world = Desk(2, sandbox)
    for task in (world.task("train", index) for index in range(40)):
        env, spent = world.environment(task, 0), []

        def recorded(call, spent=spent):
            return lambda arguments: spent.append(call(arguments)) or spent[-1]

        for tool in env.by_name.values():
            tool.call = recorded(tool.call)
        attempt = play_program(PROGRAMS["program"], env)
        assert attempt.cost_usd == pytest.approx(sum(result.cost_usd for result in spent))
        assert attempt.latency_s == pytest.approx(sum(result.latency_s for result in spent))
        assert sum(attempt.calls.values()) == len(spent) > 0


def test_no_attempt_begins_when_results_are_not_asked_for_any_more():
    """As after Ctrl-C: the process does not wait for those that run, nor pays for more."""
    gate, begun = threading.Event(), []

    def call(number):
        begun.append(number)
        assert number < 1 or gate.wait(9)
        return number

    results = in_daemons(call, range(40), 3)
    assert next(results) == 0
    results.close()
    gate.set()
    time.sleep(0.1)
    assert len(begun) <= 4
