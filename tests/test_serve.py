"""Talking to an orchestrator: what happens is shown as it happens, and mistakes are one line.

Here the engine is scripted, or nano; tools, worlds and the loop are real. test_terminal.py drives
the real program in a pseudo-terminal.
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
from openai_server import openai_server, said
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.cells import cell_len
from scripted import EchoTool, ScriptedEngine

import serve
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import RolloutSection
from nanorchestra.errors import UserError
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model import chat
from nanorchestra.model.checkpoint import NANO
from nanorchestra.records import Preference, Price, ToolResult
from nanorchestra.report.terminal import Console
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.trajectories import from_row, replay
from tools import PythonTool
from worlds.desk import ranked
from worlds.desk_ask import EXAMPLES, as_task
from worlds.terminal import (
    COMMANDS,
    DeskQuestions,
    OpenQuestions,
    Terminal,
    price,
    questions_of,
)

LAW = "What is the rank of trial 372?"
RIGHT = "It must be right."  # what the desk takes for the wish of a user who states none
CHEAP, *_, EXPENSIVE = ranked(as_task(LAW, Preference()).data["offers"], 0)
SPINNER = r"[/|\\-] \d+ s"
ESCAPES = re.compile(r"\033\[\??\d*[A-Za-z]")


def think(thought, name=None, content="", **arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    call = f"<tool_call>\n{written}\n</tool_call>" if name else ""
    return f"<think>\n{thought}\n</think>\n\n{content}{call}<|im_end|>"


def consult(expert=CHEAP):
    return think("t", "ask", expert=expert, question="trial 372")


@pytest.fixture
def talk(nano_tokenizer, sandbox):
    """talk(*lines of the script) -> (Terminal, what it has written)."""

    def start(*lines, out=None, tools=None, turns=50):
        out = out or io.StringIO()
        engine = ScriptedEngine(nano_tokenizer, itertools.repeat(iter(lines)))
        settings = RolloutSection(turns=turns, turn_tokens=2048, context_tokens=2048)
        rollout = Rollout(engine, nano_tokenizer, lambda *_: None, settings)
        world = DeskQuestions(sandbox) if tools is None else OpenQuestions(tools)
        return Terminal(rollout, world, "scripted", 0, out), out.getvalue

    return start


@pytest.fixture
def command_line(talk, monkeypatch, capsys):
    """command_line(*arguments, script, typed) -> (status, stdout, stderr) of serve.main."""

    def run(*arguments, script=(), typed=""):
        def load(path, settings, *_, **__):
            rollout = talk(*script)[0].rollout
            rollout.engine.model = load_rollout(NANO, settings, {}, 1).engine.model
            return rollout

        monkeypatch.setattr(serve, "load_rollout", load)
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = serve.main(list(arguments))
        return status, *capsys.readouterr()

    return run


def spy(call=lambda arguments: ToolResult("seen", 0.25, 2.0), blocking=False):
    """A tool of the user's own."""
    tool = EchoTool("spy", "expert", blocking)
    tool.parameters, tool.call = {"type": "object", "properties": {}}, call
    return tool


class TerminalStream(io.StringIO):
    def isatty(self):
        return True


def test_what_happens_is_shown_as_it_happens(talk, monkeypatch):
    """A line as it grows, a call before its result, and a spinner, which is erased again."""
    monkeypatch.setenv("TERM", "xterm")
    seen, out = [], TerminalStream()

    def call(arguments):
        end = time.monotonic() + 20
        while not re.search(SPINNER, out.getvalue()) and time.monotonic() < end:
            time.sleep(0.05)
        seen.append(out.getvalue())
        return ToolResult("observed")

    script = think("a b c", "spy"), think("t", content="57")
    terminal, _ = talk(*script, tools=[spy(call)], out=out)
    terminal.console.say("answer", "half a li")
    assert str(terminal.console._pending()) == "  answer half a li"
    terminal.handle("question")
    (during_the_call,) = seen
    assert "a b c" in during_the_call and '"spy"' in during_the_call
    assert re.search(SPINNER, during_the_call) and "observed" not in during_the_call
    assert "observed" in out.getvalue() and "answer \033[1m57" in out.getvalue()


