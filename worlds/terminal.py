"""The terminal of an orchestrator: the questions that it takes, and the commands.

It takes any question, with the tools of a catalogue, or those of the desk.
"""

import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.tool import Tool, all_ban_names
from nanorchestra.errors import UserError, nearest, require
from nanorchestra.files import append_line, read_json, read_json_lines, write_whole
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Task, Trajectory
from nanorchestra.report.terminal import Console, counted, footer
from nanorchestra.report.trace import tree
from nanorchestra.schemas import Json
from nanorchestra.tools.corpus import open_index
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from nanorchestra.training.trajectories import to_row
from nanorchestra.units import bill, dollars
from tools import LookupTool, load_tools, python_tool
from worlds.catalogue import as_listed, names_of, reached
from worlds.desk import FIELDS, Desk
from worlds.desk_ask import EXAMPLES, SENTENCES, WORDS, OutsideError, as_task
from worlds.load import knows_only_desk
from worlds.preferences import worded

SEARCH = "Finds passages of documents for a query of a few words."
KEYS = "Ctrl-C stops an answer, /quit or Ctrl-D leaves; Tab completes, Alt-Enter breaks the line"
COPIED = 3  # examples, to copy
MOST_EXAMPLES = 4  # of tools that answer any question
FRIENDLY = (
    "nano knows only its desk. Three questions to copy:\n  {}\nAny other needs a larger "
    "model: serve.py --model MODEL@URL, or --model with a hub id. /help lists the commands."
)
STRANGE = (
    "this model knows only the desk: it cannot use other tools. Leave out --tools and "
    "--index, or give another --model (docs/tools.md)"
)


class OpenQuestions:
    """Any question, with `tools`, in one conversation. The tools in `off` are not on offer.

    `without` is said in place of their names where there are none.
    """

    title = "any question; seconds of tools are measured, prices are the catalogue's"
    shorthand = ""  # what abbreviations in descriptions and thoughts mean
    known = ""  # what the questions of the world are about
    outside = ""  # what is said of a question that is not of the world
    alone = False  # whether each question is a task of its own, outside any conversation

    def __init__(self, tools: list[Tool], without: str = "none"):
        self.tools = tools
        self.without = without
        self.off: set[str] = set()  # names
        self.examples = examples_of(tools)

    @property
    def names(self) -> str:
        """The names of the tools, for people."""
        return ", ".join(tool.name for tool in self.tools) or self.without

    def facts(self) -> Json:
        """Returns what the chat page shows before a question: examples, tools and their prices."""
        tools = []
        for tool in self.tools:
            told = {"name": tool.name, "description": tool.description, "price": price(tool)}
            tools.append(told)
        title = self.title.replace(" (/example)", "")  # a command of the prompt
        about = ". ".join(filter(None, [title, self.shorthand]))
        about = f"{about[0].upper()}{about[1:]}."
        facts = {"about": about, "examples": self.examples, "tools": tools}
        return facts | ({"outside": self.outside} if self.outside else {})

    def open(self, question: str, preference: Preference, seed: int) -> ToolEnvironment:
        """Returns an attempt under a preference. UserError if it names nothing that is there."""
        preference.check_names("preference", names_of(self.tools), all_ban_names(self.tools))
        preference = worded(preference)
        never = [*preference.never, *reached(preference.never, self.tools)]
        preference = replace(preference, never=list(dict.fromkeys(never)))
        tools = [tool for tool in self.tools if tool.name not in self.off]
        return ToolEnvironment(Task("asked", question, preference), as_listed(tools))


def examples_of(tools: list[Tool]) -> list[str]:
    """Returns questions that have to do with the tools."""
    kinds = [tool.kind for tool in tools]
    examples = ["What is the 1000th prime number?"] if "code" in kinds else []
    for tool in tools:
        if tool.kind != "code":
            examples.append(f"What can {tool.name} do for me?")
    if len(tools) > 1:
        examples.append("Which of your tools is the cheapest?")
    return examples[:MOST_EXAMPLES] or ["What can you do?"]


