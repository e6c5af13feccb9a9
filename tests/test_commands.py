"""The commands and transcripts of README and docs: what they promise is what happens.

Every command of a shell block is of one of three kinds, and a command of none fails the test:

- RUN: it is run whole, and a transcript that stands beside it is compared with what is printed.
  Measured figures (seconds, tokens/s) are masked.
- PARSED: it trains, downloads, or asks endpoints, or another test runs it. Its program reads its
  arguments, up to where its work begins.
- NOT_TRIED: another program, or one that other tests run whole.

Files named in commands are shipped, or are of YOURS. All is in this process, apart from the server
that clients ask.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import serve
import train
from nanorchestra.config import RolloutSection
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model.checkpoint import NANO
from worlds.terminal import DeskQuestions, Terminal

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
ASSIGNED = re.compile(r"[A-Z_]+=")
TORCHRUN = re.compile(r"torchrun --nproc-per-node \d+ ")
RUN = {
    "python serve.py --ask 'What is the code of parcel 350? Keep it cheap.'",
    "python serve.py --ask 'What is 47 * 6?'",
    "python evaluate.py --policy router program perfect",
    "python train.py --plan --config qwen3-8b --gpus 8",
    "python train.py --plan --config qwen3-8b-qlora --gpu 4090",
    "python data_gen.py --show 5",
    "python tools.py index docs --out indexes/docs",
}
PARSED = {  # the beginning of a command, and why it is not run whole
    "python train.py": "trains for minutes; tests/test_train.py and .ci/run do so in small",
    "python evaluate.py": "needs checkpoints, questions or endpoints of the reader",
    "python serve.py": "a prompt, a server (test_clients_of_the_server), or a model of the hub",
    "python data_gen.py": "10,000 tasks; tests/worlds/test_toolscale_generate.py makes some",
    "python tools.py index corpus.jsonl": "needs a corpus of the reader and a GPU",
    "python tools.py serve-index": "a server; tests/serving/test_retrieval.py runs one",
    "python benchmarks/": "minutes; .ci/run rehearses the day on a GPU",
    "python -m benchmarks.gpu_parts.compile": "minutes; .ci/run runs it",
    "python -m nanorchestra.formats.adopt": "tests/formats/test_adopt.py runs it",
}
NOT_TRIED = {  # the beginning of a command, and why it is not tried
    "python -m venv": "makes the environment of .ci/run",
    "pip install": "packages; .ci/run installs them",
    "python -m pytest": "this",
    "python docs/": "tests/test_docs.py runs it",
    "python -m nanorchestra.report.page": "needs a run; tests/report/test_page.py writes pages",
    "torchrun --max-restarts": "an option alone",
    "ruff": "the first step of .ci/run",
    "bash .ci/run": "it runs this",
    "hf download": "a program of the hub, which downloads 16 GB",
    "tau2 submit": "a program of tau2-bench, which is not installed",
    "curl": "test_clients_of_the_server runs that of docs/serve.md",
}
YOURS = {  # files of the reader, and the page that says what is in them
    "mine.toml": "docs/tools.md",
    "my_tools.json": "docs/worlds.md",
    "my_tools.py": "docs/tools.md",
    "toolorchestra_tools.json": "docs/tools.md",
    "catalogue.json": "docs/worlds.md",
    "library.py": "docs/worlds.md",
    "log.jsonl": "docs/evaluate.md",
    "make24.py": "docs/worlds.md",
    "frames.jsonl": "docs/worlds.md",
    "q.jsonl": "docs/tools.md",
    "corpus.jsonl": "docs/tools.md",
    "general_thought.jsonl": "docs/training.md",
    "data.jsonl": "docs/worlds.md",
    "questions.txt": "docs/serve.md",
    "answers.jsonl": "docs/serve.md",
    "runs/trace.jsonl": "docs/training.md",
}
COMPARED = {  # how the transcripts begin that are compared
    "README.md": ["$ .venv/bin/python serve.py --ask"],
    "docs/evaluate.md": ["$ python evaluate.py --policy router"],
    "docs/serve.md": ["model: ", "nano says"],
    "docs/tools.md": ["What is the rank of trial 372?"],
}
FILE = re.compile(r"(?:^|[:,=@ ])([\w./-]+\.(?:py|toml|jsonl?|txt))(?=$|[,:= ])")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line on which it begins, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Returns the fenced blocks of all pages."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(page, line, match[1], match[2]))
    return found


def commands_of(block: Block) -> list[str]:
    """Returns the commands of a block: those of a shell block, or after "$ " of a transcript.

    Each is one line, without comment, redirection, "&" and assignments, with plain `python`.
    """
    text = block.text
    if block.language != "sh":
        text = "".join(line[2:] + "\n" for line in text.splitlines() if line.startswith("$ "))
    found, pending = [], ""
    for line in text.splitlines():
        pending += line + "\n"
        if pending.endswith("\\\n"):
            pending = pending[:-2] + " "
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation goes on
            continue
        pending = ""
        rest = " ".join(map(shlex.quote, words)).replace("'&&'", "&&")
        found += [command for part in rest.split(" && ") if (command := _plain(part))]
    assert not pending.strip(), f"{block.place}: a quotation without end"
    return found


def inline_commands() -> list[tuple[str, str]]:
    """Returns the pages and commands in backticks of prose and tables, without those with "..."."""
    found = []
    for page in PAGES:
        text = BLOCK.sub("", (ROOT / page).read_text())
        for words in re.findall(r"`((?:[A-Z_]+=\S+ )*(?:python|torchrun) [^`]+)`", text):
            if "..." not in words:
                found.append((page, _plain(" ".join(words.replace("\\|", "|").split()))))
    return found


def _plain(command: str) -> str:
    words = shlex.split(command)
    for end in ("&", "<", ">"):
        if end in words:
            words = words[: words.index(end)]
    if words and words[0] == "export":
        return ""
    while words and ASSIGNED.match(words[0]):
        del words[0]
    plain = TORCHRUN.sub("python ", shlex.join(words))
    return re.sub(r"^(\.venv/bin/)?(python3?|pip|ruff) ", lambda m: m[2][:6] + " ", plain)


FOUND = [(block, command) for block in blocks() for command in commands_of(block)]


class ParsedError(BaseException):
    """The arguments of a command are right: its work would begin now."""


def kinds(command: str) -> list[str]:
    """Returns which of the kinds a command is of."""
    run = ["run"] if command in RUN else []
    for name, table in (("not tried", NOT_TRIED), ("parsed", PARSED)):
        if any(command.startswith(begin) for begin in table):
            return run or [name]
    return run


def module_of(words: list[str]) -> tuple[str, list[str]]:
    """Returns the module that a command runs, and its arguments."""
    if words[1] == "-m":
        return words[2], words[3:]
    return words[1].removesuffix(".py").replace("/", "."), words[2:]


def call(command: str) -> int:
    """Runs a command in this process. Returns its exit status."""
    module, arguments = module_of(shlex.split(command))
    main = importlib.import_module(module).main
    sys.argv = [module, *arguments]
    return (main(arguments) if inspect.signature(main).parameters else main()) or 0


def read_arguments(command: str, monkeypatch) -> None:
    """Lets a command read its arguments, and no more."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *given):
        raise ParsedError(real(self, *given))

    def choose_run(options, words):
        raise ParsedError(options)

    command = re.sub("--resume [^ ]+", "", command.removesuffix(" ..."))  # there are no runs
    with monkeypatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(train, "choose_run", choose_run)
        patch.setattr(sys, "argv", [])
        with contextlib.suppress(ParsedError):
            call(command)
            raise AssertionError(f"{command}\n{said.getvalue()}")


