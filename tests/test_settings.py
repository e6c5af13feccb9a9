"""Settings: read from TOML and the command line, one clear line for whatever is wrong."""

from __future__ import annotations

import re

import pytest

from nanorchestra.config import Config
from nanorchestra.errors import UserError
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
    with pytest.raises(UserError, match=r"qwen4: no such file; .* nano, .*qwen3-4b"):
        load_config("qwen4")


def test_the_help_has_every_setting_with_its_type_and_the_value_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        parse(["--config", "qwen3-8b", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, value in load_config("qwen3-8b").values().items():
        option = rf"--{name} (?:STR|INT|FLOAT|{{[\w,]+}}) \w.*?\(default: (.*?)\)"
        shown = str(value).lower() if isinstance(value, bool) else str(value) or "''"
        assert re.search(option, text)[1] == shown, name


@pytest.mark.parametrize(
    "words, says",
    [
        ("--grpo.stepz 7", "--grpo.stepz: there is no such option; did you mean --grpo.steps?"),
        ("--grpo.steps 1.5", "--grpo.steps must be a whole number: '1.5'"),
        ("--grpo.steps", "--grpo.steps must be a whole number: no value is given"),
        ("--grpo.learning_rate nan", "grpo.learning_rate is nan; it must be at least 0"),
        ("--grpo.group_size 1", "grpo.group_size is 1; it must be at least 2"),
        ("--grpo.importance_cap 0.5", "grpo.importance_cap is 0.5; it must be at least 1, or 0"),
        ("--run.dtype half", "--run.dtype must be {auto,float32,bfloat16}: 'half'"),
        ("--rollout.lockstep no", "--rollout.lockstep must be {true,false}: 'no'"),
        ("--rollout.turn_tokens 4096", "turn_tokens is 4096; it must be below .*, 1024"),
        ("--rollout.pages 3", "rollout.pages is 3; it must be 0, or at least 64"),
        ("--lora.base int4", "lora.rank is 0; with lora.base int4 it must be 1 or more"),
        (
            "--lora.base int4 --lora.rank 4 --parallel.cpu_offload true",
            "parallel.cpu_offload is true; with lora.base int4 it must be false",
        ),
        ("--plann", "--plann: there is no such option; did you mean --plan?"),
        ("--gpus 8", "are only for --plan"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(words, says):
    with pytest.raises(UserError, match=says) as error:
        parse(words.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("[grpo\n", "not TOML (Expected"),
        ('worlds = ["desk"]\n', "worlds: there is no such option"),
        (
            "[grpo]\nsteppes = 3\n",
            "grpo.steppes: there is no such option; did you mean grpo.steps?",
        ),
        ("[grpo]\nsteps = true\n", "grpo.steps must be a whole number: "),
        ("[rollout]\nlockstep = 3\n", "rollout.lockstep must be {true,false}: '3'"),
        ("[grpo]\nmin_std = -1.0\n", "grpo.min_std is -1.0; it must be at least 0"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path, text, says):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'bad.toml'}: {says}")) as error:
        load_config(tmp_path / "bad.toml")
    assert "\n" not in str(error.value)
