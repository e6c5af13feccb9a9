"""Tasks that others wrote: ToolScale's rows, and domains whose tools are Python."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys

import pytest
from openai_server import openai_server, said
from scripted import ScriptedEngine, execute

from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.tool import Allowance, RefusedError
from nanorchestra.config import RolloutSection, TaskSection
from nanorchestra.errors import UserError
from nanorchestra.records import Preference, ToolCall
from worlds.load import open_world
from worlds.toolscale.dataset import load_world

KIT = """
class Toolkit:
    def __init__(self, db):
        self.db = db
"""
CINEMA = f'''{KIT}
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
        "unknown_info": None,
    }
    criteria = {
        "actions": [{"name": "cancel_booking", "arguments": every | arguments}],
        "communicate_info": ["S78YJLG-B1"],
        "nl_assertions": ["It is polite.", "It is short."],
        "reward_basis": basis,
    }
    return {
        "id": str(number),
        "description": {"purpose": "", "relevant_policies": None, "notes": None},
        "user_scenario": {"persona": None, "instructions": instructions},
        "initial_state": None,
        "evaluation_criteria": criteria,
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
    return lambda *rows: written(tmp_path, rows)


def written(directory, rows):
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory / "data.jsonl"


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
    """The trajectory of a policy that makes the golden calls, or none, and says what is asked."""
    calls = [{"name": n, "arguments": a} for n, a in env.scorer.golden] if golden else []
    script = [f"<tool_call>\n{json.dumps(made)}\n</tool_call><|im_end|>" for made in calls]
    script += [f"{last_word(env)}<|im_end|>"] * 9
    engine = ScriptedEngine(tokenizer, [script])
    settings = RolloutSection(turns=40, turn_tokens=512, context_tokens=10**6)
    (t,) = Rollout(engine, tokenizer, lambda seed, budget: None, settings).run([env], [0])
    assert not any(result.error for turn in t.turns for result in turn.results)
    return t.outcome


def test_golden_calls_score_1_and_nothing_done_0(cinema, nano_tokenizer):
    """A row as ToolScale's hub offers it plays from end to end."""
    world = load_world(cinema(*map(row, range(5))))
    for golden in (True, False):
        assert play(environment(world, "movie/4"), nano_tokenizer, golden) == golden


def test_what_one_table_of_all_tools_did_to_arguments_is_undone(cinema):
    """Fields of other tools are null there, and days have become times or milliseconds."""
    days = "2026-05-15T00:00:00", "2026-05-15 00:00:00", 1778803200000, "2026-05-15", "15 May"
    world = load_world(cinema(*(row(n, on=day, refund=5) for n, day in enumerate(days))))
    for n in range(5):
        env, day = environment(world, f"movie/{n}"), "15 May" if n == 4 else "2026-05-15"
        ((_, arguments),) = env.scorer.golden
        assert arguments == {"booking_id": f"B{n}", "on": day, "refund": 5}
    assert env.task.question == "I am Ana Silva. I want to cancel my booking. Be quick."


def test_a_row_without_a_preference_has_that_of_the_setting(cinema):
    """Training draws one for each task; an evaluation has none, or that of its user."""

    def wishes(preference, rows=row):
        path = str(cinema(*map(rows, range(5))))
        world = open_world(TaskSection(path, preference=preference), 0, None)
        return [world.task("train", index).preference for index in range(4)]

    assert len({wish.text for wish in wishes("drawn")}) == 4
    assert wishes("") == [Preference()] * 4
    assert wishes("Be frugal. cost=1 usd=0.5") == [Preference("Be frugal.", cost=1, usd=0.5)] * 4
    with pytest.raises(UserError, match="task.preference names gpt-5; movie/0 offers experts"):
        wishes("never=gpt-5")
    assert wishes("x=1", trained)[0].tools == {"expert-1": 3, "expert-2": 0}


