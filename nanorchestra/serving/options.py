"""The options of serve.py. No torch, so that --help and a mistake cost no seconds."""

import argparse
from pathlib import Path

from nanorchestra.errors import ArgumentParser, require

MODES = ("int8", "int4")  # of nanorchestra/model/quantise.py


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
    add("--tools", help="a catalogue, see docs/tools.md (default: Python)")
    add("--experts", default="real", help="real, record:DIR or replay:DIR, see docs/tools.md")
    add("--index", help="offer search in an index that tools.py built")
    add("--trace", type=Path, help="add every attempt to this file, as JSON")
    add("--replay", type=Path, help="show the attempts of such a file again, and end")
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
    add("--seed", type=int, default=0, help="of sampling and simulated experts (default: 0)")
    for name, kind in (("temperature", float), ("top-p", float), ("top-k", int)):
        add(f"--{name}", type=kind, help="of sampling (default: as generation_config.json says)")
    options = parser.parse_args(arguments)
    require(
        options.experts != "simulated",
        "--experts is 'simulated'; it must be real, record:DIR or replay:DIR",
    )
    require(options.ask is None or options.ask.strip(), "--ask: the question is empty")
    if options.mcp:
        others = options.ask or options.json or options.replay
        require(not others, "--mcp: leave out --ask, --json and --replay")
    return options
