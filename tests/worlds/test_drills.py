"""Questions that real tools answer: the calls that they state lead to their answers."""

import json

import pytest

from nanorchestra.config import TaskSection
from nanorchestra.files import read_json_lines
from worlds import drills
from worlds.load import open_world

MANUAL = "The {} engine keeps every page of the cache until the {} request ends its work. "


def written(tmp_path, *options):
    words = ["quick", "tiled", "paged", "native", "second", "oldest", "newest", "final"]
    pairs = zip(words, reversed(words), strict=True)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "manual.md").write_text("\n\n".join(MANUAL.format(*pair) for pair in pairs))
    out = tmp_path / "drills"
    assert drills.main([str(corpus), "--out", str(out), "--products", "30", *options]) == 0
    return out, [row for _, row in read_json_lines(out / "questions.jsonl")]


def test_the_calls_lead_to_the_answers(tmp_path, sandbox, capsys):
    out, rows = written(tmp_path, "--expert", "small@http://127.0.0.1:9/v1")
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("product", "gap")}
    assert len(kinds["product"]) == 30 and 4 < len(kinds["gap"]) <= 8
    assert len(rows) - 30 - len(kinds["gap"]) == len(drills.CAPITALS)
    settings = TaskSection(f"questions:{out}/questions.jsonl", tools=str(out / "tools.toml"))
    world = open_world(settings, 0, sandbox)
    answered = {}
    for index in range(12):
        env, (lesson, last) = world.lesson(index)
        answered[env.task.kind] = last.content
        assert last.content in lesson.result.content
    assert {"product", "gap"} <= set(answered)
    again = tmp_path / "again"
    again.mkdir()
    assert written(again, "--expert", "small@http://127.0.0.1:9/v1")[1] == rows


@pytest.mark.parametrize("expert", ["small", "@http://127.0.0.1", "small@127.0.0.1:9"])
def test_a_wrong_expert_is_one_line_and_nothing_is_written(tmp_path, capsys, expert):
    out = tmp_path / "drills"
    assert drills.main([str(tmp_path), "--out", str(out), "--expert", expert]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert json.dumps(expert)[1:-1] in line and "MODEL@URL" in line
    assert not out.exists()