class DeskQuestions(OpenQuestions):
    """The desk's questions, each a task of its own, and its simulated experts."""

    title = (
        "the desk: questions such as those of /example, each on its own; experts are simulated, "
        "their prices and seconds are virtual, and others for each question"
    )
    shorthand = (
        "12c 20s: a call costs about 12 US cents and takes about 20 seconds; a thought has the "
        "wish, the experts in its order, what they said, the number and word it is about, and "
        "what to do"
    )
    known = (
        f"It knows the {' or '.join(FIELDS)} of a word with a number of three digits, products of "
        "two digits and one, and wishes.\n"
        f"Words: {', '.join(WORDS)}\n"
        f"Wishes: {' '.join(SENTENCES)}"
    )
    outside = (
        "nano knows only its desk: questions like these, and products of two digits and one. Any "
        "other needs a larger model: serve.py --http --model MODEL@URL, or --model with a hub id."
    )
    alone = True

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        super().__init__([])
        self.examples = EXAMPLES
        self.tools = list(self.open(EXAMPLES[0], Preference(), 0).by_name.values())

    def open(self, question: str, preference: Preference, seed: int) -> ToolEnvironment:
        """Returns an attempt under a preference, whose limits bind unsaid: nano cannot read them.

        UserError, OutsideError if it is the question.
        """
        task = as_task(question, preference)
        env = Desk(0, self.sandbox).environment(task, seed)
        tools = list(env.by_name.values())
        task.preference.check_names("preference", names_of(tools), all_ban_names(tools))
        env.messages[0]["content"] = f"{task.question} {task.preference.text}"
        env.tools = [tool.schema for tool in tools if tool.name not in self.off]
        env.by_name = {tool.name: tool for tool in tools if tool.name not in self.off}
        return env


def questions_of(
    model: Path | None,
    catalogue: str | None,
    index: str | None,
    sandbox: Sandbox,
    spending: Spending | None = None,
) -> OpenQuestions:
    """Returns the questions of a checkpoint: the desk's, if it was trained there.

    With tools of `catalogue`, or search in `index`, or a model behind an endpoint (None), they are
    any. Without a catalogue there is Python. `spending` has the recorded replies of its experts.
    """
    if model and knows_only_desk(model) and not (catalogue or index):
        return DeskQuestions(sandbox)
    search = [LookupTool("search", SEARCH, open_index(index))] if index else []
    if catalogue:
        return OpenQuestions(load_tools(catalogue, sandbox, spending, more=search))
    return OpenQuestions([python_tool(sandbox), *search])


