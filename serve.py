"""Talk to an orchestrator in the terminal: what it thinks, calls and observes is shown as it happens, then the answer and its price.

    python serve.py                                                    the bundled nano in its miniature world
    python serve.py --ask "law case 372 is hard: what is its code?"    one question; questions can also be piped in, one a line
    python serve.py --model PATH --tools FILE                          another checkpoint, with tools and experts of your own

The miniature knows four kinds of questions. `miniature_task` recognises them, so that its simulated experts know an answer to what is
typed, and words them as the world does; anything else is refused in one line, unless --tools brings real tools. Questions do not build on
each other.
"""

from __future__ import annotations

import operator
import os
import random
import re
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

from nanorchestra import Engine, SamplingParams
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.load import NANO, load_policy
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.errors import ArgumentParser, UserError
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Task, Trajectory
from nanorchestra.report.terminal import Console, Stream, bill, show_trace
from nanorchestra.tools.sandbox import Sandbox
from reward import POLICY, PRICES
from tools import HttpExpert, load_tools
from worlds.evaluation import score
from worlds.miniature.offers import bounds, corpus, is_expert, preference_name, title
from worlds.miniature.tables import (
    CHAINS,
    EASY_RELATIONS,
    FIELDS,
    PHRASES,
    PREFERENCES,
    QUESTIONS,
    SUBJECTS,
)
from worlds.miniature.world import World, environment

MAX_CONTEXT, PAGE = 16_384, 16  # tokens of one conversation at most, and of one KV page
LINE_UP = [
    {"name": name, "what": what, "price": price, "latency": latency}
    for name, what, price, latency in (
        ("orion", "large", 300, 60),
        ("calc", "code", 30, 3),
        ("search", "search", 35, 3),
        ("records", "records", 20, 2),
        ("lyra", "small", 25, 2),
    )
]
EXAMPLES = (
    "law case 372 is hard: what is its code?",
    "what is the value of 417 * 6?",
    "what is the mass of element 79?",
    "what is the age of the agent of the customer of order 512?",
)
HELP = f"""nano can be asked four kinds of questions (subjects: {", ".join(SUBJECTS)}; chains: {"; ".join(" > ".join(chain) for chain in CHAINS)}):
{chr(10).join("  " + example for example in EXAMPLES)}
Numbers are as long as in these examples; two of two digits can be added or subtracted. Each question stands for itself. Codes of cases and records are made up (always the same for the same case); the corpus is real.
commands:
  /prefer TEXT   what matters to you: be right, be cheap, be fast, a balance; avoid a tool by its name. Without TEXT: what it is now
  /tools         what it may call, with prices and latencies
  /example       draws a held-out task of the miniature, with its own tools and preference, and runs it
  /trace         the last answer's ids and text, sampled and given, its turns, cost and latency
  /reset         forgets the preference and the last answer, and starts again from --seed
  /help, /quit   this; leave (or Ctrl-D). Ctrl-C stops an answer"""


# A typed question -> a task of the miniature.

EXPRESSION = r"(\d{1,9}(?:\s*[+*-]\s*\d{1,9}){1,7})"
ARITHMETIC = [
    re.compile(
        re.escape(words.rstrip(".?")).replace(r"\{expression\}", EXPRESSION) + r"[\s.?!=]*",
        re.IGNORECASE,
    )
    for words in (
        "{expression}",
        "what is {expression}",
        "what's {expression}",
        "how much is {expression}",
        "calculate {expression}",
        *(words for split in QUESTIONS.values() for words in split["arithmetic"]),
    )
]
SUBJECT = "|".join(SUBJECTS)
KNOWLEDGE = re.compile(rf"\b(?:({SUBJECT}) case|case of ({SUBJECT}),) (\d{{1,9}})\b")
CHAIN = re.compile(r"\b((?:\w+ of )+)(\w+) (\d{1,9})\b")
DRAWN = re.compile(r"[1-9]\d [+-] [1-9]\d|[1-9]\d\d \* [1-9]")  # the expressions of the world
WISHES = (
    ("balanced", "balanc"),
    ("right", "right|correct|accura|any price"),
    ("cheap", "cheap|low|spend|money"),
    ("fast", "fast|quick|hurry|soon"),
    ("balanced", "cost.*time|time.*cost|mind"),
    ("cheap", "cost|price"),
    ("fast", "time"),
)
NOT = r"\b(?:avoid|away|never|not|don't|without|leave|no)(?: \w+){0,3}? "  # what stands before the name of a tool to avoid


