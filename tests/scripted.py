"""An engine that says what a test has written, and a tool that repeats its argument."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from types import SimpleNamespace

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.tool import Allowance, RefusedError, Tool, refused
from nanorchestra.config import RolloutSection
from nanorchestra.records import Preference, Price, Task, ToolResult

SETTINGS = RolloutSection(turn_tokens=512, context_tokens=2048)
ANSWER = "<think>\nt\n</think>\n\n42<|im_end|>"


def call(text="hi", name="echo"):
    """A turn that calls the tool `name`."""
    arguments = f'{{"name": "{name}", "arguments": {{"text": "{text}"}}}}'
    return f"<think>\nt\n</think>\n\n<tool_call>\n{arguments}\n</tool_call><|im_end|>"


def both(first, second):
    """A turn that makes the calls of two turns."""
    return first.replace("<|im_end|>", "\n") + second.split("\n\n")[1]


def execute(env, call):
    """The result of a ToolCall without limits."""
    try:
        return asyncio.run(env.prepare(call, Allowance()).run())
    except RefusedError as error:
        return refused(str(error))


class ScriptedEngine:
    """Each session says the next of its script's lines each turn; every turn takes one step.

    A line is cut to the budget of `params`, if these are (seed, budget). `params` holds what the
    turns were asked with, `sessions` what was opened.
    """

    max_context = 2048

    def __init__(self, tokenizer, scripts, finish="stop"):
        self.tokenizer, self.scripts, self.finish = tokenizer, iter(scripts), finish
        self.numbers, self.queue = itertools.count(), []
        self.params, self.sessions = [], []

    def session(self, ids):
        self.sessions.append(ScriptedSession(self, list(ids), iter(next(self.scripts))))
        return self.sessions[-1]

    def step(self):
        done, self.queue = self.queue, []
        return done


class ScriptedSession:
    def __init__(self, engine, ids, script):
        self.engine, self.prompt, self.script, self.closed = engine, ids, script, False

    def append(self, ids):
        pass

    def submit(self, params, on_token=None):
        whole = self.engine.tokenizer.backend.encode(next(self.script)).ids
        ids = whole[: params[1]] if params else whole
        if on_token:
            for token in ids:
                on_token(token, -0.5)
        completion = SimpleNamespace(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            text="",
            finish_reason=self.engine.finish if ids == whole else "length",
            weight_versions=[3] * len(ids),
        )
        self.engine.queue.append(
            SimpleNamespace(id=next(self.engine.numbers), completed=lambda: completion)
        )
        self.engine.params.append(params)
        return self.engine.queue[-1]

    def close(self):
        self.closed = True


@dataclass
class EchoTool(Tool):
    """Repeats its text, or returns `result`, for 0.25 dollars and 2 seconds."""

    name: str = "echo"
    kind: str = "echo"
    blocking: bool = False
    result: ToolResult | None = None
    seconds: float = 0.0
    description = "says it again"
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }

    def call(self, arguments):
        time.sleep(self.seconds)
        if arguments["text"] == "raise":
            raise RuntimeError("broken tool")
        return self.result or ToolResult(arguments["text"], 0.25, 2.0)


def echoing(tool=None, number=0):
    """The environment of a question whose answer is 42."""
    task = Task(f"t{number}", "question?", Preference("be cheap"))
    return ToolEnvironment(task, [tool or EchoTool()], lambda answer: float(answer == "42"))


def play(tokenizer, *scripts, envs=None, finish="stop", settings=SETTINGS, on_event=None, **more):
    """(trajectories, engine) of an attempt a script; with rebuilt context, of one attempt.

    `params` of the engine are (seed, budget).
    """
    envs = envs or [echoing(number=i) for i in range(len(scripts))]
    if "answer" in envs[0].kinds.values():  # a turn has a session, in which the script goes on
        scripts = itertools.repeat(iter(scripts[0]))
    engine = ScriptedEngine(tokenizer, scripts, finish)
    params = lambda seed, budget: (seed, budget)  # noqa: E731
    rollout = Rollout(engine, tokenizer, params, settings, Price(1.0, 2.0), **more)
    return rollout.run(envs, list(range(len(envs))), on_event=on_event), engine