@dataclass(eq=False)
class Terminal:
    """Answers questions and commands. The method do_X is the command /X, its docstring the help.

    `about` is a line about the model. `status` is the exit status, 1 if a question had no answer.
    `last` is the row of the last attempt; all rows are appended to the file `trace`. `as_json`: an
    answer is printed as its row. At a prompt, Ctrl-C ends no more than an answer.
    """

    rollout: Rollout
    world: OpenQuestions
    about: str
    seed: int
    stream: TextIO
    trace: Path | None = None
    as_json: bool = False

    def __post_init__(self):
        self.console = Console(self.stream)
        self.at_prompt = False
        self.status = 0
        self.seeds = itertools.count(self.seed)
        self.examples = itertools.cycle(self.world.examples)
        self.preference = Preference()
        self.total = Counter()
        self.last: Json = {}
        self.transcript = Transcript(self.rollout.tokenizer)

    def handle(self, line: str) -> None:
        """Handles what was typed; UserError if nothing can be done with it."""
        name, _, rest = line.partition(" ")
        if name.startswith("/"):
            wrong = f"{name}: no such command; /help lists them{nearest(name, COMMANDS)}"
            require(name in COMMANDS, wrong)
            getattr(self, "do_" + name[1:])(rest.strip())
            return
        if self.at_prompt and line.lower() in ("help", "?"):
            self.do_help("")
            return
        try:
            self.ask(line)
        except OutsideError:
            if not self.at_prompt:
                raise
            self.console.line(FRIENDLY.format("\n  ".join(self.world.examples[:COPIED])))

    def ask(self, question: str) -> Trajectory:
        """Runs one attempt at a question, shows it with its cost and returns it.

        Ctrl-C stops it; the conversation goes on from the ids that were sampled by then.
        """
        console = self.console
        seed = next(self.seeds)
        start = time.monotonic()
        env = self.world.open(question, self.preference, seed)
        task = env.task
        console.trajectory = None
        if not self.at_prompt:
            console.say("task", env.messages[0]["content"])
        elif self.world.shorthand and not self.total:  # once a session
            console.say("note", self.world.shorthand)
        if not task.data:
            self.transcript.lead(env)
        try:
            self.rollout.run([env], [seed], on_event=console.on_event)
        except KeyboardInterrupt:
            if not console.trajectory:
                raise
            console.trajectory.status = "stopped"
        finally:
            console.rest()
        t = console.trajectory
        seconds = time.monotonic() - start
        if task.data:
            self.transcript.note(task.question, t.answer)
        elif any(t.sampled):
            self.transcript.keep(env, t)
        if not t.answer:
            self.status = 1
            why = " ".join(t.failure.removeprefix("Error: ").split())
            console.say("answer", f"none ({why or self._why(task, t)})")
        text = footer(t, seconds, console.sampling)
        if task.data and t.status == "answered":
            text += "\nright" if t.outcome else f"\nwrong, it is {task.data['answer']}"
        tokens = 0 if None in t.logprobs else sum(t.sampled)  # an endpoint's are not known as ids
        self.total.update(answers=1, tokens=tokens, usd=t.cost_usd)
        self.total.update(seconds=t.latency_s, measured=seconds)
        if self.total["answers"] > 1:
            spent = bill(self.total["usd"], self.total["seconds"], self.total["measured"])
            text += f"\nsession: {spent}, {counted(self.total['answers'], 'answer')}"
            text += f", {tokens} tokens" if (tokens := self.total["tokens"]) else ""
        console.say("cost", text)
        console.end()
        self.last = to_row(task, t)
        line = json.dumps(self.last)
        if self.trace:
            append_line(self.trace, line)
        if self.as_json:
            print(line, flush=True)
        if t.status == "stopped" and not self.at_prompt:
            raise KeyboardInterrupt
        return t

    def _why(self, task: Task, t: Trajectory) -> str:
        """Returns why an attempt has no answer, in words."""
        settings, preference = self.rollout.settings, task.preference
        if t.status == "token_limit":
            last = t.turns[-1] if t.turns else None
            if last is None or len(t.ids) - last.context >= settings.context_tokens:
                return "the context is full; /reset begins anew"
            return f"a turn was longer than {settings.turn_tokens} tokens"
        if t.status == "user_limit":
            usd, seconds = preference.usd, preference.seconds
            stated = [dollars(usd)] if usd is not None else []
            stated += [f"{seconds:g} s"] if seconds is not None else []
            return f"the limit of {' and '.join(stated)} is reached"
        return "the model wrote nothing" if t.status == "answered" else t.status

    def do_prefer(self, text: str) -> None:
        """TEXT tells the model what matters; usd=0.05 seconds=60 never=NAME bind; "off" clears."""
        preference = self.preference
        if text:
            preference = Preference.parse("" if text == "off" else text, "preference")
        env = self.world.open(self.world.examples[0], preference, 0)
        self.preference = preference
        asked = env.task.preference
        added = env.messages[-1]["content"].removeprefix(env.task.question).strip()
        self.console.line(f"added to a question: {added or 'nothing'}")
        words = "; the words are for the model" if preference.text else ""
        self.console.line(f"binds: {binding(asked)}{words}")

    def do_tools(self, text: str) -> None:
        """What may be called, its price and parameters; NAME switches one off, or on again."""
        off = self.world.off
        names = [tool.name for tool in self.world.tools]
        wrong = f"/tools: no {text!r}; there are {self.world.names}{nearest(text, names)}"
        require(not text or text in names, wrong)
        if text in off:
            off.remove(text)
        elif text:
            off.add(text)
        for tool in self.world.tools:
            state = "off, " if tool.name in off else ""
            self.console.line(f"  {tool.name} ({state}{price(tool)}): {tool.description}")
            self.console.line(f"    {json.dumps(tool.parameters)}")
        if not self.world.tools:
            self.console.line(f"tools: {self.world.names}")

    def do_model(self, text: str) -> None:
        """The checkpoint, its device and sampling; the world and the tools."""
        told = f"model: {self.about}\nworld: {self.world.title}\ntools: {self.world.names}"
        self.console.line(told)

    def do_example(self, text: str) -> None:
        """Asks an example, each time the next."""
        example = next(self.examples)
        self.console.line(f"> {example}")
        self.ask(example)

    def do_trace(self, text: str) -> None:
        """The last attempt as a tree of its calls."""
        require(self.last, "/trace: nothing was asked yet")
        self.console.line(tree(self.last))

    def do_fold(self, text: str) -> None:
        """Cuts reasoning to one line, or shows it in full again."""
        self.console.folded = not self.console.folded

    def do_reset(self, text: str) -> None:
        """Forgets the conversation."""
        self.transcript = Transcript(self.rollout.tokenizer)

    def do_save(self, file: str) -> None:
        """Writes the conversation to FILE."""
        require(file, "/save: name the file")
        require(self.transcript.messages, "/save: nothing was said yet")
        self.transcript.save(file)
        asked = [each for each in self.transcript.messages if each["role"] == "user"]
        self.console.line(f"saved: {counted(len(asked), 'question')} in {file}")

    def do_load(self, file: str) -> None:
        """Goes on with the conversation in FILE, whose last question and answer it shows."""
        require(file, "/load: name the file")
        self.transcript.load(file)
        *before, question, answer = (message["content"] for message in self.transcript.messages)
        self.console.line(f"> {question}\n{answer or 'no answer'}")
        alone = "; each question here stands alone" if self.world.alone else ""
        self.console.line(f"loaded: {counted(1 + len(before) // 2, 'question')}{alone}")

    def do_help(self, text: str) -> None:
        """Examples and commands."""
        lines = [f"{name:9}{getattr(self, 'do_' + name[1:]).__doc__}" for name in COMMANDS]
        examples = [f"  {example}" for example in self.world.examples]
        known = filter(None, [self.world.known])
        self.console.line("\n".join(["Questions to copy:", *examples, *known, *lines, KEYS]))


