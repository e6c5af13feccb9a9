"""The command: figures, byte-identity, resuming, bad input; the LLM author against a scripted server, good and bad answers alike."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nanorchestra.tools import experts
from worlds.toolscale.domains import build
from worlds.toolscale.formats import load_tasks
from worlds.toolscale.pipeline import main, make_batch
from worlds.toolscale.score import Scorer
from worlds.toolscale.world import World

ROOT = Path(__file__).parents[2]


def run(out, *more):
    return main(
        ["--tasks", "60", "--seed", "3", "--domains", "travel,weather", "--out", str(out), *more]
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    assert run(out, "--workers", "1") == 0
    return out


def test_the_files_are_what_the_readme_says_and_every_task_is_solved_in_the_saved_world(made):
    assert sorted(path.name for path in made.iterdir()) == ["tasks.jsonl", "worlds"]
    tasks = load_tasks(made / "tasks.jsonl")
    assert len(tasks) == 60 and [task["domain"] for task in tasks[:4]] == ["travel", "weather"] * 2
    for domain in ("travel", "weather"):
        world = World.load(made / "worlds" / domain)
        for task in tasks:
            if task["domain"] == domain:
                scorer = Scorer(world, task)
                assert (
                    scorer.score(
                        scorer.golden_calls(), task["evaluation_criteria"]["communicate_info"]
                    ).reward
                    == 1
                    and scorer.score([], []).reward == 0
                )


def test_the_bytes_do_not_depend_on_the_workers(made, tmp_path):
    assert run(tmp_path, "--workers", "3") == 0
    for path in sorted(made.rglob("*.*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / path.relative_to(made)).read_bytes()


def test_a_killed_run_goes_on_with_what_it_had_to_the_same_bytes(made, tmp_path, capsys):
    command = [
        sys.executable,
        "data_gen.py",
        "--tasks",
        "60",
        "--seed",
        "3",
        "--domains",
        "travel,weather",
        "--out",
        str(tmp_path),
        "--workers",
        "1",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("parts/*-0*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = list(tmp_path.glob("parts/*-0*.json"))
    assert kept and not (tmp_path / "tasks.jsonl").exists()
    stamp = kept[0].stat().st_mtime_ns
    assert (
        main([*command[2:6], "--domains", "travel", "--out", str(tmp_path)]) == 2
    )  # another command may not take its place
    assert "unfinished work" in capsys.readouterr().err
    (tmp_path / "parts" / "weather-00000.json").write_text('{"tasks": [')  # half written: made anew
    assert kept[0].stat().st_mtime_ns == stamp or kept[0].name.startswith("weather")
    assert run(tmp_path, "--workers", "1") == 0
    assert "going on with" in capsys.readouterr().err
    assert (tmp_path / "tasks.jsonl").read_bytes() == (made / "tasks.jsonl").read_bytes()


def test_the_figures_are_printed(tmp_path, capsys):
    assert (
        main(
            [
                "--tasks",
                "50",
                "--seed",
                "1",
                "--domains",
                "railway",
                "--out",
                str(tmp_path),
                "--workers",
                "1",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "100.00% by their golden calls, 0.00% by doing nothing, 0.00% with one golden argument altered"
        in said
    )
    for figure in (
        "thrown away:",
        "environment steps per second",
        "distinct tool sequences",
        "distinct argument patterns",
        "more than 1% of the others",
        "golden calls a task: 1:",
        "railway (29 tools",
    ):
        assert figure in said
    assert int(re.search(r"replay: ([\d,]+)", said)[1].replace(",", "")) > 1000


def test_show_prints_tasks_to_read_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--show", "2", "--domains", "finance,sport"]) == 0
    said = capsys.readouterr().out
    assert said.count("Wants: ") == said.count("Golden calls:") == said.count(
        "Changes in the database:"
    ) == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--tasks", "0", "--out", "x"], "--tasks is 0; it must be at least 1"),
        (["--tasks", "ten"], "--tasks"),
        ([], "--out is missing"),
        (["--domains", "ferry", "--out", "x"], "domain 'ferry'"),
        (["--difficulty", "6", "--out", "x"], "--difficulty is '6'"),
        (["--difficulty", "4-2", "--out", "x"], "level from 1 to 5"),
        (["--author", "llm", "--out", "x"], "needs --endpoint"),
        (["--domains", "sport,sport", "--out", "x"], "none twice"),
        (["--out", __file__], "is a file"),
        (["--what"], "unrecognized"),
        (["--workers", "0", "--out", "x"], "--workers is 0"),
    ],
)
def test_a_bad_option_gets_one_line(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and error.startswith("data_gen.py: ")


def test_no_torch_is_loaded():
    code = "import sys, worlds.toolscale.pipeline, worlds.toolscale.author, worlds.toolscale.environment, worlds.toolscale.preferences; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- the LLM author


class Scripted(BaseHTTPRequestHandler):
    """Answers each stage from a world of the built-in author, and every few questions with something that is of no use."""

    world, tasks, asked, bad = None, [], [], True
    served = {"records": 0, "tools": 0, "tasks": 0}

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, cls = body["messages"][0]["content"], type(self)
        cls.asked.append(body)
        if cls.bad and len(cls.asked) % 7 == 3:
            self.send_response(500)
            self.end_headers()
            return
        text = "I would rather not." if cls.bad and len(cls.asked) % 5 == 2 else self.answer(prompt)
        reply = json.dumps(
            {
                "choices": [{"message": {"content": text}}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 5},
            }
        ).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def answer(self, prompt):
        world, served = self.world, self.served
        if "different subjects" in prompt:
            return json.dumps(
                ["Lisbon", "Oslo", "night trains", "families", "commuters", "students"]
            )
        if "Design the database" in prompt:
            return "Here it is:\n```json\n" + json.dumps(world.schema) + "\n```"
        if "realistic, different records" in prompt:
            served["records"] += 1
            low, high = 40 * (served["records"] - 1), 40 * served["records"]
            tables = {
                table: dict(list(rows.items())[low:high]) for table, rows in world.tables.items()
            }
            first = next(iter(world.tables))
            return json.dumps(tables | {first: tables[first] | {"X1": {"broken": True}}})
        if "Write 6 tools" in prompt:
            served["tools"] += 1
            plain = [tool for tool in world.tools if tool["kind"] in ("read", "write")]
            wrong = [
                {
                    "kind": "read",
                    "function": {
                        "name": "wrong",
                        "description": "",
                        "parameters": {"properties": {}},
                    },
                    "program": [{"op": "exec", "code": "1"}],
                }
            ]
            return json.dumps(plain[6 * (served["tools"] - 1) : 6 * served["tools"]] + wrong)
        served["tasks"] += 1
        start = 2 * served["tasks"]
        if "Make this task harder" in prompt:
            return json.dumps([self.raw(self.tasks[-1 - served["tasks"] % 5])])
        bad = self.raw(self.tasks[start % 40])
        bad["actions"] = bad["actions"] + [{"name": "nothing", "arguments": {}}]
        return json.dumps(
            [self.raw(self.tasks[n % 40]) for n in (start, start + 1, 0)] + [bad, {"no": "task"}]
        )

    @staticmethod
    def raw(task):
        criteria = task["evaluation_criteria"]
        return {
            "user_scenario": task["user_scenario"],
            "actions": [
                {"name": a["name"], "arguments": a["arguments"]} for a in criteria["actions"]
            ],
            "communicate_info": criteria["communicate_info"],
            "nl_assertions": criteria["nl_assertions"],
        }

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setattr(experts.time, "sleep", lambda seconds: None)
    world, _ = build("railway", 1)
    Scripted.world, Scripted.asked, Scripted.bad, Scripted.served = (
        world,
        [],
        True,
        {"records": 0, "tools": 0, "tasks": 0},
    )
    fit = [
        task
        for number in (0, 1, 2)
        for task in make_batch("railway", 1, (1, 2, 3), number)["tasks"]
        if not {"calculate", "transfer_to_human_agents"}
        & {a["name"] for a in task["evaluation_criteria"]["actions"]}
    ]
    Scripted.tasks = fit[:60]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def test_the_llm_author_goes_through_all_stages_with_good_and_bad_answers(
    endpoint, tmp_path, capsys
):
    command = [
        "--author",
        "llm",
        "--endpoint",
        endpoint,
        "--domains",
        "Night trains",
        "--tasks",
        "12",
        "--seed",
        "1",
        "--out",
        str(tmp_path),
        "--workers",
        "1",
        "--difficulty",
        "1-3",
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    tasks, world = (
        load_tasks(tmp_path / "tasks.jsonl"),
        World.load(tmp_path / "worlds" / "night_trains"),
    )
    assert (
        len(tasks) == 12 and sum(map(len, world.tables.values())) >= 200 and len(world.tools) >= 12
    )
    for task in tasks:
        scorer = Scorer(world, task)
        assert (
            scorer.score(
                scorer.golden_calls(), task["evaluation_criteria"]["communicate_info"]
            ).reward
            == 1
        )
    assert "op is 'exec'" in said.err and "rows that break the schema" in said.err  # named
    for reason in ("a golden call errs", "near duplicate", "not in the task format"):
        assert reason in said.out
    assert any(
        "cannot be used: it is not JSON" in body["messages"][-1]["content"]
        for body in Scripted.asked
    )


def test_an_llm_author_that_gives_nothing_is_refused(endpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Scripted, "answer", lambda self, prompt: "no")
    assert (
        main(
            [
                "--author",
                "llm",
                "--endpoint",
                endpoint,
                "--domains",
                "a,b",
                "--tasks",
                "5",
                "--out",
                str(tmp_path),
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "domain 'a': left out" in error and "no domain could be written" in error


def test_an_llm_author_that_repeats_itself_is_left_with_what_there_is(
    endpoint, tmp_path, capsys, monkeypatch
):
    answer = Scripted.answer
    monkeypatch.setattr(
        Scripted,
        "answer",
        lambda self, prompt: (
            json.dumps([self.raw(self.tasks[0])] * 3)
            if "task" in prompt and "Tools:" in prompt
            else answer(self, prompt)
        ),
    )
    assert (
        main(
            [
                "--author",
                "llm",
                "--endpoint",
                endpoint,
                "--domains",
                "trains",
                "--tasks",
                "4",
                "--out",
                str(tmp_path),
                "--workers",
                "1",
                "--difficulty",
                "1",
            ]
        )
        == 1
    )
    said = capsys.readouterr()
    assert "only 1 of 4 tasks could be made" in said.err and "near duplicate" in said.out


def test_an_endpoint_that_is_not_there_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(experts.time, "sleep", lambda seconds: None)
    assert (
        main(
            [
                "--author",
                "llm",
                "--endpoint",
                "http://127.0.0.1:9",
                "--domains",
                "a",
                "--out",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert (
        "no answer (ConnectionError)" in capsys.readouterr().err
        and not (tmp_path / "tasks.jsonl").exists()
    )
