"""Talks to an orchestrator in the terminal: thoughts, calls and observations as they happen.

    python serve.py                             the bundled nano at its desk
    python serve.py --ask "What is the code of order 512?"                  one question
    python serve.py --model Qwen/Qwen3-0.6B     any question, with Python (docs/tools.md)
    python serve.py --model MODEL@URL           the same, of an OpenAI-compatible server
    python serve.py --model PATH --index DIR    and with search in an index
    python serve.py --model PATH --tools python,FILE   and tools of yours (docs/tools.md)
    python serve.py --http                      OpenAI's API, and a page to chat (docs/serve.md)
    python serve.py --mcp                       a tool of MCP, on stdin and stdout (docs/serve.md)
    python serve.py --trace FILE                records every attempt, a JSON line each
    python serve.py --replay FILE               shows recorded attempts as trees of their calls

Questions can also be piped in, one a line. Exit status: 0 if all questions were answered, 1 if one
was not, 2 for a mistake in options, a question or a command, 130 after Ctrl-C.
"""

import argparse
import gc
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanorchestra import SamplingParams, formats
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import RolloutSection
from nanorchestra.errors import ArgumentParser, UserError, command, require
from nanorchestra.files import append_line
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model.checkpoint import NANO, read_config, read_sampling
from nanorchestra.model.quantise import MODES
from nanorchestra.records import Task, Trajectory
from nanorchestra.schemas import Json
from nanorchestra.tools.replies import store_of
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from nanorchestra.training.trajectories import to_row
from nanorchestra.units import dollars
from worlds.load import knows_only_desk
from worlds.policies import PRICE, Policy, checkpoint_settings
from worlds.policies import parse as parse_policy
from worlds.terminal import (
    COMMANDS,
    KEYS,
    STRANGE,
    OpenQuestions,
    Terminal,
    questions_of,
    show_again,
)

LEAVE = ("quit", "exit")  # at a prompt
OLLAMA = "http://localhost:11434/v1"  # where it listens, as it comes
ENDPOINT_CONTEXT = 131072  # ids of a conversation, of which nano's tokenizer makes 1 of 1.6 bytes


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options; `model` is None for nano. UserError if one is wrong."""
    parser = ArgumentParser(
        prog="serve.py",
        description="Talk to an orchestrator: a prompt, one question (--ask), or a pipe.",
    )
    add = parser.add_argument
    text = "a directory, .gguf file, hub id or MODEL@URL of an OpenAI-compatible server"
    add("--model", help=f"{text} (default: nano)")
    add("--quantise", choices=MODES, help="round the weights, to fit a smaller GPU")
    add("--ask", help="answer this and end")
    add("--json", action="store_true", help="write a JSON object for each question")
    add("--tools", help="a catalogue, see docs/tools.md (default: python)")
    add("--experts", default="real", help="real, record:DIR or replay:DIR, see docs/tools.md")
    add("--index", help="offer search in an index that tools.py built")
    add("--trace", type=Path, help="add every attempt to this file, as JSON")
    add("--replay", type=Path, help="show the attempts of such a file, and end")
    add("--http", action="store_true", help="serve OpenAI's API and a page in place of a prompt")
    add("--mcp", action="store_true", help="serve a tool of MCP by pipes, with --http at /mcp")
    add("--host", default="127.0.0.1", help="with --http: where to listen (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="with --http (default: 8000)")
    add(
        "--key-env",
        metavar="NAME",
        default="",
        help="with --http: the variable that holds the API key",
    )
    add("--seed", type=int, help="of sampling and simulated experts (default: 0)")
    for name, kind in (("temperature", float), ("top-p", float), ("top-k", int)):
        add(f"--{name}", type=kind, help="of sampling (default: as generation_config.json says)")
    options = parser.parse_args(arguments)
    require(
        options.experts != "simulated",
        "--experts is 'simulated'; it must be real, record:DIR or replay:DIR",
    )
    require(options.model != "", "--model is empty; name one, or leave the option out for nano")
    require(options.ask is None or options.ask.strip(), "--ask: the question is empty")
    if options.mcp:
        others = options.ask or options.json or options.replay
        require(not others, "--mcp: leave out --ask, --json and --replay")
    return options


def typed(words: list[str]) -> Iterator[str]:
    """Yields what is typed at a prompt that completes `words`, until Ctrl-D.

    Earlier lines are in the user's state folder, if that can be written.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "nanorchestra"
    with suppress(OSError):
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    prompt = PromptSession(
        "> ",
        history=FileHistory(state / "history") if os.access(state, os.W_OK) else None,
        key_bindings=keys,
        completer=WordCompleter(words, WORD=True),
        complete_while_typing=False,
    )
    with suppress(EOFError):
        while True:
            with suppress(KeyboardInterrupt):  # clears what was typed
                yield prompt.prompt()


