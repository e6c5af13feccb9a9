"""Settings: read from TOML and the command line, written and read back; shipped; in the help."""

from __future__ import annotations

import re

import pytest

from nanorchestra.config import Config
from nanorchestra.settings import CONFIGS, load_config
from nanorchestra.training.command import parse
from nanorchestra.training.run import to_toml


def test_a_config_is_written_resolved_and_read_back(tmp_path):
    words = ["--grpo.steps", "7", "--run.name=x", "--grpo.learning_rate", "1"]
    words += ["--rollout.lockstep", "false", "--run.root", 'a "b" \\ é\n']
    config = parse(words).settings
    assert (config.grpo.steps, config.run.name, config.grpo.learning_rate) == (7, "x", 1.0)
    assert not config.rollout.lockstep and config.rollout.pages == 4608
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == config
    assert load_config(None) == Config()


def test_every_shipped_config_is_valid_and_found_by_its_name():
    paths = sorted(CONFIGS.glob("*.toml"))
    assert {"nano", "qwen3-4b", "qwen3-8b"} <= {path.stem for path in paths}
    for path in paths:
        assert load_config(path.stem) == load_config(path)
        assert load_config(path).run.name == path.stem


def test_the_help_has_every_setting_with_its_type_and_the_value_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        parse(["--config", "qwen3-8b", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, value in load_config("qwen3-8b").values().items():
        option = rf"--{name} (?:STR|INT|FLOAT|{{[\w,]+}}) \w.*?\(default: (.*?)\)"
        shown = str(value).lower() if isinstance(value, bool) else str(value) or "''"
        assert re.search(option, text)[1] == shown, name