def test_every_command_is_run_or_parsed_or_listed_with_a_reason(monkeypatch):
    for block, command in FOUND:
        assert kinds(command), f"{block.place}: {command}: add it to a table of {__file__}"
        if kinds(command) == ["parsed"]:
            try:
                read_arguments(command, monkeypatch)
            except Exception as error:
                raise AssertionError(f"{block.place}: {command}: {error}") from error
    commands = {command for _, command in FOUND}
    assert commands >= RUN, f"no page has {RUN - commands}"
    commands |= {command for _, command in inline_commands()}
    for begin in [*PARSED, *NOT_TRIED]:
        used = any(command.startswith(begin) for command in commands)
        assert used, f"no page has {begin}: remove it"


def test_commands_in_prose_are_parsed_and_their_tests_exist(monkeypatch):
    names = " ".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page, command in inline_commands():
        assert kinds(command), f"{page}: {command}: add it to a table of {__file__}"
        if kinds(command) == ["parsed"]:
            module, arguments = module_of(command.split())
            assert importlib.util.find_spec(module), f"{page}: {command}"
            if arguments:  # else it is no more than a name
                read_arguments(command, monkeypatch)
        elif command.startswith("python -m pytest"):
            for place in re.findall(r" (tests/[\w/.]+)", command):
                assert (ROOT / place).exists(), f"{page}: {command}"
            for word in re.findall(r"-k (\w+)", command):
                assert re.search(rf"def test_\w*{word}", names), f"{page}: {command}"