def miniature_task(question: str, wish: str) -> Task:
    """The task of the miniature that `question` is, in the world's words, with LINE_UP on offer. UserError if it is of none of the four kinds, or its
    numbers are not as long as the world's: copying them is what nano has learnt."""
    found = _chain(question) or _knowledge(question) or _lookup(question) or _arithmetic(question)
    if found is None:
        raise UserError(
            f"outside the miniature's world: {question[:60]!r}; ask for example {EXAMPLES[0]!r}, {EXAMPLES[1]!r}, {EXAMPLES[2]!r} or {EXAMPLES[3]!r}"
        )
    question = QUESTIONS["train"][found["kind"]][0].format(**found.pop("words"))
    wrong = [
        str(n)
        for n in random.Random(question).sample(range(1, 1000), 9)
        if str(n) != found["answer"]
    ][:8]
    tools = [
        t for t in LINE_UP if is_expert(t) or (t["what"] == "records") == (found["kind"] == "chain")
    ]  # as in the world: no records without tables
    return Task(
        f"asked/{question}",
        question,
        preference(spell_out(wish), [t["name"] for t in tools]),
        {"tables": {}, "solution": None, "wrong": wrong, "tools": tools}
        | {"bounds": bounds(tools, found["difficulty"])}
        | found,
    )


def spell_out(wish: str) -> str:
    """The wish with LINE_UP's names as the miniature's users say them, the kind in front: "avoid lyra" -> "avoid small lyra"."""
    for offered in LINE_UP:
        wish = re.sub(
            rf"\b(?:{offered['what']} )?{offered['name']}\b",
            title(offered),
            wish,
            flags=re.IGNORECASE,
        )
    return wish


def preference(wish: str, names: Iterable[str]) -> Preference:
    """The user's words with the weights that they come to, by key words. They only decide the reward that is shown."""
    name = next(
        (name for name, words in WISHES if re.search(rf"\b(?:{words})", wish, re.IGNORECASE)),
        "balanced",
    )
    weights = PREFERENCES[name][1]
    return Preference(
        wish,
        *weights,
        {
            n: -sum(weights)
            for n in names
            if re.search(rf"{NOT}{re.escape(n)}\b", wish, re.IGNORECASE)
        },
    )


def _words(text: str) -> str:
    """Small letters, single spaces, and no article after "of"."""
    return re.sub(r" of (an?|the) ", " of ", " ".join(text.casefold().split()))


def _made_up(what: str, low: int, high: int) -> str:
    """A whole number that depends on `what` alone: the facts that the miniature's experts and records are said to know."""
    return str(random.Random(f"made up/{what}").randint(low, high))


def _knowledge(question: str) -> dict[str, Any] | None:
    if not (match := KNOWLEDGE.search(_words(question))):
        return None
    subject, n = match[1] or match[2], _number(match[3])
    difficulty = "hard" if re.search(r"\bhard\b", question, re.IGNORECASE) else "easy"
    return {
        "kind": "knowledge",
        "subject": subject,
        "difficulty": difficulty,
        "answer": _made_up(f"{subject} case {n}", 10, 99),
        "words": {"subject": subject, "difficulty": difficulty, "n": n},
    }


def _number(digits: str) -> int:
    if not re.fullmatch(r"[1-9]\d\d", digits):
        raise UserError(
            f"outside the miniature's world: number {digits}; nano knows cases and records by numbers of three digits, as in {EXAMPLES[0]!r}"
        )
    return int(digits)


