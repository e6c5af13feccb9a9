"""Talking to an orchestrator: what is shown, said before, stopped, recorded, and refused.

The engine is scripted, or nano; tools, worlds and the loop are real.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import sys
import threading
import time

import pytest
from openai_server import openai_server
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from scripted import EchoTool, ScriptedEngine

import serve
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import RolloutSection
from nanorchestra.errors import UserError
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model import chat
from nanorchestra.model.checkpoint import NANO
from nanorchestra.records import Preference, ToolResult
from worlds.desk import ranked
from worlds.desk_ask import as_task
from worlds.terminal import DeskQuestions, OpenQuestions, Terminal, questions_of

LAW = "What is the rank of trial 372?"
RIGHT = "It must be right."  # what the desk takes for the wish of a user who states none
CHEAP, *_ = ranked(as_task(LAW, Preference()).data["offers"], 0)


def think(thought, name=None, content="", **arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    call = f"<tool_call>\n{written}\n</tool_call>" if name else ""
    return f"<think>\n{thought}\n</think>\n\n{content}{call}<|im_end|>"


CONSULT = think("t", "ask", expert=CHEAP, question="trial 372")


@pytest.fixture
def talk(nano_tokenizer, sandbox):
    """talk(*lines of the script) -> (Terminal, what it has written)."""

    def start(*lines, tools=None, turns=50):
        out = io.StringIO()
        engine = ScriptedEngine(nano_tokenizer, itertools.repeat(iter(lines)))
        settings = RolloutSection(turns=turns, turn_tokens=2048, context_tokens=2048)
        rollout = Rollout(engine, nano_tokenizer, lambda *_: None, settings)
        world = DeskQuestions(sandbox) if tools is None else OpenQuestions(tools)
        return Terminal(rollout, world, "scripted", 0, out), out.getvalue

    return start


@pytest.fixture
def command_line(talk, monkeypatch, capsys):
    """command_line(*arguments, script, typed) -> (status, stdout, stderr) of serve.main.

    If `typed` is None it has a prompt.
    """

    def run(*arguments, script=(), typed=""):
        def load(path, settings, *_, **__):
            rollout = talk(*script)[0].rollout
            rollout.engine.model = load_rollout(NANO, settings, {}, 1).engine.model
            return rollout

        monkeypatch.setattr(serve, "load_rollout", load)
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed or ""))
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: typed is None, raising=False)
        status = serve.main(list(arguments))
        return status, *capsys.readouterr()

    return run


def spy(call=lambda arguments: ToolResult("seen", 0.25, 2.0), blocking=False):
    """A tool of the user's own."""
    tool = EchoTool("spy", "expert", blocking)
    tool.parameters, tool.call = {"type": "object", "properties": {}}, call
    return tool


def test_a_call_is_shown_before_its_result_and_texts_cannot_drive_a_terminal(talk):
    seen = []
    tool = spy(lambda arguments: seen.append(out()) or ToolResult("a\033[2Jb\rc\x9bd"))
    script = think("a b c", "spy"), think("t", content="\033]0;x\007done")
    terminal, out = talk(*script, tools=[tool])
    terminal.handle("question")
    (during_the_call,) = seen
    assert "a b c" in during_the_call and '"spy"' in during_the_call
    assert "a[2Jbcd" not in during_the_call and "a[2Jbcd" in out() and "]0;xdone" in out()
    assert not set(out()) & set("\033\r\x9b\007")


def test_broken_calls_and_missing_answers_are_told(talk):
    for script, settings, says in (
        (["<tool_call>\n{oops}\n</tool_call><|im_end|>", think("t")], {}, "call   {oops}"),
        ([think("t", "nothing"), think("t")], {}, "error  Error: no tool named 'nothing'"),
        ([CONSULT], {"turns": 1}, "answer none (turn_limit)"),
        ([think("t", content="57")], {"tools": [spy()]}, "answer none (the context is full"),
    ):
        terminal, out = talk(*script, **settings)
        terminal.handle("long " * 3000 if "context" in says else LAW)
        assert says in out() and terminal.status == 1


