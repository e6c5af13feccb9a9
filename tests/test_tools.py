"""The tools, and the catalogue that makes them: what is wrong in it gets one line."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
from openai_server import openai_server, said

from nanorchestra.agent.evidence import Evidence
from nanorchestra.agent.tool import Allowance, RefusedError
from nanorchestra.errors import UserError
from nanorchestra.records import Price, ToolResult
from nanorchestra.schemas import argument_error
from nanorchestra.tools import models
from nanorchestra.tools.index import Index, Passage
from tools import LookupTool, PythonTool, RecordsTool, load_tools, tool

CODE = {"name": "py", "description": "runs Python", "kind": "code", "usd_per_call": 0.001}
SEARCH = {
    "name": "wiki",
    "description": "finds facts",
    "kind": "search",
    "corpus": "corpus.jsonl",
}
WEB = {"kind": "web", "name": "web", "description": "d"}
EXPERT = {"name": "llm", "description": "an expert", "kind": "expert", "expert": "mine"}
MINE = {"endpoint": "here", "model": "m-1", "usd": [1, 2], "max_tokens": 100}
ANSWER = {"name": "answer", "description": "ends", "kind": "role", "models": ["a-1", "boxed"]}
ROLES = [ANSWER | {"name": name} for name in ("enhance_reasoning", "search", "answer")]
ASSETS = Path(__file__).parents[1] / "assets"
PUBLISHED = Path(__file__).parents[2] / "shared/data/toolorchestra_tools.json"


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


def test_an_entry_may_be_an_openai_function_object_and_has_its_settings(load):
    function = {"type": "function", "function": {"name": "py", "description": "runs Python"}}
    settings = {"kind": "code", "usd_per_call": 0.001, "timeout_s": 60, "usd_per_second": 0.5}
    code, search, expert = load(catalogue(function | settings, SEARCH | {"passages": 2}, EXPERT))
    assert code.name == "py" and code.timeout_s == 60 and code.usd_per_second == 0.5
    assert code.call({"code": "x = 1"}).content == "(no output)"
    assert len(search.call({"query": "gold has"}).content.split("\n")) == 2
    assert search.call({"query": "?"}).content == "nothing found"
    assert expert.expert.price == Price(1, 2) and expert.expert.max_tokens == 100


@pytest.mark.parametrize(
    "settings, sent",
    [
        ({}, {"max_tokens": 100}),
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


def test_headers_come_from_the_environment_and_reach_no_message(load, server, monkeypatch, capsys):
    """Not even one that is too odd for HTTP, or that the server repeats."""
    secret = "org-7 / key"
    endpoint = {"headers": {"X-Org": "$MY_ORG", "api-key": "$MY_OTHER"}}
    (expert,) = load(catalogue(EXPERT, here=server.url, endpoint=endpoint))
    monkeypatch.setenv("MY_ORG", f" {secret}\n")
    monkeypatch.setattr(models, "TOLD", set())
    server.status, server.answer = 400, lambda body: f"unknown {secret}".encode()
    said_by_it = [expert.call({"task": "t"}).content for _ in range(2)]
    assert said_by_it == ["Error: llm did not answer: HTTP 400: unknown ..."] * 2
    assert server.headers[0]["X-Org"] == secret and "api-key" not in server.headers[0]
    assert capsys.readouterr().err == "m-1 needs MY_OTHER, which is not set\n"
    monkeypatch.setenv("MY_OTHER", "geheim\u2603")
    assert "geheim" not in expert.call({"task": "t"}).content
    assert secret not in repr(expert) + capsys.readouterr().err


def test_web_search_counts_in_the_cap_of_a_run_and_of_a_user(load, server, monkeypatch):
    monkeypatch.setenv("TAVILY_API_KEY", "tvly")
    prices = {"usd_per_call": 0.05, "base_url": server.url}
    web = WEB | prices
    experts = {"mine": MINE | {"max_tokens": 1000}}
    tools = load(
        catalogue(EXPERT, web, here=server.url, max_usd=0.051, experts=experts, aliases={})
    )
    assert tools[1].most_usd({"query": "q"}) == pytest.approx(0.05)
    server.answer = lambda body: said("a", usage=(0, 1000))
    assert not tools[0].call({"task": "t"}).error  # $0.002
    assert "more than the run has left" in tools[1].call({"query": "q"}).content
    assert len(server.bodies) == 1


def test_published_roles_read_the_evidence_and_return_what_was_found(load, server, nano_tokenizer):
    offered = load(catalogue(*ROLES, SEARCH | {"usd_per_call": 0.25}, here=server.url))
    known = ["old document"], [["print(2)", "2"]], [["a-1", "lead"]]
    evidence = Evidence("What is gold?", *known, nano_tokenizer)
    reason, search, answer = (tool.for_attempt(evidence) for tool in offered)
    server.answer = lambda body: said("```python\nprint(6*7)\n```", usage=(100, 50))
    result = reason.call({"model": "a-1"})
    assert result.findings == {"code": [["print(6*7)", "42"]]} and "42" in result.content
    assert result.cost_usd == pytest.approx(0.0002, rel=0.1) and result.alias == "a-1"
    (message,) = server.bodies[-1]["messages"]
    texts = ["Doc 1: old document", "print(2)", "Attempt1 answer by a-1: lead", "What is gold?"]
    places = [message["content"].index(text) for text in [*texts, "Do not answer"]]
    assert places == sorted(places)
    server.answer = lambda body: said("<query>atomic number of gold</query>")
    result = search.call({"model": "a-1"})
    assert result.findings["documents"][-1].startswith("Gold has") and result.cost_usd > 0.25
    own = search.experts["a-1"].most_usd(search.prompt(search.experts["a-1"]))
    assert search.most_usd({"model": "a-1"}) == own + 0.25, "helpers are billed too"
    evidence.documents += ["long " * 500]
    for model, text, found in (
        ("a-1", "<answer>79</answer>.", "79"),
        ("boxed", r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    ):
        server.answer = lambda body, text=text: said(text)
        assert answer.call({"model": model}).content == found
    assert len(server.bodies[-1]["messages"][0]["content"]) < 1500  # its budget is 400 tokens
    with pytest.raises(RefusedError, match="answer: no model 'gpt'; there are a-1"):
        answer.within({"model": "gpt"}, Allowance())


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs ../shared/data")
def test_the_published_file_loads_as_it_is(sandbox, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "corpus.jsonl").write_text('{"text": "Gold has 79."}')
    search = SEARCH | {"corpus": str(tmp_path / "corpus.jsonl")}
    (tmp_path / "mine.json").write_text(json.dumps([search]))
    offered = load_tools(f"{PUBLISHED},{tmp_path}/mine.json", sandbox)
    tools = {tool.name: tool for tool in offered}
    assert list(tools) == ["enhance_reasoning", "answer", "search"]
    published = [entry["function"] for entry in json.loads(PUBLISHED.read_text())]
    assert [tool.schema["function"] for tool in tools.values()] == published
    expert = tools["answer"].experts["answer-math-2"]
    assert (expert.model, expert.price, expert.latency_s) == (
        "Qwen/Qwen2.5-Math-7B-Instruct",
        Price(0.2, 0.2),
        9,
    )
    assert tools["search"].experts["search-1"].latency_s == 22
    assert not capsys.readouterr().err, "simulated experts need no key"


@pytest.mark.parametrize("name", ["toolorchestra-training", "toolorchestra-unseen"])
def test_a_shipped_catalogue_shows_aliases_and_prices_and_no_name_of_a_model(
    name, sandbox, tmp_path
):
    (tmp_path / "corpus.jsonl").write_text('{"text": "Gold has 79."}')
    (tmp_path / "mine.json").write_text(
        json.dumps([SEARCH | {"corpus": f"{tmp_path}/corpus.jsonl"}])
    )
    roles = load_tools(f"{ASSETS}/{name}.toml,{tmp_path}/mine.json", sandbox)
    assert {role.name for role in roles} == {role["name"] for role in ROLES}
    for role in roles:
        shown = role.parameters["properties"]["model"]["description"]
        for alias, expert in role.experts.items():
            assert expert.note and min(expert.price) > 0
            assert alias in shown and expert.model not in shown
        assert " | 0s" not in shown


MY_TOOLS = '''
from __future__ import annotations
from typing import Literal
from tools import tool

@tool(usd_per_call=0.5, timeout_s=0.2)
def convert(amount: float, to: Literal["EUR", "USD"] = "EUR", names: set[str] | None = None):
    """Converts money.

    Args:
        amount: in francs
    """
    import time
    if amount < 0:
        raise ValueError("negative")
    time.sleep(amount)
    return {"to": to, "names": names and sorted(names | {"b"})}
'''


def test_a_python_function_is_a_tool_with_its_schema(tmp_path, sandbox):
    (tmp_path / "my_tools.py").write_text(MY_TOOLS)
    (tmp_path / "t.json").write_text(json.dumps([CODE]))
    code, convert = load_tools(f"{tmp_path}/t.json, {tmp_path}/my_tools.py", sandbox)
    assert (code.name, convert.name, convert.description) == ("py", "convert", "Converts money.")
    amount = {"type": "number", "description": "in francs"}
    listed = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    names = {"anyOf": [listed, {"type": "null"}]}
    names |= {"default": None}
    to = {"type": "string", "enum": ["EUR", "USD"], "default": "EUR"}
    assert convert.parameters == {
        "type": "object",
        "properties": {"amount": amount, "to": to, "names": names},
        "required": ["amount"],
        "additionalProperties": False,
    }
    for amount, says, error in (
        (0, '{"to": "EUR", "names": ["a", "b"]}', False),
        (-1, "negative", True),
        (0.5, "0.2 s", True),
    ):
        result = convert.call({"amount": amount, "names": ["a"]})
        assert says in result.content and result.error == error and result.cost_usd == 0.5


HELPERS = """
from tools import ToolResult, tool