def _arithmetic(question: str) -> dict[str, Any] | None:
    match = next(filter(None, (words.fullmatch(question.strip()) for words in ARITHMETIC)), None)
    if match is None:
        return None
    expression = " ".join(re.findall(r"\d+|[+*-]", match[1]))
    if not DRAWN.fullmatch(expression):
        raise UserError(
            f"outside the miniature's world: {expression[:60]!r}; nano adds and subtracts two numbers of two digits, as in 47 + 36, and "
            "multiplies a number of three digits by one digit, as in 417 * 6"
        )
    a, sign, b = expression.split()
    value = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](int(a), int(b))
    return {
        "kind": "arithmetic",
        "subject": "arithmetic",
        "difficulty": "hard" if sign == "*" else "easy",
        "answer": str(value),
        "solution": expression,
        "words": {"expression": expression},
    }


def _lookup(question: str) -> dict[str, Any] | None:
    said = _words(question)
    for fact in corpus()[0]:
        phrase = f"{fact['relation']} of {fact['subject']}"
        if re.search(
            rf"\b{re.escape(_words(phrase))}(?![\w-])", said
        ):  # Guinea is not Guinea-Bissau
            return {
                "kind": "lookup",
                "subject": "lookup",
                "difficulty": "easy" if fact["relation"] in EASY_RELATIONS else "hard",
                "answer": fact["value"],
                "solution": phrase,
                "words": fact,
            }
    return None


def _chain(question: str) -> dict[str, Any] | None:
    """Records made up for the tables on the path: the same row says the same in every question."""
    said = _words(question)
    if not (match := CHAIN.search(said)):
        return None
    hops = re.findall(r"(\w+) of", match[1])
    field = (
        hops.pop(0)
        if hops[0] in FIELDS
        else next((f for f in FIELDS if re.search(rf"\b{f}\b", said)), None)
    )
    names = (match[2], *reversed(hops))
    if (
        field is None
        or len(names) < 2
        or names not in {chain[:length] for chain in CHAINS for length in (2, 3)}
    ):
        return None
    ids, tables = [str(_number(match[3]))], {}
    for table, following in zip(names, (*names[1:], field)):
        value = _made_up(
            f"{table} {ids[-1]} {following}", *((10, 99) if following == field else (100, 999))
        )
        tables[table] = {ids[-1]: {following: int(value)}}
        ids.append(value)
    return {
        "kind": "chain",
        "subject": "chain",
        "difficulty": "easy" if len(names) == 2 else "hard",
        "answer": ids[-1],
        "tables": tables,
        "solution": [names[0], int(ids[0])],
        "words": {
            "field": field,
            "path": " of the ".join(reversed(names[1:])) + " of",
            "table": names[0],
            "n": ids[0],
        },
    }


def _offer(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"  {t['name']:8} {t['what']:9} ${t['price']} per {'million tokens' if is_expert(t) else 'thousand calls'}, {t['latency']} s"
        for t in tools
    ]


