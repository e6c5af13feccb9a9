"""Experts are profiled: what is written is what they did, and the prompt shows it."""

import json
import tomllib

import pytest
from openai_server import openai_server, said
from test_questions import catalogue, lines

from nanorchestra.errors import UserError
from nanorchestra.records import ToolResult
from tools import load_tools
from worlds import profile

ROWS = [
    {"question": f"What is {n} plus {n}?", "answer": 2 * n, "category": "sums" if n % 2 else "twos"}
    for n in range(40)
]


def test_profiles_are_what_the_experts_did_and_stand_in_the_descriptions(tmp_path, sandbox, capsys):
    def answer(body):
        n = int(body["messages"][-1]["content"].split()[2])
        knows = body["model"] == "strong" or body["model"] == "quick" and n % 2
        return said(str(2 * n if knows else 0), usage=(10, 5))

    rows, out = lines(tmp_path / "rows.jsonl", ROWS), tmp_path / "profiles.toml"
    with openai_server() as server:
        server.answer = answer
        file = catalogue(tmp_path, server.url)
        options = [file, "--questions", str(rows), "--out", str(out), "--count", "20"]
        assert profile.main(options) == 0
        assert len(server.bodies) == 4 * 20
    profiles = tomllib.loads(out.read_text())["profiles"]
    assert set(profiles) == {"strong", "middle", "quick", "judge"}
    assert profiles["strong"].startswith("Right in 100% [84, 100] of 20 questions (")
    assert profiles["middle"].startswith(("Right in 0% [0, 16]", "Right in 5% ["))
    assert "sums 100%" in profiles["quick"] and "twos 0%" in profiles["quick"]
    assert "$6.2e-05" in profiles["strong"]  # 10 and 5 tokens at $1.25 and $10
    tools = {tool.name: tool for tool in load_tools(f"{file},{out}", sandbox)}
    assert tools["quick"].description == f"a quick model. {profiles['quick']}"
    assert "python" in tools and "Right in" not in tools["python"].description


def test_what_is_paid_for_is_written_before_the_next_expert_is_asked(tmp_path, monkeypatch):
    out, asked = tmp_path / "profiles.toml", []

    def ask_all(world, name, *rest):
        asked.append(name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [profile.Answer("sums", True, ToolResult("2", 0.01, 1.0))]

    monkeypatch.setattr(profile, "ask_all", ask_all)
    rows = lines(tmp_path / "rows.jsonl", ROWS)
    with openai_server() as server:
        file = catalogue(tmp_path, server.url)
        assert profile.main([file, "--questions", str(rows), "--out", str(out)]) == 130
    assert list(tomllib.loads(out.read_text())["profiles"]) == asked[:1]


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--count", "0"], "--count is 0"),
        (["--questions", "none.jsonl"], "none.jsonl"),
        (["--max-usd", "0.0000001"], "no expert answered"),
    ],
)
def test_a_profile_without_answers_is_one_line_and_no_file(tmp_path, capsys, options, problem):
    rows = lines(tmp_path / "rows.jsonl", ROWS)
    with openai_server() as server:
        file = catalogue(tmp_path, server.url)
        given = [file, "--questions", str(rows), "--out", str(tmp_path / "out.toml"), *options]
        assert profile.main(given) != 0
    assert problem in capsys.readouterr().err and not (tmp_path / "out.toml").exists()


def test_a_profile_of_no_tool_is_refused(tmp_path, sandbox):
    extra = tmp_path / "extra.json"
    extra.write_text(json.dumps({"profiles": {"nobody": "Good."}}))
    with pytest.raises(UserError, match="profiles: there is no tool 'nobody'"):
        load_tools(f"{catalogue(tmp_path)},{extra}", sandbox)


def test_the_interval_is_wilsons():
    low, high = profile.wilson(8, 10)  # as statsmodels' proportion_confint(8, 10, method="wilson")
    assert (low, high) == pytest.approx((0.49016, 0.94331), abs=2e-4)
    assert profile.wilson(0, 20)[0] == 0 and profile.wilson(20, 20)[1] == pytest.approx(1)
