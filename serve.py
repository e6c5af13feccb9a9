"""Talks to an orchestrator in the terminal: thoughts, calls and observations as they happen.

    python serve.py                             the bundled nano in its miniature world
    python serve.py --ask "law case 372 is hard: what is its code?"        one question
    python serve.py --model PATH --tools FILE   another checkpoint, with tools and experts of yours

Questions can also be piped in, one a line; they do not build on each other. In the miniature,
worlds/miniature/ask.py turns a question into a task and refuses what nano does not know. The file
of tools is described in tools.py.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("serve.py")  # importing torch takes seconds

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from nanorchestra import Engine, SamplingParams
from nanorchestra.agent.environment import Tool, ToolEnvironment
from nanorchestra.agent.load import NANO, load_policy
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import ArgumentParser, UserError, command, require
from nanorchestra.model import chat
from nanorchestra.records import Preference, Task
from nanorchestra.report.terminal import Console, summary
from nanorchestra.tools.sandbox import Sandbox
from reward import POLICY, PRICES
from tools import load_tools
from worlds.evaluation import score
from worlds.miniature.ask import EXAMPLES, LINE_UP, as_preference, as_task
from worlds.miniature.offers import describe
from worlds.miniature.tables import HELD_OUT, SUBJECTS
from worlds.miniature.world import World, environment

MAX_CONTEXT, PAGE = 16_384, 16  # tokens of a conversation, and of a KV page
HELP = f"""nano knows four kinds of questions, about {", ".join(SUBJECTS)} and more:
  {(chr(10) + "  ").join(EXAMPLES)}
Numbers are as long as in these examples; two numbers of two digits can be added or subtracted.
Codes of cases and records are made up, always the same for the same case. The corpus is real.
commands:
  /prefer TEXT   what matters: be right, cheap, fast, a balance; avoid a tool by its name
  /tools         what it may call, with prices and latencies
  /example       draws a held-out task of the miniature and runs it
  /help, /quit   this; leave (or Ctrl-D). Ctrl-C stops an answer"""
NOTICE = (
    "nano knows only its miniature world (/help says what to ask); its experts are simulated, "
    "prices and latencies virtual."
)
WHY_NO_ANSWER = {
    "turn_limit": "the turn limit is reached",
    "token_limit": "the context is full",
    "infrastructure": "a tool failed, through no fault of the orchestrator",
    "answered": "it said nothing",
}


class Session:
    """Answers questions and commands, one line at a time. `tools` None: the miniature's."""

    def __init__(self, rollout: Rollout, sandbox: Sandbox, tools: list[Tool] | None, seed: int):
        self.rollout, self.sandbox, self.tools, self.seed = rollout, sandbox, tools, seed
        self.console = Console(sys.stdout, lambda: TurnStream(rollout.tokenizer))
        self.wish, self.attempts, self.last = "", 0, None
        self.commands = {
            "/prefer": self.prefer,
            "/tools": self.list_tools,
            "/example": self.example,
            "/help": lambda _: self.console.line(HELP),
        }

    def handle(self, line: str) -> None:
        """Handles one line; UserError if nothing can be done with it."""
        name, _, rest = line.partition(" ")
        if line.startswith("/"):
            known = ", ".join(self.commands)
            require(name in self.commands, f"{name}: no such command; there are {known}, /quit")
            self.commands[name](rest.strip())
        elif self.tools is None:
            self.run(as_task(line, self.wish))
        else:
            self.run(Task("asked", line, Preference(self.wish), {}))

    def run(self, task: Task) -> None:
        """Runs one attempt and shows it; `last` is its trajectory, None while there is none."""
        rollout, console, self.last = self.rollout, self.console, None
        seed, self.attempts = self.seed + self.attempts, self.attempts + 1
        console.say("task", f"{task.question} {task.preference.text}")
        if "tools" in task.data:
            env = environment(task, seed, self.sandbox)
        else:
            env = ToolEnvironment(task, self.tools, grade=lambda answer: 0.0)
        tokens = len(chat.encode(rollout.tokenizer, env.messages, env.tools))
        context = rollout.limits.context_tokens
        require(tokens < context, f"the prompt has {tokens} tokens, the context {context}")
        (last,) = rollout.run([env], [seed], on_event=console.on_event)
        if not last.answer:
            console.say("answer", f"none: {WHY_NO_ANSWER[last.status]}")
        text = summary(last)
        if "answer" in task.data:
            verdict = "right" if last.outcome else f"wrong, it is {task.data['answer']}"
            text += f"; {verdict}, reward {score(task, last).reward:.2f} ({task.data['wish']})"
        console.say("cost", text)
        console.end()
        self.last = last

    def prefer(self, words: str) -> None:
        """Sets the preference that later prompts state, and says how it is understood."""
        self.wish = words or self.wish
        text = self.wish if self.tools else as_preference(self.wish, LINE_UP)[1].text
        self.console.line(f"preference: {text}")

    def list_tools(self, _: str) -> None:
        """Lists the tools with their prices."""
        for offer in LINE_UP if self.tools is None else ():
            self.console.line(f"  {offer['name']:12} {describe(offer)}")
        for tool in self.tools or ():
            price = tool.price if tool.kind == "expert" else f"${tool.usd_per_call:g} a call"
            self.console.line(f"  {tool.name:12} {tool.kind:7} {price}. {tool.description}")

    def example(self, _: str) -> None:
        """Runs a held-out task of the miniature, with its own tools and preference."""
        task = World(self.seed).task(HELD_OUT, self.attempts)
        for offer in task.data["tools"]:
            self.console.line(f"  {offer['name']:12} {describe(offer)}")
        self.run(task)


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