class Repl:
    """Questions and commands, one line at a time. `tools` are the user's own; None: the miniature's."""

    def __init__(
        self,
        engine,
        tokenizer: Tokenizer,
        sandbox: Sandbox,
        console: Console,
        *,
        seed: int = 0,
        temperature: float = 0.0,
        max_turns: int = 50,
        tools: list[Any] | None = None,
    ):
        price, context = PRICES[POLICY], engine.max_context
        self.engine, self.tokenizer, self.sandbox, self.console, self.seed, self.tools = (
            engine,
            tokenizer,
            sandbox,
            console,
            seed,
            tools,
        )
        self.rollout = Rollout(
            engine,
            tokenizer,
            lambda seed, budget: SamplingParams(
                max_tokens=budget, temperature=temperature, seed=seed
            ),
            Limits(max_turns, context, context),
            price,
        )
        self.commands: dict[str, Callable[[str], Any]] = {
            "/prefer": self.prefer,
            "/tools": self.show_tools,
            "/example": self.example,
            "/trace": self.trace,
            "/reset": self.reset,
            "/help": lambda _: console.line(HELP),
        }
        self.reset("")

    def handle(self, line: str) -> None:
        """One line: a question or a command (/quit is the caller's). UserError if nothing can be done with it."""
        line = line.strip()
        command, _, rest = line.partition(" ")
        if not line.startswith("/"):
            self.ask(line)
        elif command in self.commands:
            self.commands[command](rest.strip())
        else:
            raise UserError(
                f"{command}: no such command; there are {', '.join(self.commands)}, /quit"
            )

    def ask(self, question: str) -> None:
        if self.tools is None:
            task = miniature_task(question, self.wish)
            about = {
                "knowledge": f"{task.data['difficulty']} {task.data['subject']}; the code is made up",
                "chain": f"a chain of {len(task.data['tables'])} records, made up",
                "lookup": "lookup in the corpus",
                "arithmetic": f"{task.data['difficulty']} arithmetic",
            }[task.data["kind"]]
            self.console.say("task", f"{about}. {self.wish}")
            self.run(environment(task, self.seed + self.attempts, self.sandbox))
        else:
            for tool in self.tools:
                if isinstance(tool, HttpExpert):
                    tool.question = question
            self.run(
                ToolEnvironment(
                    Task(f"asked/{question}", question, Preference(self.wish), {}),
                    self.tools,
                    grade=lambda answer: 0.0,
                )
            )

    def run(self, env: ToolEnvironment) -> None:
        """One attempt, shown. The trajectory is then in `last`, None while there is none."""
        self.last = None
        tokens, context = (
            len(chat.encode(self.tokenizer, env.messages, env.tools)),
            self.engine.max_context,
        )
        if tokens >= context:
            raise UserError(
                f"prompt: {tokens} tokens with its tools; the context is {context} and leaves room for {context - 1}, make it shorter"
            )
        seed, self.attempts = self.seed + self.attempts, self.attempts + 1
        (last,) = self.rollout.run([env], [seed], on_event=Stream(self.console, self.tokenizer))
        why = {
            "turn_limit": f"the turn limit of {self.rollout.limits.turns} is reached",
            "token_limit": f"the context of {context} tokens is full",
            "infrastructure": "a tool failed, through no fault of the orchestrator",
            "answered": "it said nothing",
        }[last.status]
        if not last.answer:
            self.console.say("answer", f"none: {why}")
        summary = bill(last)
        if "answer" in env.task.data:
            summary += f"; {'right' if last.outcome else 'wrong, it is ' + env.task.data['answer']}, reward {score(env.task, last).reward:.2f} ({preference_name(env.task.preference)})"
        self.console.say("cost", summary)
        self.console.end()
        self.last = last

    # The commands.

    def prefer(self, words: str) -> None:
        if words:
            self.wish = words[0].upper() + words[1:] + ("" if words[-1] in ".!?" else ".")
        meant = preference(
            self.wish,
            [t["name"] for t in LINE_UP] if self.tools is None else [t.name for t in self.tools],
        )
        avoided = f", avoid {', '.join(meant.avoided)}" if meant.avoided else ""
        self.console.line(f"preference: {self.wish!r}, scored as {preference_name(meant)}{avoided}")

    def show_tools(self, _: str) -> None:
        if self.tools is None:
            lines = [
                *_offer(LINE_UP),
                "  Experts are simulated; prices are charged to a virtual account and latencies pass on a virtual clock.",
                "  records is offered with questions about records, calc and search with all others.",
            ]
        else:
            prices = [
                f"${t.price.input_per_million:g} in, ${t.price.output_per_million:g} out per million tokens"
                if isinstance(t, HttpExpert)
                else f"${t.usd_per_call:g} per call"
                for t in self.tools
            ]
            lines = [
                f"  {tool.name:12} {tool.kind:7} {price}. {tool.description}"
                for tool, price in zip(self.tools, prices)
            ]
            lines.append("  Prices are those of the tool file; latencies are measured.")
        self.console.line("\n".join(lines))

    def example(self, _: str) -> None:
        task = World(self.seed).task("held_out", self.draw.randrange(1_000_000))
        self.console.line(
            "\n".join([f"{task.question} {task.preference.text}", *_offer(task.data["tools"])])
        )
        self.run(environment(task, self.seed + self.attempts, self.sandbox))

    def trace(self, _: str) -> None:
        if self.last is None:
            raise UserError("/trace: there is no finished answer yet")
        show_trace(self.console, self.tokenizer, self.last)

    def reset(self, _: str) -> None:
        self.wish, self.attempts, self.draw = (
            PHRASES["train"]["balanced"][0],
            0,
            random.Random(self.seed),
        )
        self.last: Trajectory | None = None


