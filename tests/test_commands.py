"""The commands and transcripts of README and docs: what they promise is what happens.

A command of RUN is run whole, and a transcript that stands beside it is compared with what is
printed; measured figures are masked. Of any other the program reads its arguments, up to where its
work begins. NOT_TRIED are other programs, and those that other tests run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:python|torchrun) [^`]+)`")
RUN = {
    "python serve.py --ask 'What is the code of parcel 350? Keep it cheap.'",
    "python serve.py --ask 'What is 47 * 6?'",
    "python evaluate.py --policy router program perfect",
    "python train.py --plan --config qwen3-8b --gpus 8",
    "python train.py --plan --config qwen3-8b-qlora --gpu 4090",
    "python data_gen.py --show 5",
    "python tools.py index docs --out indexes/docs",
}
NOT_TRIED = (  # the beginnings of commands
    "python -m venv",
    "python -m pytest",
    "python docs/",
    "python -m nanorchestra.report.page",
    "pip install",
    "torchrun --max-restarts",
    "ruff",
    "bash .ci/run",
    "hf download",
    "tau2 submit",
    "curl",
)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns the language and text of each fenced block of a page."""
    return BLOCK.findall(page.read_text())


def plain_command(command: str) -> str:
    """Returns a command without redirections, "&", assignments and torchrun, with plain python."""
    words = shlex.split(command, comments=True)
    for end in ("&", "<", ">"):
        if end in words:
            words = words[: words.index(end)]
    while words and re.match("[A-Z_]+=", words[0]):
        del words[0]
    plain = re.sub(r"^torchrun --nproc-per-node \d+ ", "python ", shlex.join(words))
    return re.sub(r"^\.venv/bin/|(?<=^python)3(?= )", "", plain)


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Returns the commands of a page, each with its transcript: "" if there is none.

    They stand in shell blocks, after "$ " in other ones, and in backticks if without "...".
    """
    found = []
    for language, text in blocks(page):
        if language == "sh":
            lines, pending = text.replace("\\\n", " ").splitlines(), ""
            for line in lines:
                pending += line + "\n"
                with contextlib.suppress(ValueError):  # a quotation goes on
                    shlex.split(pending, comments=True)
                    found += [(part, "") for part in pending.split(" && ")]
                    pending = ""
        elif text.startswith("$ "):
            command, _, transcript = text[2:].partition("\n")
            found.append((command, transcript))
    for words in INLINE.findall(BLOCK.sub("", page.read_text())):
        if "..." not in words:
            found.append((words.replace("\\|", "|"), ""))
    plain = [(plain_command(command), transcript) for command, transcript in found]
    return [pair for pair in plain if pair[0] and not pair[0].startswith("export ")]


class ParsedError(BaseException):
    """The arguments of a command are right: its work would begin now."""


def call(command: str) -> int:
    """Runs a command in this process. Returns its exit status."""
    _, program, *arguments = shlex.split(command)
    if program == "-m":
        program, *arguments = arguments
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    sys.argv = [program, *arguments]
    given = [arguments] if inspect.signature(module.main).parameters else []
    return module.main(*given) or 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_has_arguments_that_its_program_reads(page, monkeypatch, capsys):
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *given):
        raise ParsedError(real(self, *given))

    def choose_run(options):
        raise ParsedError(options)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(train, "choose_run", choose_run)
    monkeypatch.setattr(sys, "argv", [])
    for command, _ in commands_of(page):
        for place in re.findall(r" (tests/[\w/.]+)", command):
            assert (ROOT / place).exists(), command
        words = shlex.split(command)
        if command in RUN or command.startswith(NOT_TRIED) or len(words) < 3:
            continue  # of two words: the name of a program, or nothing to read
        command = re.sub("--resume [^ ]+", "", command.removesuffix(" ..."))  # there are no runs
        try:
            call(command)
        except ParsedError:
            continue
        raise AssertionError(f"{command}\n{capsys.readouterr().err}")


def plain(text: str) -> str:
    """Returns a text on one line, with masks for what is measured, and short figures."""
    text = " ".join(text.split())
    text = re.sub(r" \(measured [\d.,]+ s\)", "", text)
    text = re.sub(r"(\d+ tokens?) at [\d,]+/s", r"\1 at N/s", text)
    return re.sub(r"\d+\.\d{6,}", lambda match: f"{float(match[0]):.5f}", text)


@pytest.mark.slow
def test_short_commands_run_and_print_their_transcript(tmp_path, monkeypatch, capsys):
    for name in ("docs", "assets", "configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    promised = dict.fromkeys(RUN, "")
    for page in PAGES:
        promised |= {pair[0]: pair[1] for pair in commands_of(page) if pair[1]}
    assert promised.keys() == RUN, "a transcript of a command that is not run"
    for command, transcript in promised.items():
        assert call(command) == 0, command
        printed = plain(capsys.readouterr().out)
        assert printed
        # lines of a wide table are cut
        for part in map(
            plain, transcript.split("...\n") if "evaluate" in command else [transcript]
        ):
            assert part in printed, f"{command} has another transcript; now:\n{printed}"


@pytest.mark.slow
def test_clients_of_the_server_get_what_the_page_says():
    """Runs the Python of docs/serve.md with OpenAI's client, and its curl, against the command."""
    command = [sys.executable, "serve.py", "--http", "--port", "0"]
    page = blocks(ROOT / "docs/serve.md")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = re.search(r":(\d+)/v1", process.stdout.readline())[1]
            for (language, text), (_, following) in zip(page, page[1:], strict=False):
                text = text.replace(":8000", f":{port}")
                if language == "python":
                    out = io.StringIO()
                    with contextlib.redirect_stdout(out):
                        exec(text, {})
                    assert plain(following) == plain(out.getvalue()), f"now:\n{out.getvalue()}"
                elif "curl" in text and shutil.which("curl"):
                    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
                    assert '"status":"answered"' in done.stdout, done
        finally:
            process.terminate()
    assert process.returncode == 0
