"""Shows an attempt in the terminal as it happens: thoughts, calls, observations, answer, bill."""

from __future__ import annotations

import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from wcwidth import wcswidth

from nanorchestra.records import Trajectory
from nanorchestra.report.run import number

LABELS = {"reasoning": "think", "content": "answer", "tool_call": "call"}
STYLES = {"think": "2", "call": "36", "error": "31", "answer": "1", "cost": "2"}
INDENT = 9  # cells before the text of a label
SHOWN_CHARS = 300  # of one observation
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# A line may break between these: a line feed, space, a character of a wide script, a word.
WIDE = "\u2e80-\uffef\U0001f000-\U0003ffff"
PIECES = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")
QUIET = 0.3  # seconds without output until the spinner shows
SPINNER = 10  # cells that it needs


class Console:
    """Labelled lines that break between words, in colour on a terminal.

    No control character of a text reaches it. `on_event` shows the events of an attempt
    (`Rollout.run`). `open_turn()` returns what splits a turn's ids into reasoning and content, as
    engine.stream.TurnStream does. With `folded`, reasoning is cut to one line. Of the last attempt
    there are the `trajectory`, and `sampling`, the seconds of its turns.
    """

    def __init__(self, stream: TextIO, open_turn: Callable[[], Any]):
        self.stream, self.open_turn, self.live = stream, open_turn, stream.isatty()
        self.trajectory, self.folded, self._rest = None, False, threading.Event()
        self._label, self._held, self._column = "", "", 0
        self._written = 0.0

    def say(self, label: str, text: str, whole: bool = False) -> None:
        """Continues the line of `label`, or begins one. Its last word waits, unless `whole`."""
        if label != self._label:
            self.end()
            self._put([f"  {label:7}"])
            self._label = label
        pieces = PIECES.findall(self._held + CONTROL.sub("", text).expandtabs(4))
        waits = pieces and not whole and not pieces[-1].isspace()
        self._held = pieces.pop() if waits else ""
        self._put(pieces)

    def end(self) -> None:
        """Ends the line that was begun."""
        self.say(self._label, "", whole=True)
        if self._column:
            self._write("\n")
        self._label, self._column = "", 0

    def line(self, text: str) -> None:
        """Writes lines of their own."""
        self.end()
        self.say("", text, whole=True)
        self.end()

    def on_event(self, kind: str, payload: Any) -> None:
        """Shows an event: the start, a sampled id, the end of a turn, the results of its calls."""
        now = time.monotonic()
        if kind in ("token", "turn"):
            deltas = self.turn.feed(payload) if kind == "token" else self.turn.finish()[0]
            for part, text in deltas:
                if part == "tool_call":
                    self.end()
                self.say(LABELS[part], text, whole=part == "tool_call")
        if kind == "token":
            return
        if kind == "turn":
            self.sampling += now - self._begun
        elif kind == "start":
            self.trajectory, self.sampling, self._rest = payload, 0.0, threading.Event()
            if self.live:
                threading.Thread(target=self._spin, args=(self._rest,), daemon=True).start()
        else:
            for call, result in zip(payload.calls, payload.results, strict=True):
                spent = bill(result.cost_usd, result.latency_s)
                self.end()
                self.say(
                    "error" if result.error else "result",
                    f"{result.content[:SHOWN_CHARS]}   ({call.name or 'no tool'}: {spent})",
                )
            self.end()
        self.turn, self._begun = self.open_turn(), now

    def rest(self) -> None:
        """Ends the line and the spinner of an attempt."""
        self._rest.set()
        self.end()

    def _put(self, pieces: list[str]) -> None:
        """Writes pieces of text, and breaks the line before one that does not fit."""
        # The last cell stays empty; without a terminal lines have no end.
        width = shutil.get_terminal_size().columns - 1 if self.live else math.inf
        folds = self.folded and self._label == "think"
        indent, out = INDENT * bool(self._label), ""
        for piece in pieces:
            self._column += (cells := max(0, wcswidth(piece)))
            if piece == "\n" or self._column > width - SPINNER * folds:
                if folds:
                    self._column = math.inf
                    continue
                out, self._column = f"{out.rstrip(' ')}\n{' ' * indent}", indent
                if piece.isspace():
                    continue
                self._column += cells
            out += piece
        style = STYLES.get(self._label) if self.live and "NO_COLOR" not in os.environ else None
        if out:
            self._write(f"\033[{style}m{out}\033[0m" if style else out)

    def _write(self, text: str) -> None:
        self.stream.write("\033[K" * self.live + text)  # erases the spinner
        self.stream.flush()
        self._written = time.monotonic()

    def _spin(self, rest: threading.Event) -> None:
        """Shows the seconds since the last output, behind the cursor, until `rest`."""
        while not rest.wait(0.1):
            idle = time.monotonic() - self._written
            room = shutil.get_terminal_size().columns - self._column
            if idle > QUIET and (room > SPINNER or room < 0):
                frame = "|/-\\"[int(idle * 8) % 4]
                self.stream.write(f"\0337  {frame} {idle:.0f} s\033[K\0338")
                self.stream.flush()


def bill(usd: float, seconds: float) -> str:
    """Returns a cost and a duration in words."""
    return f"${number(usd)}, {seconds:.1f} s"


def footer(t: Trajectory, seconds: float, sampling: float) -> str:
    """Returns what an attempt has used, by tool; `seconds` and those of sampling were measured."""
    tokens, tools = sum(t.sampled), {}
    for turn in t.turns:
        for call, result in zip(turn.calls, turn.results, strict=False):
            if result.refused:
                continue
            name = result.alias or call.name
            count, usd, spent = tools.get(name, (0, 0.0, 0.0))
            tools[name] = count + 1, usd + result.cost_usd, spent + result.latency_s
    lines = [
        f"{bill(t.cost_usd, seconds)}, {len(t.turns)} turns, "
        f"{tokens} tokens at {tokens / max(sampling, 1e-9):.0f}/s"
    ]
    lines += [f"{name} ({n}): {bill(usd, spent)}" for name, (n, usd, spent) in tools.items()]
    return "\n".join(lines)