def trained(number, **changes):
    """A row that the published orchestrator was trained on."""
    asked = {"expert": {"type": "string", "description": "expert-1: strong. expert-2: weak."}}
    return {
        "id": number,
        "index": f"movie____{number}",
        "category": "func_call",
        "tools": [{"function": {"name": "call_expert", "parameters": {"properties": asked}}}],
        "model_mapping": {"expert-1": "gpt-5", "expert-2": "new-7b", "search-1": "gpt-5"},
        "tool_pricing": {
            "gpt-5": {"input_tokens_per_million": 1.25e-06, "output_tokens_per_million": 1e-05},
            "new-7b": {"input_tokens_per_million": 0.2, "output_tokens_per_million": 0.3},
            "code_interpreter_per_second": 8.3e-06,
        },
        "pref_vec": {"accuracy": 3, "cost": 0.1, "latency": 0.1, "expert-1": 3, "search-1": 1},
        "example": row(number),
    } | changes


def test_a_training_row_brings_its_experts_prices_and_preference(cinema):
    question = {"index": "stem____1", "category": "qa", "problem": "1 + 1?", "answer": "2"}
    env = environment(load_world(cinema(question, *map(trained, range(5)))), "movie____0")
    wish = env.task.preference
    assert (wish.outcome, wish.cost, wish.latency) == (3, 0.1, 0.1)
    assert wish.tools == {"expert-1": 3, "expert-2": 0}
    prices = [tuple(e["usd"]) for e in env.experts.values()]
    assert prices == [pytest.approx((1.25, 10)), (0.2, 0.3)]
    assert env.tools[-1]["function"] == trained(0)["tools"][0]["function"]
    result = call(env, "call_expert", expert="expert-1")
    assert result.alias == "expert-1" and result.cost_usd > 0 and json.dumps(env.task.data)
    with pytest.raises(UserError, match="line 6: id 'movie____1' stands twice"):
        load_world(cinema(*map(trained, range(5)), trained(1)))


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
    path = str(cinema(*(row(n, ["DB", "NL_ASSERTION"]) for n in range(5))))
    for settings, says in (({}, r"5 \(task.judge is needed\)"), ({"user": "me"}, "'me', ''")):
        with pytest.raises(UserError, match=says):
            open_world(TaskSection(path, **settings), 0, None)
    server, settings = catalogue
    world = open_world(TaskSection(path, **settings, user="big", judge="big"), 0, None)
    for verdict, outcome in (("So: [true, true]", 1), ("[true, false]", 0), ("yes, both", 0)):
        answers = iter(["Wait.", "Thanks. ###STOP###", verdict])
        server.bodies.clear()
        server.answer = lambda body, answers=answers: said(next(answers))
        assert play(environment(world, "movie/0"), nano_tokenizer) == outcome
        first, second, third = (body["messages"][0]["content"] for body in server.bodies)
        assert "You are Ana Silva." in first and "You: Wait." in second
        assert "The user: Wait." in third and "2. It is short." in third
    server.status, server.answer = 400, lambda body: b"no"
    env = environment(world, "movie/0")
    result = asyncio.run(env.reply("Hello."))
    assert result.infrastructure and "HTTP 400" in result.content
    call(env, "cancel_booking", **env.scorer.golden[0][1])
    with pytest.raises(EndpointError, match="HTTP 400"):
        env.score("")


def test_real_experts_do_a_turn_and_a_failing_one_does_nothing(cinema, catalogue):
    usd = {"input_tokens_per_million": 2.0, "output_tokens_per_million": 4.0}
    behind = {"expert-1": "m", "expert-2": "absent"}
    offer = {"model_mapping": behind, "tool_pricing": {"m": usd, "absent": usd}}
    server, settings = catalogue
    path = str(cinema(*(trained(n, **offer) for n in range(5))))
    env = environment(
        open_world(TaskSection(path, **settings, experts="real"), 0, None), "movie____0"
    )
    assert list(env.experts) == ["expert-1"]  # the catalogue has no other
    (_, golden) = env.scorer.golden[0]
    made = json.dumps({"name": "cancel_booking", "arguments": golden})
    server.answer = lambda body: said(f"<tool_call>{made}</tool_call>")
    result = call(env, "call_expert", expert="expert-1")
    assert result.content.startswith("expert-1 called cancel_booking({")
    assert result.cost_usd == pytest.approx((10 * 2 + 5 * 4) / 1e6) and result.alias == "expert-1"
    asked = server.bodies[0]["messages"][0]["content"]
    assert "Be kind." in asked and '"cancel_booking"' in asked and "call_expert" not in asked
    server.answer = lambda body: said(last_word(env))
    assert "The user has ended the talk." in call(env, "call_expert", expert="expert-1").content
    assert env.score("") == 1
    server.status = 400
    before, asked = list(env.history), len(server.bodies) + 1
    assert call(env, "call_expert", expert="expert-1").error and env.history == before
    for ban in ("expert-1", "m", "Call expert", "expert", "proprietary"):
        allowance = Allowance(never=[ban])
        with pytest.raises(RefusedError, match=f"the user forbids {ban}$"):
            env.prepare(ToolCall("call_expert", {"expert": "expert-1"}), allowance)
    assert len(server.bodies) == asked