@tool(kind="search", usd_per_call=0.25)
def pages(query: str, count: int = 2) -> list[str]:
    "Finds pages, best first."
    if query == "the cached page":
        return ToolResult("one page", 0.125)
    return ["half \\ud800", {"row": 2}, "", None]

@tool(kind="code")
def run(code: str) -> str:
    "Runs it."
    return f"ran {code}"

@tool
def other(query: str) -> str:
    "Is on offer itself."
    return query
"""


def test_a_python_function_stands_behind_a_published_role(load, tmp_path, server, nano_tokenizer):
    """What a function finds becomes evidence and is billed; the policy sees the roles alone."""
    (tmp_path / "mine.py").write_text(HELPERS)
    reason, search, answer, other = load(catalogue(*ROLES, here=server.url), ",mine.py")
    assert [each.name for each in (reason, search, answer)] == [role["name"] for role in ROLES]
    assert (other.name, other.kind, search.helpers[0].name) == ("other", "function", "pages")
    evidence = Evidence("What is gold?", tokenizer=nano_tokenizer)
    reason, search = (role.for_attempt(evidence) for role in (reason, search))
    for query, documents, usd in (
        ("pages about gold", ['{"row": 2}', "half \ufffd"], 0.25),
        ("the cached page", ["one page"], 0.125),
    ):
        server.answer = lambda body, q=query: said(f"<query>{q}</query>", usage=(0, 0))
        result = search.call({"model": "a-1"})
        assert result.findings == {"documents": documents} and not result.error
        assert result.cost_usd == pytest.approx(usd, abs=0.001)
    server.answer = lambda body: said("```python\nx\n```")
    result = reason.call({"model": "a-1"})
    assert result.findings == {"code": [["x", "ran x"]]} and "ran x" in result.content


def test_a_role_with_nothing_behind_it_is_an_error_at_the_start(tmp_path, sandbox, load):
    says = "^t.json: search: nothing to search in; add a tool of the kind search or web, "
    for tools in (ROLES, ROLES[1:2]):
        with pytest.raises(UserError, match=says) as refused:
            load(catalogue(*tools))
        assert "\n" not in str(refused.value)
    assert len(load(catalogue(*ROLES, SEARCH))) == 3


def test_a_function_that_cannot_be_a_tool_is_refused_in_one_line(tmp_path, sandbox):
    for content, says in (
        ("1/0", "line 2: ZeroDivisionError: division by zero"),
        ("x = 1", "no function is decorated with @tool"),
        ("@tool\ndef f(x: str): pass", "function f: it has no docstring"),
        ('@tool\ndef f(x):\n "d"', "function f: parameter x has no type hint"),
        (
            '@tool(kind="serch")\ndef f(query: str):\n "d"',
            "kind is 'serch'; it should be .*; did you mean search?",
        ),
        ('@tool(kind="search")\ndef f(q: str):\n "d"', "kind is 'search', so .* is query: str"),
        (
            '@tool(usd_per_call="0.1")\ndef f(x: str):\n "d"',
            "usd_per_call is '0.1'; it should be a valid number",
        ),
        (
            '@tool(timeout_s=0)\ndef f(x: str):\n "d"',
            "timeout_s is 0; it should be greater than or equal to 0.1",
        ),
        ('@tool(usd=1)\ndef f(x: str):\n "d"', "there is no usd"),
    ):
        (tmp_path / "mine.py").write_text(f"from tools import tool\n{content}")
        with pytest.raises(UserError, match=says) as refused:
            load_tools(tmp_path / "mine.py", sandbox)
        assert str(refused.value).startswith(f"{tmp_path}/mine.py") and "\n" not in str(
            refused.value
        )


def test_records_that_are_not_there_are_named_and_a_virtual_clock_is_not_measured(sandbox):
    rows = RecordsTool("r", "", {"order": {"5": {"customer": 7}}}, 0.01, latency_s=2.0)
    for table, key, content in (
        ("order", 6, "Error: no row 6"),
        ("x", 5, "Error: no table x; there are order"),
    ):
        result = rows.call({"table": table, "id": key})
        assert (result.content, result.error, result.cost_usd) == (content, True, 0.01)
    python = PythonTool("python", "d", sandbox, latency_s=2.0)
    search = LookupTool("docs", "d", Index.of([Passage("gold")]), latency_s=2.0)
    results = [result, python.call({"code": "1"}), search.call({"query": "gold"})]
    assert [result.latency_s for result in results] == [2.0] * 3


PUBLISHED_FORM = {
    "type": "object",
    "properties": {"model": {"type": "string", "description": "a-1 | $1.0 | $2.0 | 5s"}},
    "required": ["model"],
}


def test_a_bad_catalogue_is_one_line_that_names_the_file_and_the_setting(load, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"text": 1}\n')
    key, header = {"key_variable": "sk-123"}, {"headers": {"X-Org": "org-123"}}
    for content, says in (
        ([], "t.json: no tool"),
        (3, "t.json: it is 3; it should be a valid dictionary"),
        (catalogue(CODE, max_usd=math.nan), "t.json: max_usd is nan; it should be a finite number"),
        ([{}], r"t.json: tools\[0\].kind is ''; it must be one of code, search, web, "),
        (
            [CODE | {"function": "py"}],
            r"t.json: tools\[0\].function: it is 'py'; it should be a va",
        ),
        ([CODE, CODE], "t.json: two tools are named 'py'"),
        ([CODE | {"kind": "Code"}], r"t.json: tools\[0\].kind is 'Code'; it must be one of code"),
        ([CODE | {"name": "a b"}], r"t.json: tools\[0\]: name is 'a b'; string should match"),
        ([CODE | {"colour": 1}], r"t.json: tools\[0\]: there is no colour"),
        ([SEARCH | {"corpus": "none.jsonl"}], "none.jsonl: "),
        ([SEARCH | {"corpus": "broken.jsonl"}], "broken.jsonl, line 1: "),
        (
            catalogue(EXPERT, here="http://u:sk-123@h/v1"),
            "t.json: endpoints.here: base_url must be",
        ),
        (catalogue(EXPERT, endpoint=key), "t.json: endpoints.here: key_variable must be the name"),
        (
            catalogue(EXPERT, endpoint=header),
            r"t.json: endpoints.here: headers.X-Org must be '\$NAME'",
        ),
        (
            catalogue(WEB | {"base_url": "tvly-123"}),
            r"t.json: tools\[0\]: base_url must be http",
        ),
        (catalogue(EXPERT, experts={}), "t.json: llm: expert is 'mine'; it must be one of gpt-5, "),
        (catalogue(EXPERT, experts={"mine": MINE | {"endpoint": "x"}}), "t.json: experts.mine.end"),
        (
            catalogue(ANSWER | {"models": ["big"]}),
            "t.json: answer: big: expert is 'big'; it must be one",
        ),
        (
            catalogue(ANSWER | {"parameters": PUBLISHED_FORM | {"required": []}}),
            r"t.json: answer: parameters are those of no published role; they must have one",
        ),
        (
            [CODE | {"kind": "role", "name": "answer"}],
            r"t.json: tools\[0\]: there is no usd_per_call",
        ),
    ):
        with pytest.raises(UserError, match=f"^{says}") as refused:
            load(content)
        assert "\n" not in str(refused.value) and "-123" not in str(refused.value)


def test_a_misspelt_name_in_a_catalogue_is_told_with_the_nearest(tmp_path, sandbox):
    python = 'kind = "code"\nname = "python"\ndescription = "d"\n'
    expert = '[[tools]]\nkind = "expert"\nname = "e"\ndescription = "d"\nexpert = "mine"\n'
    mine = '[experts.mine]\nendpoint = "openai"\nmodel = "m"\nusd = [1, 1]\n'
    for text, near in (
        (f"[[tool]]\n{python}", "tools"),
        (f"[[tools]]\n{python}usd_per_cal = 1", "usd_per_call"),
        (f"[[tools]]\n{python.replace('code', 'serch')}", "search"),
        (f"{expert.replace('mine', 'mien')}{mine}", "mine"),
    ):
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(UserError, match=rf"mine\.toml.*; did you mean {near}\?$"):
            load_tools(tmp_path / "mine.toml", sandbox)
    (tmp_path / "mine.toml").write_text(f"[[tools]]\n{python}zzz = 1")
    with pytest.raises(UserError, match="there is no zzz$"):
        load_tools(tmp_path / "mine.toml", sandbox)


STAND_IN = f"""#!{sys.executable}
from mcp.server.mcpserver import MCPServer