def converse(terminal: Terminal, lines: Iterable[str]) -> int:
    """Handles each line, and returns the exit status. A refused line ends nothing."""
    for line in lines:
        line = line.strip()
        if not line:
            continue
        if line == "/quit" or terminal.at_prompt and line.lower() in LEAVE:
            break
        try:
            terminal.handle(line)
        except UserError as error:
            terminal.console.end()
            print(f"serve.py: {error}", file=sys.stderr)
            terminal.status = 2
    return terminal.status


def endpoint_of(options: argparse.Namespace) -> Policy:
    """Returns the policy that --model MODEL@URL names, as evaluate.py has it. UserError."""
    policy = parse_policy(options.model, (), "--model")
    for name in ("quantise", "top_p", "top_k"):
        option = name.replace("_", "-")
        right = f"--{option}: leave it out; a model behind a URL is given --temperature alone"
        require(getattr(options, name) is None, right)
    limited = policy.settings["tools"] != "all" or "usd" in policy.settings
    right = "leave out basic, none and usd; here /tools and /prefer do that"
    require(not limited, f"--model {options.model}: {right}")
    if options.temperature is not None:
        right = f"--temperature is {options.temperature:g}; it must be 0 or more"
        require(0 <= options.temperature < math.inf, right)
        policy.settings["temperature"] = options.temperature
    if ":context_tokens=" not in options.model:
        policy.settings["context_tokens"] = ENDPOINT_CONTEXT
    return policy


def told(policy: Policy) -> str:
    """Returns a line about a model behind an endpoint: where it is, and what its tokens cost."""
    name, _, url = policy.base.partition("@")
    price = "no price is known, so its tokens count as free; :input=X:output=X after the URL states"
    price += " US dollars per million tokens"
    if policy.priced:
        usd_in, usd_out = (dollars(policy.settings[name]) for name in PRICE)
        price = f"{usd_in} in, {usd_out} out per million tokens"
    given = policy.settings.get("temperature")
    sampling = "" if given is None else f", temperature {given:g}"
    return f"{name} at {url}{sampling}; {price}"


def sampling_in_words(sampling: dict[str, float]) -> str:
    """Returns temperature, top-p and top-k as they are said to a person."""
    if not sampling["temperature"]:
        return "greedy sampling"
    return "temperature {temperature:g}, top-p {top_p:g}, top-k {top_k:g}".format(**sampling)


def recorder(trace: Path | None) -> Callable[[Task, Trajectory], None] | None:
    """Returns what adds an attempt to the file of --trace, as the terminal does; None without."""
    if trace is None:
        return None

    def record(task: Task, trajectory: Trajectory) -> None:
        append_line(trace, json.dumps(to_row(task, trajectory)))

    return record


def serve_openai(
    options: argparse.Namespace,
    name: str,
    rollout: Rollout,
    world: OpenQuestions,
    sampling: dict[str, float],
) -> None:
    """Serves a rollout and the tools of a world over HTTP until a signal ends it.

    `name` is the model's for clients.
    """
    from nanorchestra.serving.api import Server, serve_http  # half a second, only for --http

    key = os.environ.get(options.key_env, "")
    require(key or not options.key_env, f"--key-env: {options.key_env} is not set")
    gc.freeze()  # a collection of all that was imported would take 100 ms, while streams wait
    try:
        server = Server(
            rollout,
            name,
            world,
            sampling,
            options.host,
            key,
            recorder(options.trace),
            options.mcp,
        )
        serve_http(server, options.port)
    finally:
        gc.unfreeze()  # nanobind would report at the end what is not collected


def serve_mcp(
    options: argparse.Namespace,
    pipes: Any,
    name: str,
    rollout: Rollout,
    world: OpenQuestions,
    sampling: dict[str, float],
) -> None:
    """Serves a client of MCP on its pipes until it closes them."""
    from nanorchestra.serving.loop import Service
    from nanorchestra.serving.mcp import serve_pipes, tool_server

    service = Service(rollout.engine, recorder(options.trace))
    serve_pipes(tool_server(service, rollout, world, sampling, name), service, pipes)


