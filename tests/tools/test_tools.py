"""The tool file: what is right becomes tools, what is wrong gets one line that names the file, the tool, the field, and what would be right."""

from __future__ import annotations

import json

import pytest

from nanorchestra.errors import UserError
from reward import Price
from tools import HttpExpert, LookupTool, PythonTool, load_tools

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
    """load(entries or the text of the file) with a corpus beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text(
        '{"text": "Gold has the atomic number 79."}\n{"text": "Iron has 26."}\n'
    )

    def run(content):
        (tmp_path / "t.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
        return load_tools("t.json", "why?", sandbox)

    return run


def test_a_good_file_becomes_tools_that_work(load):
    code, search, expert = load(
        [
            CODE | {"timeout_s": 2},
            SEARCH | {"passages": 2},
            EXPERT | {"key_variable": "MY_KEY", "timeout_s": 9.5, "max_tokens": 100},
        ]
    )
    assert isinstance(code, PythonTool) and code.timeout_s == 2
    assert (
        code.call({"code": "6 * 7"}).content == "42" and code.call({"code": "1"}).cost_usd == 0.001
    )
    assert (
        isinstance(search, LookupTool)
        and search.call({"query": "gold"}).content.startswith("Gold")
        and search.passages == 2
    )
    assert isinstance(expert, HttpExpert) and (
        expert.price,
        expert.question,
        expert.key_variable,
        expert.max_tokens,
    ) == (Price(1, 2), "why?", "MY_KEY", 100)


@pytest.mark.parametrize(
    "tool, field, values",
    [
        (CODE, "kind", [["code"], "Code", None, {}]),
        (CODE, "usd_per_call", [float("nan"), float("inf"), 10**400, 1e300, -1, True, "1", None]),
        (CODE, "timeout_s", [0, 1e9, float("inf"), float("nan")]),
        (CODE, "name", ["", "a b", 'a"b', "a\nb", "\ud800", "a" * 65, 5]),
        (CODE, "description", ["", " \n", "\udfff", ["text"]]),
        (SEARCH, "passages", [0, 1.5, 10**9]),
        (SEARCH, "corpus", ["", "none.jsonl", ".", "a\0b", "broken.jsonl", 3]),
        (EXPERT, "input_usd_per_million", [float("nan"), float("inf"), 10**400]),
        (
            EXPERT,
            "base_url",
            [
                "",
                "foo",
                "file:///etc/passwd",
                "http://",
                "http://h:x/v1",
                "http://h:99999",
                "http://user:key@h/v1",
                "http://h/v 1",
                1,
            ],
        ),
        (EXPERT, "model", ["", 3]),
        (EXPERT, "key_variable", ["", "a=b", "1A", "sk-123"]),
        (EXPERT, "max_tokens", [0, -1, 2.5]),
        (EXPERT, "timeout_s", [0]),
    ],
)
def test_a_bad_value_is_one_line_that_names_tool_and_field(load, tmp_path, tool, field, values):
    (tmp_path / "broken.jsonl").write_text("[" * 200_000)
    for value in values:
        with pytest.raises(UserError) as refused:
            load([CODE | {"name": "first"}, tool | {field: value}])
        said = str(refused.value)
        assert (
            said.startswith("t.json: tool 1 (")
            and f" {field}" in said
            and "\n" not in said
            and len(said) < 400
        ), said
        assert said.isprintable() and "a float" not in said and "a str" not in said, said


@pytest.mark.parametrize(
    "content, says",
    [
        ([], "one at least"),
        ({}, "a JSON list"),
        ([1], "a JSON list"),
        ("", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[{}]", "kind is None"),
        ([CODE, CODE], "name is used twice"),
        ([CODE | {"colour": 1}], "unknown field 'colour'"),
        (
            [{k: v for k, v in CODE.items() if k != "usd_per_call"}],
            "field 'usd_per_call' is missing; it must be a number of US dollars",
        ),
        (
            [{k: v for k, v in CODE.items() if k != "name"}],
            "field 'name' is missing; it must be 1 to 64 letters",
        ),
    ],
)
def test_a_bad_file_is_one_line(load, content, says):
    with pytest.raises(UserError) as refused:
        load(content)
    assert (
        str(refused.value).startswith("t.json: ")
        and says in str(refused.value)
        and "\n" not in str(refused.value)
    )
