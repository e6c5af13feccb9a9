"""The tools, and the catalogue that makes them: what is wrong in it gets one line."""

from __future__ import annotations

import json

import pytest
from openai_server import openai_server, said

from nanorchestra.agent.environment import function_schema
from nanorchestra.errors import UserError
from nanorchestra.records import Price
from tools import EndpointExpert, RecordsTool, SimulatedExpert, Skill, load_tools

CODE = {"name": "py", "description": "runs Python", "kind": "code", "usd_per_call": 0.001}
SEARCH = {
    "name": "wiki",
    "description": "finds facts",
    "kind": "search",
    "usd_per_call": 0,
    "corpus": "corpus.jsonl",
}
EXPERT = {
    "name": "llm-8b.v2",
    "description": "an expert",
    "kind": "expert",
    "base_url": "http://localhost:8000/v1",
    "model": "m",
    "input_usd_per_million": 1,
    "output_usd_per_million": 2,
}


@pytest.fixture
def load(tmp_path, monkeypatch, sandbox):
    """load(entries) with a corpus beside the file."""
    monkeypatch.chdir(tmp_path)
    facts = '{"text": "Gold has the atomic number 79."}\n{"text": "Iron has 26."}\n'
    (tmp_path / "corpus.jsonl").write_text(facts)

    def run(content):
        (tmp_path / "t.json").write_text(json.dumps(content))
        return load_tools("t.json", sandbox)

    return run


def test_a_good_catalogue_becomes_tools_that_work(load):
    settings = {"key_variable": "MY_KEY", "timeout_s": 9.5, "max_tokens": 100}
    code, search, expert = load(
        [
            CODE | {"timeout_s": 60, "usd_per_second": 0.5},
            SEARCH | {"passages": 2},
            EXPERT | settings,
        ]
    )
    result = code.call({"code": "print(1)\n1/0"})
    assert result.content == "1\nError: ZeroDivisionError: division by zero (line 2)"
    assert result.error and result.cost_usd == 0.001 + 0.5 * result.latency_s > 0.001
    assert code.call({"code": "x = 1"}).content == "(no output)" and code.timeout_s == 60
    found = search.call({"query": "gold has"}).content.split("\n")
    assert found[0].startswith("Gold") and len(found) == 2
    assert search.call({"query": "?"}).content == "nothing found"
    assert expert.price == Price(1, 2) and vars(expert).items() >= settings.items()
    schema = function_schema(search)["function"]
    assert schema["parameters"]["required"] == ["query"] and schema["name"] == "wiki"


def test_an_expert_is_asked_and_billed_and_its_silence_is_infrastructure(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with openai_server() as server:
        expert = EndpointExpert("big", "", server.url, "m", Price(1.0, 2.0), max_tokens=7)
        server.answer = lambda body: said("Paris", usage=(1000, 500))
        result = expert.call({"task": "capital of France?"})
        assert (result.content, result.cost_usd) == ("Paris", pytest.approx(0.002))
        assert (result.input_tokens, result.output_tokens) == (1000, 500)
        messages = [{"role": "user", "content": "capital of France?"}]
        assert server.bodies[0] == {"model": "m", "messages": messages, "max_tokens": 7}
        server.status = 500
        result = expert.call({"task": "?"})
    assert result.infrastructure and result.error and "big did not answer" in result.content


def test_a_simulated_expert_is_right_as_often_as_its_skill_says():
    def ask(seed):
        skill = Skill(right=0.7, unsure_if_right=0.1, unsure_if_wrong=0.8)
        tokens, seconds = (200, 500), 10.0
        expert = SimulatedExpert(
            "e", "", skill, "7", ("1", "2"), Price(1, 1), *tokens, seconds, seed
        )
        assert expert.call({}) == expert.call({})  # asked again, it repeats itself
        return expert.call({})

    results = [ask(f"{i}") for i in range(500)]
    right = [result for result in results if result.content.endswith(": 7")]
    assert abs(len(right) / 500 - 0.7) < 0.06
    assert abs(sum("unsure" in r.content for r in right) / len(right) - 0.1) < 0.05
    for result in results:
        assert 425 <= result.output_tokens <= 575 and 8.5 <= result.latency_s <= 11.5
        assert result.cost_usd == pytest.approx((200 + result.output_tokens) / 1e6)


def test_records_are_read_by_table_and_id():
    tool = RecordsTool("r", "", {"order": {"5": {"customer": 7}}}, 0.01)
    for table, key, content, error in (
        ("order", 5, '{"customer": 7}', False),
        ("order", 6, "Error: no order 6", True),
        ("x", 5, "Error: no table x; there are order", True),
    ):
        result = tool.call({"table": table, "id": key})
        assert (result.content, result.error, result.cost_usd) == (content, error, 0.01)


def test_a_bad_catalogue_is_one_line_that_names_the_file_and_the_setting(load, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"text": 1}\n')
    for content, says in (
        ({}, "t.json: {} is not of type 'array'"),
        ([{}], r"t.json: \[0\]: .* is a required property"),
        ([CODE, CODE], "t.json: two tools are named 'py'"),
        ([CODE | {"kind": "Code"}], r"t.json: \[0\].kind: "),
        ([CODE | {"usd_per_call": float("inf")}], r"t.json: \[0\].usd_per_call: "),
        ([CODE | {"usd_per_call": "1"}], r"t.json: \[0\].usd_per_call: "),
        ([CODE | {"name": "a b"}], r"t.json: \[0\].name: "),
        ([CODE | {"colour": 1}], r"t.json: \[0\]: .*colour"),
        ([CODE, SEARCH | {"passages": 0}], r"t.json: \[1\].passages: "),
        ([SEARCH | {"corpus": "none.jsonl"}], "none.jsonl: "),
        ([SEARCH | {"corpus": "broken.jsonl"}], "broken.jsonl, line 1: "),
        ([EXPERT | {"base_url": "http://user:key@h/v1"}], r"t.json: \[0\].base_url: "),
        ([EXPERT | {"key_variable": "sk-123"}], r"t.json: \[0\].key_variable: "),
    ):
        with pytest.raises(UserError, match=f"^{says}") as refused:
            load(content)
        assert "\n" not in str(refused.value)
