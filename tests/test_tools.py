"""The tools, and the catalogue that makes them: what is wrong in it gets one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from openai_server import openai_server, said
from scripted import EchoTool

from nanorchestra.agent.evidence import Evidence
from nanorchestra.errors import UserError
from nanorchestra.schemas import argument_error
from nanorchestra.tools.functions import load_functions
from nanorchestra.tools.search import WebSearch
from tools import load_tools

CODE = {"name": "py", "description": "runs Python", "kind": "code", "usd_per_call": 0.001}
SEARCH = {"name": "wiki", "description": "d", "kind": "search", "corpus": "corpus.jsonl"}
EXPERT = {"name": "llm", "description": "an expert", "kind": "expert", "expert": "mine"}
MINE = {"endpoint": "here", "model": "m-1", "usd": [1, 2], "max_tokens": 100}
ANSWER = {"name": "answer", "description": "ends", "kind": "role", "models": ["a-1", "boxed"]}
ROOT = Path(__file__).parents[1]
ROLES = [ANSWER | {"name": name} for name in ("enhance_reasoning", "search", "answer")]


def catalogue(*tools, here="http://localhost:8000/v1", endpoint=None, **tables):
    """A catalogue with an expert "mine", which is "a-1" too, and "boxed" at the endpoint `here`."""
    return {
        "tools": list(tools),
        "endpoints": {"here": {"base_url": here} | (endpoint or {})},
        "experts": {"mine": MINE, "boxed": MINE | {"boxed": True, "context_tokens": 400}},
        "aliases": {"a-1": "mine"},
    } | tables


@pytest.fixture
def load(tmp_path, monkeypatch, sandbox):
    """load(content of a JSON file, names of more files) with a corpus beside the file."""
    monkeypatch.chdir(tmp_path)
    facts = '{"text": "Gold has the atomic number 79."}\n{"text": "Iron has 26."}\n'
    (tmp_path / "corpus.jsonl").write_text(facts)

    def run(content, more=""):
        (tmp_path / "t.json").write_text(json.dumps(content))
        return load_tools(f"t.json{more}", sandbox)

    return run


@pytest.fixture
def server():
    with openai_server() as served:
        yield served


@pytest.mark.parametrize(
    "settings, sent",
    [
        ({"temperature": 0.3}, {"max_tokens": 100, "temperature": 0.3}),
        ({"reasoning": True, "temperature": 0.3}, {"max_completion_tokens": 100}),
        ({"reasoning_effort": "low"}, {"max_tokens": 100, "reasoning_effort": "low"}),
    ],
)
def test_an_expert_is_asked_as_its_entry_says_and_billed(load, server, settings, sent):
    (expert,) = load(catalogue(EXPERT, here=server.url, experts={"mine": MINE | settings}))
    server.answer = lambda body: said("Paris", usage=(100, 50))
    result = expert.call({"task": "capital of France?"})
    assert (result.content, result.cost_usd) == ("Paris", pytest.approx(0.0002))
    assert (result.input_tokens, result.output_tokens, result.retries) == (100, 50, 0)
    messages = [{"role": "user", "content": "capital of France?"}]
    assert server.bodies == [{"model": "m-1", "messages": messages} | sent]


def test_headers_come_from_the_environment_and_reach_no_message(load, server, monkeypatch):
    """Not even one that is too odd for HTTP, or that the server repeats."""
    endpoint = {"headers": {"X-Org": "$MY_ORG", "api-key": "$MY_OTHER"}}
    (expert,) = load(catalogue(EXPERT, here=server.url, endpoint=endpoint))
    monkeypatch.setenv("MY_ORG", " org-7 / key\n")
    server.status, server.answer = 400, lambda body: b"unknown org-7 / key"
    told = expert.call({"task": "t"}).content
    assert told == "Error: llm did not answer: HTTP 400: unknown ..."
    assert server.headers[0]["X-Org"] == "org-7 / key" and "api-key" not in server.headers[0]
    monkeypatch.setenv("MY_OTHER", "geheim\u2603")
    assert "geheim" not in expert.call({"task": "t"}).content and "org-7" not in repr(expert)


LONG = "The tower is 330 m high. " * 10
HITS = [
    {"url": "http://b", "title": "B", "content": "of b", "score": 0.9, "raw_content": LONG},
    {"url": "http://a", "title": "A", "content": "of a", "score": 0.4, "raw_content": "cookies?"},
    {"url": "http://c", "title": None, "content": "of c", "score": 0.1, "raw_content": None},
]


def test_pages_of_the_web_come_best_first_and_are_billed(monkeypatch):
    monkeypatch.setenv("TAVILY_API_KEY", "tvly-secret")
    with openai_server() as tavily:
        tavily.answer = lambda body: {"results": HITS, "response_time": 1}
        web = WebSearch("web", "", pages=2, base_url=tavily.url)
        result = web.call({"query": "tower " * 100})
        best, other = result.content.split("\n\n")
        assert best.startswith("B\nhttp://b (score 0.90)\nThe tower is 330 m") and LONG in best
        assert other == "A\nhttp://a (score 0.40)\nof a", "more than asked for is left out"
        assert result.findings == {"documents": [other, best]}
        assert result.cost_usd == web.most_usd({}) == 0.016 and result.latency_s > 0
        (asked,) = tavily.bodies
        assert len(asked["query"]) == 400 and asked["max_results"] == 2
        assert tavily.headers[0]["Authorization"] == "Bearer tvly-secret"
        tavily.answer = lambda body: {"results": []}
        assert web.call({"query": "nobody"}).content == "nothing found"
    monkeypatch.delenv("TAVILY_API_KEY")
    with pytest.raises(UserError, match="TAVILY_API_KEY is not set"):
        WebSearch("web", "")


def test_published_roles_read_the_evidence_and_return_what_was_found(load, server, nano_tokenizer):
    offered = load(catalogue(*ROLES, SEARCH | {"usd_per_call": 0.25}, here=server.url))
    known = ["old document"], [["print(2)", "2"]], [["a-1", "lead"]]
    evidence = Evidence("What is gold?", *known, nano_tokenizer)
    reason, search, answer = (tool.for_attempt(evidence) for tool in offered)
    server.answer = lambda body: said("```python\nprint(6*7)\n```", usage=(100, 50))
    result = reason.call({"model": "a-1"})
    assert result.findings == {"code": [["print(6*7)", "42"]]} and result.alias == "a-1"
    prompt = server.bodies[-1]["messages"][0]["content"]
    texts = ["Doc 1: old document", "print(2)", "Attempt1 answer by a-1: lead", "What is gold?"]
    places = [prompt.index(text) for text in [*texts, "Do not answer"]]
    assert places == sorted(places)
    server.answer = lambda body: said("<query>atomic number of gold</query>")
    result = search.call({"model": "a-1"})
    assert result.findings["documents"][-1].startswith("Gold has") and result.cost_usd > 0.25
    evidence.documents += ["long " * 500]
    server.answer = lambda body: said(r"so \boxed{79}")
    assert answer.call({"model": "boxed"}).content == "79"
    assert len(server.bodies[-1]["messages"][0]["content"]) < 1500  # its budget is 400 tokens


FUNCTIONS = '''
from __future__ import annotations
from typing import Literal
from tools import tool

@tool(usd_per_call=0.5)
def convert(amount: float, to: Literal["EUR", "USD"] = "EUR", names: set[str] | None = None):
    """Converts money.

    Args:
        amount: in francs
    """
    return {"to": to, "names": names and sorted(names | {"b"})}

@tool(kind="search", usd_per_call=0.25)
def pages(query: str, count: int = 2) -> list[str]:
    "Finds pages, best first."
    return ["half \\ud800", {"row": 2}, "", None]
'''


def test_a_python_function_is_a_tool_or_stands_behind_a_role(
    load, tmp_path, server, nano_tokenizer
):
    """What one finds for a role becomes evidence and is billed; the policy sees the role alone."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    search, convert = load(catalogue(ROLES[1], here=server.url), ",mine.py")
    assert (convert.name, convert.description) == ("convert", "Converts money.")
    listed = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    assert convert.parameters == {
        "type": "object",
        "properties": {
            "amount": {"type": "number", "description": "in francs"},
            "to": {"type": "string", "enum": ["EUR", "USD"], "default": "EUR"},
            "names": {"anyOf": [listed, {"type": "null"}], "default": None},
        },
        "required": ["amount"],
        "additionalProperties": False,
    }
    result = convert.call({"amount": 1, "names": ["a"]})
    assert (result.content, result.cost_usd) == ('{"to": "EUR", "names": ["a", "b"]}', 0.5)
    server.answer = lambda body: said("<query>pages about gold</query>", usage=(0, 0))
    evidence = Evidence("What is gold?", tokenizer=nano_tokenizer)
    result = search.for_attempt(evidence).call({"model": "a-1"})
    assert result.findings == {"documents": ['{"row": 2}', "half \ufffd"]} and not result.error
    assert result.cost_usd == pytest.approx(0.25, abs=0.001)


