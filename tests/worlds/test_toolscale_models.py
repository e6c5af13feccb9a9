"""What language models do for data_gen.py: a domain's file, texts in other words, hard tasks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai_server import openai_server, said

import data_gen
from data_gen import main
from worlds.toolscale.dataset import load_tasks, load_world
from worlds.toolscale.domain import build
from worlds.toolscale.user import opening
from worlds.toolscale.verify import verify

ROOT = Path(__file__).parents[2]
PARTS = {
    "records": """What = Literal["wind", "strings"]


@dataclass(frozen=True)
class Reader:
    reader_id: str
    name: str
    adult: bool


@dataclass(frozen=True)
class Loan:
    loan_id: str
    reader_id: str
    title: str
    kind: What
    weeks: int
    fee: int

    def names(self) -> list[str]:
        return [f"loan {self.loan_id}", f"your {self.title}", f"the {self.title} on loan"]""",
    "tools": '''@dataclass
class Library(Toolkit):
    """You work in a library that lends instruments."""

    readers: dict[str, Reader]
    loans: dict[str, Loan]

    @read
    def reader_by_name(self, name: str) -> Reader:
        """Finds a reader by name."""
        return self.one(self.readers.values(), "There is no such reader.", name=name)

    @read
    def loans_of(self, reader_id: str) -> list[Loan]:
        """Lists the loans of a reader."""
        return [loan for loan in self.loans.values() if loan.reader_id == reader_id]

    @read
    def loan(self, loan_id: str) -> Loan:
        """Reads a loan."""
        return self.loans[loan_id]

    @write
    def prolong(self, loan_id: str, weeks: int) -> int:
        """Prolongs a loan; returns its fee."""
        loan = self.loans[loan_id]
        fee = loan.fee + 3 * weeks
        return self.change(self.loans, loan, weeks=loan.weeks + weeks, fee=fee).fee

    @write
    def take_back(self, loan_id: str) -> str:
        """Takes an instrument back."""
        return f"{self.loans.pop(loan_id).title} is back."

    @handover
    def transfer_to_human_agents(self, reason: Literal["repair", "gift"]) -> str:
        """Hands the reader over."""
        return "Please wait."


def identify(reader: Reader) -> tuple[str, tuple]:
    return f"Your name is {reader.name}.", ("reader_by_name", reader.name)


TITLES = "lute flute viola horn harp oboe cello tuba banjo".split()


def draw(rng: Draw) -> Library:
    kit = Library(rng.today(), {}, {})
    for name in rng.people(30):
        key = rng.number("R")
        kit.readers[key] = Reader(key, name, rng.random() < 0.7)
        for title in rng.of_split(TITLES):
            loan, kind = rng.number("L"), rng.one_of(What)
            weeks, fee = rng.randint(1, 6), rng.randint(10, 80)
            kit.loans[loan] = Loan(loan, key, title, kind, weeks, fee)
    return kit''',
    "rules": """@rule("A loan is prolonged up to 8 weeks.")
def short(loan: Loan, weeks: int) -> bool:
    return loan.weeks + weeks <= 8


@rule("Wind instruments are prolonged for adults alone.")
def grown(reader: Reader, loan: Loan) -> bool:
    return reader.adult or loan.kind != "wind"


@rule("Strings with a fee of more than 50 dollars are brought back in person.")
def cheap(loan: Loan) -> bool:
    return loan.kind != "strings" or loan.fee <= 50""",
    "wishes": """loans = Mine(find="loans_of", look="loan")


@wish(loans)
def longer(scene: Scene, loan: Loan) -> Wish:
    weeks = scene.rng.randint(2, 5)
    return Wish(
        f"prolong {scene.name(loan)} by {weeks} weeks",
        do=[("prolong", loan.loan_id, weeks)],
        reads=[("reader_by_name", scene.me.name)],
        rules=[short.of(loan, weeks), grown.of(scene.me, loan)],
        facts=[scene.near(loan.fee, "its fee is below ${}")],
        ask="What is the fee then?",
        instead=[back],
    )


@wish(loans, every="bring back all that you have on loan")
def back(scene: Scene, loan: Loan) -> Wish:
    return Wish(
        f"bring back {scene.name(loan)}",
        do=[("take_back", loan.loan_id)],
        rules=[cheap.of(loan)],
        facts=[(loan.kind == "wind", "it is a wind instrument")],
        instead=[longer],
    )


@wish(loans)
def cost(scene: Scene, loan: Loan) -> Wish:
    return Wish(f"know the fee of {scene.name(loan)}", told=loan.fee)


