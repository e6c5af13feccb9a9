"""Talking to an orchestrator: what is typed becomes a task, what happens is shown as it happens, and nothing the user does hangs it.

The engine is scripted (what it samples is written in the test); tools, worlds, rewards and the loop are real.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import serve
from nanorchestra.errors import UserError
from nanorchestra.records import ToolResult
from nanorchestra.report.terminal import Console
from reward import Price
from tools import HttpExpert
from worlds.miniature.offers import preference_name, skill
from worlds.miniature.tables import PHRASES, PREFERENCES
from worlds.miniature.world import World, environment

LAW = "law case 372 is hard: what is its code?"


def think(thought, name=None, arguments="{}", content=""):
    call = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' if name else ""
    )
    return f"<think>\n{thought}\n</think>\n\n{content}{call}<|im_end|>"


class Scripted:
    """An engine and its session in one: says the next line of its script each turn, one id a step."""

    max_context = 2048

    def __init__(self, tokenizer, lines):
        self.tokenizer, self.lines, self.on_step = tokenizer, iter(lines), lambda: None

    def session(self, ids):
        return self

    def append(self, ids):
        pass

    def close(self):
        self.turn = None

    def submit(self, params, on_token=None):
        ids = self.tokenizer.encode(next(self.lines), special=True)
        self.turn = ids, iter(ids), on_token
        return SimpleNamespace(id=0)

    def step(self):
        self.on_step()
        ids, rest, on_token = self.turn
        for token in rest:
            on_token(token, -0.5)
            return []
        finish = "stop" if ids[-1] in self.tokenizer.eos_ids else "length"
        return [
            SimpleNamespace(
                id=0,
                completion=SimpleNamespace(
                    token_ids=ids,
                    logprobs=[-0.5] * len(ids),
                    finish_reason=finish,
                    weight_versions=[0] * len(ids),
                ),
            )
        ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def talk(nano_tokenizer, sandbox):
    """talk(*lines of the script) -> (Repl, what it has written)."""

    def start(*lines, stream=None, **settings):
        out = stream or io.StringIO()
        return serve.Repl(
            Scripted(nano_tokenizer, lines), nano_tokenizer, sandbox, Console(out), **settings
        ), out.getvalue

    return start


@pytest.fixture
def command_line(talk, nano_tokenizer, monkeypatch, capsys):
    """command_line(arguments, script, typed=...) -> (exit status, stdout, stderr) of serve.main without a terminal."""

    def run(*arguments, script=(), typed=""):
        monkeypatch.setattr(
            serve,
            "open_engine",
            lambda path, quantise: (Scripted(nano_tokenizer, script), nano_tokenizer),
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = serve.main(list(arguments))
        return status, *capsys.readouterr()

    return run


# --- what is typed -> a task of the miniature ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_question_of_the_world_is_recognised_for_what_it_is(split):
    for task in World(3).tasks(split, 300):
        meant = serve.miniature_task(task.question, "").data
        assert {k: meant[k] for k in ("kind", "subject", "difficulty")} == {
            k: task.data[k] for k in ("kind", "subject", "difficulty")
        }, task.question
        if task.data["kind"] in ("arithmetic", "lookup"):  # the rest is made up anew
            assert (meant["answer"], meant["solution"]) == (
                task.data["answer"],
                task.data["solution"],
            ), task.question
        elif task.data["kind"] == "chain":
            assert (
                list(meant["tables"]) == list(task.data["tables"])
                and meant["solution"] == task.data["solution"]
            ), task.question


@pytest.mark.parametrize(
    "typed",
    [
        "what is the capital of France?",
        "hi",
        "2",
        "2 ** 9",
        "2 / 2 + 1",
        "-5 + 3",
        "__import__('os') + 1",
        "(2 + 3) * 4",
        "law case",
        "tax case 372 is hard: what is its code?",
        "what is the age of the order 512?",
        "what is 1.5 + 2?",
        "what is the age of the order of the agent 512?",
        "what is the atomic number of goldfish?",
        "what is the calling code of guinea-x?",
        f"{'9' * 5000} + 1",
    ],
)
def test_what_is_outside_the_world_is_refused_in_one_line_that_says_what_can_be_asked(typed):
    with pytest.raises(UserError, match="outside the miniature's world.*law case 372") as refused:
        serve.miniature_task(typed, "")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_arithmetic_is_what_python_makes_of_it():
    rng = random.Random(1)
    for _ in range(200):
        sign = rng.choice("+-*")
        (low, high), (least, most) = ((100, 999), (3, 9)) if sign == "*" else ((10, 99), (10, 99))
        a, b = rng.randint(low, high), rng.randint(least, most)
        task = serve.miniature_task(
            f"What is {a}{rng.choice(['', ' ', '  '])}{sign}{rng.choice(['', ' '])}{b}?", ""
        )
        assert (task.data["answer"], task.data["solution"], task.question) == (
            str(eval(f"{a}{sign}{b}")),
            f"{a} {sign} {b}",
            f"what is the value of {a} {sign} {b}?",
        )


@pytest.mark.parametrize(
    "typed",
    [
        "2 + 2",
        "417 + 6",
        "6 * 417",
        "12 + 34 - 5",
        "07 + 12",
        "what is 1000 - 10?",
        "law case 7 is hard: what is its code?",
        "tell me of law case 4711",
        "what is the age of the agent of the customer of order 12345?",
    ],
)
def test_numbers_of_other_lengths_are_refused_with_what_nano_knows(typed):
    with pytest.raises(
        UserError, match="outside the miniature's world: .*; nano (knows|adds)"
    ) as refused:
        serve.miniature_task(typed, "")
    assert "\n" not in str(refused.value)


def test_the_wording_may_differ_from_the_worlds():
    assert (
        serve.miniature_task("  WHAT IS the Atomic Number of  the gold ", "").data["answer"] == "79"
    )
    assert serve.miniature_task("law case 372, the hard one", "") == serve.miniature_task(LAW, "")
    assert (
        serve.miniature_task(" the Mass of  element 79", "").question
        == "what is the mass of element 79?"
    )
    asked = "what is the age of the agent of the customer of order 512?"
    assert serve.miniature_task("age of agent of customer of order 512", "").question == asked


def test_experts_know_the_made_up_code_as_well_as_their_skill_says(sandbox):
    task = serve.miniature_task(LAW, "")
    assert (
        task.data["answer"]
        == serve.miniature_task(LAW, "other wishes").data["answer"]
        not in task.data["wrong"]
    )
    assert "records" not in [
        tool["name"] for tool in task.data["tools"]
    ]  # as in the world: only where there are tables
    says = [
        environment(task, seed, sandbox).by_name["orion"].call({}).content.split(": ")[1]
        for seed in range(200)
    ]
    assert abs(says.count(task.data["answer"]) / 200 - skill("large", "law", "hard").right) < 0.08


def test_records_lead_to_the_answer_and_agree_between_questions(sandbox):
    asked = serve.miniature_task("what is the age of the agent of the customer of order 512?", "")
    records = environment(asked, 0, sandbox).by_name["records"]
    table, key = asked.data["solution"]
    for following in ("customer", "agent", "age"):
        ((table, key),) = json.loads(records.call({"table": table, "id": key}).content).items()
        assert table == following
    assert str(key) == asked.data["answer"]
    shorter = serve.miniature_task("customer of order 512: give the rank.", "")
    assert shorter.data["tables"]["order"] == asked.data["tables"]["order"]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_worlds_own_wishes_are_scored_as_there(split):
    for name, phrases in PHRASES[split].items():
        for phrase in phrases:
            if name in PREFERENCES:
                assert preference_name(serve.preference(phrase, [])) == name
            else:
                assert serve.preference(
                    "Be cheap. " + phrase.format("vega"), ["orion", "vega"]
                ).avoided == ("vega",), phrase


@pytest.mark.parametrize(
    "wish, name",
    [
        ("cheap as you can", "cheap"),
        ("I need accuracy", "right"),
        ("quickly!", "fast"),
        ("never use orion", "balanced"),
        ("keep an eye on cost and time", "balanced"),
        ("take it slow", "balanced"),
        ("mind the price", "balanced"),
    ],
)
def test_wishes_in_other_words_are_read_by_key_words(wish, name):
    assert preference_name(serve.preference(wish, [])) == name
    assert serve.preference(
        "ask orion, it does not matter, not vega", ["orion", "vega"]
    ).avoided == ("vega",)


def test_a_tool_is_named_in_the_prompt_as_the_worlds_users_do():
    assert (
        serve.spell_out("Be fast; avoid Lyra, not large orion, nor lyrical calc.")
        == "Be fast; avoid small lyra, not large orion, nor lyrical code calc."
    )
    assert serve.miniature_task(LAW, "Avoid orion.").preference.text == "Avoid large orion."


# --- what is shown -------------------------------------------------------------------------------------------------------------------


def test_thought_call_result_answer_and_price_come_in_order(talk):
    repl, out = talk(think("hard law. ask orion", "orion"), think("sure", content="57"))
    repl.handle(LAW)
    lines = out().splitlines()
    assert [line.split()[0] for line in lines] == [
        "task",
        "think",
        "call",
        "result",
        "think",
        "answer",
        "cost",
    ]
    assert (
        "hard law" in lines[0]
        and lines[2].split()[1:] == ["orion", "{}"]
        and "(orion: $0." in lines[3]
        and lines[5].split() == ["answer", "57"]
    )
    assert (
        f"${repl.last.cost_usd:.3f}" in lines[6]
        and f"{repl.last.latency_s:.1f} s, 1 call, 2 turns; " in lines[6]
        and "reward" in lines[6]
    )
    assert "\033" not in out()


def test_each_thing_is_shown_when_it_happens_and_not_later(talk):
    seen = []
    repl, out = talk(
        think("a b c", "spy"),
        think("d", content="e"),
        tools=[
            spy := SimpleNamespace(
                name="spy",
                kind="spy",
                description="",
                parameters={"type": "object", "properties": {}},
                blocking=False,
            )
        ],
    )
    spy.call = lambda arguments: seen.append(out()) or ToolResult("observed")
    repl.engine.on_step = lambda: seen.append(out())
    repl.handle("whatever")
    assert any(s.endswith("a b") for s in seen)  # in the middle of the thought
    during_the_call = next(s for s in seen if s.rstrip().endswith("spy {}"))
    assert "think" in during_the_call and "observed" not in during_the_call
    assert (
        "observed" in out() and "right" not in out() and "wrong" not in out()
    )  # nobody knows whether it is


def test_colours_on_a_terminal_only(talk, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    script = think("t", "orion"), think("t", content="57")
    repl, out = talk(*script, stream=Terminal())
    repl.handle(LAW)
    assert "\033[2m" in out() and "\033[36morion {}\033[0m" in out()  # dim thought, coloured call
    monkeypatch.setenv("NO_COLOR", "1")
    repl, out = talk(*script, stream=Terminal())
    repl.handle(LAW)
    assert "\033" not in out()


def test_a_tool_cannot_drive_the_terminal(talk):
    tool = HttpExpert("ask", "", "", "", Price(0, 0))
    tool.call = lambda arguments: ToolResult("a\033[2Jb\rc\x9bd")
    repl, out = talk(think("t", "ask"), think("t", content="\033]0;x\007done"), tools=[tool])
    repl.handle("hello")
    assert not set(out()) & set("\033\r\x9b\007") and "a[2Jbcd" in out()


def test_a_broken_call_and_a_missing_answer_are_told(talk):
    repl, out = talk(
        "<tool_call>\n{oops}\n</tool_call><|im_end|>", think("t", "nobody"), think("t")
    )
    repl.handle(LAW)
    assert (
        "call   {oops}" in out()
        and "no tool named 'nobody'" in out()
        and "answer none: it said nothing" in out()
    )
    repl, out = talk(think("t", "orion"), max_turns=1)
    repl.handle(LAW)
    assert "answer none: the turn limit of 1 is reached" in out()
    repl, out = talk(think("t", content="less than 5 <tool"))
    repl.handle(LAW)
    assert repl.last.answer in out() and repl.last.answer.endswith(
        "<tool"
    )  # what may have been the start of a tag is shown too
    repl, out = talk("<think>\nendless")
    repl.handle(LAW)
    assert "answer none: the context of 2048 tokens is full" in out()


def test_a_prompt_longer_than_the_context_is_one_line_with_the_numbers(talk):
    repl, out = talk(tools=[])
    repl.engine.max_context = 100
    with pytest.raises(
        UserError,
        match=r"^prompt: \d{3,} tokens with its tools; the context is 100 and leaves room for 99",
    ):
        repl.handle("word " * 200)


def test_own_tools_are_told_the_question_and_any_question_is_run(talk, monkeypatch):
    asked = []
    reply = SimpleNamespace(
        status_code=200,
        raise_for_status=lambda: None,
        json=lambda: {
            "choices": [{"message": {"content": "Paris"}}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 1000},
        },
    )
    monkeypatch.setattr(
        "nanorchestra.tools.experts.requests.post",
        lambda url, json, **_: asked.append(json["messages"][0]["content"]) or reply,
    )
    repl, out = talk(
        *[think("t", "big"), think("t", content="Paris")] * 2,
        tools=[HttpExpert("big", "a model", "http://x", "m", Price(1.0, 2.0))],
    )
    for question in ("what is the capital of France?", "and of Peru?"):
        repl.handle(question)
    assert asked == ["what is the capital of France?", "and of Peru?"] and "(big: $0.00300" in out()
    repl.handle("/tools")
    assert "big" in out() and "$1 in, $2 out per million tokens" in out()


# --- commands ------------------------------------------------------------------------------------------------------------------------


def test_a_preference_stands_in_the_prompt_until_reset(talk, nano_tokenizer):
    repl, out = talk(*[think("t", content="57")] * 2)
    repl.handle("/prefer be cheap and avoid orion")
    assert "'Be cheap and avoid orion.', scored as cheap, avoid orion" in out()
    repl.handle(LAW)
    assert (
        f"{LAW} Be cheap and avoid large orion.<|im_end|>" in nano_tokenizer.decode(repl.last.ids)
        and "(cheap)" in out()
    )
    repl.handle("/reset")
    repl.handle(LAW)
    assert "Be cheap" not in nano_tokenizer.decode(repl.last.ids) and "(balanced)" in out()


def test_reset_and_seed_make_a_conversation_repeat_itself(talk):
    script = [think("t", "lyra"), think("t", content="57")]
    (one, first), (other, second) = talk(*script * 12, seed=5), talk(*script * 6, seed=5)
    for repl in (one, other):
        for _ in range(6):
            repl.handle(LAW)
    assert first() == second()
    results = [line for line in first().splitlines() if "result" in line]
    assert len(set(results)) > 1  # asked again, an expert may err differently
    one.handle("/reset")
    for _ in range(6):
        one.handle(LAW)
    assert first() == 2 * second()


def test_trace_shows_every_id_once_as_sampled_or_given(talk):
    repl, out = talk(think("t", "orion"), think("sure", content="57"))
    with pytest.raises(UserError, match="no finished answer yet"):
        repl.handle("/trace")
    repl.handle(LAW)
    before, last = len(out()), repl.last
    repl.handle("/trace")
    parts = [line.split() for line in out()[before:].splitlines() if line.startswith("ids ")]
    spans = [(*map(int, part[1].split(":")), part[2].startswith("sampled")) for part in parts]
    assert [sampled for start, end, sampled in spans for _ in range(start, end)] == last.sampled
    shown = [
        int(i)
        for line in out()[before:].splitlines()
        if line[:4] in ("  | ", "  + ") and line[4:].replace(" ", "").isdigit()
        for i in line[4:].split()
    ]
    assert shown == last.ids
    assert (
        f"{sum(last.sampled)} ids sampled" in out()
        and "call orion: $0." in out()
        and "1 call, 2 turns" in out()
    )


def test_tools_help_example_and_unknown_commands(talk):
    repl, out = talk(think("t", content="57"))
    repl.handle("/tools")
    for tool in serve.LINE_UP:
        assert f"{tool['name']:8} {tool['what']:9} ${tool['price']} per" in out()
    assert "simulated" in out()
    repl.handle("/help")
    assert all(command in out() for command in repl.commands) and all(
        example in out() for example in serve.EXAMPLES
    )
    repl.handle("/example")
    assert repl.last.task_id.startswith("held_out-0-") and "reward" in out()
    with pytest.raises(
        UserError, match="^/frobnicate: no such command; there are /prefer, .*/quit$"
    ):
        repl.handle("/frobnicate now")


def test_every_question_in_the_help_is_understood():
    assert [serve.miniature_task(example, "").data["kind"] for example in serve.EXAMPLES] == [
        "knowledge",
        "arithmetic",
        "lookup",
        "chain",
    ]


# --- stopping ------------------------------------------------------------------------------------------------------------------------


def type_lines(monkeypatch, *lines):
    """What the user types at the prompt; an exception is raised there, and at the end stands Ctrl-D."""
    lines = itertools.chain(lines, itertools.repeat(EOFError()))

    def prompt(_):
        if isinstance(line := next(lines), BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", prompt)


def test_ctrl_c_stops_the_answer_and_the_next_question_is_answered(talk, monkeypatch, capsys):
    repl, out = talk(
        think("t", content="1"), think("this will be stopped", "orion"), think("t", content="57")
    )
    steps = itertools.count(1)
    repl.engine.on_step = lambda: (
        repl.attempts == 2 and next(steps) == 4 and os.kill(os.getpid(), signal.SIGINT)
    )
    type_lines(monkeypatch, LAW, LAW, "/trace", LAW)
    assert serve.interact(repl) == 0
    before, after = out().split("[stopped]")
    assert "answer 1" in before and "orion" not in before and "answer 57" in after
    assert capsys.readouterr().err == "/trace: there is no finished answer yet\n"


@pytest.mark.parametrize("go_on", [False, True])
def test_ctrl_c_does_not_wait_for_a_slow_tool_nor_trip_over_its_late_result(
    talk, monkeypatch, go_on
):
    late, failures = threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    tool = HttpExpert("slow", "", "", "", Price(0, 0))
    tool.call = lambda arguments: (
        os.kill(os.getpid(), signal.SIGINT),
        late.wait(5),
        ToolResult("late"),
    )[-1]
    repl, out = talk(think("t", "slow"), think("t", content="57"), tools=[tool])
    type_lines(monkeypatch, "anything", *(["again"] if go_on else []))
    start = time.monotonic()
    assert serve.interact(repl) == 0 and time.monotonic() - start < 2
    late.set()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.daemon:
            thread.join(1)
    assert (
        "[stopped]" in out()
        and "late" not in out()
        and not failures
        and ("answer 57" in out()) == go_on
    )


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EOFError(), "/quit"])
def test_the_prompt_is_left_at_once(talk, monkeypatch, end):
    type_lines(monkeypatch, "", end, LAW)
    repl, out = talk()
    assert serve.interact(repl) == 0 and out().strip() == ""


# --- the command line ----------------------------------------------------------------------------------------------------------------


def test_ask_answers_one_question_and_says_what_nano_is(command_line):
    status, out, err = command_line(
        "--ask", LAW, script=[think("t", "orion"), think("t", content="57")]
    )
    assert status == 0 and "answer 57" in out and "cost   $" in out
    assert err.count("\n") == 1 and "only its miniature world" in err and "simulated" in err
    assert command_line("--ask", LAW, script=[think("t")])[0] == 1  # no answer


def test_a_pipe_asks_a_question_a_line_and_goes_on_after_a_refusal(command_line):
    typed = f"{LAW}\n\nwho are you?\n/nonsense\n/prefer be fast\n47+36\n/quit\n{LAW}\n"
    status, out, err = command_line(
        typed=typed, script=[think("t", content="1"), think("t", content="83")]
    )
    assert (
        status == 2
        and out.count("answer") == 2
        and out.count("> ") >= 5
        and "answer 83" in out
        and "right" in out
    )
    refusals = err.splitlines()[1:]
    assert (
        len(refusals) == 2
        and refusals[0].startswith("serve.py: outside")
        and refusals[1].startswith("serve.py: /nonsense")
    )
    assert command_line(typed="")[0] == 0 and command_line(typed="/help\n")[0] == 0


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--ask", " "], "--ask: the question is empty"),
        (["--max-turns", "0"], "--max-turns is 0; it must be at least 1"),
        (["--seed", "x"], "--seed: invalid int"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--frob"], "--frob"),
        (["--tools", "/no/file"], "/no/file: cannot be read"),
        (["--ask", "who are you?"], "outside the miniature's world"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command_line, arguments, says):
    status, out, err = command_line(*arguments)
    *notice, line = err.splitlines()
    assert (
        status == 2
        and says in line
        and line.startswith("serve.py: ")
        and len(notice) <= 1
        and out == ""
    )


def test_without_the_bundled_checkpoint_it_says_how_to_make_one(tmp_path, monkeypatch):
    from nanorchestra.agent import load

    monkeypatch.setattr(load, "NANO", tmp_path)
    with pytest.raises(
        UserError, match=rf"^{tmp_path}: no checkpoint here yet; make one with `python train.py`"
    ):
        load.load_policy(tmp_path)


def test_weights_that_are_not_finite_are_one_line(tmp_path, nano_model, nano_tokenizer, capsys):
    from nanorchestra.model.saving import save_checkpoint

    nano_model.norm.data[3] = float("nan")
    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "m")
    assert serve.main(["--model", str(tmp_path / "m"), "--ask", LAW]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("serve.py: ") and "not finite: a weight is NaN" in last


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirection, status, says",
    [
        ("<&-", 0, ""),
        (">&- <&-", 0, ""),
        ("--ask '%s' <&-", 1, ""),
        ("--ask \"$(printf 'law case 372 \\377 is hard')\"", 1, ""),
        ("--ask '%s' > /dev/full", 1, "No space left"),
    ],
)
def test_closed_and_full_streams_and_bytes_that_are_no_text_are_no_traceback(
    tmp_path, nano_model, nano_tokenizer, redirection, status, says
):
    from dataclasses import replace

    from nanorchestra.model.saving import save_checkpoint

    nano_model.config = replace(nano_model.config, max_position_embeddings=500)
    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "m")
    command = f"{sys.executable} {serve.__file__} --model {tmp_path / 'm'} {redirection.replace('%s', LAW)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == status
        and "Traceback" not in done.stderr
        and "Exception" not in done.stderr
        and says in done.stderr
    ), done.stderr


@pytest.mark.slow
def test_a_real_checkpoint_in_a_real_process(tmp_path, nano_model, nano_tokenizer):
    """Random weights babble to the end of the context; what matters is that it ends, with a bill and without a traceback."""
    from dataclasses import replace

    from nanorchestra.model.saving import save_checkpoint

    nano_model.config = replace(nano_model.config, max_position_embeddings=1024)
    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "m")
    serve_py = Path(serve.__file__)
    done = subprocess.run(
        [sys.executable, str(serve_py), "--model", str(tmp_path / "m"), "--ask", LAW],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (
        done.returncode == 1
        and "none: the context of 1024 tokens is full" in done.stdout
        and "cost   $" in done.stdout
        and done.stderr.count("\n") == 1
    )
    done = subprocess.run(
        [sys.executable, str(serve_py), "--model", str(tmp_path / "m")],
        input=b"\xff\xfe hi\n47+36\n/tools\n",
        capture_output=True,
    )
    assert done.returncode == 2 and b"Traceback" not in done.stderr and b"orion" in done.stdout
