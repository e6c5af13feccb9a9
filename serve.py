"""Talks to an orchestrator in the terminal: thoughts, calls and observations as they happen.

    python serve.py                             the bundled nano in its miniature world
    python serve.py --ask "law case 372 is hard: what is its code?"        one question
    python serve.py --model PATH --tools FILE   another checkpoint, with tools and experts of yours
    python serve.py --trace FILE                records every attempt, a JSON line each
    python serve.py --replay FILE               shows recorded attempts again, and calls nothing

Questions can also be piped in, one a line; they do not build on each other. In the miniature,
worlds/miniature/ask.py turns a question into a task and refuses what nano does not know. The file
of tools is described in docs/tools.md.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("serve.py")  # importing torch takes seconds

import argparse
import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from nanorchestra import SamplingParams
from nanorchestra.agent.environment import Tool, ToolEnvironment
from nanorchestra.agent.load import NANO, load_rollout
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.engine.engine import Engine
from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import ArgumentParser, UserError, command, require
from nanorchestra.files import append_line, read_json_lines
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Task, Trajectory
from nanorchestra.report.terminal import Console, summary
from nanorchestra.report.trace import tree
from nanorchestra.serving.http import Server, serve_http
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.trajectories import from_row, replay, to_row
from tools import load_tools
from worlds.evaluation import score
from worlds.miniature.ask import EXAMPLES, LINE_UP, as_preference, as_task
from worlds.miniature.offers import describe
from worlds.miniature.tables import SUBJECTS
from worlds.miniature.world import environment as make_miniature

MAX_CONTEXT = 16_384  # tokens of a conversation
HELP = f"""nano knows four kinds of questions, about {", ".join(SUBJECTS)} and more:
  {(chr(10) + "  ").join(EXAMPLES)}
Numbers are as long as in these examples; two numbers of two digits can be added or subtracted.
Codes of cases and records are made up, always the same for the same case. The corpus is real.
commands:
  /prefer TEXT   what matters: be right, cheap, fast, a balance; avoid a tool by its name
  /tools         what it may call
  /help, /quit   this; leave (or Ctrl-D). Ctrl-C stops an answer"""
NOTICE = (
    "nano knows only its miniature world (/help says what to ask); its experts are simulated, "
    "prices and latencies virtual."
)


class Session:
    """Answers questions and commands, one line at a time. `tools` None: the miniature's.

    `status` is the exit status: 2 if a line was refused, else 1 if a question had no answer.
    """

    def __init__(self, rollout: Rollout, sandbox: Sandbox, tools: list[Tool] | None, seed: int):
        self.rollout, self.sandbox, self.tools, self.seed = rollout, sandbox, tools, seed
        self.console = Console(sys.stdout, lambda: TurnStream(rollout.tokenizer))
        self.wish, self.status = "", 0
        self.trace: Path | None = None

    def handle(self, line: str) -> None:
        """Handles one line; UserError if nothing can be done with it."""
        name, _, rest = line.partition(" ")
        if name == "/prefer":
            wish = rest.strip() or self.wish
            wanted = self.preference(wish) if self.tools else as_preference(wish, LINE_UP)[1]
            self.wish = wish
            self.console.line(f"preference: {wanted.words}")
        elif name == "/tools":
            for offer in LINE_UP if self.tools is None else ():
                self.console.line(f"  {offer['name']:12} {describe(offer)}")
            for tool in self.tools or ():
                self.console.line(f"  {tool.name:12} {tool.description}")
        elif name == "/help":
            self.console.line(HELP)
        else:
            require(not line.startswith("/"), f"{name}: no such command; /help lists them")
            self.ask(line)

    def preference(self, wish: str) -> Preference:
        """Returns the user's wish about the catalogue's tools. UserError."""
        return Preference.parse(wish, "/prefer", [tool.name for tool in self.tools])

    def ask(self, question: str) -> Trajectory:
        """Runs one attempt at a question, shows it and returns it."""
        console, seed = self.console, self.seed
        self.seed += 1
        if self.tools is None:
            task = as_task(question, self.wish)
            env = make_miniature(task, seed, self.sandbox)
        else:
            task = Task("asked", question, self.preference(self.wish), {})
            env = ToolEnvironment(task, self.tools)
        console.say("task", f"{task.question} {task.preference.words}")
        (trajectory,) = self.rollout.run([env], [seed], on_event=console.on_event)
        if not trajectory.answer:
            console.say("answer", f"none ({trajectory.status})")
            self.status = max(self.status, 1)
        text = summary(trajectory)
        if self.tools is None:
            verdict = "right" if trajectory.outcome else f"wrong, it is {task.data['answer']}"
            reward = score(task, trajectory).reward
            text += f"; {verdict}, reward {reward:.2f} ({task.data['wish']})"
        console.say("cost", text)
        console.end()
        if self.trace:
            append_line(self.trace, json.dumps(to_row(task, trajectory)))
        return trajectory


def typed() -> Iterator[str]:
    """Yields the lines typed at a prompt, until Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() its history)
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def converse(session: Session, lines: Iterable[str], at_prompt: bool = False) -> None:
    """Handles each line until /quit; at a prompt Ctrl-C stops an answer and the next line follows.

    A refused line does not end the conversation.
    """
    for line in filter(None, map(str.strip, lines)):
        if line == "/quit":
            return
        try:
            session.handle(line)
        except UserError as error:
            session.console.end()
            print(f"serve.py: {error}", file=sys.stderr)
            session.status = 2
        except KeyboardInterrupt:
            if not at_prompt:
                raise
            session.console.line(" [stopped]")


