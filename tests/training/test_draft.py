"""An untrained checkpoint: the same arguments write the same bytes, and training begins with it."""

from __future__ import annotations

from nanorchestra.model.checkpoint import load_checkpoint
from nanorchestra.training import draft as program
from worlds.desk import Desk
from worlds.toolscale.small import small_world


def test_a_draft_loads_and_is_a_function_of_its_seed(tmp_path, sandbox, monkeypatch):
    monkeypatch.setattr(program, "LESSONS", 40)
    world = Desk(0, sandbox)
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
    model, tokenizer = load_checkpoint(tmp_path / "a")
    ids = tokenizer.encode(world.task("train", 0).question)
    assert max(ids) < tokenizer.vocab_size <= model.config.vocab_size


def test_a_draft_of_the_world_domains_reads_its_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "LESSONS", 20)
    world = small_world(1, "domains")
    program.draft(world, 1, tmp_path / "new")
    _, tokenizer = load_checkpoint(tmp_path / "new")
    task = world.task("train", 0)
    assert tokenizer.decode(tokenizer.encode(task.question)) == task.question
