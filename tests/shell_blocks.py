"""Reads the shell commands and the transcripts of the pages."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
ASSIGNED = re.compile(r"[A-Z_]+=")
TORCHRUN = re.compile(r"torchrun --nproc-per-node \d+ ")


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
