"""Questions from a file: what a task offers, how it is split and judged, real and simulated."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from openai_server import openai_server, said

import train
from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError
from nanorchestra.records import ToolCall
from worlds.mixture import Worlds
from worlds.questions import load_rows

FRAMES = Path(__file__).parents[3] / "shared" / "data" / "frames.jsonl"
ROWS = [{"question": f"What is {n} plus {n}?", "answer": 2 * n} for n in range(60)]
MODELS = {"strong": (1.25, 10), "middle": (0.25, 2), "quick": (0.8, 0.8), "judge": (1.25, 10)}


def catalogue(folder, url="http://127.0.0.1:9/v1"):
    """The path of a catalogue: an interpreter, three experts and a judge."""
    tools = [{"name": "python", "kind": "code", "description": "Runs it.", "usd_per_call": 0.001}]
    for name in MODELS:
        expert = {"name": name, "kind": "expert", "description": f"a {name} model"}
        tools.append(expert | {"expert": name})
    experts = {
        name: {"endpoint": "here", "model": name, "usd": usd} for name, usd in MODELS.items()
    }
    tables = {"tools": tools, "experts": experts, "endpoints": {"here": {"base_url": url}}}
    path = folder / "tools.json"
    path.write_text(json.dumps(tables))
    return str(path)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def world(tmp_path, sandbox):
    """world(rows, **settings) opens a file of questions, with simulated experts."""

    def make(rows=ROWS, url="http://127.0.0.1:9/v1", **settings):
        file = lines(tmp_path / "rows.jsonl", rows)
        settings = {"judge": "judge", "tools": catalogue(tmp_path, url)} | settings
        return Worlds(TaskSection(f"questions:{file}", **settings), 0, sandbox)

    return make


def test_a_task_offers_a_subset_under_aliases_and_prices_of_its_own(world):
    worlds = world()
    tasks = worlds.tasks(40, 0)
    offers = [offer for task in tasks for offer in task.data["tools"]]
    experts = [offer for offer in offers if "price" in offer]
    assert {offer["what"] for offer in offers} == {"python", *MODELS} - {"judge"}
    assert len({tuple(sorted(o["what"] for o in t.data["tools"])) for t in tasks}) > 3
    assert all(any("price" in offer for offer in task.data["tools"]) for task in tasks)
    strong = [offer for offer in experts if offer["what"] == "strong"]
    assert len({offer["name"] for offer in strong}) > 5
    assert len({tuple(offer["price"]) for offer in strong}) > 2
    for offer in experts:
        assert f"${offer['price'][0]}" in offer["description"] and offer["what"] != offer["name"]
        assert offer["name"] in offer["description"]
    for task in tasks:
        env = worlds.environment(task, 0)
        assert [tool["function"]["name"] for tool in env.tools] == [
            offer["name"] for offer in task.data["tools"]
        ]
        assert set(task.preference.tools) <= set(env.by_name)
        assert json.loads(json.dumps(task.data)) == task.data
    assert world().tasks(40, 0) == tasks and len({t.preference.text for t in tasks}) > 10


def test_no_question_is_both_trained_on_and_held_out(world):
    worlds = world([*ROWS, *ROWS])
    train_on, held_out = worlds.tasks(200, 0), worlds.held_out(200)
    seen, kept = ({task.question for task in tasks} for tasks in (train_on, held_out))
    assert not seen & kept and len(seen | kept) == 60 and 4 < len(kept) < 22


def test_a_simulated_expert_is_paid_as_quoted_and_the_stronger_is_right_more_often(world):
    worlds = world()
    right = {name: [] for name in MODELS}
    for task in worlds.tasks(200, 0):
        env = worlds.environment(task, 1)
        for offer in task.data["tools"]:
            if "price" not in offer:
                continue
            result = asyncio.run(env.execute(ToolCall(offer["name"], {})))
            price = env.by_name[offer["name"]].price
            assert [price.input_per_million, price.output_per_million] == offer["price"]
            assert result.cost_usd == price.cost(result.input_tokens, result.output_tokens) > 0
            right[offer["what"]].append(task.data["answer"] == result.content.split(": ")[1])
    shares = {name: sum(found) / len(found) for name, found in right.items() if found}
    assert shares["strong"] > shares["middle"] > shares["quick"] > 0.5


def test_a_row_or_the_config_says_what_the_user_wants(world):
    row = {"preference": "No strong please.", "pref_vec": {"strong": -1, "accuracy": 3, "x": 1}}
    for task in world([row | ROWS[n] for n in range(40)]).tasks(20, 0):
        names = {offer["what"]: offer["name"] for offer in task.data["tools"]}
        alias = names.get("strong", "strong")
        assert task.preference.text == f"No {alias} please." and task.preference.outcome == 3
        assert task.preference.tools == ({alias: -1.0} if "strong" in names else {})
    for task in world(preference="Be frugal. cost=1 never=strong usd=0.02").tasks(20, 0):
        names = [o["name"] for o in task.data["tools"] if o["what"] == "strong"]
        assert task.preference.never == names
        assert task.preference.usd == 0.02 and task.data["wish"] == "cheap"


def test_a_row_that_is_no_question_is_left_out_with_one_line(tmp_path, capsys):
    bad = [{"question": "Who?"}, [], {"question": " ", "answer": 1}, ROWS[0] | {"image": "data:"}]
    bad += [ROWS[0] | {"pref_vec": {"cost": "low"}}, {"Prompt": "Who?", "Answer": "Ada"}]
    (row,) = load_rows(lines(tmp_path / "rows.jsonl", bad))
    assert (row.question, row.answer) == ("Who?", "Ada")
    said = capsys.readouterr().err
    assert "5 of 6 rows are left out" in said and "line 1: no answer; it must be" in said
    assert said.count("\n") == 1
    with pytest.raises(UserError, match="line 1: no answer"):
        load_rows(lines(tmp_path / "rows.jsonl", bad[:1]))


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"tools": ""}, "needs a catalogue"),
        ({"judge": "python"}, "task.judge is 'python'"),
        ({"preference": "never=stong"}, "task.preference: there is no stong"),
        ({"rows": ROWS[:1]}, "are too few"),
    ],
)
def test_what_does_not_fit_the_catalogue_is_named(world, settings, problem):
    with pytest.raises(UserError, match=problem):
        world(**settings)


@pytest.mark.slow
@pytest.mark.skipif(not FRAMES.exists(), reason="the data beside the project are absent")
def test_training_on_frames_asks_real_experts_and_a_real_judge(tmp_path, monkeypatch):
    def answer(body):
        if body["model"] == "judge":
            right = len(server.bodies) % 2
            return said(f"<correct>{bool(right)}</correct>" if len(server.bodies) % 5 else "Hm.")
        return said("sure: 42", usage=(100, 20))

    monkeypatch.setitem(train.settings.SMALL, "rollout.turns", 4)
    monkeypatch.setitem(train.settings.SMALL, "grpo.group_size", 12)
    monkeypatch.setattr("nanorchestra.training.phases.write_report", lambda path: None)
    with openai_server() as server:
        server.answer = answer
        options = ["--config", "qwen3-0.6b", "--dry-run", "--run.root", str(tmp_path)]
        options += ["--task.world", f"questions:{FRAMES}", "--task.experts", "real"]
        options += ["--task.tools", catalogue(tmp_path, server.url), "--task.judge", "judge"]
        assert train.main(options) == 0
    (run,) = tmp_path.glob("*-dry-run")
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").open()]
    asked = [body["model"] for body in server.bodies]
    paid = 0
    for row in rows:
        prices = {offer["name"]: offer.get("price") for offer in row["task"]["data"]["tools"]}
        for turn in row["turns"]:
            for call, result in zip(turn["calls"], turn["results"], strict=True):
                if result["input_tokens"]:
                    usd, paid = prices[call["name"]], paid + 1
                    assert result["cost_usd"] == pytest.approx((100 * usd[0] + 20 * usd[1]) / 1e6)
    assert 0 < paid <= len(asked) - asked.count("judge")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert any("loss" in row for row in metrics)
    assert any({"model", "unparsed"} <= set(row["verdicts"]) for row in metrics)
