"""Configuration: overrides, and one clear line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanorchestra.config import Config, load_config, to_toml
from nanorchestra.errors import UserError


def test_a_config_is_written_resolved_and_read_back(tmp_path):
    config = load_config(
        "configs/nano.toml", ["--grpo.steps", "7", "--run.name=x", "--grpo.learning_rate", "1"]
    )
    assert (config.grpo.steps, config.run.name, config.grpo.learning_rate) == (7, "x", 1.0)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    "text", ["😀", "𝔸 é", 'a"b', "a\\b\\u0041", "a\nb\r\tc", "\x00\x1b\x7f\x85\u2028", "''", " "]
)
def test_odd_characters_come_back(tmp_path, text):
    config = load_config(None, ["--run.root", text, "--model.path", f"{text}/x"])
    Path(tmp_path / "config.toml").write_bytes(to_toml(config).encode())
    assert load_config(tmp_path / "config.toml") == config and config.run.root == text


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["--run.root", "a\udcffb"], ["run.root is 'a\\udcffb'", "UTF-8"]),
        (["--grpo.stepz", "7"], ["unknown key grpo.stepz", "steps"]),
        (["--grp.steps", "7"], ["unknown section [grp]", "warm_start"]),
        (["--grpo.steps", "many"], ["grpo.steps is 'many'", "whole number"]),
        (["--grpo.steps", "1.5"], ["grpo.steps is 1.5", "whole number"]),
        (["--grpo.steps", "-1"], ["grpo.steps is -1", "0 or more"]),
        (["--grpo.steps"], ["--grpo.steps has no value"]),
        (["steps", "1"], ["'steps' is not understood", "--section.key value"]),
        (["--grpo.bounds", "none"], ["grpo.bounds is 'none'", "group, task"]),
        (["--grpo.group_size", "1"], ["at least 2"]),
        (["--rollout.turn_tokens", "4096"], ["below rollout.context_tokens"]),
        (["--world.avoid_share", "1.5"], ["0..1"]),
        (["--grpo.normalise_std", "1"], ["boolean"]),
        (["--rollout.temperature", "0"], ["above 0"]),
        (["--run.seed", "18446744073709551616"], ["run.seed is 18446744073709551616", "at most"]),
        (["--grpo.learning_rate", "1" + "0" * 400], ["grpo.learning_rate is 1000", "at most"]),
        (["--grpo.learning_rate", "NaN"], ["grpo.learning_rate is nan", "finite"]),
        (["--run.threads", "100000"], ["run.threads is 100000", "at most 1024"]),
        (
            ["--model.vocab_size", "1000000000"],
            ["model.vocab_size is 1000000000", "at most 1048576"],
        ),
        *(
            (["--run.name", name], ["run.name is ", "name of a directory", "run.root"])
            for name in ("", ".", "..", "a/b", "/tmp/x", "../x", "a\nb")
        ),
        (
            ["--evaluation.best", "loss"],
            ["evaluation.best is 'loss'", "reward, accuracy, preference, cost_per_correct_usd"],
        ),
        (["--evaluation.every_tasks", "0"], ["above 0"]),
        (["--grpo.grad_clip", "0"], ["grpo.grad_clip is 0", "above 0"]),
        (["--grpo.advantage_clip", "0"], ["grpo.advantage_clip is 0", "above 0"]),
        (
            ["--rollout.pages", "63"],
            ["rollout.pages is 63", "64 for rollout.context_tokens = 1024"],
        ),
    ],
)
def test_what_is_wrong_is_named_in_one_line(overrides, words):
    with pytest.raises(UserError) as error:
        load_config(None, overrides)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_bad_file_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[grpo\n")
    with pytest.raises(UserError, match="bad.toml: not TOML"):
        load_config(bad)
    bad.write_text("a = " + "[" * 100_000)
    with pytest.raises(UserError, match="bad.toml: not TOML"):
        load_config(bad)
    bad.write_text("[grpo]\nsteppes = 3\n")
    with pytest.raises(UserError, match="bad.toml: unknown key grpo.steppes"):
        load_config(bad)


def test_the_config_of_a_run_that_goes_on_must_be_whole(tmp_path):
    file, text = tmp_path / "config.toml", to_toml(Config())
    for content, missing in (
        ("", "run.name"),
        (text[: text.index("seed")], "run.seed"),
        (text[: text.index("[evaluation]")], "evaluation.tasks"),
        (text.replace("steps = 100\n", ""), "grpo.steps"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=rf"config.toml: {missing} is missing"):
            load_config(file, whole=True)
    file.write_text(text)
    assert load_config(file, whole=True) == Config()


def test_defaults_are_valid():
    assert load_config(None) == Config()
