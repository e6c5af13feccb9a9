"""Settings: read from TOML and the command line, one clear line for whatever is wrong."""

from __future__ import annotations

import re

import pytest

from nanorchestra.config import Config
from nanorchestra.errors import ArgumentParser, UserError
from nanorchestra.report.run import to_toml
from nanorchestra.settings import (
    CONFIGS,
    add_settings,
    given_settings,
    load_config,
)


def parse(*words):
    parser = ArgumentParser(allow_abbrev=False)
    add_settings(parser)
    return given_settings(parser.parse_args(words))


def test_a_config_is_written_resolved_and_read_back(tmp_path):
    words = ("--grpo.steps", "7", "--run.name=x", "--grpo.learning_rate", "1")
    given = parse(*words, "--rollout.lockstep", "false", "--run.root", 'a "b" \\ é\n')
    config = load_config("nano", given)
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


def test_another_objective_does_not_keep_what_the_file_chose_for_the_first():
    assert load_config("nano", parse("--grpo.objective", "grpo")) == load_config("nano")
    other = load_config("nano", parse("--grpo.objective", "toolorchestra")).grpo
    assert other.kl_coef == Config().grpo.kl_coef and other.learning_rate == 1e-3
    big = load_config(
        "qwen3-8b", parse("--grpo.objective", "toolorchestra", "--grpo.kl_coef", "0.5")
    ).grpo
    assert (big.min_std, big.kl_coef) == (Config().grpo.min_std, 0.5)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--grpo.stepz", "7"], "unrecognized arguments: --grpo.stepz"),
        (["--grpo.steps", "1.5"], "--grpo.steps: '1.5' must be a whole number"),
        (["--grpo.learning_rate", "nan"], "--grpo.learning_rate: nan must be"),
        (["--lora.base", "int4"], "lora.rank is 0; with lora.base int4 it must be 1 or more"),
        (
            ["--lora.base", "int4", "--lora.rank", "4", "--model.path", "x"]
            + ["--parallel.cpu_offload", "true"],
            "parallel.cpu_offload is true; with lora.base int4 it must be false",
        ),
        (["--rollout.turn_tokens", "4096"], "below rollout.context_tokens, 1024"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(words, says):
    with pytest.raises(UserError) as error:
        load_config(None, parse(*words))
    assert "\n" not in str(error.value) and says in str(error.value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("[grpo\n", "bad.toml: Expected"),
        ('worlds = ["miniature"]\n', "'worlds' is no section of settings of a run"),
        ("[grpo]\nsteppes = 3\n", "arguments: --grpo.steppes=3; did you mean --grpo.steps?"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path, text, says):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UserError, match=re.escape(says)):
        load_config(tmp_path / "bad.toml")