@dataclass
class Transcript:
    """Questions and answers as messages, and all that followed the first question as ids.

    An attempt continues the ids, so that the engine's prefix cache serves them. Tools may change in
    between: their descriptions stand before the ids.
    """

    tokenizer: Tokenizer
    messages: list[Json] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def lead(self, env: ToolEnvironment) -> None:
        """Puts the transcript before the message of `env`."""
        (question,) = env.messages
        if self.ids:  # else the template writes all anew
            next_ids = chat.encode_reply(self.tokenizer, "user", [question["content"]])
            env.prompt = [*self._head(env), *self.ids, *next_ids]
        env.messages = [*self.messages, question]

    def keep(self, env: ToolEnvironment, attempt: Trajectory) -> None:
        """Adds the attempt at `env` that `lead` began, whether it has ended or was stopped."""
        self.messages = [*env.messages, {"role": "assistant", "content": attempt.answer}]
        if not self.tokenizer.markers:
            return
        self.ids = attempt.ids[len(self._head(env)) :]
        if self.ids[-1:] != [self.tokenizer.end_of_turn]:
            self.ids.append(self.tokenizer.end_of_turn)

    def note(self, question: str, answer: str) -> None:
        """Adds a question that stands alone, and its answer; no attempt continues it."""
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def _head(self, env: ToolEnvironment) -> list[int]:
        """Returns the ids of the tools and the first question."""
        return chat.encode(self.tokenizer, self.messages[:1], env.tools)

    def save(self, path: str) -> None:
        """Writes the conversation as JSON. UserError if the place cannot be written."""
        write_whole(path, json.dumps([self.messages, self.ids]) + "\n")

    def load(self, path: str) -> None:
        """Reads what `save` wrote with the same tokenizer. UserError for another kind of file."""
        saved = read_json(path)
        try:
            messages, ids = saved
            _ = messages[-2]["content"], messages[-1]["content"]
        except (TypeError, ValueError, LookupError):
            raise UserError(f"{path}: not a conversation, as /save writes") from None
        self.messages, self.ids = messages, ids


def show_again(path: Path) -> None:
    """Shows the recorded attempts of a file, each as the tree of its calls. UserError."""
    console = Console(sys.stdout)
    for line, row in read_json_lines(path):
        try:
            console.line(tree(row))
        except (KeyError, TypeError):
            where = f"{path}, line {line}: not a recorded attempt"
            raise UserError(f"{where}; --trace and training write them") from None


COMMANDS = ["/" + name[3:] for name in vars(Terminal) if name.startswith("do_")]


def binding(preference: Preference) -> str:
    """Returns the limits of a preference in words: "never gpt-5, at most $0.05", or "nothing"."""
    limits = [f"never {' or '.join(preference.never)}"] if preference.never else []
    if preference.usd is not None:
        limits.append(f"at most {dollars(preference.usd)}")
    if preference.seconds is not None:
        limits.append(f"at most {preference.seconds:g} s")
    return ", ".join(limits) or "nothing"


def price(tool: Tool) -> str:
    """Returns what a tool charges, in US dollars."""
    charges = []
    for model in getattr(tool, "experts", {"": tool}).values():
        if hasattr(model, "price"):
            usd_in, usd_out = map(dollars, model.price)
            charges.append(f"{usd_in} in, {usd_out} out per million tokens")
    charges += [f"{dollars(usd)} per {unit}" for unit, usd in tool.prices.items() if usd]
    return "; ".join(dict.fromkeys(charges)) or "free"
