"""What language models do for data_gen.py: a domain's file, texts in other words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from openai_server import openai_server, said

from data_gen import main
from worlds.toolscale.dataset import load_tasks
from worlds.toolscale.domains import restaurant

SOURCE = Path(restaurant.__file__).read_text()  # the domain that the model writes


TASKS = ["--domains", "bank", "--tasks", "12", "--seed", "1", "--out"]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with openai_server() as served:
        yield served


def content(body):
    return body["messages"][-1]["content"]


def written(text):
    return said(f"Here it is.\n\n```python\n{text}\n```")


def draft(server, *more):
    about = ["--domain", "a library that lends instruments", "--out", "library.py"]
    return main([*about, "--endpoint", f"m@{server.url}", *more])


# --- a domain


def test_a_model_writes_a_domain_until_it_can_be_used(server):
    files = [SOURCE.replace("dish.price, ", "dish.cost, "), SOURCE]
    server.answer = lambda body: written(files[len(server.bodies) - 1])
    assert draft(server) == 0
    assert Path("library.py").read_text() == SOURCE and len(server.bodies) == 2
    repaired = content(server.bodies[1])
    assert "That cannot be used: AttributeError: 'Dish' object has no attribute 'cost'" in repaired
    assert draft(server) == 2, "it is there already"
    Path("library.py").unlink()
    assert draft(server) == 0 and Path("library.py").read_text() == SOURCE
    assert len(server.bodies) == 2, "what was replied is not asked for again"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("open('mark', 'w')", "written 4 times: "),
        ("import socket\nsocket.create_connection(('127.0.0.1', 1))", "PermissionError"),
    ],
)
def test_what_a_model_writes_runs_in_the_sandbox_alone(server, capsys, text, says):
    server.answer = lambda body: written(text)
    assert draft(server) == 2
    error = capsys.readouterr().err
    assert says in error.splitlines()[-1] and not Path("mark").exists()


# --- other words


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain tasks of TASKS, by what the user says."""
    out = tmp_path_factory.mktemp("plain")
    assert main([*TASKS, str(out)]) == 0
    return dict(zip(reasons(out), load_tasks(out / "tasks.jsonl"), strict=True))


def reasons(path):
    tasks = load_tasks(Path(path) / "tasks.jsonl")
    return [task["user_scenario"]["instructions"]["reason_for_call"] for task in tasks]


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
        listed = re.findall(r"^(\d+)\. (.*)$", content(body), re.MULTILINE)
        return said(self.finds or f"They are {[int(n) for n, each in listed if each in wishes]}")


def reword(text):
    return "Hello. " + text.replace("You want to", "You would like to")


def test_texts_in_other_words_are_kept_and_paid_for_once(server, plain, capsys):
    """What was said before the dollars were spent is not asked for again."""
    server.answer = Writer(reword)
    options = [*TASKS, "reworded", "--endpoint", f"m@{server.url}:input=1:output=1"]
    assert main([*options, "--max-usd", "0.04"]) == 2
    assert "more than the run has left to spend; the same command goes" in capsys.readouterr().err
    paid = len(server.bodies)
    assert not Path("reworded/tasks.jsonl").exists()
    assert main(options) == 0
    assert reasons("reworded") == [reword(text) for text in plain]
    assert len(server.bodies) == 24 > paid


@pytest.mark.parametrize(
    ("change", "finds", "why"),
    [
        (lambda text, told: re.sub(r"\d+", "some", text), None, "a number or a name is missing"),
        (lambda text, told: text + " You want 77 more.", None, "a number is added"),
        (lambda text, told: " ".join([text, *told]), None, "the answer is in the text"),
        (lambda text, told: "So: " + text, "[0]", "other wishes are found in the text"),
    ],
)
def test_a_text_that_says_something_else_stays_plain(server, plain, capsys, change, finds, why):
    def changed(text):
        return change(text, plain[text]["evaluation_criteria"]["communicate_info"])

    server.answer = Writer(changed, finds)
    assert main([*TASKS, "data", "--endpoint", f"m@{server.url}"]) == 0
    assert reasons("data") == [*plain] and why in capsys.readouterr().out