server = MCPServer("stands in for mcp-server-time, which the tests do not install")


@server.tool()
def get_current_time(timezone: str) -> str:
    return timezone


server.run()
"""


def test_the_catalogues_of_the_documentation_load(tmp_path, sandbox, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "mcp-server-time").write_text(STAND_IN)
    (tmp_path / "mcp-server-time").chmod(0o755)
    page = (Path(__file__).parents[1] / "docs/tools.md").read_text()
    blocks = re.findall(r"```(toml|python)\n(.*?)```", page, re.DOTALL)
    names = []
    for i, (kind, text) in enumerate(blocks):
        file = tmp_path / f"{i}.{kind.replace('python', 'py')}"
        file.write_text(text)
        if kind == "toml" and "[[tools]]" not in text:  # it changes a preset alone
            shipped = f"{ASSETS}/toolorchestra.toml"
            *_, answer = load_tools(f"{shipped},{file}", sandbox, simulated=True)
            assert answer.experts["answer-1"].model == "the-successor"
            continue
        tools = load_tools(file, sandbox)
        names += [tool.name for tool in tools]
        for each in tools:
            if each.kind == "mcp":  # a process, which other tests count
                each.server.life.cancel()
    time_now = "time_get_current_time"
    assert names == ["python", "coder", "mini", "answer", "convert", time_now, "deputy"]


@pytest.mark.parametrize(
    "result, content, usd, seconds",
    [
        (ToolResult("yes", 0.2, 3.0), "yes", 0.2, 3.0),
        (ToolResult("yes", 0.0, refused=True), "yes", 0.0, 0.0),  # it has run, so it counts
        (ToolResult({"mean": 3}, 0.1, -50.0), '{"mean": 3}', 0.1, None),
        (ToolResult(7, 0.1, math.nan), "7", 0.1, None),
        (ToolResult(None, 0.1, math.inf), "null", 0.1, None),
        (ToolResult("half \ud83d", 0.1, "soon"), "half \ufffd", 0.1, None),
        (ToolResult("yes", 0.3), None, 0.3, 0.0),
        (ToolResult("yes", -1.0), None, 0.25, 0.0),
        (ToolResult("yes", math.nan), None, 0.25, 0.0),
        (ToolResult("yes", "0.1"), None, 0.25, 0.0),
    ],
)
def test_a_result_that_a_function_makes_is_made_plain_and_charges_what_was_stated_at_most(
    result, content, usd, seconds
):
    """A user's limit holds by what a function states; a charge beyond it is an error, billed.

    Seconds that are none are those that passed.
    """

    @tool(usd_per_call=0.25)
    def ask(text: str) -> ToolResult:
        """Asks."""
        return result

    called = ask.call({"text": "well?"})
    assert (called.cost_usd, called.refused) == (usd, False)
    if content is None:
        assert called.error and "usd_per_call states $0.25 at most" in called.content
    else:
        assert not called.error and called.content == content
    assert 0 <= called.latency_s < 1 if seconds is None else called.latency_s == seconds


def test_a_schema_that_cannot_be_applied_is_an_error_of_each_call():
    for shape in (
        {"$ref": "http://127.0.0.1:1/x"},
        {"$ref": "#/nowhere"},
        {"$ref": "#/properties/text"},
        {"pattern": "("},
    ):
        problem = argument_error({"text": "a"}, {"properties": {"text": shape}})
        assert problem.startswith("its schema cannot be applied (")
