"""Talking to an orchestrator: what happens is shown as it happens, and mistakes are one line.

The engine is scripted; tools, worlds, rewards and the loop are real.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import threading
import time

import pytest
from scripted import EchoTool, ScriptedEngine

import serve
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.errors import UserError
from nanorchestra.records import ToolResult
from worlds.miniature.ask import EXAMPLES, LINE_UP

LAW = EXAMPLES[0]


def think(thought, name=None, content=""):
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    return f"<think>\n{thought}\n</think>\n\n{content}{call if name else ''}<|im_end|>"


@pytest.fixture
def talk(nano_tokenizer, sandbox, monkeypatch):
    """talk(*lines of the script) -> (Session, what it has written)."""

    def start(*lines, out=None, tools=None, turns=50):
        out = out or io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        engine = ScriptedEngine(nano_tokenizer, itertools.repeat(iter(lines)))
        limits = Limits(turns, 2048, 2048)
        rollout = Rollout(engine, nano_tokenizer, lambda *_: None, limits)
        return serve.Session(rollout, sandbox, tools, 0), out.getvalue

    return start


@pytest.fixture
def command_line(talk, monkeypatch, capsys):
    """command_line(*arguments, script, typed) -> (status, stdout, stderr) of serve.main."""

    def run(*arguments, script=(), typed=""):
        stdout = sys.stdout
        session, _ = talk(*script)
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(serve, "load_rollout", lambda *_: session.rollout)
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = serve.main(list(arguments))
        return status, *capsys.readouterr()

    return run


def spy(call, blocking=False):
    """A tool of the user's own."""
    tool = EchoTool("spy", "expert", blocking)
    tool.parameters, tool.call = {"type": "object", "properties": {}}, call
    return tool


def test_thought_call_result_answer_and_price_come_in_order(talk):
    session, out = talk(think("hard law. ask orion", "orion"), think("sure", content="57"))
    t = session.ask(LAW)
    lines = out().splitlines()
    labels = [line.split()[0] for line in lines]
    assert labels == ["task", "think", "call", "result", "think", "answer", "cost"]
    assert f"{LAW} Mind cost and time." in lines[0] and '"orion"' in lines[2]
    assert "(orion: $0." in lines[3] and lines[5].split() == ["answer", "57"]
    assert f"${t.cost_usd:.3f}" in lines[6] and "reward" in lines[6]
    assert f"{t.latency_s:.1f} s, calls: 1, turns: 2; " in lines[6] and "\033" not in out()


def test_a_call_is_shown_before_its_result(talk):
    seen = []
    tool = spy(lambda arguments: seen.append(out()) or ToolResult("observed"))
    session, out = talk(think("a b c", "spy"), think("d", content="e"), tools=[tool])
    session.handle("whatever")
    (during_the_call,) = seen
    assert "think  a b c" in during_the_call and '"spy"' in during_the_call.splitlines()[-1]
    assert "observed" not in during_the_call and "observed" in out()


