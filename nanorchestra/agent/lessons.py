"""A demonstrated turn, as the teacher of a world gives it."""

from dataclasses import dataclass

from nanorchestra.records import ToolCall, ToolResult


@dataclass(frozen=True)
class Lesson:
    """One demonstrated turn: a thought, then a call or a message.

    `result` is the answer of the tool or of the user; None after the last message.
    """

    thought: str
    content: str = ""
    call: ToolCall | None = None
    result: ToolResult | None = None