def test_colours_are_for_terminals_and_texts_cannot_drive_one(talk, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, out = talk(think("t"), out=TerminalStream())
    terminal.handle(LAW)
    assert "\033[2mt\033[0m" in out()
    tool = spy(lambda arguments: ToolResult("a\033[2Jb\rc\x9bd"))
    terminal, out = talk(think("t", "spy"), think("t", content="\033]0;x\007done"), tools=[tool])
    terminal.handle("hello")
    assert not set(out()) & set("\033\r\x9b\007") and "a[2Jbcd" in out()


def test_broken_calls_and_missing_answers_are_told(talk):
    for script, settings, says in (
        (["<tool_call>\n{oops}\n</tool_call><|im_end|>", think("t")], {}, "call   {oops}"),
        ([think("t", "nothing"), think("t")], {}, "error  Error: no tool named 'nothing'"),
        ([think("t")], {}, "answer none (the model wrote nothing)"),
        ([consult()], {"turns": 1}, "answer none (turn_limit)"),
        ([think("t", content="less than 5 <tool")], {}, "less than 5 <tool"),
    ):
        terminal, out = talk(*script, **settings)
        terminal.handle(LAW)
        assert says in out() and terminal.status == ("none" in says or not terminal.last["answer"])
        assert "nothing (" not in out(), "what was not run is not billed"


def test_an_answer_has_one_line_and_what_is_none_is_text(talk):
    """What is said beside a call, and what is cut by a limit or Ctrl-C, was once an answer too."""
    beside, half = think("t", "spy", "I look."), "<think>\nt\n</think>\n\nIt is ab"
    for script, finish, stop, labels in (
        ([beside, think("t", content="57")], "stop", False, "text call result think answer"),
        ([half], "length", False, "text answer"),
        ([half], "stop", True, "text answer"),
    ):
        terminal, out = talk(*script, tools=[spy()])
        terminal.at_prompt, engine = True, terminal.rollout.engine
        engine.finish, step = finish, engine.step

        def stopped(engine=engine, step=step):
            if engine.queue:
                raise KeyboardInterrupt
            return step()

        engine.step = stopped if stop else step
        terminal.handle("whatever")
        seen = [line.split()[0] for line in out().splitlines() if line[2:3].strip()]
        assert seen == ["think", *labels.split(), "cost"], out()
        assert out().count("  answer ") == 1 and ("answer none" in out()) == (len(script) == 1)
        assert ("a turn was longer than" in out()) == (finish == "length")
        replayed = Console(io.StringIO())
        replay(from_row(terminal.last)[1], terminal.rollout.tokenizer, replayed.on_event)
        replayed.rest()
        assert replayed.screen.file.getvalue().count("  answer ") == (len(script) == 2)


def test_commands(talk, nano_tokenizer):
    terminal, out = talk(*[think("t", content="57")] * 3)
    bare = nano_tokenizer.decode(terminal.ask(LAW).ids)
    assert f"{LAW} {RIGHT}<|im_end|>" in bare, "nothing more is added unless it was asked for"
    terminal.handle("/prefer spend little never=ant usd=0.05 seconds=60")
    added = "Spend little."
    assert f"added to a question: {added}" in out().replace("\n", " ")
    limits = "binds: never ant, at most $0.05, at most 60 s"
    assert limits in out().replace("\n", " ")
    assert f"{LAW} {added}<|im_end|>" in nano_tokenizer.decode(terminal.ask(LAW).ids)
    for line, problem in (
        ("/frob now", "^/frob: no such command; /help lists them$"),
        ("/prefer usd=much", "^preference: usd is 'much'; it should be a valid number"),
        ("/tools pyton", "did you mean python[?]$"),
        ("/prefer sing", "^preference: nano has not learnt 'sing'; it knows right, cheap"),
        ("/load /no/file", "^/no/file: cannot be read"),
    ):
        with pytest.raises(UserError, match=problem):
            terminal.handle(line)
    assert terminal.preference.usd == 0.05, "a refused line changes nothing"
    for line, words, limits in (
        ("cost=1 latency=0.2 never=records", "Keep it cheap.\n", "never records"),
        ("fast", "Be quick.", "nothing; "),
        ("off", RIGHT, "nothing\n"),
    ):
        terminal.handle(f"/prefer {line}")
        assert f"added to a question: {words}" in out() and f"\nbinds: {limits}" in out()
    terminal.handle("/tools python")
    last = nano_tokenizer.decode(terminal.ask(LAW).ids)
    assert f"{LAW} {RIGHT}<|im_end|>" in last and '"ask"' in last and '"python"' not in last
    terminal.handle("/trace")
    assert f"{LAW}\nturn 1: " in out() and out().endswith("answered: 57\n")
    terminal.handle("/help")
    assert all(word in out() for word in [*COMMANDS, *EXAMPLES, "lawyer", "I cannot wait."])


def test_nano_answers_a_newcomer_with_questions_to_copy(talk, capsys):
    """At a prompt; its shorthand is explained once, before the first answer."""
    terminal, out = talk(*[think("right ant", content="57")] * 2)
    terminal.at_prompt = True
    lines = ["hello", "2 + 2", "what can you do?", "help", "?", LAW, LAW, "Quit", LAW]
    assert serve.converse(terminal, lines) == 0 and capsys.readouterr().err == ""
    friendly, helped = "nano knows only its desk. Three questions to copy:\n", "/prefer "
    assert out().count(friendly) == 3 and out().count(f"\n{helped}") == 2
    note, thought = "  note   12c 20s: a call costs about 12 US cents", "\n  think  right ant\n"
    assert out().count("  note ") == 1 and note in out().split(thought)[0]
    assert out().count("answer 57") == 2
    terminal.at_prompt = False  # a script is told by its status
    with pytest.raises(UserError, match="outside the world of the desk: 'quit'; ask like"):
        terminal.handle("quit")


def test_what_a_limit_refused_is_said_where_it_happens_in_the_bill_and_in_the_trace(talk):
    """The page shows the same text: it is the content of the result in the stream."""
    script = consult(EXPENSIVE), consult(CHEAP), think("t", content="57")
    terminal, out = talk(*script)
    cents, _ = as_task(LAW, Preference()).data["offers"][CHEAP]
    terminal.handle(f"/prefer usd={0.014 * cents}")
    terminal.handle(LAW)
    terminal.handle("/trace")
    shown = out().replace("\n" + " " * 9, " ")
    happened, bill = shown.split("  cost   ")
    bill, trace = bill.split(f"\n{LAW}")
    reason = r"up to \$0\.\d+, \$0\.\d+ left"
    assert re.search(rf"error  Error: refused ask: {reason}", happened)
    assert re.search(rf"{CHEAP} \(1\): .*ask \(1 refused\): {reason}", bill)
    assert re.search(rf'ask {{"expert": "{EXPENSIVE}", .*}}: Error: refused ask: {reason}', trace)


def test_nano_outside_its_world_says_so(command_line, tmp_path):
    (tmp_path / "tools.toml").write_text(
        '[[tools]]\nkind = "code"\nname = "python"\ndescription = "runs"\n'
    )
    given = "--tools", str(tmp_path / "tools.toml"), "--ask", "what is the 1000th prime?"
    script = [consult(), think("t", "python", code="1"), think("t", content="2")]
    status, out, err = command_line(*given, script=script)
    assert status == 0 and "answer 2" in out
    notice = err.splitlines()[0]
    assert notice.startswith("serve.py: this model knows only the desk: it cannot use other")
    _, _, err = command_line("--ask", LAW, script=[think("t", content="2")])
    assert "knows only" not in err


def test_an_answer_has_one_time_and_that_of_the_clock_where_it_is_another(talk):
    """As in its calls, in its row and on the page; a session adds up both."""
    tool = spy(lambda arguments: ToolResult("seen", 0.25, 11.0))
    terminal, out = talk(*[think("t", "spy"), think("t", content="57")] * 2, tools=[tool])
    for question in ("a", "b"):
        terminal.handle(question)
    latency = terminal.last["latency_s"]
    answered = rf"cost   \$0\.25\d*, {latency:.1f} s \(measured [\d.]+ s\), 2 turns"
    assert len(re.findall(answered, out())) == 2 and latency > 11
    assert re.search(rf"session: \$0\.5\d*, {2 * latency:.1f} s \(measured [\d.]+ s\), 2 a", out())


def test_prices_are_in_dollars():
    tool = spy()
    assert price(tool) == "free"
    tool.usd_per_second, tool.experts = 2.5e-5, {"a": EchoTool(), "b": EchoTool()}
    for expert, usd in zip(tool.experts.values(), (0.25, 2.0), strict=True):
        expert.price = Price(usd, 8 * usd)
    assert price(tool).count("per million tokens") == 2 and "$0.000025 per second" in price(tool)


def test_a_conversation_sees_what_was_said_in_the_cache(sandbox, tmp_path, capsys):
    """Real engine, real tools: nano babbles, but its prompt is all that was said before."""
    rollout = load_rollout(
        NANO, RolloutSection(turns=2, turn_tokens=48, context_tokens=2048), {"temperature": 0.0}, 1
    )
    cached = []
    make = rollout.engine.make_request_on

    def make_request_on(sequence, *rest):
        request = make(sequence, *rest)
        cached.append(request)
        return request

    rollout.engine.make_request_on = make_request_on
    terminal = Terminal(rollout, OpenQuestions([spy()]), "", 0, io.StringIO())
    first = terminal.ask("My name is Ada.")
    second = terminal.ask("What is my name?")
    end = [rollout.tokenizer.end_of_turn] * (first.ids[-1] != rollout.tokenizer.end_of_turn)
    asked = chat.encode_reply(rollout.tokenizer, "user", ["What is my name?"])
    assert second.ids[: second.prompt_length] == first.ids + end + asked
    follow_up = cached[len(first.turns)]
    computed = first.turns[-1].end  # the result of a last call is not
    assert follow_up.cached_tokens >= computed - 16, "a page of 16 tokens may be begun"
    terminal.handle(f"/save {tmp_path / 'talk.json'}")
    terminal.handle("/reset")
    assert terminal.ask("Hello").prompt_length < first.prompt_length + 16
    terminal.handle(f"/load {tmp_path / 'talk.json'}")
    third = terminal.ask("And now?")
    assert third.ids[: len(second.ids)] == second.ids
    terminal.handle("/tools spy")
    assert "Ada" in rollout.tokenizer.decode(fourth := terminal.ask("Still?").ids)
    assert '"spy"' not in rollout.tokenizer.decode(fourth[:40])
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match="bad.json: not a conversation"):
        terminal.handle(f"/load {tmp_path / 'bad.json'}")