PACKAGE = f"""
import copy
from types import SimpleNamespace
{CINEMA.replace('["bookings"]', ".bookings").replace("return booking", "return vars(self.db)")}
    def show(self):
        return self.db

    show.__tool_type__ = "read"

class DB(SimpleNamespace):
    @classmethod
    def model_validate(cls, value):
        return cls(**copy.deepcopy(value))

    def model_dump(self):
        return vars(self)

def get_environment():
    shape = {{name: {{"type": "string"}} for name in ("booking_id", "on")}}
    functions = ("cancel_booking", {{"properties": shape}}), ("show", {{"properties": {{}}}})
    functions = [{{"name": n, "description": n, "parameters": p}} for n, p in functions]
    tools = [SimpleNamespace(openai_schema={{"function": f}}) for f in functions]
    return SimpleNamespace(tools=Toolkit(DB()), get_tools=lambda: tools)
"""


@pytest.fixture
def no_tau2():
    """Forgets the package tau2, before and after; it is not installed."""

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "tau2"]:
            del sys.modules[name]

    forget()
    if importlib.util.find_spec("tau2"):
        pytest.skip("tau2-bench is installed")
    yield
    forget()


@pytest.mark.parametrize(
    "files, cause",
    [
        ({}, "ModuleNotFoundError: No module named 'tau2'"),
        ({"tau2/domains/movie/environment.py": "1 / 0"}, "ZeroDivisionError: division by zero"),
        ({"worlds/movie/toolkit.py": "import nothing_of_this_name"}, "ModuleNotFoundError: "),
        ({"worlds/movie/toolkit.py": ""}, "KeyError: 'Toolkit'"),
    ],
)
def test_a_domain_without_the_code_of_its_tools_is_one_line_with_what_to_do(
    cinema, monkeypatch, no_tau2, files, cause
):
    path = cinema(*map(row, range(5)))
    (path.parent / "worlds/movie/toolkit.py").unlink()
    for name, text in files.items():
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).write_text(text)
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(UserError) as refused:
        load_world(path)
    says = str(refused.value)
    assert f"worlds/movie: the code of its tools cannot be used ({cause}" in says
    assert "toolkit.py with the methods cancel_booking" in says and "\n" not in says


def test_a_domain_of_tau2s_package_plays(cinema, monkeypatch, no_tau2):
    state = {"initialization_data": {"agent_data": {"bookings": {"B1": {"seat": 7}}}}}
    path = cinema(*(row(n) | {"initial_state": state} for n in range(5)))
    (path.parent / "worlds" / "movie" / "toolkit.py").unlink()
    package = path.parent / "tau2" / "domains" / "movie"
    package.mkdir(parents=True)
    (package / "environment.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(path.parent)
    env = environment(load_world(path), "movie/1")
    start = env.kit.toolkit.db
    assert not call(env, "show").error and env.kit.toolkit.db is start  # reading needs no copy
    failed = call(env, "cancel_booking", booking_id="B1", on="never")
    assert failed.content == "Error: not a day" and env.kit.toolkit.db == start
    result = call(env, "cancel_booking", **env.scorer.golden[0][1])
    booking = {"status": "canceled", "seat": 7, "canceled_at": "2026-05-15"}
    assert json.loads(result.content)["bookings"]["B1"] == booking
    asyncio.run(env.reply(last_word(env)))
    assert env.score("") == 1 and start.bookings["B1"]["status"] == "confirmed"
