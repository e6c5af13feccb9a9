"""Each command has a help, tells a mistake in one line, and ends with a status, however it ends."""

from __future__ import annotations

import json
import re
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

import data_gen
import evaluate
import serve
import tools
import train
from nanorchestra.errors import command
from nanorchestra.model.checkpoint import NANO_BASE
from nanorchestra.settings import load_config
from nanorchestra.training.run import RunFolder, to_toml
from worlds.routers import PRACTISED

COMMANDS = {
    "train.py": train,
    "evaluate.py": evaluate,
    "serve.py": serve,
    "tools.py": tools,
    "data_gen.py": data_gen,
}
ASKED = "--world questions:rows.jsonl --tools tools.json"
REWARD = "--policy program --reward my.py:pay"
OWN = "--world my.py --policy mine/model"
INT8_OVER_4 = "--rollout.weights int8 --config qwen3-8b-qlora"
RESET = "class A:\n    def reset(self, seed):\n        return 'What?'\n"
CASE = '{"id": 1, "answers": {"ant": ["A", 1, 0.1]}}\n'
FILES = {  # of the directory in which each mistake is made
    "rows.jsonl": "".join(f'{{"question": "Who is {n}?", "answer": "Ada"}}\n' for n in range(40)),
    "tools.json": json.dumps([{"name": "python", "kind": "code", "description": "Runs it."}]),
}
MISTAKES = [  # a command, its arguments, what the line has to say, and files of the user's
    ("train.py", "--grpo.stepz 3", "--grpo.stepz: there is no such option; did you mean --grpo.s"),
    ("train.py", "--grpo.steps 1.5", "--grpo.steps must be a whole number: '1.5'"),
    ("train.py", "--grpo.learning_rate nan", "grpo.learning_rate is nan; it must be at least 0"),
    ("train.py", "--grpo.momentum 1.5", "grpo.momentum is 1.5; it must be below 1"),
    ("train.py", "--grpo.hold 7", "grpo.hold is 7.0; it must be at most 1, a share of the steps"),
    ("train.py", "--rollout.turn_tokens 4096", "turn_tokens is 4096; it must be below rollout."),
    ("train.py", "--lora.base int4", "lora.rank is 0; with lora.base int4 it must be 1 or more"),
    (
        "train.py",
        "--rollout.weights int8",
        "importance_cap is 0; with rollout.weights int8 it must",
    ),
    ("train.py", INT8_OVER_4, "rollout.weights is int8; with lora.base int4 it must be full"),
    ("train.py", "--gpus 8", "are only for --plan"),
    ("train.py", "--config qwen-4b", "; did you mean qwen3-4b?"),
    ("train.py", "--config my.toml", "my.toml: not TOML (Expected", "[grpo\n"),
    ("train.py", "--config my.toml", "grpo.steppes: there is no", "[grpo]\nsteppes = 3\n"),
    ("train.py", "--config my.toml", "my.toml: grpo.steps must be a wh", "[grpo]\nsteps = true\n"),
    ("train.py", "--run.name ../x", "run.name is '../x'; it must be the name of a directory"),
    ("train.py", "--resume nowhere", "nowhere: no such run; give its directory, or its name in"),
    ("train.py", "--resume there", "there: this run is finished; --grpo.steps above 700 ext"),
    ("train.py", "--resume there --run.seed 1 --config base", "cannot change run.seed, --config"),
    ("train.py", "--task.world nowhere", "task.world: there is no world 'nowhere'; it must be"),
    ("train.py", "--task.world desk,desk=2", "it must name each world once with a weight above 0"),
    ("train.py", "--config base --task.world my.py", "draft, and nothing demonstrates", RESET),
    ("train.py", "--task.world desk --grpo.epochs 2", "grpo.epochs: desk has tasks without end"),
    ("evaluate.py", "--taks 1", "unrecognized arguments: --taks 1; did you mean --tasks?"),
    ("evaluate.py", "--trials 0", "--trials is 0; it must be at least 1"),
    ("evaluate.py", "--policy mine", f"linear-{PRACTISED}, routers; did you mean mine/model?"),
    ("evaluate.py", "--policy runs/a/model", "runs/a/model: there is no such path; it must be a"),
    ("evaluate.py", "--policy torn", "torn/model.safetensors: not a whole safetensors file"),
    ("evaluate.py", "--policy mine/model:top_p=2", "top_p must be above 0, at most 1"),
    ("evaluate.py", "--policy program:usd=nan", "usd must be US dollars, 0 or more"),
    ("evaluate.py", "--policy program:turns=3", "turns=3 must be basic, none, or a number of usd"),
    ("evaluate.py", "--policy router --run there", "runs/there: holds another evaluation"),
    ("evaluate.py", "compare runs/there runs/none", "runs/there: holds no attempts"),
    ("evaluate.py", "--world questions:rows.jsonl", "needs a catalogue of tools: task.tools"),
    ("evaluate.py", f"{ASKED} --judge nobody", "task.user and task.judge are ('', 'nobody')"),
    ("evaluate.py", f"{ASKED} --preference never=no", "task.preference: there is no no to ban"),
    ("evaluate.py", "--record a.jsonl", "--record: --world is desk; it must be one questions:FILE"),
    ("evaluate.py", f"{REWARD}", "pay, line 2: ZeroDi", "def pay(group):\n    return 1 / 0\n"),
    ("evaluate.py", f"{REWARD}", "pay: it returned 1; it mus", "def pay(group):\n    return 1\n"),
    ("evaluate.py", OWN, "my.py: it has no class with a method reset", "x = 1\n"),
    ("evaluate.py", OWN, "A.reset, line 3: ZeroDivis", RESET.replace("'What?'", "1 / 0")),
    ("evaluate.py", OWN, "there is no questoin; did", RESET.replace("'What?'", "{'questoin': ''}")),
    ("evaluate.py", OWN, "A: function ask: it has no docstring", f"{RESET}    def ask(s): pass\n"),
    ("evaluate.py", "--world recorded:my.jsonl", "answers.ant", CASE.replace("1, 0.1", "2, 0.1")),
    ("evaluate.py", "--world my.jsonl", "my.jsonl", "\n"),
    ("serve.py", "--modle x", "unrecognized arguments: --modle x; did you mean --model?"),
    ("tools.py", "index corpus", "--out"),
    ("data_gen.py", "--taks 1", "unrecognized arguments: --taks 1; did you mean --tasks?"),
    ("data_gen.py", "--difficulty 9 --show 1", "--difficulty"),
]