def test_commands(talk, nano_tokenizer):
    terminal, out = talk(*[think("t", content="57")] * 3)
    bare = nano_tokenizer.decode(terminal.ask(LAW).ids)
    assert f"{LAW} {RIGHT}<|im_end|>" in bare, "nothing more is added unless it was asked for"
    terminal.handle("/prefer spend little never=ant usd=0.05 seconds=60")
    assert "added to a question: Spend little." in out()
    assert "binds: never ant, at most $0.05, at most 60 s" in out()
    assert f"{LAW} Spend little.<|im_end|>" in nano_tokenizer.decode(terminal.ask(LAW).ids)
    for line, problem in (
        ("/frob now", "^/frob: no such command; /help lists them$"),
        ("/prefer usd=much", "^preference: usd is 'much'; it should be a valid number"),
        ("who are you?", "outside the world of the desk"),
    ):
        with pytest.raises(UserError, match=problem):
            terminal.handle(line)
    assert terminal.preference.usd == 0.05, "a refused line changes nothing"
    terminal.handle("/prefer off")
    terminal.handle("/tools python")
    assert "python (off, $0.01 per call): " in out() and '"required": ["code"]}' in out()
    last = nano_tokenizer.decode(terminal.ask(LAW).ids)
    assert f"{LAW} {RIGHT}<|im_end|>" in last and '"ask"' in last and '"python"' not in last
    terminal.handle("/trace")
    assert f"{LAW}\nturn 1: " in out() and out().endswith("answered: 57\n")
    terminal.at_prompt = True
    terminal.handle("hello")
    assert "nano knows only its desk. Three questions to copy:\n" in out()


def test_a_conversation_sees_what_was_said_in_the_cache(tmp_path):
    """nano babbles, but its prompt is all that was said before."""
    settings = RolloutSection(turns=2, turn_tokens=48, context_tokens=2048)
    rollout = load_rollout(NANO, settings, {"temperature": 0.0}, 1)
    terminal, cached = Terminal(rollout, OpenQuestions([spy()]), "", 0, io.StringIO()), []
    make = rollout.engine.make_request_on

    def make_request_on(*given):
        cached.append(make(*given))
        return cached[-1]

    rollout.engine.make_request_on = make_request_on
    first = terminal.ask("My name is Ada.")
    second = terminal.ask("What is my name?")
    asked = chat.encode_reply(rollout.tokenizer, "user", ["What is my name?"])
    end = rollout.tokenizer.end_of_turn
    assert second.ids[: second.prompt_length] in (first.ids + asked, [*first.ids, end, *asked])
    computed = first.turns[-1].end  # the result of a last call is not
    assert cached[len(first.turns)].cached_tokens >= computed - 16, "a page may be begun"
    terminal.handle(f"/save {tmp_path / 'talk.json'}")
    terminal.handle("/reset")
    assert terminal.ask("Hello").prompt_length < first.prompt_length + 16
    terminal.handle(f"/load {tmp_path / 'talk.json'}")
    third = terminal.ask("And now?")
    assert third.ids[: len(second.ids)] == second.ids


def test_ctrl_c_stops_an_answer_at_once_and_shows_its_cost(talk, capsys):
    late = threading.Event()

    def call(arguments):
        os.kill(os.getpid(), signal.SIGINT)
        assert late.wait(60)
        return ToolResult("late")

    tool = spy(call, blocking=True)
    terminal, out = talk(think("t", "spy"), think("t", content="57"), tools=[tool])
    terminal.at_prompt = True
    assert serve.converse(terminal, ["anything", "/frob", "again"]) == 2
    assert not late.is_set(), "the tool is still at work"
    late.set()
    time.sleep(0.05)
    assert "answer none (stopped)" in out() and "answer 57" in out() and "late" not in out()
    first, *_ = re.findall(r"cost   \$(\S+), ", out())
    assert float(first) > 0, "the stopped answer has a cost"
    assert capsys.readouterr().err.startswith("serve.py: /frob: no such command")


