"""Tasks that others wrote: ToolScale's rows, and domains whose tools are Python."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai_server import openai_server, said
from scripted import ScriptedEngine, execute

from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import RolloutSection, TaskSection
from nanorchestra.errors import UserError
from nanorchestra.records import ToolCall
from worlds.load import open_world
from worlds.toolscale.dataset import load_world

CINEMA = '''
class Toolkit:
    def __init__(self, db):
        self.db = db

    def cancel_booking(self, booking_id: str, on: str, refund: float | None = None) -> dict:
        """Cancels a booking."""
        booking = self.db["bookings"][booking_id]
        booking.update(status="canceled", canceled_at=on)
        if on == "never":
            raise ValueError("not a day")
        return booking
'''


def row(number, basis=None, **arguments):
    """A row as the hub offers it: the arguments of all tools in one struct."""
    every = {"booking_id": f"B{number}", "on": "2026-05-15", "club_id": None, "refund": None}
    instructions = {
        "domain": "movie",
        "task_instructions": "Be quick.",
        "reason_for_call": "You want to cancel your booking.",
        "known_info": "You are Ana Silva.",
    }
    criteria = {
        "actions": [{"name": "cancel_booking", "arguments": every | arguments}],
        "communicate_info": ["S78YJLG-B1"],
        "nl_assertions": ["It is polite.", "It is short."],
        "reward_basis": basis,
    }
    return {
        "id": str(number),
        "user_scenario": {"persona": None, "instructions": instructions},
        "initial_state": None,
        "evaluation_criteria": criteria,
    }


def trained(number):
    """A row that the published orchestrator was trained on."""
    asked = {"expert": {"type": "string", "description": "expert-1: strong. expert-2: weak."}}
    return {
        "id": number,
        "index": f"movie____{number}",
        "category": "func_call",
        "tools": [{"function": {"name": "call_expert", "parameters": {"properties": asked}}}],
        "model_mapping": {"expert-1": "m", "expert-2": "absent", "search-1": "m"},
        "tool_pricing": {
            "m": {"input_tokens_per_million": 2e-06, "output_tokens_per_million": 4e-06},
            "absent": {"input_tokens_per_million": 0.2, "output_tokens_per_million": 0.3},
            "code_interpreter_per_second": 8.3e-06,
        },
        "pref_vec": {"accuracy": 3, "cost": 0.1, "latency": 0.1, "expert-1": 3, "search-1": 1},
        "example": row(number),
    }


@pytest.fixture
def cinema(tmp_path):
    """Writes rows beside a domain of one's own; returns their file."""
    home = tmp_path / "worlds" / "movie"
    home.mkdir(parents=True)
    db = {"bookings": {f"B{n}": {"status": "confirmed"} for n in range(9)}}
    files = {"db.json": json.dumps(db), "policy.md": "Be kind.", "toolkit.py": CINEMA}
    for name, text in files.items():
        (home / name).write_text(text)

    def write(*rows):
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / "data.jsonl")

    return write


def environment(world, name):
    """One attempt at the task of that id."""
    tasks = (world.task("all", index) for index in range(world.size("all")))
    (task,) = (task for task in tasks if task.data["task"]["id"] == name)
    return world.environment(task, 0)


def call(env, name, /, **arguments):
    return execute(env, ToolCall(name, arguments))


def last_word(env):
    return f"This is done. {', '.join(env.scorer.communicate_info)}"


def play(env, tokenizer, golden=True):
    """The outcome of a policy that makes the golden calls, or none, and says what is asked."""
    calls = [{"name": n, "arguments": a} for n, a in env.scorer.golden] if golden else []
    script = [f"<tool_call>\n{json.dumps(made)}\n</tool_call><|im_end|>" for made in calls]
    script += [f"{last_word(env)}<|im_end|>"] * 9
    engine = ScriptedEngine(tokenizer, [script])
    settings = RolloutSection(turns=40, turn_tokens=512, context_tokens=10**6)
    (t,) = Rollout(engine, tokenizer, lambda seed, budget: None, settings).run([env], [0])
    assert not any(result.error for turn in t.turns for result in turn.results)
    return t.outcome


