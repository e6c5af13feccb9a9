"""The comparison of recipes: runs are made once, and compared task by task."""

from __future__ import annotations

import json

import pytest

from benchmarks import recipe
from nanorchestra.report.run import to_toml
from nanorchestra.settings import load_config


def finished_run(path, rewards):
    path.mkdir(parents=True)
    name, seed = path.name.split("-")[1:]
    settings = {"run.name": path.name, "run.root": str(path.parent), "run.threads": 1}
    settings |= {"run.seed": int(seed)} | recipe.VARIANTS[name]
    (path / "config.toml").write_text(to_toml(load_config("nano", settings)))
    (path / "summary.json").write_text("{}")
    rows = [{"phase": "before", "reward": 9.0}]
    rows += [{"phase": "after", "reward": reward} for reward in rewards]
    (path / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_finished_runs_are_compared_with_the_preset_of_their_seed(tmp_path, capsys):
    for seed, rewards in enumerate(([0.5, 0.7, 0.1], [0.2, 0.4, 0.9])):
        finished_run(tmp_path / f"recipe-preset-{seed}", rewards)
        finished_run(tmp_path / f"recipe-kl-{seed}", [reward + 0.1 for reward in rewards])
    words = ["--seeds", "0", "1", "--variants", "kl", "--root", str(tmp_path)]
    assert recipe.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["preset"]["difference"] == [0.0, 0.0, 0.0]
    assert figures["kl"]["by_seed"] == pytest.approx([0.1, 0.1])
    assert figures["kl"]["reward"] == pytest.approx(0.1 + 2.8 / 6)
    assert "+0.100 [+0.100, +0.100]" in capsys.readouterr().out
    assert recipe.main([*words, "--set", "grpo.steps=40"]) != 0
    assert "recipe-preset-0: has other settings; name another" in capsys.readouterr().err


def test_every_variant_is_a_command_that_train_understands(capsys):
    from nanorchestra.training import options

    assert recipe.main(["--list", "--seeds", "3", "--set", "grpo.steps=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(recipe.VARIANTS)
    for line in lines:
        options.parse(line.split()[2:])
    assert lines[0].endswith("--run.seed 3 --run.threads 1 --run.root runs --grpo.steps 4")


def test_a_run_that_fails_is_named_with_its_log(tmp_path, capsys):
    words = ["--seeds", "0", "--variants", "preset", "--root", str(tmp_path)]
    assert recipe.main([*words, "--set", "model.path=nowhere"]) != 0
    assert "recipe-preset-0.log: the run ended with status 2" in capsys.readouterr().err