def test_a_full_context_is_told_and_the_conversation_goes_on(talk):
    terminal, out = talk(think("t", content="57"), tools=[spy()])
    terminal.handle("long " * 3000)
    assert "answer none (the context is full" in out() and terminal.transcript.messages == []
    terminal.handle("short")
    assert "answer 57" in out()


def test_ctrl_c_stops_an_answer_at_once_and_shows_its_cost(talk, monkeypatch, capsys):
    late, failures = threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", failures.append)

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
    (first, _), *_ = re.findall(r"cost   \$(\S+), .* turns?, (\d+) tokens", out())
    assert float(first) > 0, "the stopped answer has a cost"
    assert "anything" in terminal.rollout.tokenizer.decode(
        terminal.rollout.engine.sessions[1].prompt
    )
    assert not failures and capsys.readouterr().err.startswith("serve.py: /frob: no such command")


def test_ctrl_c_stops_code_that_runs_and_quit_does_not_wait_for_it(talk):
    pressed = []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    class Interrupted(PythonTool):
        def call(self, arguments):
            threading.Timer(0.3, press).start()
            return super().call(arguments)

    with Sandbox(1) as box:
        tool = Interrupted("python", "Runs it.", box, timeout_s=60.0)
        code = think("t", "python", code="while True: pass")
        terminal, out = talk(code, tools=[tool])
        terminal.at_prompt = True
        assert serve.converse(terminal, ["anything", "/quit", "never asked"]) == 1
        assert "answer none (stopped)" in out()
    assert time.monotonic() - pressed[0] < 1.0, "the worker of the sandbox is gone"