person = hand_over("speak with a person about", repair="a broken string", gift="a gift")""",
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
        "tools": PARTS["tools"].replace("self.loans[loan_id]", "self.loans[loan]"),
        "wishes": PARTS["wishes"].replace("loan.fee, ", "loan.price, "),
    }

    def answer(body):
        part = part_of(body)
        return written(wrong.pop(part, PARTS[part]))

    server.answer = answer
    assert draft(server) == 0
    assert not wrong and len(server.bodies) == 6
    printed = capsys.readouterr().out
    source = Path("library.py").read_text()
    for text in PARTS.values():
        assert text in source and text in printed
    assert "library.py: read it" in printed
    tools, repaired = content(server.bodies[2]), content(server.bodies[5])
    assert "You wrote:" in tools and "That cannot be used: a call of loan: " in tools
    assert "That cannot be used: AttributeError: 'Loan' object has no attribute 'price'" in repaired
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


def test_a_part_that_stays_wrong_ends_in_one_line_and_the_rest_is_kept(server, capsys):
    endless = PARTS["rules"].replace("return loan.weeks", "return True or loan.weeks")

    def answer(body):
        part = part_of(body)
        return written({"rules": endless}.get(part, PARTS[part]))

    server.answer = answer
    assert draft(server) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "wishes, written 3 times: no wish breaks the rule 'A loan is prolonged" in error
    assert "library.part.py has what is written" in error and not Path("library.py").exists()
    kept = Path("library.part.py").read_text()
    assert all(PARTS[part] in kept for part in ("records", "tools", "wishes"))
    assert draft(server) == 2 and len(server.bodies) == 6
    assert draft(server, "--seed", "1") == 2 and len(server.bodies) == 12


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        ("I cannot.", "SyntaxError"),
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

TASKS = ["--domains", "bank", "--tasks", "20", "--seed", "3", "--workers", "1", "--out", "data"]


def sentences(body):
    return dict(re.findall(r"^(\d+)\. (.*)$", content(body), re.M))


class Writer:
    """Says texts in other words by `change(text, number)`, and finds the wishes of plain ones."""

    def __init__(self, change):
        self.change, self.plain, self.number = change, {}, 0

    def __call__(self, body):
        text = re.search(r":\n\n(.*?)\n\n", content(body), re.S)[1]
        if "sentences" not in content(body):
            self.number += 1
            changed = self.change(text, self.number)
            self.plain[changed] = text
            return said(changed)
        plain = self.plain[text]
        wishes = re.split(r" (?=You (?:want|were about) to )", plain)
        right = [int(number) for number, each in sentences(body).items() if each in wishes]
        return said(f"They are {right}")


def reasons(path="data/tasks.jsonl"):
    tasks = load_tasks(Path(path))
    return [task["user_scenario"]["instructions"]["reason_for_call"] for task in tasks]


def reword(text, number):
    return "Hello. " + text.replace("You want to", "You would like to")


def test_a_text_in_other_words_is_kept_and_its_task_played(server, capsys):
    assert main(TASKS) == 0
    plain = reasons()
    server.answer = Writer(reword)
    options = [*TASKS[:-1], "reworded", "--endpoint", f"m@{server.url}:input=1:output=1"]
    assert main(options) == 0
    texts = reasons("reworded/tasks.jsonl")
    assert texts == [reword(text, 0) for text in plain] and len(server.bodies) == 40
    printed = capsys.readouterr().out
    assert (
        "    20  said in other words" in printed and "paid to endpoints: $0.0006 (texts" in printed
    )
    world = load_world("reworded")
    assert world.task("train", 0).question.count("I would like to") == texts[0].count(
        "You would like to"
    )
    asked = [sentences(body) for body in server.bodies if "sentences" in content(body)]
    assert len(asked) == 20 and min(map(len, asked)) > 3, "the wishes stand among others"
    assert main(options) == 0 and len(server.bodies) == 40
    assert main([*options[:-1], "other@http://127.0.0.1:1"]) == 2
    assert "holds tasks of another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text, number: re.sub(r"\d+", "some", text) + " 7", "a number"),
        (lambda text, number: "", "a number or a name is missing"),
        (lambda text, number: text.split(",")[0] + " and more", "a number or a name is missing"),
        (lambda text, number: text + " You want 77 more.", "a number is added"),
    ],
)
def test_a_text_that_says_something_else_stays_plain(server, capsys, change, why):
    assert main(TASKS) == 0
    plain = reasons()
    server.answer = Writer(change)
    options = [*TASKS[:-1], "reworded", "--endpoint", f"m@{server.url}"]
    assert main(options) == 0
    for before, after in zip(plain, reasons("reworded/tasks.jsonl"), strict=True):
        assert after == before or re.findall(r"\d+", after) == re.findall(r"\d+", before)
    assert why in capsys.readouterr().out


def test_an_answer_in_the_text_and_other_wishes_leave_it_plain(server, capsys):
    assert main(TASKS) == 0
    plain, tasks = reasons(), load_tasks(Path("data/tasks.jsonl"))
    told = {
        text: task["evaluation_criteria"]["communicate_info"]
        for text, task in zip(plain, tasks, strict=True)
    }
    words = [info for infos in told.values() for info in infos if not re.search(r"\d", info)]
    server.answer = Writer(lambda text, number: " ".join([text, *told[text]]))
    assert main([*TASKS[:-1], "answers", "--endpoint", f"m@{server.url}"]) == 0
    printed = capsys.readouterr().out
    assert "a number is added" in printed and ("the answer is in the text" in printed or not words)
    changed = [
        after
        for before, after in zip(plain, reasons("answers/tasks.jsonl"), strict=True)
        if told[before] and after != before
    ]
    assert not changed

    def blind(body):
        return (
            said("[1]")
            if "sentences" in content(body)
            else said("So: " + re.search(r":\n\n(.*?)\n\n", content(body), re.S)[1])
        )

    server.answer = blind
    assert main([*TASKS[:-1], "blind", "--endpoint", f"m2@{server.url}"]) == 0
    assert "other wishes are found in the text" in capsys.readouterr().out


def test_an_endpoint_that_fails_and_dollars_that_are_spent_end_in_one_line(server, capsys):
    options = [*TASKS, "--endpoint", f"m@{server.url}:input=1:output=1"]
    server.answer = Writer(reword)
    assert main([*options, "--max-usd", "0.04"]) == 2
    error = capsys.readouterr().err
    assert "more than the run has left to spend; the same command goes on" in error
    paid = len(server.bodies)
    assert not Path("data/tasks.jsonl").exists()
    assert main(options) == 0 and len(server.bodies) == 40 > paid
    server.status = 401
    assert main([*TASKS[:-1], "x", "--endpoint", f"n@{server.url}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "HTTP 401" in error and "the same command goes on" in error


def test_ctrl_c_ends_at_once_and_what_was_said_is_not_asked_for_again(server):
    slow = Writer(reword)

    def answer(body):
        time.sleep(30 if slow.number > 10 else 0)
        return slow(body)

    server.answer = answer
    command = [sys.executable, str(ROOT / "data_gen.py"), *TASKS, "--endpoint", f"m@{server.url}"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    while slow.number < 11:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert [line for line in process.stderr][-1] == "data_gen.py: interrupted\n"
    assert process.wait() == 130 and time.monotonic() - start < 15, "no reply is waited for"
    kept = len(list(Path("runs/replies").glob("??/*/*.json"))) // 2
    assert kept >= 10
    server.answer, before = slow, len(server.bodies)
    assert main([*TASKS, "--endpoint", f"m@{server.url}"]) == 0
    assert len(server.bodies) - before == 40 - kept


# --- how hard


def test_a_solver_drops_what_it_never_solves(server, capsys):
    """It refuses half of the tasks; at the others every second attempt does what is right."""
    assert main(TASKS) == 0
    tasks = load_tasks(Path("data/tasks.jsonl"))
    script = Solver(tasks)
    server.answer = script
    options = [*TASKS[:-1], "hard", "--solver", f"m@{server.url}:input=0:output=0"]
    assert main(options) == 0
    kept = load_tasks(Path("hard/tasks.jsonl"))
    assert [task["id"] for task in kept] == [task["id"] for task in tasks[1::2]]
    assert {task["solved"] for task in kept} == {0.5}
    assert "solved: 10 of 20 tasks are kept, 50.0% of their attempts" in capsys.readouterr().out
    asked = len(server.bodies)
    assert main(options) == 0 and len(server.bodies) == asked
    assert not any("call_expert" in json.dumps(body["tools"]) for body in server.bodies)


class Solver:
    """Knows the golden calls of every second task, and makes them in attempts of even seeds."""

    def __init__(self, tasks):
        self.turns = {}
        for number, task in enumerate(tasks):
            self.turns[opening(task)] = number, task["evaluation_criteria"]

    def __call__(self, body):
        messages = body["messages"]
        number, criteria = self.turns[messages[1]["content"]]
        if number % 2 == 0 or body["seed"] % 2:
            return said("I am sorry, that cannot be done.")
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


def test_a_bad_option_gets_one_line(server, capsys):
    for options, says in (
        ("--endpoint gpt --out x", "--endpoint is 'gpt'; it must be MODEL@ and a base URL"),
        ("--domain ferry", "--domain needs the --endpoint"),
        ("--user m@http://h --out x", "--user plays the users of --solver"),
        ("--domain x --endpoint m@http://h --out x", "a domain is a file NAME.py"),
    ):
        assert main(options.split()) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
