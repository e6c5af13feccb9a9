"""Shows an attempt in the terminal: thoughts, calls and observations as they happen."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TextIO

from nanorchestra.records import Trajectory
from nanorchestra.report.run import number

SHOWN_CHARS = 1000  # of one observation
STYLES = {"think": "2", "answer": "1"}
UNSAFE = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tab and line feed


class Console:
    """Labelled lines, in colour on a terminal. No control character of a text reaches it.

    `on_event` shows the events of an attempt (`Rollout.run`). `open_turn()` returns what splits a
    turn's ids into reasoning and content, as engine.stream.TurnStream does.
    """

    def __init__(self, stream: TextIO, open_turn: Callable[[], Any]):
        self.stream, self.open_turn = stream, open_turn
        self.turn, self._label = open_turn(), ""
        self.colour = stream.isatty() and "NO_COLOR" not in os.environ

    def say(self, label: str, text: str) -> None:
        """Continues the line of `label`, or begins one."""
        if label != self._label:
            self.end()
            self.stream.write(f"  {label:7}")
            self._label = label
        text = text.translate(UNSAFE).replace("\n", "\n" + " " * 9)
        if self.colour and label in STYLES:
            text = f"\033[{STYLES[label]}m{text}\033[0m"
        self.stream.write(text)
        self.stream.flush()

    def end(self) -> None:
        """Ends the line that was begun."""
        if self._label:
            self.stream.write("\n")
        self._label = ""

    def line(self, text: str) -> None:
        """Writes a line of its own."""
        self.end()
        print(text.translate(UNSAFE), file=self.stream, flush=True)

    def on_event(self, kind: str, payload: Any) -> None:
        """Shows an event: a sampled id, the end of a turn, or the results of its calls."""
        if kind == "results":
            for call, result in zip(payload.calls, payload.results, strict=True):
                text = result.content[:SHOWN_CHARS]
                self.line(f"  result {text}   ({call.name or 'no tool'}: {bill(result)})")
            return
        for part, text in self.turn.feed(payload) if kind == "token" else self.turn.finish()[0]:
            if part == "tool_call":
                self.line(f"  call   {text}")
            else:
                self.say("think" if part == "reasoning" else "answer", text)
        if kind == "turn":
            self.turn = self.open_turn()


def bill(spent: Any) -> str:
    """Returns the cost and the latency of a trajectory or a result."""
    return f"${number(spent.cost_usd)}, {spent.latency_s:.1f} s"


def summary(trajectory: Trajectory) -> str:
    """Returns cost, latency, calls and turns in a few words."""
    calls, turns = sum(trajectory.calls.values()), len(trajectory.turns)
    return f"{bill(trajectory)}, calls: {calls}, turns: {turns}"
