"""The tree of an attempt's calls: what each was, what it cost, and what it called itself."""

from __future__ import annotations

from scripted import ANSWER, EchoTool, call, echoing, play

from nanorchestra.records import Task, ToolCall, ToolResult, Trajectory, Turn, part
from nanorchestra.report.trace import tree
from nanorchestra.training.trajectories import to_row


def test_the_tree_has_every_call_with_what_it_cost_and_called(nano_tokenizer):
    expert = ToolResult(
        "wrote\na query", 0.2, 1.0, False, False, 30, 7, alias="a-1", retries=2, waited_s=0.6
    )
    search = ToolResult("x" * 500, 0.05, 1.0)
    parts = [part("expert", {}, expert), part("web", {"query": "q"}, search)]
    result = ToolResult("found", 0.25, 2.0, parts=parts)
    envs = [echoing(EchoTool(result=result))]
    (t,), _ = play(nano_tokenizer, [call(), ANSWER], envs=envs)
    lines = tree(to_row(envs[0].task, t)).splitlines()
    assert lines[0] == "question?" and lines[1].startswith("turn 1: ")
    assert lines[2] == '  echo {"text": "hi"}: found ($0.25, 2.0 s)'
    spent = "$0.2, 1.0 s, 0.6 s waited, 30 + 7 tokens, 2 retries"
    assert lines[3] == f"    expert/a-1 {{}}: wrote a query ({spent})"
    assert lines[4].startswith('    web {"query": "q"}: xxx') and len(lines[4]) < 160
    assert lines[-1] == "answered: 42" and " + calls $0.25 = $" in lines[-2]


def test_a_policy_that_costs_nothing_costs_nothing_whatever_its_calls_cost():
    """Its part was the sum less those of the calls, and read "$-0.000000"."""
    t = Trajectory("t", 0)
    for dollars in ((0.1,), (0.2, 0.3)):
        t.turns.append(Turn(0, 0, "stop"))
        results = [ToolResult("a", usd) for usd in dollars]
        t.add_calls(t.turns[-1], [ToolCall("echo", {})] * len(results), results)
    line = tree(to_row(Task("t", "question?"), t)).splitlines()[-2]
    assert line.startswith("policy $0") and "-" not in line
