"""What language models do for data_gen.py: a domain's file, texts in other words, hard tasks."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from openai_server import openai_server, said, told

import data_gen
from data_gen import main
from worlds.toolscale.dataset import load_tasks, load_world
from worlds.toolscale.domain import build
from worlds.toolscale.domains import restaurant
from worlds.toolscale.user import opening
from worlds.toolscale.verify import verify

ROOT = Path(__file__).parents[2]
SOURCE = Path(restaurant.__file__).read_text()  # the domain that the model writes


def section(first, last=None):
    """The text of the domain from one line to another, or to its end."""
    return SOURCE[SOURCE.index(first) : last and SOURCE.index(last)].strip()


PARTS = {
    "records": section("Allergen = ", "@dataclass\nclass Restaurant"),
    "tools": section("@dataclass\nclass Restaurant", "# Rules")
    + "\n\n\n"
    + section("def identify"),
    "rules": section("# Rules", "# What guests"),
    "wishes": section("# What guests", "def identify"),
}
DOMAIN = ["--domain", "a library that lends instruments", "--out", "library.py"]


class InThisProcess:
    """In place of a pool of processes: none may be forked beside the threads of a server."""

    def __init__(self, *_, **__):
        self.map = map

    def shutdown(self, **_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_gen, "ProcessPoolExecutor", InThisProcess)
    with openai_server() as served:
        yield served


def content(body):
    return body["messages"][-1]["content"]


def part_of(body):
    return re.search(r"Write the next part, the (\w+):", content(body))[1]


def written(text):
    return said(f"Here it is.\n\n```python\n{text}\n```")


def draft(server, *more):
    return main([*DOMAIN, "--endpoint", f"m@{server.url}", *more])


# --- a domain


def test_a_model_writes_a_domain_that_is_tried_part_by_part(server, capsys):
    wrong = {
        "tools": PARTS["tools"].replace("return self.reservations[", "return self.tables["),
        "wishes": PARTS["wishes"].replace("dish.price, ", "dish.cost, "),
    }

    streamed = []

    def answer(body):
        """Sends no more of a reply until its beginning is printed."""
        part, before = part_of(body), sys.stdout.getvalue().count("Here it is.")
        events = told(written(wrong.pop(part, PARTS[part])))
        yield from itertools.islice(events, 5)  # "Here it is."
        deadline = time.monotonic() + 20
        while sys.stdout.getvalue().count("Here it is.") == before and time.monotonic() < deadline:
            time.sleep(0.01)
        streamed.append(sys.stdout.getvalue().count("Here it is.") > before)
        yield from events

    server.answer = answer
    assert draft(server) == 0
    assert not wrong and len(server.bodies) == 6 and streamed == [True] * 6
    printed = capsys.readouterr().out
    source = Path("library.py").read_text()
    for text in PARTS.values():
        assert text in source and text in printed
    assert "library.py: read it" in printed
    tools, repaired = content(server.bodies[2]), content(server.bodies[5])
    assert "You wrote:" in tools and "That cannot be used: a call of reservation: " in tools
    assert "That cannot be used: AttributeError: 'Dish' object has no attribute 'cost'" in repaired
    assert PARTS["rules"] in repaired, "a part is written after those before it"
    assert (
        main(["--domains", "library.py", "--tasks", "40", "--workers", "1", "--out", "data"]) == 0
    )
    domain = build("library.py", 0)
    tasks = load_tasks(Path("data/tasks.jsonl"))
    assert len(tasks) == 40 and {task["level"] for task in tasks} == {1, 2, 3, 4, 5}
    assert not any(verify(domain, task) for task in tasks)
    before = len(server.bodies)
    assert draft(server) == 2 and "library.py: is there already" in capsys.readouterr().err
    Path("library.py").unlink()
    assert draft(server) == 0 and Path("library.py").read_text() == source
    assert len(server.bodies) == before, "what was replied is not asked for again"
    assert PARTS["wishes"] in capsys.readouterr().out


def test_a_part_that_stays_wrong_ends_in_one_line_and_the_rest_is_kept(server, capsys):
    endless = PARTS["rules"].replace("return seats <= 8", "return True")

    def answer(body):
        part = part_of(body)
        return written({"rules": endless}.get(part, PARTS[part]))

    server.answer = answer
    assert draft(server) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "wishes, written 3 times: no wish breaks the rule 'No more than 8 " in error
    assert "library.part.py has what is written" in error and not Path("library.py").exists()
    kept = Path("library.part.py").read_text()
    assert all(PARTS[part] in kept for part in ("records", "tools", "wishes"))
    assert draft(server) == 2 and len(server.bodies) == 6
    assert draft(server, "--seed", "1") == 2 and len(server.bodies) == 12


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        ("", "a record that wishes are about must have names()"),
        ("@dataclass\nclass A:\n    a: str\n", "A must be @dataclass(frozen=True)"),
        ("open('mark', 'w')", "records, written 3 times: "),
        ("import os\nos._exit(0)", "records, written 3 times: it ends the process"),
        ("import os\nos.kill(os.getppid(), 9)", "records, written 3 times"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 1))", "PermissionError"),
    ],
)
def test_what_a_model_writes_runs_in_the_sandbox_alone(server, capsys, text, says):
    server.answer = lambda body: written(text)
    assert draft(server) == 2
    error = capsys.readouterr().err
    assert says in error.splitlines()[-1] and not Path("mark").exists()


# --- other words

TASKS = ["--domains", "bank", "--tasks", "20", "--seed", "3", "--workers", "1", "--out"]


def reasons(path):
    tasks = load_tasks(Path(path) / "tasks.jsonl")
    return [task["user_scenario"]["instructions"]["reason_for_call"] for task in tasks]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain tasks of TASKS, by what the user says."""
    out = tmp_path_factory.mktemp("plain")
    assert main([*TASKS, str(out)]) == 0
    return dict(zip(reasons(out), load_tasks(out / "tasks.jsonl"), strict=True))