def test_tokens_of_a_stopped_turn_are_kept_and_billed(talk):
    rollout = load_rollout(
        NANO, RolloutSection(turns=2, turn_tokens=1024, context_tokens=2048), {}, 1
    )
    terminal = Terminal(rollout, OpenQuestions([spy()]), "", 0, io.StringIO())
    terminal.at_prompt, seen = True, []
    show = terminal.console.on_event

    def on_event(kind, payload):
        show(kind, payload)
        seen.append(kind)
        if seen.count("text") == 5:
            os.kill(os.getpid(), signal.SIGINT)

    terminal.console.on_event = on_event
    t = terminal.ask("hello")
    sampled = sum(t.sampled)
    assert t.status == "stopped" and sampled >= 5 and rollout.engine.blocks.available == 129
    assert t.cost_usd == pytest.approx(rollout.price.cost(len(t.ids) - sampled, sampled))
    terminal.console.on_event = show
    assert terminal.ask("go on").ids[: len(t.ids)] == t.ids


def test_lines_break_between_words_within_the_width(monkeypatch):
    words = ["a", "word", "naïve", "日本語日本語", "🙂🙂", "e\u0301tude", "x" * 12, "\t", "\n"]
    for width in (24, 37, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        out = TerminalStream()
        console = Console(out)
        text = " ".join(words * 9)
        for start in range(0, len(text), 3):
            console.say("answer", text[start : start + 3])
        console.end()
        shown = ESCAPES.sub("", out.getvalue())
        lines = shown.splitlines()
        assert all(cell_len(line) <= width for line in lines)
        assert all(line.startswith(" " * 9) for line in lines[1:] if line.strip())
        assert shown.split().count("word") == shown.split().count("x" * 12) == 9
        assert "".join(shown.split()) == "answer" + "".join(text.split())


def test_folded_reasoning_takes_one_line(talk, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    thought = "many words " * 30 + "\nand a line"
    for folded, lines in ((True, 1), (False, 8)):
        terminal, _ = talk(tools=[spy()], out=(out := TerminalStream()))
        if folded:
            terminal.handle("/fold")
        for label, text in (("think", thought[:50]), ("think", thought[50:]), ("answer", "57")):
            terminal.console.say(label, text)
        terminal.console.end()
        *thoughts, answer = ESCAPES.sub("", out.getvalue()).splitlines()
        assert len(thoughts) == lines and answer == "  answer 57"


def test_a_line_is_recalled_in_the_next_session(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for keys in ("one\x1b\rtwo\r\x04", "\x1b[A\r\x04"):
        with create_pipe_input() as keyboard, create_app_session(keyboard, DummyOutput()):
            keyboard.send_text(keys)
            assert list(serve.typed([])) == ["one\ntwo"]


def test_a_checkpoint_without_tools_offers_python_and_search(sandbox, tmp_path):
    """The world of a run of the desk is its own; any other checkpoint answers any question."""
    run = tmp_path / "run" / "model"
    run.mkdir(parents=True)
    for world, kind in (("desk", DeskQuestions), ("questions:q.jsonl", OpenQuestions)):
        (tmp_path / "run" / "config.toml").write_text(f'[task]\nworld = "{world}"\n')
        assert type(questions_of(run, None, None, sandbox)) is kind
    (python,) = questions_of(tmp_path, None, None, sandbox).tools
    assert python.call({"code": "6 * 7"}).content == "42"
    assert type(questions_of(NANO, None, None, sandbox)) is DeskQuestions


def test_examples_and_what_a_parameter_is_follow_the_tools(sandbox, tmp_path, talk):
    """A catalogue takes Python's place, unless "python" stands beside it."""
    (tmp_path / "mine.py").write_text(
        "from tools import tool\n\n@tool\ndef weather(city: str) -> str:\n    'Tells it.'\n"
    )
    (tmp_path / "docs.jsonl").write_text('{"text": "Iron rusts."}\n')
    (tmp_path / "expert.json").write_text(
        '[{"kind": "expert", "name": "sage", "description": "d", "expert": "gpt-5"}]'
    )
    prime, weather = "What is the 1000th prime number?", "What can weather do for me?"
    for words, index, names, examples in (
        (None, None, ["python"], [prime]),
        ("mine.py", None, ["weather"], [weather]),
        ("mine.py,python", None, ["weather", "python"], [prime, weather]),
        ("expert.json", "docs.jsonl", ["sage", "search"], ["What can sage do for me?"]),
    ):
        files = words and ",".join(
            word if word == "python" else str(tmp_path / word) for word in words.split(",")
        )
        world = questions_of(None, files, index and str(tmp_path / index), sandbox)
        assert sorted(tool.name for tool in world.tools) == sorted(names)
        assert world.examples[: len(examples)] == examples
        assert (prime in world.examples) == ("python" in names)
        terminal, out = talk(tools=world.tools)
        terminal.handle("/help")
        assert all(f"  {example}\n" in out() for example in examples)
        for tool in world.tools:
            for name, schema in tool.parameters["properties"].items():
                described = schema.get("description", "")
                assert (described.endswith(".") and " " in described) or name == "city"


def test_the_desks_prompt_is_what_nano_was_trained_on(sandbox):
    """To the byte: no parameter there has a description."""
    tools = DeskQuestions(sandbox).tools
    assert [tool.parameters for tool in tools[:2]] == [
        {
            "type": "object",
            "properties": {"table": {"type": "string"}, "id": {"type": "integer"}},
            "required": ["table", "id"],
        },
        {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    ]


def test_tools_an_index_and_an_expert_work_in_one_conversation(talk, sandbox, tmp_path, capsys):
    """An expert that does not state its usage is billed by an estimate."""
    from tools import main as tools_main

    assert tools_main(["index", "docs", "--out", str(tmp_path / "index")]) == 0
    with openai_server() as server:
        (tmp_path / "tools.toml").write_text(
            f"""
            [endpoints.here]
            base_url = "{server.url}"
            [experts.sage]
            endpoint = "here"
            model = "m"
            usd = [1000.0, 1000.0]
            [[tools]]
            kind = "expert"
            expert = "sage"
            name = "sage"
            description = "answers"
            [[tools]]
            kind = "code"
            name = "python"
            description = "runs"
            """
        )
        roles, index = str(NANO.with_name("toolorchestra.toml")), str(tmp_path / "index")
        by_name = {tool.name: tool for tool in questions_of(NANO, roles, index, sandbox).tools}
        assert [*by_name] == ["enhance_reasoning", "search", "answer"]
        assert len(by_name["search"].helpers) == 1
        world = questions_of(NANO, str(tmp_path / "tools.toml"), index, sandbox)
        script = [
            think("t", "python", code="6 * 7"),
            think("t", "search", query="the scheduler admits a request to its pages"),
            think("t", content="42"),
            think("t", "sage", task="what?"),
            think("t", content="done"),
        ]
        terminal, out = talk(*script, tools=world.tools)
        terminal.handle("What is six times seven?")
        assert "result 42 " in out() and "search (1): " in out()
        assert "[engine.md]" in terminal.last["turns"][1]["results"][0]["content"]
        reply = said("ninety")
        del reply["usage"]
        server.answer = lambda body: reply
        terminal.handle("and now?")
        assert "ninety" in out()
        assert terminal.last["cost_usd"] > 0.01
        assert len(terminal.transcript.messages) == 4


def test_ask_answers_one_question_and_says_what_is_loaded(command_line):
    script = [consult(), think("t", content="57")]
    status, out, err = command_line("--ask", LAW, script=script)
    assert status == 0 and "answer 57" in out and "cost   $" in out
    assert err.count("\n") == 1 and "the desk" in err
    assert "assets/nano, float32 on cpu, context 2048, greedy sampling; " in err
    status, out, _ = command_line("--ask", LAW, "--json", script=script)
    row = json.loads(out)
    assert status == 0 and row["answer"] == "57" and row["task"]["question"] == LAW
    assert row["calls"] == {CHEAP: 1} and row["turns"][0]["results"][0]["cost_usd"] > 0
    assert command_line("--ask", LAW, script=[think("t")])[0] == 1  # no answer


def test_a_recorded_expert_needs_no_server_and_one_that_is_down_ends_no_answer(
    command_line, tmp_path, monkeypatch
):
    """A person would rather have an answer without it; training and evaluation exclude it."""
    monkeypatch.setattr("nanorchestra.tools.http.random.uniform", lambda *_: 0.0)
    offered = {"name": "llm", "kind": "expert", "description": "d", "expert": "big"}
    tables = {"experts": {"big": {"endpoint": "here", "model": "big", "usd": [1, 2]}}}
    script = think("it knows", "llm", task="what?"), think("so", content="42")

    def asked(*words):
        words = ["--tools", f"{tmp_path}/t.json", *words]
        status, out, _ = command_line("--ask", "what?", *words, script=script)
        assert status == 0
        return out

    with openai_server() as server:
        tables |= {"endpoints": {"here": {"base_url": server.url}}, "tools": [offered]}
        (tmp_path / "t.json").write_text(json.dumps(tables))
        recorded = json.loads(asked("--experts", f"record:{tmp_path}/kept", "--json"))
    replayed = json.loads(asked("--experts", f"replay:{tmp_path}/kept", "--json"))
    assert recorded["turns"][0]["results"][0]["content"] == "42"
    assert replayed["turns"] == recorded["turns"]
    down = asked()
    assert "answer 42" in down
    assert "error  Error: llm did not answer: no connection (Connection refused)" in down


def test_an_attempt_is_recorded_and_shown_again_without_calling_anything(
    command_line, tmp_path, monkeypatch, nano_tokenizer, capsys
):
    file = str(tmp_path / "trace.jsonl")
    script = [consult(), think("t", content="57")]
    _, before, _ = command_line("--ask", LAW, "--trace", file, script=script)
    monkeypatch.setattr(serve.Tokenizer, "from_dir", lambda path: nano_tokenizer)
    monkeypatch.setattr(serve, "load_rollout", None)
    monkeypatch.setattr(serve, "Sandbox", None)
    assert serve.main(["--replay", file]) == 0
    printed = capsys.readouterr().out.splitlines()
    attempt = before[: before.index("  cost")].splitlines()
    assert list(map(str.rstrip, printed[: len(attempt)])) == attempt
    assert any(f"  ask/{CHEAP} {{" in line for line in printed)


def test_a_pipe_asks_a_question_a_line_and_goes_on_after_a_refusal(command_line):
    typed = f"{LAW}\n\nwho are you?\n/nonsense\n/prefer be quick\n47*6\n/example\n/quit\n{LAW}\n"
    script = [think("t", content="1"), think("t", content="282"), think("t", content="2")]
    status, out, err = command_line(typed=typed, script=script)
    assert status == 2 and out.count("answer ") == 3 == out.count("  task ")
    assert "answer 282" in out and "right" in out and "session: $" in out
    _, outside, nonsense = err.splitlines()
    assert outside.startswith("serve.py: outside") and nonsense.startswith("serve.py: /nonsense")


def test_a_mistake_is_one_line_and_status_2(command_line, tmp_path):
    for arguments, says in (
        (["--temperature", "-1", "--ask", LAW], "temperature is -1.0"),
        (["--ask", "who are you?"], "outside the world of the desk"),
        (["--experts", "simulated"], "it must be real, record:DIR or replay:DIR"),
    ):
        status, out, err = command_line(*arguments)
        *notice, line = err.splitlines()
        assert status == 2 and says in line and line.startswith("serve.py: ")
        assert len(notice) <= 1 and out == ""
