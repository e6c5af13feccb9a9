"""An engine that says what a test has written, and a tool that repeats its argument."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from nanorchestra.records import ToolResult


@dataclass
class Completion:
    token_ids: list
    logprobs: list
    finish_reason: str
    weight_versions: list


@dataclass
class Request:
    id: int
    completion: Completion


class ScriptedEngine:
    """Says the next line of its session's script each turn; finishes every submitted request in one step."""

    def __init__(self, tokenizer, scripts, finish="stop"):
        self.tokenizer, self.scripts, self.finish = tokenizer, iter(scripts), finish
        self.numbers, self.queue, self.order = itertools.count(), [], []

    def session(self, ids):
        return ScriptedSession(self, list(ids), iter(next(self.scripts)))

    def step(self):
        done, self.queue = self.queue, []
        return done


class ScriptedSession:
    def __init__(self, engine, ids, script):
        self.engine, self.ids, self.script, self.closed = engine, ids, script, False

    def append(self, ids):
        self.ids += ids

    def submit(self, params, on_token=None):
        ids = self.engine.tokenizer.encode(next(self.script), special=True)
        self.ids += ids
        request = Request(
            next(self.engine.numbers),
            Completion(ids, [-0.5] * len(ids), self.engine.finish, [3] * len(ids)),
        )
        self.engine.queue.append(request)
        self.engine.order.append(params)
        return request

    def close(self):
        self.closed = True


@dataclass
class EchoTool:
    name: str = "echo"
    kind: str = "echo"
    description: str = "says it again"
    parameters: dict = field(
        default_factory=lambda: {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        }
    )
    blocking: bool = False
    result: ToolResult | None = None
    seconds: float = 0.0

    def call(self, arguments):
        time.sleep(self.seconds)
        if arguments["text"] == "raise":
            raise RuntimeError("broken tool")
        return self.result or ToolResult(arguments["text"], 0.25, 2.0)


def call(text="hi", name="echo"):
    return f'<think>\nt\n</think>\n\n<tool_call>\n{{"name": "{name}", "arguments": {{"text": "{text}"}}}}\n</tool_call><|im_end|>'


ANSWER = "<think>\nt\n</think>\n\n42<|im_end|>"
