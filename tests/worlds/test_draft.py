"""An untrained checkpoint: the same arguments write the same bytes, and training begins with it."""

from __future__ import annotations

from nanorchestra.model.weights import load_model
from worlds.miniature import draft as program
from worlds.miniature.world import Miniature
from worlds.toolscale.small import small_world


def test_a_draft_loads_and_is_a_function_of_its_seed(tmp_path, sandbox, monkeypatch):
    monkeypatch.setattr(program, "LESSONS", 40)
    world = Miniature(0, sandbox)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        program.draft(world, seed, tmp_path / name)
    files = {
        name: {
            file: (tmp_path / name / file).read_bytes()
            for file in ("model.safetensors", "tokenizer.json", "config.json")
        }
        for name in "abc"
    }
    assert files["a"] == files["b"]
    assert files["a"]["tokenizer.json"] == files["c"]["tokenizer.json"]
    assert files["a"]["model.safetensors"] != files["c"]["model.safetensors"]
    model, tokenizer = load_model(tmp_path / "a")
    ids = tokenizer.encode(world.task("train", 0).question)
    assert max(ids) < tokenizer.vocab_size <= model.config.vocab_size


def test_what_cannot_be_drafted_is_one_line(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    assert program.main([str(tmp_path / "there")]) == 2
    assert "it exists; name another one" in capsys.readouterr().err
    file = tmp_path / "own.py"
    file.write_text("class A:\n    def reset(self, seed):\n        return 'What?'\n")
    assert program.main([str(tmp_path / "new"), "--world", str(file)]) == 2
    line = capsys.readouterr().err
    assert "nothing demonstrates its tasks" in line and not (tmp_path / "new").exists()


def test_the_command_drafts_the_world_domains(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "LESSONS", 20)
    assert program.main([str(tmp_path / "new"), "--world", "domains", "--seed", "1"]) == 0
    _, tokenizer = load_model(tmp_path / "new")
    task = small_world(1, "domains").task("train", 0)
    assert tokenizer.decode(tokenizer.encode(task.question)) == task.question