def sentences(body):
    return dict(re.findall(r"^(\d+)\. (.*)$", content(body), re.MULTILINE))


class Writer:
    """Says texts in other words by `change(text)`, and finds the wishes of plain ones."""

    def __init__(self, change, finds=None):
        self.change, self.finds, self.plain = change, finds, {}

    def __call__(self, body):
        text = re.search(r":\n\n(.*?)\n\n", content(body), re.DOTALL)[1]
        if "sentences" not in content(body):
            changed = self.change(text)
            self.plain[changed] = text
            return said(changed)
        wishes = re.split(r" (?=You (?:want|were about) to )", self.plain[text])
        right = [int(number) for number, each in sentences(body).items() if each in wishes]
        return said(self.finds or f"They are {right}")


def reword(text):
    return "Hello. " + text.replace("You want to", "You would like to")


def test_a_text_in_other_words_is_kept_and_its_task_played(server, plain, capsys):
    server.answer = Writer(reword)
    options = [*TASKS, "reworded", "--endpoint", f"m@{server.url}:input=1:output=1"]
    assert main(options) == 0
    texts = reasons("reworded")
    assert texts == [reword(text) for text in plain] and len(server.bodies) == 40
    printed = capsys.readouterr().out
    assert "    20  said in other words" in printed
    assert "paid to endpoints: $0.0006 (texts" in printed
    question, wishes = load_world("reworded").task("train", 0).question, texts[0].count("You would")
    assert question.count("I would like to") == wishes
    asked = [sentences(body) for body in server.bodies if "sentences" in content(body)]
    assert len(asked) == 20 and min(map(len, asked)) > 3, "the wishes stand among others"
    assert main(options) == 0 and len(server.bodies) == 40
    assert main([*options[:-1], "other@http://127.0.0.1:1"]) == 2
    assert "holds tasks of another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "finds", "why"),
    [
        (lambda text, told: re.sub(r"\d+", "some", text), None, "a number or a name is missing"),
        (lambda text, told: "", None, "a number or a name is missing"),
        (lambda text, told: text + " You want 77 more.", None, "a number is added"),
        (lambda text, told: " ".join([text, *told]), None, "the answer is in the text"),
        (lambda text, told: "So: " + text, "[1]", "other wishes are found in the text"),
    ],
)
def test_a_text_that_says_something_else_stays_plain(server, plain, capsys, change, finds, why):
    def changed(text):
        return change(text, plain[text]["evaluation_criteria"]["communicate_info"])

    server.answer = Writer(changed, finds)
    assert main([*TASKS, "data", "--endpoint", f"m@{server.url}"]) == 0
    assert reasons("data") == [*plain] and why in capsys.readouterr().out