@command("serve.py")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = parse(arguments)
    if options.replay:
        show_again(options.replay)
        return 0
    if not options.mcp:
        return play(options)
    try:
        from nanorchestra.serving.mcp import protocol_pipes  # brings mcp, a second to import
    except ModuleNotFoundError as error:
        needs = "--mcp needs the package mcp: pip install mcp==2.3.0"
        raise UserError(f"{needs} ({error})") from None
    if options.http:
        return play(options)
    with protocol_pipes() as pipes:
        return play(options, pipes)


def local_rollout(
    options: argparse.Namespace, model: Path, sampling: Json, world: OpenQuestions
) -> tuple[Rollout, str]:
    """Returns the rollout of a checkpoint of this machine, and a line about it. UserError."""
    context = read_config(model).max_position_embeddings
    settings = RolloutSection(turn_tokens=context // 2, context_tokens=context)
    if knows_only_desk(model):  # whatever else it is asked, it babbles
        trained = checkpoint_settings(model)["turn_tokens"]
        settings = replace(settings, turn_tokens=trained)
        if not world.alone:
            print(f"serve.py: {STRANGE}", file=sys.stderr)
    running, engine_options = 1, {}
    if options.http or options.mcp:  # a pool of fixed size, for whose pages requests wait
        running, engine_options = 256, {"max_batch_tokens": 2048}
    rollout = load_rollout(
        model,
        settings,
        sampling,
        running,
        options.quantise,
        chats=not (options.tools or options.index or options.mcp),
        named=options.model,
        **engine_options,
    )
    weight = rollout.engine.model.embed_tokens.weight
    where = f"{weight.dtype} on {weight.device}".removeprefix("torch.")
    return rollout, f"{options.model}, {where}, context {context}, {sampling_in_words(sampling)}"


def play(options: argparse.Namespace, pipes: Any = None) -> int:
    """Loads the model and its tools, and answers. Returns the exit status.

    `pipes` are stdin and stdout of a client of MCP.
    """
    options.model = options.model or str(NANO)
    remote = "://" in options.model
    require(
        remote or formats.names_model(options.model),
        f"--model {options.model}: no such file; it must be the path of a directory or a .gguf "
        "file; owner/name of the hub, such as Qwen/Qwen3-0.6B; or MODEL@URL of a server, such as "
        f"llama3.2@{OLLAMA}",
    )
    if remote:
        policy = endpoint_of(options)
        title, model = policy.base.partition("@")[0], None
        temperature = policy.settings.get("temperature")  # that of the server if none is given
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
    else:
        title, options.model = formats.title(options.model), formats.pinned(options.model)
        model = formats.directory_of(options.model)
        sampling = read_sampling(model)
        for name in sampling:
            if getattr(options, name) is not None:
                sampling[name] = getattr(options, name)
        SamplingParams(**sampling)  # checks it
    with Sandbox() as sandbox:
        replies = store_of(options.experts, "--experts")
        spending = Spending(replies=replies)
        world = questions_of(model, options.tools, options.index, sandbox, spending)
        if remote:
            states_seed = options.seed is not None
            rollout = policy.load(spending, 1).sampling(temperature, states_seed)
            about = told(policy)
        else:
            rollout, about = local_rollout(options, model, sampling, world)
        if not rollout.tokenizer.markers:
            world = OpenQuestions([], "none (this tokenizer has no <tool_call>; see docs/serve.md)")
        rollout.survives_failures = True  # a person would rather have an answer without that expert
        if options.http:
            serve_openai(options, title, rollout, world, sampling)
            return 0
        stream = io.StringIO() if options.json else sys.stdout
        if pipes:
            print(f"{about}; {world.title}; MCP on stdin and stdout", file=sys.stderr)
            serve_mcp(options, pipes, title, rollout, world, sampling)
            return 0
        terminal = Terminal(
            rollout, world, about, options.seed or 0, stream, options.trace, options.json
        )
        typing = sys.stdin.isatty() and sys.stdout.isatty() and not options.json
        if options.ask or not typing:
            notes = [note for note in (about, world.title, world.shorthand) if note]
            notes += [] if world.tools else [f"tools: {world.names}"]
            print("; ".join(notes), file=sys.stderr)
            return converse(terminal, [options.ask] if options.ask else sys.stdin)
        terminal.at_prompt = True
        terminal.do_model("")
        terminal.console.line(f"/help lists the commands. {KEYS}")
        converse(terminal, typed([*COMMANDS, *(tool.name for tool in world.tools)]))
        return 0


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