def test_colours_are_for_terminals_and_texts_cannot_drive_one(talk, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    session, out = talk(think("t"), out=Terminal())
    session.handle(LAW)
    assert "\033[2mt\033[0m" in out()
    tool = spy(lambda arguments: ToolResult("a\033[2Jb\rc\x9bd"))
    session, out = talk(think("t", "spy"), think("t", content="\033]0;x\007done"), tools=[tool])
    session.handle("hello")
    assert not set(out()) & set("\033\r\x9b\007") and "a[2Jbcd" in out()


def test_broken_calls_and_missing_answers_are_told(talk):
    for script, settings, says in (
        (["<tool_call>\n{oops}\n</tool_call><|im_end|>", think("t")], {}, "call   {oops}"),
        ([think("t", "nothing"), think("t")], {}, "no tool named 'nothing'"),
        ([think("t")], {}, "answer none (answered)"),
        ([think("t", "orion")], {"turns": 1}, "answer none (turn_limit)"),
        ([think("t", content="less than 5 <tool")], {}, "less than 5 <tool"),
    ):
        session, out = talk(*script, **settings)
        session.handle(LAW)
        assert says in out()


def test_commands(talk, nano_tokenizer):
    session, out = talk(think("t", content="57"))
    session.handle("/prefer be cheap and avoid orion")
    assert "preference: Be cheap. Do not use large orion." in out()
    prompt = f"{LAW} Be cheap. Do not use large orion.<|im_end|>"
    assert prompt in nano_tokenizer.decode(session.ask(LAW).ids) and "(cheap)" in out()
    session.handle("/tools")
    assert all(f"{offer['what']} {offer['name']}" in out() for offer in LINE_UP)
    session.handle("/help")
    assert all(word in out() for word in ["/prefer", "/tools", *EXAMPLES])
    with pytest.raises(UserError, match="^/frob: no such command; /help lists them$"):
        session.handle("/frob now")
    session, out = talk(tools=[spy(None)])
    session.handle("/tools")
    assert "spy          says it again" in out()


def type_lines(monkeypatch, *lines):
    """What is typed at the prompt; an exception is raised there, and at the end stands Ctrl-D."""
    lines = itertools.chain(lines, itertools.repeat(EOFError()))

    def prompt(_):
        if isinstance(line := next(lines), BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", prompt)


def test_ctrl_c_stops_an_answer_at_once_and_the_next_question_is_answered(
    talk, monkeypatch, capsys
):
    late, failures = threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", failures.append)

    def call(arguments):
        os.kill(os.getpid(), signal.SIGINT)
        late.wait(5)
        return ToolResult("late")

    tool = spy(call, blocking=True)
    session, out = talk(think("t", "spy"), think("t", content="57"), tools=[tool])
    type_lines(monkeypatch, "anything", "/frob", "again")
    start = time.monotonic()
    serve.converse(session, serve.typed(), at_prompt=True)
    assert time.monotonic() - start < 2
    late.set()
    time.sleep(0.05)
    assert "[stopped]" in out() and "answer 57" in out() and "late" not in out()
    assert not failures and capsys.readouterr().err.startswith("serve.py: /frob: no such command")


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EOFError(), "/quit"])
def test_the_prompt_is_left_at_once(talk, monkeypatch, end):
    type_lines(monkeypatch, "", end, LAW)
    session, out = talk()
    serve.converse(session, serve.typed(), at_prompt=True)
    assert out().strip() == ""


def test_ask_answers_one_question_and_says_what_nano_is(command_line):
    script = [think("t", "orion"), think("t", content="57")]
    status, out, err = command_line("--ask", LAW, script=script)
    assert status == 0 and "answer 57" in out and "cost   $" in out
    assert err.count("\n") == 1 and "only its miniature world" in err
    assert command_line("--ask", LAW, script=[think("t")])[0] == 1  # no answer


def test_an_attempt_is_recorded_and_shown_again_without_calling_anything(
    command_line, tmp_path, monkeypatch, nano_tokenizer, capsys
):
    file = str(tmp_path / "trace.jsonl")
    script = [think("ask orion", "orion"), think("t", content="57")]
    _, before, _ = command_line("--ask", LAW, "--trace", file, script=script)
    monkeypatch.setattr(serve.Tokenizer, "from_dir", lambda path: nano_tokenizer)
    monkeypatch.setattr(serve, "load_rollout", None)
    monkeypatch.setattr(serve, "Sandbox", None)
    assert serve.main(["--replay", file]) == 0
    shown = capsys.readouterr().out.splitlines()
    attempt = before[: before.index("  cost")].splitlines()
    assert shown[: len(attempt)] == attempt and any("  orion {}: " in line for line in shown)
    (tmp_path / "trace.jsonl").write_text('{"task": 3}\n')
    assert serve.main(["--replay", file]) == 2
    assert "trace.jsonl, line 1: not a recorded attempt" in capsys.readouterr().err


def test_a_pipe_asks_a_question_a_line_and_goes_on_after_a_refusal(command_line):
    typed = f"{LAW}\n\nwho are you?\n/nonsense\n/prefer be fast\n47+36\n/quit\n{LAW}\n"
    script = [think("t", content="1"), think("t", content="83")]
    status, out, err = command_line(typed=typed, script=script)
    assert status == 2 and out.count("answer") == 2 == out.count("  task ")
    assert "answer 83" in out and "right" in out
    _, outside, nonsense = err.splitlines()
    assert outside.startswith("serve.py: outside") and nonsense.startswith("serve.py: /nonsense")


def test_a_mistake_is_one_line_and_status_2(command_line):
    for arguments, says in (
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--tools", "/no/file"], "/no/file: cannot be read"),
        (["--ask", "who are you?"], "outside the miniature's world"),
    ):
        status, out, err = command_line(*arguments)
        *notice, line = err.splitlines()
        assert status == 2 and says in line and line.startswith("serve.py: ")
        assert len(notice) <= 1 and out == ""