# Where the lines come from.


def interact(repl: Repl) -> int:
    """The prompt. Ctrl-C stops an answer; at the prompt it leaves, as Ctrl-D and /quit do."""
    import readline  # noqa: F401  gives input() its history and line editing

    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            line = "/quit"
            repl.console.line()
        if line == "/quit":
            return 0
        try:
            if line:
                repl.handle(line)
        except UserError as error:
            repl.console.end()
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            repl.console.line(" [stopped]")


def answer_all(repl: Repl, lines: Iterable[str], echo: bool) -> int:
    """Each line in turn. Exit status 2 if one of them was refused, else 1 if the last question got no answer."""
    status = 0
    for line in filter(None, map(str.strip, lines)):
        if line == "/quit":
            break
        if echo:
            repl.console.line(f"> {line}")
        try:
            repl.handle(line)
        except UserError as error:
            repl.console.end()
            print(f"serve.py: {error}", file=sys.stderr)
            status = 2
    return status or int(repl.attempts > 0 and not (repl.last and repl.last.answer))


def open_engine(path: Path, quantise: str | None = None) -> tuple[Engine, Tokenizer]:
    """Opens an engine for one conversation at a time."""
    model, tokenizer = load_policy(path, quantise)
    context = min(model.config.max_position_embeddings, MAX_CONTEXT)
    pages = -(-context // PAGE) + 1
    engine = Engine(
        model, tokenizer, num_pages=pages, page_size=PAGE, max_running=1, max_context=context
    )
    return engine, tokenizer


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog="serve.py",
        description="Talk to an orchestrator: a prompt, one question (--ask), or questions from a pipe.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=NANO,
        metavar="PATH",
        help="a checkpoint directory in Hugging Face layout (default: the bundled nano)",
    )
    parser.add_argument("--ask", metavar="QUESTION", help="answer this and end")
    parser.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="a JSON tool file, instead of the miniature's tools",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the sampling and of the simulated experts (default: 0)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of the sampling (default: 0, greedy)"
    )
    parser.add_argument(
        "--max-turns",
        type=int,
        default=50,
        metavar="N",
        help="turns an answer may take (default: 50)",
    )
    parser.add_argument(
        "--quantise",
        choices=("int8", "int4"),
        help="round the linear layers while loading, to fit a smaller card",
    )
    console = Console(sys.stdout)
    try:
        options = parser.parse_args(arguments)
        if options.max_turns < 1:
            raise UserError(f"--max-turns is {options.max_turns}; it must be at least 1")
        if options.ask is not None:
            options.ask = options.ask.encode("utf-8", "surrogateescape").decode(
                "utf-8", "replace"
            )  # as what is typed
        if options.ask is not None and not options.ask.strip():
            raise UserError("--ask: the question is empty")
        SamplingParams(temperature=options.temperature)  # says now what is wrong with it
        with Sandbox() as sandbox:
            tools = load_tools(options.tools, "", sandbox) if options.tools else None
            engine, tokenizer = open_engine(options.model, options.quantise)
            if tools is None:
                notice = "nano knows only its miniature world (/help says what to ask); its experts are simulated, prices and latencies virtual."
            else:
                notice = (
                    "The bundled nano knows only its miniature world, not the tools of --tools: expect little."
                    if options.model.resolve() == NANO.resolve()
                    else ""
                )
            if notice:
                print(notice, file=sys.stdout if sys.stdout.isatty() else sys.stderr)
            repl = Repl(
                engine,
                tokenizer,
                sandbox,
                console,
                seed=options.seed,
                temperature=options.temperature,
                max_turns=options.max_turns,
                tools=tools,
            )
            if options.ask is not None:
                return answer_all(repl, [options.ask], echo=False)
            return (
                interact(repl)
                if sys.stdin.isatty() and sys.stdout.isatty()
                else answer_all(repl, sys.stdin, echo=True)
            )
    except UserError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.line()
        return 130
    except OSError as error:  # who read the output has left, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"serve.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started it
            setattr(sys, name, open(os.devnull, mode))
        getattr(sys, name).reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
