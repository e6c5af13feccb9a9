"""An attempt as a person sees it in a terminal: what is thought, called, observed and answered, as it happens, and the trace afterwards."""

from __future__ import annotations

import json
import os
from typing import Any

from nanorchestra.engine.stream import TurnStream
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import ParsedTurn, Trajectory, Turn
from nanorchestra.report.run import number

SHOWN_CHARS = 1000  # of one observation


class Console:
    """Labelled lines, coloured on a terminal, plain in a pipe. Control characters of others never reach the terminal."""

    STYLES = {"task": "2", "think": "2", "call": "36", "result": "33", "answer": "1", "cost": "2"}
    UNSAFE = dict.fromkeys(
        [*range(9), *range(11, 32), *range(127, 160)]
    )  # all but tab and line feed

    def __init__(self, stream):
        self.stream = stream
        self.colour = (
            stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        )
        self._open = ""  # the label of the line that is being written

    def say(self, label: str, text: str) -> None:
        """Goes on with the line of `label`, or begins it."""
        if label != self._open:
            self.end()
            self.stream.write(f"  {label:7}")
            self._open = label
        text = text.translate(self.UNSAFE).replace("\n", "\n" + " " * 9)
        self.stream.write(f"\033[{self.STYLES[label]}m{text}\033[0m" if self.colour else text)
        self.stream.flush()

    def end(self) -> None:
        if self._open:
            self.stream.write("\n")
            self._open = ""

    def line(self, text: str = "") -> None:
        self.end()
        self.stream.write(text.translate(self.UNSAFE) + "\n")
        self.stream.flush()


class Stream:
    """The events of one attempt (`Rollout.run`'s on_event) as lines on the console, as they come."""

    def __init__(self, console: Console, tokenizer: Tokenizer):
        self.console, self.tokenizer = console, tokenizer
        self._begin()

    def __call__(self, kind: str, payload: Any) -> None:
        {"token": self._token, "turn": self._turn, "results": self._results}[kind](payload)

    def _begin(self) -> None:
        self._turn_stream, self._calls = TurnStream(self.tokenizer), 0

    def _token(self, token: int) -> None:
        self._show(self._turn_stream.feed(token))

    def _turn(self, turn: ParsedTurn) -> None:
        deltas, _ = self._turn_stream.finish()
        self._show(deltas)
        self._begin()

    def _show(self, deltas: list[tuple[str, str]]) -> None:
        for kind, text in deltas:
            if kind == "tool_call":
                call = self._turn_stream.calls[self._calls]
                self._calls += 1
                text = (
                    call.raw
                    if call.error
                    else f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}"
                )
                self.console.end()
            self.console.say(
                {"reasoning": "think", "content": "answer", "tool_call": "call"}[kind], text
            )

    def _results(self, turn: Turn) -> None:
        for call, result in zip(turn.calls, turn.results):
            text, more = result.content[:SHOWN_CHARS], len(result.content) - SHOWN_CHARS
            self.console.end()
            self.console.say(
                "result",
                f"{text}{f' [{more} more characters]' if more > 0 else ''}   ({call.name or 'no tool'}: {_paid(result)})",
            )


def show_trace(console: Console, tokenizer: Tokenizer, trajectory: Trajectory) -> None:
    """The ids of a trajectory and their text, part by part: "|" what was given, "+" what was sampled; the price of each call and of all."""

    def part(what: str, start: int, end: int) -> None:
        if start < end:
            ids, mark = trajectory.ids[start:end], "  + " if trajectory.sampled[start] else "  | "
            text = tokenizer.decode(ids).replace("\n", "\n" + mark)
            console.line(f"ids {start}:{end} {what}\n{mark}{text}\n{mark}{' '.join(map(str, ids))}")

    at = 0
    for k, turn in enumerate(trajectory.turns, 1):
        part("given", at, turn.start)
        part(f"sampled, turn {k} ({turn.finish_reason})", turn.start, turn.end)
        for call, result in zip(turn.calls, turn.results):
            console.line(
                f"  call {call.name or call.raw}: {'error, ' if result.error else ''}{_paid(result)}"
            )
        at = turn.end
    part("given", at, len(trajectory.ids))
    sampled = sum(trajectory.sampled)
    console.line(
        f"{trajectory.status}: {sampled} ids sampled, {len(trajectory.ids) - sampled} given; {bill(trajectory)}"
    )


def bill(trajectory: Trajectory) -> str:
    """Cost, latency, calls and turns in a few words."""
    calls, turns = sum(trajectory.calls.values()), len(trajectory.turns)
    return (
        f"{_paid(trajectory)}, {calls} call{'s' * (calls != 1)}, {turns} turn{'s' * (turns != 1)}"
    )


def _paid(spent: Any) -> str:
    return f"${number(spent.cost_usd)}, {spent.latency_s:.1f} s"
