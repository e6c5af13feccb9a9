"""Shows an attempt in the terminal as it happens: thoughts, calls, observations, answer, bill."""

import re
import time
from collections import Counter
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.text import Text

from nanorchestra.records import Trajectory
from nanorchestra.units import bill

LABELS = {"reasoning": "think", "content": "answer", "tool_call": "call"}
STYLES = {"think": "dim", "call": "cyan", "error": "red", "answer": "bold", "cost": "dim"}
INDENT = 9  # cells before the text of a label
SHOWN_CHARS = 300  # of one observation
REASON_CHARS = 100  # of why a call was refused, in the bill
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
QUIET = 0.3  # seconds without output until the spinner shows


class Console:
    """Labelled lines that break between words, in colour on a terminal.

    What a policy says is an "answer", or "text" if it goes on to call a tool or is cut.
    No control character of a text reaches it. `on_event` shows the events of an attempt
    (`Rollout.run`). With `folded`, reasoning is cut to one line. Of the last attempt there are the
    `trajectory`, and `sampling`, the seconds of its turns.
    """

    def __init__(self, stream: TextIO):
        live = stream.isatty()  # otherwise lines have no end
        self.screen = rich.console.Console(
            file=stream, force_terminal=live, width=None if live else 1 << 20, highlight=False
        )
        self.trajectory, self.folded, self.live = None, False, Live()
        self._label = self._text = ""
        self._called = False  # in this turn

    def say(self, label: str, text: str) -> None:
        """Continues the text of `label`, or begins one on a line of its own."""
        if label != self._label:
            self.end()
        self._label, self._written = label, time.monotonic()
        self._text += CONTROL.sub("", text)

    def end(self) -> None:
        """Ends the text that was begun."""
        if self._text:
            self.screen.print(self._rows())
        self._label = self._text = ""

    def line(self, text: str) -> None:
        """Writes lines of their own."""
        self.end()
        self.say("", text)
        self.end()

    def on_event(self, kind: str, payload: Any) -> None:
        """Shows an event: the start, parts of a turn, its end, the results of its calls."""
        for part, text in payload if kind in ("text", "turn") else ():
            if part == "tool_call":
                self._end_unanswered()
                self._called = True
            self.say(LABELS[part], text)
        if kind == "text":
            return
        if kind == "turn":
            if self._called or self.trajectory.turns[-1].finish_reason != "stop":
                self._end_unanswered()
            self._called = False
        self.end()
        now = time.monotonic()
        if kind == "turn":
            self.sampling += now - self._begun
        elif kind == "start":
            self.trajectory, self.sampling, self._written = payload, 0.0, now
            self.live = Live(get_renderable=self._pending, console=self.screen, transient=True)
            self.live.start()
        else:
            for call, result in zip(payload.calls, payload.results, strict=False):
                spent = bill(result.cost_usd, result.latency_s)
                self.say(
                    "error" if result.error else "result",
                    f"{result.content[:SHOWN_CHARS]}   ({call.name or 'no tool'}: {spent})",
                )
                self.end()
        self._begun = now

    def rest(self) -> None:
        """Ends the line and the spinner of an attempt, also one that was stopped in a turn."""
        self._end_unanswered()
        self._called = False
        self.live.stop()

    def _end_unanswered(self):
        """Ends the text that was begun, which is no answer."""
        if self._label == "answer":
            self._label = "text"
        self.end()

    def _rows(self):
        """The text that was begun, in rows of which the first has the label. Folded, it is one."""
        indent = INDENT * bool(self._label)
        text = Text(self._text.rstrip("\n"), STYLES.get(self._label, ""))
        rows = [*text.wrap(self.screen, self.screen.width - indent)]
        if self.folded and self._label == "think":
            del rows[1:]
        head = f"  {self._label:7}" if indent else ""
        return Text(head).append_text(Text("\n" + " " * indent).join(rows))

    def _pending(self):
        """What stands below: the end of the text that was begun, and a spinner."""
        rows = self._rows().split("\n")[2 - self.screen.height :]
        if (idle := time.monotonic() - self._written) > QUIET:
            frame = "|/-\\"[int(idle * 8) % 4]
            rows[-1].append(f"  {frame} {idle:.0f} s")
        return Text("\n").join(rows)


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: "1 turn", "2 turns"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def footer(t: Trajectory, duration: float, sampling: float) -> str:
    """Returns what an attempt has used, by tool, and what it was refused, with the last reason.

    `duration` and `sampling` are measured seconds.
    """
    tokens, usd, spent = sum(t.sampled), Counter(), Counter()
    refusals, reasons = Counter(), {}
    for turn in t.turns:
        for call, result in zip(turn.calls, turn.results, strict=False):
            name = result.alias or call.name
            limit = f"Error: refused {name}: "
            if result.content.startswith(limit):  # by a limit or a ban of the user
                refusals[name] += 1
                reasons[name] = result.content.removeprefix(limit)[:REASON_CHARS]
            usd[name] += result.cost_usd
            spent[name] += result.latency_s
    text = f"{bill(t.cost_usd, t.latency_s, duration)}, {counted(len(t.turns), 'turn')}"
    if tokens and None not in t.logprobs:  # of an endpoint, whose tokens are not these
        text += f", {counted(tokens, 'token')}"
        if sampling:  # an interrupted turn has no time of its own
            text += f" at {tokens / sampling:.0f}/s"
    for name, count in t.calls.items():
        text += f"\n{name} ({count}): {bill(usd[name], spent[name])}"
    for name, count in refusals.items():
        text += f"\n{name} ({count} refused): {reasons[name]}"
    return text