def converse(session: Session, lines: Iterable[str], at_prompt: bool = False) -> int:
    """Handles each line until /quit; at a prompt Ctrl-C stops an answer and the next line follows.

    Returns 2 if a line was refused, else 1 if the last question had no answer.
    """
    status = 0
    for line in filter(None, map(str.strip, lines)):
        if line == "/quit":
            break
        try:
            session.handle(line)
        except UserError as error:
            session.console.end()
            print(f"serve.py: {error}", file=sys.stderr)
            status = 2
        except KeyboardInterrupt:
            if not at_prompt:
                raise
            session.console.line(" [stopped]")
    return status or int(session.attempts > 0 and not (session.last and session.last.answer))


def open_rollout(options: argparse.Namespace) -> Rollout:
    """Returns a rollout of the checkpoint that runs one attempt at a time."""
    model, tokenizer = load_policy(options.model, options.quantise)
    context = min(model.config.max_position_embeddings, MAX_CONTEXT)
    pages = -(-context // PAGE) + 1
    engine = Engine(
        model, tokenizer, num_pages=pages, page_size=PAGE, max_running=1, max_context=context
    )

    def params(seed: int, budget: int) -> SamplingParams:
        return SamplingParams(max_tokens=budget, temperature=options.temperature, seed=seed)

    limits = Limits(turn_tokens=context, context_tokens=context)
    return Rollout(engine, tokenizer, params, limits, PRICES[POLICY])


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options. UserError if one is wrong."""
    parser = ArgumentParser(
        prog="serve.py",
        description="Talk to an orchestrator: a prompt, one question (--ask), or a pipe.",
    )
    add = parser.add_argument
    add("--model", type=Path, default=NANO, metavar="PATH", help="a checkpoint (default: nano)")
    add("--ask", metavar="QUESTION", help="answer this and end")
    add("--tools", type=Path, metavar="FILE", help="a JSON file of tools, see tools.py")
    add("--seed", type=int, default=0, help="of sampling and simulated experts (default: 0)")
    add("--temperature", type=float, default=0.0, help="of sampling (default: 0, greedy)")
    add("--quantise", choices=("int8", "int4"), help="round the linear layers while loading")
    options = parser.parse_args(arguments)
    require(options.ask is None or options.ask.strip(), "--ask: the question is empty")
    SamplingParams(temperature=options.temperature)  # checks it
    return options


@command("serve.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = parse(arguments)
    with Sandbox() as sandbox:
        tools = load_tools(options.tools, sandbox) if options.tools else None
        session = Session(open_rollout(options), sandbox, tools, options.seed)
        if tools is None or options.model == NANO:
            print(NOTICE, file=sys.stdout if sys.stdout.isatty() else sys.stderr)
        if options.ask is None and sys.stdin.isatty() and sys.stdout.isatty():
            converse(session, typed(), at_prompt=True)
            return 0
        return converse(session, sys.stdin if options.ask is None else [options.ask])


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
