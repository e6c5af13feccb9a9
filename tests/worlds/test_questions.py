"""Questions from a file: what a task offers, how it is split and judged, real and simulated."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import random
import re
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from menu_policy import Menu
from openai_server import openai_server, said
from run_rows import TIMINGS
from scripted import call, execute

import train
from nanorchestra.agent.tool import Allowance
from nanorchestra.agent.world import demonstrates
from nanorchestra.config import RolloutSection, TaskSection
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.errors import UserError
from nanorchestra.formats import hub
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model.checkpoint import NANO
from nanorchestra.records import Preference, Price, ToolCall
from nanorchestra.training import build
from worlds.load import open_world
from worlds.questions import PUBLISHED, load_rows
from worlds.terminal import questions_of

ROLES_FILE = Path(__file__).parents[2] / "assets" / "toolorchestra.toml"
HOSTS = ("openai", "together", "here")
ROWS = [{"question": f"What is {n} plus {n}?", "answer": 2 * n} for n in range(60)]
MODELS = {"strong": [1.25, 10], "middle": [0.25, 2], "quick": [0.8, 0.8], "judge": [1.25, 10]}


def catalogue(folder, url="http://127.0.0.1:9/v1"):
    """The path of a catalogue: an interpreter, three experts and a judge."""
    tools = [{"name": "python", "kind": "code", "description": "Runs it.", "usd_per_call": 0.001}]
    words = {name: f"a {name} model" for name in MODELS}
    tools += [
        {"name": name, "kind": "expert", "description": words[name], "expert": name}
        for name in MODELS
    ]
    experts = {name: {"endpoint": "here", "model": name, "usd": MODELS[name]} for name in MODELS}
    endpoints = {"here": {"base_url": url, "concurrency": 64}}
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
    assert {offer["what"] for offer in offers} == {"python", *MODELS} - {"judge"}
    assert len({tuple(sorted(o["what"] for o in t.data["tools"])) for t in tasks}) > 3
    assert all(any(offer["models"] for offer in task.data["tools"]) for task in tasks)
    strong = [offer for offer in experts if offer["what"] == "strong"]
    assert len({offer["name"] for offer in strong}) > 5
    assert len({tuple(offer["models"][offer["name"]]["usd"]) for offer in strong}) > 2
    for offer in experts:
        usd = offer["models"][offer["name"]]["usd"][0]
        assert f"${usd}" in offer["description"] and offer["name"] in offer["description"]
        assert offer["what"] != offer["name"]
    for task in tasks:
        env = worlds.environment(task, 0)
        assert [tool["function"]["name"] for tool in env.tools] == [
            offer["name"] for offer in task.data["tools"]
        ]
        assert set(task.preference.tools) <= set(env.by_name)
        assert json.loads(json.dumps(task.data)) == task.data
    again = world()
    assert [again.task("train", i) for i in range(40)] == tasks
    assert len({t.preference.text for t in tasks}) > 10
    (listed,) = {
        json.dumps(task.data["tools"]) for task in [worlds.task("held_out", i) for i in range(9)]
    }
    assert "$10.0" in listed and '"name": "strong"' in listed


def test_serve_describes_an_expert_as_evaluation_and_training_do(world, tmp_path, sandbox):
    made = json.loads(Path(catalogue(tmp_path)).read_text())
    made["experts"]["strong"]["latency_s"] = 41
    path = tmp_path / "timed.json"
    path.write_text(json.dumps(made))
    worlds = world(tools=str(path), judge="")
    held_out = worlds.environment(worlds.task("held_out", 0), 0)
    served = questions_of(None, str(path), None, sandbox).open("Who?", Preference(), 0)
    assert served.tools == held_out.tools
    said = {tool["function"]["name"]: tool["function"]["description"] for tool in served.tools}
    price = "Price: $1.25 per million input tokens, $10.0 per million output tokens"
    assert said["strong"] == f"strong: a strong model. {price}; about 41 s an answer."
    assert said["judge"] == f"judge: a judge model. {price}.", "no latency is known"
    for tool in worlds.environment(worlds.task("train", 0), 0).tools:
        text = tool["function"]["description"]
        assert "$" in text and (" 41 s" in text) == ("strong" in text)


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


def test_a_published_role_has_some_of_its_experts_in_another_order(world, tmp_path, nano_tokenizer):
    roles = {"answer": ["strong", "middle", "quick"], "enhance_reasoning": ["strong", "quick"]}
    made = json.loads(Path(catalogue(tmp_path)).read_text())
    model = {"type": "string", "description": "as listed"}
    listed = {"type": "object", "properties": {"model": model}, "required": ["model"]}
    common = {"kind": "role", "description": "It.", "parameters": listed}
    made["tools"] = [common | {"name": name, "models": roles[name]} for name in roles]
    (tmp_path / "roles.json").write_text(json.dumps(made))
    settings = {"tools": str(tmp_path / "roles.json"), "judge": "", "preference": "never=strong"}
    worlds, orders = world(**settings), set()
    for task in [worlds.task("train", i) for i in range(12)]:
        env = worlds.environment(task, 0)
        env.evidence.tokenizer = nano_tokenizer
        for offer in task.data["tools"]:
            assert set(offer["models"]) <= set(roles[offer["name"]])
            orders.add((offer["name"], *((a, m["what"]) for a, m in offer["models"].items())))
            said = env.by_name[offer["name"]].parameters["properties"]["model"]["description"]
            alias, model = random.Random(task.id).choice(list(offer["models"].items()))
            assert f"{alias} | ${model['usd'][0]:g} | ${model['usd'][1]:g} |" in said
            result = execute(env, ToolCall(offer["name"], {"model": alias}))
            printed = re.findall(r"output\n(.*)\n", result.content) or [result.content]
            assert printed[0] in [task.data["answer"], *task.data["wrong"]] and not result.error
            assert result.alias == alias and result.cost_usd > 0
        hidden = [
            a for o in task.data["tools"] for a, m in o["models"].items() if m["what"] == "strong"
        ]
        assert task.preference.never == list(dict.fromkeys(hidden))
    assert len(orders) > 12
    env = worlds.environment(worlds.task("held_out", 0), 0)
    assert all(tool["function"]["parameters"] == listed for tool in env.tools)


def test_a_search_with_nothing_behind_it_is_simulated_with_the_experts_or_refused(
    world, tmp_path, nano_tokenizer
):
    made = json.loads(Path(catalogue(tmp_path)).read_text())
    role = {"name": "search", "kind": "role", "description": "It.", "models": ["strong"]}
    (tmp_path / "roles.json").write_text(json.dumps(made | {"tools": [role]}))
    settings = {"tools": str(tmp_path / "roles.json"), "judge": ""}
    with pytest.raises(UserError, match="roles.json: search: nothing to search in; add a tool"):
        world(**settings, experts="real")
    worlds, right = world(**settings), []
    for task in [worlds.task("train", i) for i in range(60)]:
        env = worlds.environment(task, 0)
        env.evidence.tokenizer = nano_tokenizer
        call = ToolCall("search", {"model": next(iter(task.data["tools"][0]["models"]))})
        result = execute(env, call)
        question, answer = result.content.split("\n")
        assert question == task.question and result.findings["documents"] == [result.content]
        assert 0.01 < result.cost_usd <= env.by_name["search"].most_usd(call.arguments)
        right.append(answer == task.data["answer"])
    assert 0.5 < sum(right) / len(right) < 0.9


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
    with pytest.raises(UserError, match="line 1: answer is missing"):
        load_rows(lines(tmp_path / "rows.jsonl", bad[:1]))


def test_what_does_not_fit_the_catalogue_is_named(world):
    for settings, problem in (
        ({"preference": "never=stong"}, "task.preference: there is no stong"),
        ({"rows": [ROWS[0] | {"vector": {"never": ["stong"]}}]}, "question 1: there is no stong"),
    ):
        with pytest.raises(UserError, match=problem):
            world(**settings)


def test_a_set_without_a_split_is_played_whole_and_demands_none(world):
    few = world(ROWS[:1])
    assert few.task("all", 0).question == ROWS[0]["question"] and few.size("all") == 1
    (missing,) = [split for split in ("train", "held_out") if not few.splits[split]]
    for asked in (few.size, lambda split: few.task(split, 0)):
        with pytest.raises(
            UserError, match="none of 1 questions is (held out|for training); every"
        ):
            asked(missing)


QUOTED = 'Who said\t"no"?\nAda or Bob?'
COLUMNS = {  # as they are published, but for some that are not read
    "frames": ["", "Prompt", "Answer", "wikipedia_link_1", "reasoning_types"],
    "hle": ["id", "question", "image", "answer", "rationale", "category"],
}
WRITTEN = {  # rows by column; no tool can see the picture
    "frames": [
        [0, QUOTED, "Ada", "https://a", "Tabular reasoning"],
        [1, "How many?", "42", "", "Numerical reasoning"],
    ],
    "hle": [
        ["6a", QUOTED, "", "Ada", "r", "Math"],
        ["6b", "What is shown?", "data:" + "x" * 200_000, "B", "r", "Art"],
    ],
}


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "parquet"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_published_set_is_read_as_it_is(name, suffix, world, tmp_path, monkeypatch, capsys):
    """By its file, or by its name from the hub."""
    file = tmp_path / f"test.{suffix}"
    rows = [dict(zip(COLUMNS[name], row, strict=True)) for row in WRITTEN[name]]
    if suffix == "jsonl":
        lines(file, rows)
    elif suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, COLUMNS[name], delimiter="\t" if suffix == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    asked = []
    monkeypatch.setattr(
        hub, "hf_hub_download", lambda *what, repo_type: asked.append((*what, repo_type)) or file
    )
    read = load_rows(file)
    for word in (f"questions:{file}", name):
        opened = world(name=word)
        questions = {opened.task("all", i).question for i in range(opened.size("all"))}
        assert questions == {row.question for row in read}
    assert asked == [(*PUBLISHED[name], "dataset")]
    first = read[0]
    assert (first.question, first.answer) == (QUOTED, "Ada")
    if name == "frames":
        assert [row.kind for row in read] == ["Tabular reasoning", "Numerical reasoning"]
        assert read[1].answer == "42" and len(read) == 2
    else:
        assert [(row.id, row.kind) for row in read] == [("6a", "Math")]
        assert "1 of 2 rows are left out; the first:" in capsys.readouterr().err


ROLES = {
    "answer": ("answer-1", "answer-2", "answer-3", "answer-4"),
    "search": ("search-1",),
    "enhance_reasoning": ("reasoner-1",),
}


def hold_to_calls_of_roles(monkeypatch, tokenizer):
    """Makes the policy of train.py draw each turn among the calls of ROLES."""
    turns = [
        call(alias, name).replace('"text"', '"model"').replace("\nt\n", f"\n{alias[-2:]}\n")
        for name, aliases in ROLES.items()
        for alias in aliases
    ]
    monkeypatch.setattr(
        build, "SamplingParams", partial(SamplingParams, guide=Menu(tokenizer, turns))
    )


def of_a_run(root):
    """What a run in `root` has written that is a function of its seed, by file."""
    (run,) = root.glob("*-dry-run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    steps = [{k: v for k, v in row.items() if k not in {*TIMINGS, "bill_usd"}} for row in rows]
    held_out = json.loads((run / "summary.json").read_text())["held_out"]
    files = [run / "trajectories.jsonl", *sorted((run / "model").glob("*.safetensors"))]
    return {"steps": steps, "held_out": held_out} | {f.name: f.read_bytes() for f in files}


def check_the_bill(root):
    """Attempts and steps of the run in `root` cost what their calls did, by the prices offered."""
    (run,) = root.glob("*-dry-run")
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").open()]
    paid = 0
    for row in rows:
        spent = sum(result["cost_usd"] for turn in row["turns"] for result in turn["results"])
        own = Price(0.2, 0.2).cost(len(row["ids"]), 0)
        assert row["cost_usd"] == pytest.approx(spent + own, abs=1e-9)
        for turn in row["turns"]:
            for made, result in zip(turn["calls"], turn["results"], strict=True):
                if made["name"] == "answer" and not result["error"]:
                    (role,) = (o for o in row["task"]["data"]["tools"] if o["name"] == "answer")
                    usd, paid = Price(*role["models"][result["alias"]]["usd"]), paid + 1
                    tokens = result["input_tokens"], result["output_tokens"]
                    assert result["cost_usd"] == usd.cost(*tokens) > 0
    assert paid > 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    bill = json.loads((run / "summary.json").read_text())["bill_usd"]
    assert bill["judge"] > 0 and len(bill) > 1, "which experts are asked is drawn"
    for step in (step for step in steps if "costs_usd" in step):
        assert step["costs_usd"]["policy"] > 0 and step["seconds_by"]["policy"] > 0
        assert sum(step["costs_usd"].values()) == pytest.approx(step["cost_usd"])
        assert sum(step["seconds_by"].values()) == pytest.approx(step["latency_s"])
    assert any({"model", "unparsed"} <= set(step["verdicts"]) for step in steps)


def test_rows_that_state_calls_demonstrate_them_with_real_tools(world):
    rows = [
        row
        | {"calls": [{"tool": "python", "arguments": {"code": f"print({row['question'][8]}*2)"}}]}
        for row in ROWS[:9]
    ]
    rows += [row | {"calls": [{"tool": "middle", "thought": "ask"}]} for row in ROWS[10:30]]
    taught = world(rows + ROWS[30:])
    asked = Counter()
    for index in range(40):
        most = index % 3
        env, lessons = taught.lesson(index, most)
        assert not most or len(env.tools) <= most
        *calls, last = lessons
        assert last.content == str(env.task.data["answer"]) and last.result is None
        (lesson,) = calls
        what = env.task.offers[lesson.call.name]
        asked[what] += 1
        assert last.content in lesson.result.content and not lesson.result.error
        assert lesson.thought == ("ask" if what == "middle" else "")
        assert lesson.call.name not in env.task.preference.never
        again, _ = taught.lesson(index, most)
        assert again.task == env.task and again.tools == env.tools
    assert min(asked["python"], asked["middle"]) > 5


def test_rows_whose_calls_do_not_lead_to_the_answer_teach_nothing(world, capsys):
    wrong = {"calls": [{"tool": "python", "arguments": {"code": "print('no')"}}]}
    with pytest.raises(UserError, match="calls of .* rows lead to no result"):
        world([row | wrong for row in ROWS]).lesson(0)
    unfit = {"calls": [{"tool": "python", "arguments": {"code": 3}}]}
    with pytest.raises(UserError, match="calls: python: code"):
        world([*ROWS, {"question": "Which?", "answer": "x"} | unfit])
    capsys.readouterr()
    assert not demonstrates(world([row | {"calls": [{"tool": "perl"}]} for row in ROWS]))
    assert "calls of tools that the catalogue lacks: perl (60 rows)" in capsys.readouterr().err


@pytest.mark.slow
def test_grpo_on_recorded_replies_is_the_run_that_was_recorded(
    tmp_path, monkeypatch, capsys, without_report
):
    """Replies, seconds and failures are drawn at random, so that no two recordings are equal."""
    monkeypatch.setattr("nanorchestra.tools.http.random.uniform", lambda *_: 0.0)
    hold_to_calls_of_roles(monkeypatch, load_rollout(NANO, RolloutSection(), {}, 1).tokenizer)
    judged = itertools.count()

    def answer(body):
        threading.Event().wait(random.random() * 0.03)
        if random.random() < 0.05:
            return b"a gateway's page"
        if body["model"] == "judge":
            says = f"<correct>{random.random() < 0.5}</correct>"
            return said(says if next(judged) % 3 else "Hm.")
        text = f"It is {random.randrange(99)}.\n```python\nimport time\nprint(time.time())\n```"
        return said(text + "<query>who was the first lady</query>", usage=(10, random.randrange(9)))

    rows = lines(tmp_path / "rows.jsonl", ROWS)

    def run(word, name, seed="0"):
        options = ["--config", "toolorchestra-8b", "--dry-run", "--run.root", str(tmp_path / name)]
        options += ["--rollout.temperature", "4", "--rollout.lockstep", "true"]
        options += ["--task.world", f"questions:{rows}", "--task.experts", word, "--run.seed", seed]
        options += ["--task.tools", f"{ROLES_FILE},{tmp_path}/mine.json", "--task.judge", "judge"]
        return train.main(options)

    kept = tmp_path / "kept"
    with openai_server() as server:
        server.answer = answer
        here = {"base_url": server.url, "key_variable": ""}
        tables = json.loads(Path(catalogue(tmp_path)).read_text())
        pages = lines(tmp_path / "pages.jsonl", [{"text": "Eliza was the first lady."}])
        search = {"kind": "search", "name": "pages", "description": "d", "corpus": str(pages)}
        tables |= {"tools": [search, tables["tools"][-1]], "endpoints": dict.fromkeys(HOSTS, here)}
        (tmp_path / "mine.json").write_text(json.dumps(tables))
        assert run(f"record:{kept}", "recorded") == 0
        asked = len(server.bodies)
    recorded = of_a_run(tmp_path / "recorded")
    assert asked > 10 and any("loss" in step for step in recorded["steps"])
    check_the_bill(tmp_path / "recorded")
    files = {file: file.read_bytes() for file in kept.rglob("*.json")}
    assert run(f"replay:{kept}", "replayed") == 0  # the server is down
    replayed = of_a_run(tmp_path / "replayed")
    for part in recorded.keys() - {"steps"}:
        assert replayed[part] == recorded[part], part
    for step, before in zip(replayed["steps"], recorded["steps"], strict=True):
        assert step | {"retried": 0} == before | {"retried": 0}, "but for what was repeated"
    (done,) = (tmp_path / "replayed").glob("*-dry-run")
    assert json.loads((done / "summary.json").read_text())["bill_usd"] == {}
    assert not list(done.glob("spent/*"))
    assert {file: file.read_bytes() for file in kept.rglob("*.json")} == files
    capsys.readouterr()
    assert run(f"replay:{kept}", "another", seed="1") == 2, "other questions were not asked"
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train.py: replay: no reply is recorded to ") and "What is" in error
