"""The curve of reward against calls: a run's points, and the table of skills beside the rule."""

from __future__ import annotations

import json

import pytest

from benchmarks import calls


def written_run(path, steps):
    path.mkdir()
    (path / "config.toml").write_text("[grpo]\nprompts = 4\ngroup_size = 2\n")
    rows = [{"phase": "warm_start", "step": 1}]
    for step in range(steps):
        reward = step / steps
        rows.append({"phase": "grpo", "reward": reward, "calls": {"large": 1.0, "code": 0.5}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_is_drawn_by_the_calls_that_it_spent(tmp_path):
    curve = calls.training_curve(written_run(tmp_path / "run", 40))
    spent, rewards = [point[0] for point in curve], [point[1].mean for point in curve]
    assert spent == sorted(spent) and rewards == sorted(rewards)
    assert spent[0] == 2 * 1.5 * 8  # the middle of the first four steps of eight attempts
    assert spent[-1] < 40 * 1.5 * 8 and len(curve) < 12


def test_the_table_comes_near_the_rule_and_all_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calls, "CALLS", (5, 1000))
    run = written_run(tmp_path / "mine", 9)
    files = [tmp_path / "calls.png", tmp_path / "calls.json"]
    assert (
        calls.main([str(run), "--tasks", "80", "--out", str(files[0]), "--json", str(files[1])])
        == 0
    )
    assert files[0].read_bytes().startswith(b"\x89PNG")
    figures = json.loads(files[1].read_text())
    (few, poor), (many, good) = figures["table of skills"]
    assert (few, many) == (5, 1000)
    assert poor[0] < good[0] <= figures["informed"][0] + 0.03
    assert "mine: 24 calls" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, '{"phase": "warm_start"}\n'])
def test_a_directory_without_grpo_is_told_in_a_line(tmp_path, capsys, content):
    run = tmp_path / "run"
    run.mkdir()
    if content:
        (run / "metrics.jsonl").write_text(content)
    assert calls.main([str(run), "--out", str(tmp_path / "calls.png")]) == 2
    assert "metrics.jsonl: no" in capsys.readouterr().err