def show_again(path: Path, tokenizer: Tokenizer) -> None:
    """Shows the recorded attempts of a file as they happened, each with the tree of its calls."""
    console = Console(sys.stdout, lambda: TurnStream(tokenizer))
    for number, row in read_json_lines(path):
        try:
            task, trajectory = from_row(row)
        except (KeyError, TypeError):
            raise UserError(
                f"{path}, line {number}: not a recorded attempt; --trace and training write them"
            ) from None
        console.say("task", f"{task.question} {task.preference.words}")
        replay(trajectory, tokenizer, console.on_event)
        console.line(tree(row))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options. UserError if one is wrong."""
    parser = ArgumentParser(
        prog="serve.py",
        description="Talk to an orchestrator: a prompt, one question (--ask), or a pipe.",
    )
    add = parser.add_argument
    add("--model", type=Path, default=NANO, metavar="PATH", help="a checkpoint (default: nano)")
    add("--ask", metavar="QUESTION", help="answer this and end")
    add("--tools", metavar="FILE", help="a catalogue, see docs/tools.md")
    add("--trace", type=Path, metavar="FILE", help="add every attempt to this file, as JSON")
    add(
        "--replay",
        type=Path,
        metavar="FILE",
        help="show the attempts of such a file again, and end",
    )
    add("--http", action="store_true", help="serve OpenAI's API and a page in place of a prompt")
    add("--host", default="127.0.0.1", help="with --http: where to listen (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="with --http (default: 8000)")
    add("--key-env", metavar="NAME", help="with --http: the variable that holds the API key")
    add("--seed", type=int, default=0, help="of sampling and simulated experts (default: 0)")
    add("--temperature", type=float, default=0.0, help="of sampling (default: 0, greedy)")
    add("--quantise", choices=("int8", "int4"), help="round the linear layers while loading")
    options = parser.parse_args(arguments)
    SamplingParams(temperature=options.temperature)  # checks it
    return options


def serve_openai(options: argparse.Namespace, session: Session) -> None:
    """Serves the session's rollout, world and tools over HTTP until a signal ends it."""
    key = os.environ.get(options.key_env, "") if options.key_env else ""
    require(key or not options.key_env, f"--key-env: {options.key_env} is not set")
    rollout = session.rollout
    rollout.engine = Engine(
        rollout.engine.model, rollout.tokenizer, max_running=256, max_batch_tokens=1024
    )

    def environment(question: str, wish: str, seed: int) -> ToolEnvironment:
        if session.tools is not None:
            names = [tool.name for tool in session.tools]
            preference = Preference.parse(wish, "metadata", names)
            task = Task("asked", question, preference, {})
            return ToolEnvironment(task, session.tools)
        task = as_task(question, wish)
        limits = Preference.parse(wish, "metadata")
        bounds = {name: getattr(limits, name) for name in ("never", "usd", "seconds")}
        task = replace(task, preference=replace(task.preference, **bounds))
        return make_miniature(task, seed, session.sandbox)

    given = {"temperature": options.temperature, "top_p": 1.0, "top_k": 0}
    hosts = None if options.host in ("127.0.0.1", "::1", "localhost") else ["*"]
    server = Server(rollout, options.model.resolve().name, environment, given, key, hosts)
    serve_http(server, options.host, options.port)


@command("serve.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = parse(arguments)
    if options.replay:
        show_again(options.replay, Tokenizer.from_dir(options.model))
        return 0
    with Sandbox() as sandbox:
        tools = load_tools(options.tools, sandbox) if options.tools else None
        limits = Limits(turn_tokens=MAX_CONTEXT, context_tokens=MAX_CONTEXT)
        rollout = load_rollout(options.model, limits, options.temperature, 1, options.quantise)
        session = Session(rollout, sandbox, tools, options.seed)
        session.trace = options.trace
        if options.http:
            serve_openai(options, session)
            return 0
        if tools is None or options.model == NANO:
            print(NOTICE, file=sys.stdout if sys.stdout.isatty() else sys.stderr)
        if options.ask is None and sys.stdin.isatty() and sys.stdout.isatty():
            converse(session, typed(), at_prompt=True)
            return 0
        converse(session, sys.stdin if options.ask is None else [options.ask])
        return session.status


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