def test_a_row_of_the_hub_plays_and_its_golden_calls_alone_score_1(cinema, nano_tokenizer):
    """Fields of other tools are null there, and days have become times or milliseconds."""
    days = "2026-05-15T00:00:00", "2026-05-15 00:00:00", 1778803200000, "2026-05-15", "15 May"
    world = load_world(cinema(*(row(n, on=day, refund=5) for n, day in enumerate(days))))
    for n in range(5):
        env, day = environment(world, f"movie/{n}"), "15 May" if n == 4 else "2026-05-15"
        ((_, arguments),) = env.scorer.golden
        assert arguments == {"booking_id": f"B{n}", "on": day, "refund": 5}
    assert env.task.question == "I am Ana Silva. I want to cancel my booking. Be quick."
    start = env.kit.toolkit.db
    failed = call(env, "cancel_booking", booking_id="B1", on="never")
    assert failed.content == "Error: not a day" and env.kit.toolkit.db == start
    assert start["bookings"]["B1"]["status"] == "confirmed"
    for golden in (True, False):
        assert play(environment(world, "movie/4"), nano_tokenizer, golden) == golden


@pytest.fixture
def catalogue(tmp_path):
    """(Server, settings) of a catalogue whose experts, big and other, are the server's model m."""
    with openai_server() as server:
        given = {"kind": "expert", "description": "Wise.", "expert": "m"}
        tables = {
            "endpoints": {"here": {"base_url": server.url}},
            "experts": {"m": {"endpoint": "here", "model": "m", "usd": [1, 1]}},
            "tools": [{"name": "big"} | given, {"name": "other"} | given],
        }
        (tmp_path / "c.json").write_text(json.dumps(tables))
        yield server, {"tools": str(tmp_path / "c.json")}


def test_the_user_and_the_judge_may_be_language_models(cinema, nano_tokenizer, catalogue):
    path = cinema(*(row(n, ["DB", "NL_ASSERTION"]) for n in range(5)))
    with pytest.raises(UserError, match=r"5 \(task.judge is needed\)"):
        open_world(TaskSection(path), 0, None)
    server, settings = catalogue
    world = open_world(TaskSection(path, **settings, user="big", judge="big"), 0, None)
    for verdict, outcome in (("So: [true, true]", 1), ("[true, false]", 0), ("yes, both", 0)):
        answers = iter(["Wait.", "Thanks. ###STOP###", verdict])
        server.answer = lambda body, answers=answers: said(next(answers))
        assert play(environment(world, "movie/0"), nano_tokenizer) == outcome
    first, second, third = (body["messages"][0]["content"] for body in server.bodies[-3:])
    assert "You are Ana Silva." in first and "You: Wait." in second
    assert "The user: Wait." in third and "2. It is short." in third
    server.status, server.answer = 400, lambda body: b"no"
    env = environment(world, "movie/0")
    assert asyncio.run(env.reply("Hello.")).infrastructure
    call(env, "cancel_booking", **env.scorer.golden[0][1])
    with pytest.raises(EndpointError, match="HTTP 400"):
        env.score("")


def test_real_experts_do_a_turn_and_a_failing_one_does_nothing(cinema, catalogue):
    """A training row brings them, their prices and a preference."""
    server, settings = catalogue
    path = cinema(*map(trained, range(5)))
    world = open_world(TaskSection(path, **settings, experts="real"), 0, None)
    env = environment(world, "movie____0")
    assert list(env.experts) == ["expert-1"]  # the catalogue has no other
    assert env.tools[-1]["function"] == trained(0)["tools"][0]["function"]
    wish = env.task.preference
    assert (wish.outcome, wish.cost, wish.tools) == (3, 0.1, {"expert-1": 3, "expert-2": 0})
    made = json.dumps({"name": "cancel_booking", "arguments": env.scorer.golden[0][1]})
    server.answer = lambda body: said(f"<tool_call>{made}</tool_call>")
    result = call(env, "call_expert", expert="expert-1")
    assert result.content.startswith("expert-1 called cancel_booking({")
    assert result.cost_usd == pytest.approx((10 * 2 + 5 * 4) / 1e6) and result.alias == "expert-1"
    server.answer = lambda body: said(last_word(env))
    assert "The user has ended the talk." in call(env, "call_expert", expert="expert-1").content
    assert env.score("") == 1
    server.status, before = 400, list(env.history)
    assert call(env, "call_expert", expert="expert-1").error and env.history == before