def test_a_person_types_at_a_prompt(command_line, monkeypatch, tmp_path):
    """Ctrl-C drops a line, Alt-Enter breaks it; the next session recalls it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for keys in (f"half\x03{LAW}\x1b\r\r\x04", "\x1b[A\r/quit\r"):
        with create_pipe_input() as keyboard, create_app_session(keyboard, DummyOutput()):
            keyboard.send_text(keys)
            status, out, _ = command_line(script=[think("t", content="57")], typed=None)
        assert status == 0 and "/help lists the commands" in out and "57" in out


def test_a_checkpoint_has_the_questions_of_its_run_or_any_with_python(talk, sandbox, tmp_path):
    """With an index, search beside it."""
    (run := tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text('[task]\nworld = "desk"\n')
    assert type(questions_of(run, None, None, sandbox)) is DeskQuestions
    (tmp_path / "docs.jsonl").write_text('{"text": "Iron rusts."}\n')
    world = questions_of(NANO, None, str(tmp_path / "docs.jsonl"), sandbox)
    calls = think("t", "python", code="6 * 7"), think("t", "search", query="iron")
    terminal, out = talk(*calls, think("t", content="42"), tools=world.tools)
    terminal.handle("What is six times seven?")
    assert "result 42 " in out() and "result Iron rusts." in out() and "search (1): " in out()


def test_ask_answers_one_question_says_what_is_loaded_and_records_it(
    command_line, tmp_path, monkeypatch, capsys
):
    """--replay shows what was called, and loads nothing."""
    script, file = [CONSULT, think("t", content="57")], str(tmp_path / "trace.jsonl")
    status, shown, err = command_line("--ask", LAW, "--trace", file, script=script)
    assert status == 0 and "answer 57" in shown and "cost   $" in shown
    assert err.count("\n") == 1 and "the desk" in err
    status, out, _ = command_line("--ask", LAW, "--json", script=script)
    row = json.loads(out)
    assert status == 0 and row["answer"] == "57" and row["task"]["question"] == LAW
    assert row["calls"] == {CHEAP: 1} and row["turns"][0]["results"][0]["cost_usd"] > 0
    assert command_line("--ask", LAW, script=[think("t")])[0] == 1  # no answer
    monkeypatch.setattr(serve, "load_rollout", None)
    monkeypatch.setattr(serve, "Sandbox", None)
    assert serve.main(["--replay", file]) == 0
    question, turn, call, *_, end = capsys.readouterr().out.splitlines()
    assert (question, end) == (LAW, "answered: 57") and turn.startswith("turn 1: ")
    assert call.startswith(f"  ask/{CHEAP} ")


def test_an_expert_that_is_down_ends_no_answer(command_line, tmp_path, monkeypatch):
    """A person would rather have an answer without it; training and evaluation exclude it."""
    monkeypatch.setattr("nanorchestra.tools.http.random.uniform", lambda *_: 0.0)
    offered = {"name": "llm", "kind": "expert", "description": "d", "expert": "big"}
    tables = {"experts": {"big": {"endpoint": "here", "model": "big", "usd": [1, 2]}}}
    with openai_server() as server:
        tables |= {"endpoints": {"here": {"base_url": server.url}}, "tools": [offered]}
    (tmp_path / "t.json").write_text(json.dumps(tables))
    script = think("it knows", "llm", task="what?"), think("so", content="42")
    words = "--tools", f"{tmp_path}/t.json", "--ask", "what?"
    status, out, err = command_line(*words, script=script)
    assert status == 0 and "answer 42" in out and "this model knows only the desk" in err
    assert "error  Error: llm did not answer: no connection (Connection refused)" in out


def test_a_pipe_asks_a_question_a_line_and_goes_on_after_a_refusal(command_line):
    typed = f"{LAW}\n\nwho are you?\n/nonsense\n/prefer be quick\n47*6\n/example\n/quit\n{LAW}\n"
    script = [think("t", content="1"), think("t", content="282"), think("t", content="2")]
    status, out, err = command_line(typed=typed, script=script)
    assert status == 2 and out.count("answer ") == 3 == out.count("  task ")
    assert "answer 282" in out and "right" in out and "session: $" in out
    _, outside, nonsense = err.splitlines()
    assert outside.startswith("serve.py: outside") and nonsense.startswith("serve.py: /nonsense")