def test_the_catalogues_of_the_documentation_load(tmp_path, sandbox, monkeypatch):
    """But for their MCP server, which is not installed."""
    monkeypatch.setattr("nanorchestra.tools.mcp.open_servers", lambda *_: [EchoTool()])
    page, names = (ROOT / "docs/tools.md").read_text(), []
    for i, (kind, text) in enumerate(re.findall(r"```(toml|python)\n(.*?)```", page, re.DOTALL)):
        files = file = tmp_path / f"{i}.{kind.replace('python', 'py')}"
        file.write_text(text)
        if kind == "toml" and "[[tools]]" not in text:  # it changes a preset alone
            files = f"{ROOT}/assets/toolorchestra.toml,{file}"
        names += [tool.name for tool in load_tools(files, sandbox, simulated=files != file)]
    assert {"python", "coder", "answer", "convert", "echo", "deputy"} <= {*names}


@pytest.mark.parametrize(
    "content, says",
    [
        (catalogue(CODE, max_usd=math.nan), "max_usd is nan; it should be a finite number"),
        ([{}], r"tools\[0\].kind is ''; it must be one of code, search, web, "),
        ([CODE | {"usd_per_cal": 1}], r"tools\[0\]: there is no .* did you mean usd_per_call\?$"),
        (catalogue(EXPERT, here="http://u:sk-123@h/v1"), "endpoints.here: base_url must be"),
        (
            catalogue(EXPERT, endpoint={"key_variable": "sk-123"}),
            "endpoints.here: key_variable must be the name",
        ),
        (
            catalogue(EXPERT, endpoint={"headers": {"X-Org": "org-123"}}),
            r"endpoints.here: headers.X-Org must be '\$NAME'",
        ),
        (catalogue(EXPERT, experts={}), "llm: expert is 'mine'; it must be one of gpt-5, "),
        (catalogue(ROLES[1]), "search: nothing to search in; add a tool of the kind search or web"),
    ],
)
def test_a_bad_catalogue_is_one_line_that_names_the_file_and_the_setting(load, content, says):
    with pytest.raises(UserError, match=f"^t.json: {says}") as refused:
        load(content)
    assert "\n" not in str(refused.value) and "-123" not in str(refused.value)


@pytest.mark.parametrize(
    "settings, hint, says",
    [
        ("", "range", "parameter x is range, which JSON cannot hold; write str, int, "),
        ("price=3", "int", "there is no price"),
    ],
)
def test_a_function_that_is_no_tool_is_one_line(tmp_path, settings, hint, says):
    file = tmp_path / "mine.py"
    text = 'from tools import tool\n\n\n@tool({})\ndef f(x: {}):\n    """Does."""\n'
    file.write_text(text.format(settings, hint))
    with pytest.raises(UserError, match=f"^{file}, line 4: function f: {says}"):
        load_functions(file)


def test_a_schema_that_cannot_be_applied_is_an_error_of_each_call():
    for shape in (
        {"$ref": "http://127.0.0.1:1/x"},
        {"$ref": "#/nowhere"},
        {"$ref": "#/properties/text"},
        {"pattern": "("},
    ):
        problem = argument_error({"text": "a"}, {"properties": {"text": shape}})
        assert problem.startswith("its schema cannot be applied (")