def test_files_of_the_commands_are_shipped_or_the_readers_own():
    ignored = (ROOT / ".gitignore").read_text().split()
    for block, command in FOUND:
        for name in FILE.findall(command):
            if (ROOT / name).exists():
                continue
            assert name in YOURS, f"{block.place}: {command}: {name} is not shipped"
            page = (ROOT / YOURS[name]).read_text()
            assert Path(name).name in page, f"{YOURS[name]} does not name {name}"
        for name in re.findall(r"--out (\w+)/", command):
            assert f"/{name}/" in ignored or f"{name}/" in ignored, f"{command}: git sees {name}/"


def test_every_transcript_is_compared():
    for block in blocks():
        if not block.language:
            known = COMPARED.get(block.page, [])
            listed = any(block.text.startswith(begin) for begin in known)
            assert listed, f"{block.place}: add {block.text[:60]!r} to COMPARED of {__file__}"


def plain(text: str) -> str:
    """Returns a text on one line, with masks for what is measured, and short figures."""
    text = " ".join(text.split())
    text = re.sub(r" \(measured [\d.,]+ s\)", "", text)
    text = re.sub(r"(\d+ tokens?) at [\d,]+/s", r"\1 at N/s", text)
    return re.sub(r"\d+\.\d{6,}", lambda match: f"{float(match[0]):.5f}", text)


def transcript(page: str, begin: str) -> str:
    """Returns the block of a page that begins with some words."""
    texts = [block.text for block in blocks() if block.page == page]
    (text,) = [text for text in texts if text.startswith(begin)]
    return text


def same(place: str, promised: str, printed: str) -> None:
    """Compares a transcript with what is printed now, which a failure shows whole."""
    assert plain(promised) == plain(printed), f"{place} has another transcript; now:\n{printed}"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory with the folders that commands name, but no runs."""
    for name in ("docs", "assets", "configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)


@pytest.mark.slow
def test_short_commands_run_and_print_their_transcript(elsewhere, monkeypatch, capsys):
    promised = {}
    for block, command in FOUND:
        if block.language != "sh" and command in RUN:
            promised[command] = block.text.partition("\n")[2]
    for command in sorted(RUN):
        assert call(command) == 0, command
        printed = capsys.readouterr().out
        if command not in promised:
            assert printed, command
        elif "evaluate.py" not in command:
            same(command, promised[command], printed)
        else:  # whose lines are cut
            now = [" ".join(line.split()) for line in printed.splitlines()]
            for line in promised[command].splitlines():
                begin = " ".join(line.removesuffix("...").split())
                known = any(each.startswith(begin) for each in now)
                assert known, f"docs/evaluate.md: {line}; now:\n{printed}"


def test_the_session_of_the_terminal_is_what_nano_does(sandbox):
    """Two transcripts: that of docs/serve.md, and the trace in docs/tools.md."""
    promised = transcript("docs/serve.md", "model: ")
    assert serve.read_sampling(NANO) == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    settings = RolloutSection(turn_tokens=160, context_tokens=2048)
    rollout = load_rollout(NANO, settings, serve.read_sampling(NANO), 1)
    out = io.StringIO()
    greedy = serve.sampling_in_words(serve.read_sampling(NANO))
    about = f"assets/nano, float32 on cpu, context 2048, {greedy}"
    terminal = Terminal(rollout, DeskQuestions(sandbox), about, 0, out)
    terminal.at_prompt = True
    terminal.do_model("")
    terminal.console.line(f"/help lists the commands. {serve.KEYS}")
    for line in re.findall("^> (.*)$", promised, re.M):
        out.write(f"> {line}\n")
        terminal.handle(line)
    same("docs/serve.md", promised, out.getvalue())

    trace = transcript("docs/tools.md", "What is the rank of trial 372?")
    alone = Terminal(rollout, DeskQuestions(sandbox), "", 0, io.StringIO())
    alone.handle(trace.splitlines()[0])
    begin = len(alone.console.screen.file.getvalue())
    alone.handle("/trace")
    same("docs/tools.md", trace, alone.console.screen.file.getvalue()[begin:])


@pytest.mark.slow
def test_clients_of_the_server_get_what_the_page_says():
    """Runs the Python of docs/serve.md with OpenAI's client, and its curl, against the command."""
    command = [sys.executable, "serve.py", "--http", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = re.search(r":(\d+)/v1", process.stdout.readline())[1]
            page = [block for block in blocks() if block.page == "docs/serve.md"]
            for block, following in zip(page, page[1:], strict=False):
                if block.language == "python":
                    code, out = block.text.replace(":8000", f":{port}"), io.StringIO()
                    with contextlib.redirect_stdout(out):
                        exec(code, {})
                    same(block.place, following.text, out.getvalue())
                elif "curl" in block.text and shutil.which("curl"):
                    shell = block.text.replace(":8000", f":{port}").replace("curl ", "curl -s ")
                    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
                    assert '"status":"answered"' in done.stdout, done
        finally:
            process.terminate()
    assert process.returncode == 0
