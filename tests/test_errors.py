"""Each command has a help, tells a mistake in one line, and ends with a status, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import data_gen
import evaluate
import serve
import tools
import train
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
RESET = "class A:\n    def reset(self, seed):\n        return 'What?'\n"
CASE = '{"id": 1, "answers": {"ant": ["A", 1, 0.1]}}\n'
FILES = {  # of the directory in which each mistake is made
    "rows.jsonl": "".join(f'{{"question": "Who is {n}?", "answer": "Ada"}}\n' for n in range(40)),
    "tools.json": json.dumps([{"name": "python", "kind": "code", "description": "Runs it."}]),
}
MISTAKES = [  # a command, its arguments, what the line has to say, and files of the user's
    ("train.py", "--grpo.stepz 3", "--grpo.stepz: there is no such option; did you mean --grpo.s"),
    ("train.py", "--plann", "--plann: there is no such option; did you mean --plan?"),
    ("train.py", "--grpo.steps 1.5", "--grpo.steps must be a whole number: '1.5'"),
    ("train.py", "--grpo.steps", "--grpo.steps must be a whole number: no value is given"),
    ("train.py", "--run.dtype half", "--run.dtype must be {auto,float32,bfloat16}: 'half'"),
    ("train.py", "--rollout.lockstep no", "--rollout.lockstep must be {true,false}: 'no'"),
    ("train.py", "--grpo.learning_rate nan", "grpo.learning_rate is nan; it must be at least 0"),
    ("train.py", "--grpo.group_size 1", "grpo.group_size is 1; it must be at least 2"),
    ("train.py", "--grpo.importance_cap 0.5", "grpo.importance_cap is 0.5; it must be at least 1"),
    ("train.py", "--rollout.turn_tokens 4096", "turn_tokens is 4096; it must be below rollout."),
    ("train.py", "--rollout.pages 3", "rollout.pages is 3; it must be 0, or at least 64"),
    ("train.py", "--lora.base int4", "lora.rank is 0; with lora.base int4 it must be 1 or more"),
    (
        "train.py",
        "--lora.base int4 --lora.rank 4 --parallel.cpu_offload true",
        "parallel.cpu_offload is true; with lora.base int4 it must be false",
    ),
    ("train.py", "--gpus 8", "are only for --plan"),
    ("train.py", "--plan --gpus 0", "--gpus is 0; it must be 1 or more"),
    ("train.py", "--plan --memory 0.0 --gpus 2 --lora.base int4 --lora.rank 4", "--gpus is 2"),
    ("train.py", "--config qwen-4b", "qwen-4b: no such file; give a TOML file, or one of"),
    ("train.py", "--config qwen-4b", "; did you mean qwen3-4b?"),
    ("train.py", "--config my.toml", "my.toml: not TOML (Expected", "[grpo\n"),
    ("train.py", "--config my.toml", "my.toml: worlds: there is no such option", "worlds = [1]\n"),
    ("train.py", "--config my.toml", "grpo.steppes: there is no", "[grpo]\nsteppes = 3\n"),
    ("train.py", "--config my.toml", "my.toml: grpo.steps must be a wh", "[grpo]\nsteps = true\n"),
    ("train.py", "--config my.toml", "lockstep must be {true,false}", "[rollout]\nlockstep = 3\n"),
    ("train.py", "--config my.toml", "grpo.min_std is -1.0; it must", "[grpo]\nmin_std = -1.0\n"),
    ("train.py", "--run.name ../x", "run.name is '../x'; it must be the name of a directory"),
    ("train.py", "--run.name x-dry-run", "run.name is 'x-dry-run'; names of dry runs end so"),
    ("train.py", "--resume nowhere", "nowhere: no such run; give its directory, or its name in"),
    (
        "train.py",
        "--resume thre",
        "thre: no such run; give its directory, or its name in runs/; did",
    ),
    ("train.py", "--resume there", "there: this run is finished; --grpo.steps above 700 ext"),
    ("train.py", "--resume there --run.seed 1 --config base", "cannot change run.seed, --config"),
    ("train.py", "--task.world nowhere", "task.world: there is no world 'nowhere'; it must be"),
    ("train.py", "--task.world a=0", "task.world is 'a=0'; it must name each world once"),
    ("train.py", "--task.world desk,desk=2", "it must name each world once with a weight above 0"),
    ("train.py", "--task.world few.jsonl", "few.jsonl: no such file"),
    ("train.py", "--config base --task.world my.py", "draft, and nothing demonstrates", RESET),
    ("train.py", "--task.world desk --grpo.epochs 2", "grpo.epochs: desk has tasks without end"),
    ("evaluate.py", "--tasks 0", "--tasks, --trials and --parallel must be at least 1, not 0"),
    ("evaluate.py", "--taks 1", "unrecognized arguments: --taks 1; did you mean --tasks?"),
    ("evaluate.py", "--run ../../x", "--run is '../../x'; it must be the name of a directory"),
    ("evaluate.py", "--policy mine", f"linear-{PRACTISED}, routers; did you mean mine/model?"),
    ("evaluate.py", "--policy programm", "; did you mean program?"),
    (
        "evaluate.py",
        "--policy mine/model:turns=many",
        "turns=many must be basic, none, or a number",
    ),
    ("evaluate.py", "--policy mine/model:top_p=2", "top_p must be above 0, at most 1"),
    ("evaluate.py", "--policy program:usd=nan", "usd must be US dollars, 0 or more"),
    ("evaluate.py", "--policy program:turns=3", "turns=3 must be basic, none, or a number of usd"),
    (
        "evaluate.py",
        "--policy mine/model:turns=0:calls_per_turn=0",
        "turns, calls_per_turn must be",
    ),
    ("evaluate.py", "--policy a@http://x/v1:input=1", "input and output must both be US dollars"),
    ("evaluate.py", "--policy router --run there", "runs/there: holds another evaluation"),
    ("evaluate.py", "compare runs/there runs/none", "runs/there: holds no attempts"),
    ("evaluate.py", "--world nowhere", "task.world: there is no world 'nowhere'"),
    ("evaluate.py", "--world questions:rows.jsonl", "needs a catalogue of tools: task.tools"),
    ("evaluate.py", f"{ASKED} --judge nobody", "task.user and task.judge are ('', 'nobody')"),
    ("evaluate.py", f"{ASKED} --policy routers", "--policy routers: these worlds have none"),
    ("evaluate.py", f"{ASKED} --preference never=no", "task.preference: there is no no to ban"),
    ("evaluate.py", "--record a.jsonl", "--record: --world is desk; it must be one questions:FILE"),
    (
        "evaluate.py",
        "--world frames --tools tools.json",
        "google/frames-benchmark: not whole on th",
    ),
    ("evaluate.py", "--world hle --tools tools.json", "huggingface.co/datasets/cais/hle)"),
    ("evaluate.py", "--policy program --reward my.py", "must be FILE.py:FUNCTION"),
    ("evaluate.py", f"{REWARD}", "my.py: cannot be read"),
    ("evaluate.py", f"{REWARD}", "has no function 'pay'", "pay = 3\n"),
    ("evaluate.py", f"{REWARD}", "pay, line 2: ZeroDi", "def pay(group):\n    return 1 / 0\n"),
    ("evaluate.py", f"{REWARD}", "pay: it returned 1; it mus", "def pay(group):\n    return 1\n"),
    ("evaluate.py", OWN, "my.py: it has no class with a method reset", "x = 1\n"),
    ("evaluate.py", OWN, "my.py, line 1: SyntaxError", "class A\n"),
    ("evaluate.py", OWN, "A.reset, line 3: ZeroDivis", RESET.replace("'What?'", "1 / 0")),
    ("evaluate.py", OWN, "A: function ask: it has no docstring", f"{RESET}    def ask(s): pass\n"),
    (
        "evaluate.py",
        OWN,
        "A.reset: there is no questoin; did you mean question?",
        RESET.replace("'What?'", "{'questoin': ''}"),
    ),
    (
        "evaluate.py",
        OWN,
        "A.reset: preference weighs latency; state the most that an attempt may last",
        RESET.replace("'What?'", "{'question': 'What?', 'preference': 'Be quick. latency=1'}"),
    ),
    ("evaluate.py", "--world recorded:my.jsonl", "my.jsonl: 1 cases are too few; half", CASE),
    ("evaluate.py", "--world recorded:my.jsonl", "line 1: id", CASE.replace("1", "null", 1)),
    ("evaluate.py", "--world recorded:my.jsonl", "answers.ant", CASE.replace("1, 0.1", "2, 0.1")),
    ("evaluate.py", "--world my.jsonl", "my.jsonl", "\n"),
    ("evaluate.py", "--world empty", "empty/tasks.jsonl: cannot be read"),
    ("evaluate.py", "--world desk=nan", "task.world is 'desk=nan'; it must name each world once"),
    ("evaluate.py", "--world desk,", "task.world is 'desk,'; it must name each world once"),
    ("serve.py", "--modle x", "unrecognized arguments: --modle x; did you mean --model?"),
    ("serve.py", "--port many", "--port"),
    ("tools.py", "index corpus", "--out"),
    ("tools.py", "index nowhere --out there", "nowhere"),
    ("data_gen.py", "--taks 1", "unrecognized arguments: --taks 1; did you mean --tasks?"),
    ("data_gen.py", "--difficulty 9 --show 1", "--difficulty"),
]


@pytest.fixture
def place(tmp_path, monkeypatch, sandbox):
    """A directory with a finished run `there`, and a checkpoint of another one, `mine`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "Sandbox", lambda: nullcontext(sandbox))
    monkeypatch.setattr(train, "Sandbox", lambda: nullcontext(sandbox))
    for name, text in FILES.items():
        Path(name).write_text(text)
    RunFolder.create("runs/there", to_toml(load_config("nano"))).write_json(
        "summary.json", {"steps": 700}
    )
    Path("empty").mkdir()
    Path("mine").mkdir()
    Path("mine/model").symlink_to(NANO_BASE)
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