def test_an_endpoint_that_fails_and_dollars_that_are_spent_end_in_one_line(server, capsys):
    options = [*TASKS, "data", "--endpoint", f"m@{server.url}:input=1:output=1"]
    server.answer = Writer(reword)
    assert main([*options, "--max-usd", "0.04"]) == 2
    error = capsys.readouterr().err
    assert "more than the run has left to spend; the same command goes on" in error
    paid = len(server.bodies)
    assert not Path("data/tasks.jsonl").exists()
    assert main(options) == 0 and len(server.bodies) == 40 > paid
    server.status = 401
    assert main([*TASKS, "x", "--endpoint", f"n@{server.url}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "HTTP 401" in error and "the same command goes on" in error


def test_ctrl_c_ends_at_once_and_what_was_said_is_not_asked_for_again(server):
    slow = Writer(reword)

    def answer(body):
        time.sleep(30 if len(slow.plain) > 10 else 0)
        return slow(body)

    server.answer = answer
    options = [*TASKS, "data", "--endpoint", f"m@{server.url}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "data_gen.py"), *options],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    while len(slow.plain) < 11:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert [line for line in process.stderr][-1] == "data_gen.py: interrupted\n"
    assert process.wait() == 130 and time.monotonic() - start < 15, "no reply is waited for"
    kept = len(list(Path("runs/replies").glob("??/*/*.json"))) // 2
    assert kept >= 10
    server.answer, before = slow, len(server.bodies)
    assert main(options) == 0
    assert len(server.bodies) - before == 40 - kept


# --- how hard


def test_a_solver_drops_what_it_never_solves(server, plain, capsys):
    """It refuses half of the tasks; at the others every second attempt does what is right."""
    tasks = [*plain.values()]
    server.answer = Solver(tasks)
    options = [*TASKS, "hard", "--solver", f"m@{server.url}:input=0:output=0"]
    assert main(options) == 0
    kept = load_tasks(Path("hard/tasks.jsonl"))
    assert [task["id"] for task in kept] == [task["id"] for task in tasks[1::2]]
    assert {task["solved"] for task in kept} == {0.5}
    assert "solved: 10 of 20 tasks are kept, 50.0% of their attempts" in capsys.readouterr().out
    asked = len(server.bodies)
    assert main(options) == 0 and len(server.bodies) == asked
    assert not any("call_expert" in json.dumps(body["tools"]) for body in server.bodies)


class Solver:
    """Knows the golden calls of every second task, and makes them in every second attempt."""

    def __init__(self, tasks):
        self.turns = {}
        self.begun = defaultdict(itertools.count)  # attempts at each task
        for number, task in enumerate(tasks):
            self.turns[opening(task)] = number, task["evaluation_criteria"]

    def __call__(self, body):
        messages = body["messages"]
        number, criteria = self.turns[messages[1]["content"]]
        refusal = "I am sorry, that cannot be done."
        refused = any(message.get("content") == refusal for message in messages)
        if not any(message["role"] == "assistant" for message in messages):
            refused = next(self.begun[number]) % 2 == 0
        if number % 2 == 0 or refused:
            return said(refusal)
        made = sum(len(message.get("tool_calls") or ()) for message in messages)
        if made == len(criteria["actions"]):
            return said(f"This is done. {', '.join(criteria['communicate_info'])}")
        action = criteria["actions"][made]
        confirmed = messages[-1]["role"] == "user" and messages[-1]["content"] == "Yes, please."
        if not confirmed and not action["name"].startswith(READS):
            given = ", ".join(map(str, action["arguments"].values()))
            return said(f"Shall I do this: {given}?".replace("_", " "))
        return said(calls=[(action["name"], json.dumps(action["arguments"]))])


READS = tuple(build("bank", 3).of_kind("read")) + tuple(build("bank", 3).of_kind("handover"))
