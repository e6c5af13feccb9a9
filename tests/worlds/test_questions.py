"""Questions from a file: what a task offers, how it is split and judged, real and simulated."""

from __future__ import annotations

import asyncio
import csv
import json

import pytest

from nanorchestra.agent.tool import Allowance
from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError
from nanorchestra.formats import hub
from nanorchestra.records import Price, ToolCall
from worlds.load import open_world
from worlds.questions import load_rows

ROWS = [{"question": f"What is {n} plus {n}?", "answer": 2 * n} for n in range(60)]
MODELS = {"strong": [1.25, 10], "middle": [0.25, 2], "quick": [0.8, 0.8], "judge": [1.25, 10]}


def catalogue(folder):
    """The path of a catalogue: an interpreter, three experts and a judge."""
    tools = [{"name": "python", "kind": "code", "description": "Runs it.", "usd_per_call": 0.001}]
    words = {name: f"a {name} model" for name in MODELS}
    tools += [
        {"name": name, "kind": "expert", "description": words[name], "expert": name}
        for name in MODELS
    ]
    experts = {name: {"endpoint": "here", "model": name, "usd": MODELS[name]} for name in MODELS}
    endpoints = {"here": {"base_url": "http://127.0.0.1:9/v1"}}
    path = folder / "tools.json"
    path.write_text(json.dumps({"tools": tools, "experts": experts, "endpoints": endpoints}))
    return str(path)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def world(tmp_path, sandbox):
    """world(rows, **settings) opens a file of questions, with simulated experts."""

    def make(rows=ROWS, name="", **settings):
        file = lines(tmp_path / "rows.jsonl", rows)
        settings = {"judge": "judge", "tools": catalogue(tmp_path)} | settings
        return open_world(TaskSection(name or f"questions:{file}", **settings), 0, sandbox)

    return make


def test_a_task_offers_a_subset_under_aliases_and_prices_of_its_own(world):
    worlds = world()
    tasks = [worlds.task("train", i) for i in range(40)]
    offers = [offer for task in tasks for offer in task.data["tools"]]
    experts = [offer for offer in offers if offer["models"]]
    assert len({tuple(sorted(o["what"] for o in t.data["tools"])) for t in tasks}) > 3
    strong = [offer for offer in experts if offer["what"] == "strong"]
    assert len({offer["name"] for offer in strong}) > 5
    assert len({tuple(offer["models"][offer["name"]]["usd"]) for offer in strong}) > 2
    for offer in experts:
        usd = offer["models"][offer["name"]]["usd"][0]
        assert f"${usd}" in offer["description"] and offer["name"] in offer["description"]
        assert offer["what"] != offer["name"]
    for task in tasks:
        env = worlds.environment(task, 0)
        assert set(task.preference.tools) <= set(env.by_name)
    again = world()
    assert [again.task("train", i) for i in range(40)] == tasks
    held_out = [worlds.task("held_out", i).data["tools"] for i in range(9)]
    (listed,) = {json.dumps(offered) for offered in held_out}
    assert "$10.0" in listed and '"name": "strong"' in listed


def test_no_question_is_both_trained_on_and_held_out(world):
    worlds = world([*ROWS, *ROWS])
    seen = {worlds.task("train", i).question for i in range(200)}
    kept = {worlds.task("held_out", i).question for i in range(200)}
    assert not seen & kept and len(seen | kept) == 60 and 4 < len(kept) < 22


def test_a_simulated_expert_is_paid_as_quoted_and_the_stronger_is_right_more_often(world):
    worlds = world()
    right = {name: [] for name in MODELS}
    for task in [worlds.task("train", i) for i in range(200)]:
        env = worlds.environment(task, 1)
        for offer in task.data["tools"]:
            for alias, model in offer["models"].items():
                prepared = env.prepare(ToolCall(alias, {}), Allowance(usd_left=9.0))
                result = asyncio.run(prepared.run())
                usd = Price(*model["usd"]).cost(result.input_tokens, result.output_tokens)
                assert result.cost_usd == usd > 0
                assert usd <= prepared.most_usd
                right[offer["what"]].append(task.data["answer"] == result.content)
    shares = {name: sum(found) / len(found) for name, found in right.items() if found}
    assert shares["strong"] > shares["middle"] > shares["quick"] > 0.5


def test_a_row_or_the_config_says_what_the_user_wants(world):
    row = {"preference": "No strong, please.", "pref_vec": {"strong": -1, "accuracy": 3, "x": 1}}
    own = world([row | ROWS[n] for n in range(40)])
    for task in [own.task("train", i) for i in range(20)]:
        names = {offer["what"]: offer["name"] for offer in task.data["tools"]}
        alias = names.get("strong", "strong")
        assert task.preference.text == f"No {alias}, please." and task.preference.outcome == 3
        assert task.preference.tools == ({alias: -1.0} if "strong" in names else {})
    frugal = world(preference="Be frugal. cost=1 never=strong usd=0.02")
    for task in [frugal.task("train", i) for i in range(20)]:
        names = [o["name"] for o in task.data["tools"] if o["what"] == "strong"]
        assert task.preference.never == names
        assert task.preference.usd == 0.02 and task.preference.name == "cheap"


def test_a_row_that_is_no_question_is_left_out_with_one_line(tmp_path, capsys):
    bad = [{"question": "Who?"}, [], {"question": " ", "answer": 1}, ROWS[0] | {"image": "data:"}]
    bad += [ROWS[0] | {"pref_vec": {"cost": "low"}}, {"Prompt": "Who?", "Answer": "Ada"}]
    (row,) = load_rows(lines(tmp_path / "rows.jsonl", bad))
    assert (row.question, row.answer) == ("Who?", "Ada")
    said = capsys.readouterr().err
    assert "5 of 6 rows are left out" in said and "line 1: answer is missing" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("end", ["", 'Ada\n"Who else?",Bob\n'])
def test_a_quote_that_is_not_closed_is_told_with_its_row(end, tmp_path):
    """The rest of the file, or up to the next quote, would be one row, and its rows lost."""
    file = tmp_path / "rows.csv"
    file.write_text(f'question,answer\n"Who\nis it?",Ada\n"Who?,Bob\n{end}')
    with pytest.raises(UserError, match="rows.csv, row from line 4 on: .*must be closed"):
        load_rows(file)


PUBLISHED_AS = {  # the columns that are read, and rows; no tool can see the picture
    "frames": (
        ["Prompt", "Answer", "reasoning_types"],
        [['Who said\t"no"?\nAda or Bob?', "Ada", "Tabular reasoning"]],
    ),
    "hle": (
        ["question", "answer", "category", "image"],
        [["Who?", "Ada", "Math", ""], ["What is shown?", "B", "Art", "data:" + "x" * 200_000]],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED_AS)
def test_a_published_set_is_read_as_it_is(name, world, tmp_path, monkeypatch):
    columns, rows = PUBLISHED_AS[name]
    file = tmp_path / "test.tsv"
    with file.open("w", newline="") as out:
        csv.writer(out, delimiter="\t").writerows([columns, *rows])
    monkeypatch.setattr(hub, "hf_hub_download", lambda *what, repo_type: file)
    opened = world(name=name)
    task = opened.task("all", 0)
    question, answer, kind, *_ = rows[0]
    assert (task.question, task.data["answer"], task.kind) == (question, answer, kind)
    assert opened.size("all") == 1