@pytest.mark.parametrize(
    "failure",
    [
        "torch.empty(1 << 40)",
        "mmap.mmap(-1, 1 << 40)",
        "bytearray(1 << 40)",
        "[threading.Thread(target=time.sleep, args=[9], daemon=True).start() for _ in range(999)]",
    ],
)
def test_no_memory_is_a_line_and_status_1(failure):
    program = f"""
import mmap, resource, sys, threading, time
{"import torch" if "torch" in failure else ""}
from nanorchestra.errors import command

@command("prog")
def main(arguments):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)
    {failure}

sys.exit(main([]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "prog: no memory is left, or a limit such as ulimit -v is too low"
    )


PROGRAM = """
import atexit, os, sys, time
from nanorchestra.errors import command, end_on_interrupt
end_on_interrupt("prog")
phase = sys.argv[1]

def wait(*_, write=os.write, sleep=time.sleep):
    write(2, b"ready\\n")
    sleep(2)

class Late:
    __del__ = wait

if phase == "import":
    wait()

@command("prog")
def main(arguments):
    print("done")
    if phase == "run":
        wait()
    return 0

if phase == "atexit":
    atexit.register(wait)
if phase == "teardown":
    late = Late()
sys.exit(main([]))
"""


@pytest.mark.parametrize("phase", ["import", "run", "atexit", "teardown"])
def test_an_interrupt_at_any_time_is_no_traceback(phase):
    """It is one line and status 130, but while the interpreter frees its modules nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    printed, told = process.communicate(timeout=10)
    assert printed == ("" if phase == "import" else "done\n")
    assert told == ("" if phase == "teardown" else "\nprog: interrupted\n")
    assert process.returncode == (0 if phase == "teardown" else 130)


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", ["evaluate.py", "train.py", "serve.py", "tools.py"])
def test_an_interrupt_while_torch_is_imported_is_one_line_and_130(program):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, program, "--help"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, f"\n{program}: interrupted\n")


UNREAD = """
import sys
from nanorchestra.errors import command

@command("unread")
def main(arguments):
    print("a line", flush=sys.argv[1] == "flushed")
    return 0

sys.stdin.read()
sys.exit(main([]))
"""


@pytest.mark.parametrize("line", ["flushed", "buffered"])
def test_a_reader_that_has_gone_away_is_status_1_without_a_word(line):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    unread = [sys.executable, "-c", UNREAD, line]
    with subprocess.Popen(unread, env=buffered, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", 1)