@pytest.fixture
def place(tmp_path, monkeypatch, sandbox):
    """A directory with a finished run `there`, a checkpoint `mine`, and half a one, `torn`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "Sandbox", lambda: nullcontext(sandbox))
    monkeypatch.setattr(train, "Sandbox", lambda: nullcontext(sandbox))
    for name, text in FILES.items():
        Path(name).write_text(text)
    RunFolder.create("runs/there", to_toml(load_config("nano"))).write_json(
        "summary.json", {"steps": 700}
    )
    Path("mine").mkdir()
    Path("mine/model").symlink_to(NANO_BASE)
    shutil.copytree(NANO_BASE, "torn", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: f"{row[0]} {row[1]}"[:60])
def test_a_mistake_is_one_line_and_status_2_and_makes_nothing(place, capsys, row):
    program, arguments, says, *text = row
    if text:
        (name,) = {*re.findall(r"\bmy\.\w+", arguments)}
        Path(name).write_text(*text)
    words = arguments.split()
    if program == "train.py" and "--resume" not in words:
        words += ["--run.threads", "1"]
    assert COMMANDS[program].main(words) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert line.startswith(f"{program}: ") and says in line and "Traceback" not in err
    assert not out and [path.name for path in Path("runs").iterdir()] == ["there"]


@pytest.mark.parametrize("program", COMMANDS)
def test_each_command_has_a_help(program, capsys):
    with pytest.raises(SystemExit) as end:
        COMMANDS[program].main(["--help"])
    assert end.value.code == 0 and "usage: " in capsys.readouterr().out


def test_ctrl_c_is_one_line_and_130(capsys):
    @command("prog")
    def main(arguments):
        signal.raise_signal(signal.SIGINT)

    assert main([]) == 130 and capsys.readouterr().err == "\nprog: interrupted\n"
