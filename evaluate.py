"""Evaluates a checkpoint on held-out tasks of the miniature, beside the fixed routers it must beat.

python evaluate.py --model assets/nano --tasks 480 --seed 0 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from nanorchestra import Engine, SamplingParams
from nanorchestra.agent.load import NANO, load_policy
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.config import load_config
from nanorchestra.errors import UserError
from nanorchestra.files import write_whole
from nanorchestra.model import chat
from nanorchestra.report.run import number, table
from nanorchestra.tools.sandbox import Sandbox
from worlds.evaluation import evaluate, summarise
from worlds.miniature.probe import price_probe
from worlds.miniature.tables import HELD_OUT
from worlds.miniature.world import World, environment
from worlds.routers import evaluate_routers

CONFIG = Path(__file__).parent / "configs" / "nano.toml"  # its limits are those of an evaluation
ROWS = 128  # attempts at a time


def refuse_arguments(message: str) -> NoReturn:
    """For ArgumentParser.error: one line instead of the usage."""
    raise UserError(f"{message} (--help shows the usage)")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options. UserError."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description="Evaluates a checkpoint and the fixed routers on the same held-out tasks of "
        "the miniature. 480 tasks take about 15 seconds on two CPU cores.",
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=NANO,
        metavar="PATH",
        help="a checkpoint directory in Hugging Face layout (default: the bundled nano)",
    )
    add("--tasks", type=int, default=480, metavar="N", help="held-out tasks (default: 480)")
    add("--temperature", type=float, default=1.0, help="of the sampling; 0 is greedy (default: 1)")
    add("--seed", type=int, default=0, help="of tasks and simulated experts (default: 0)")
    add("--quantise", choices=("int8", "int4"), help="round the linear layers while loading")
    add(
        "--context",
        choices=("append", "rebuild"),
        default="append",
        help="a growing session, or a prompt composed each turn, as rollout.context in training",
    )
    add("--json", type=Path, metavar="FILE", help="write all the figures there too")
    parser.error = refuse_arguments
    options = parser.parse_args(arguments)
    if options.tasks < 1:
        raise UserError(f"--tasks is {options.tasks}; it must be at least 1")
    if not 0 <= options.temperature < float("inf"):
        raise UserError(
            f"--temperature is {options.temperature}; it must be a finite number, 0 or more"
        )
    place = options.json and options.json.parent
    if place and (options.json.is_dir() or not place.is_dir() or not os.access(place, os.W_OK)):
        raise UserError(
            f"--json {options.json}: cannot be written; give a file in a writable directory"
        )
    return options


def load_rollout(options: argparse.Namespace) -> Rollout:
    """Returns the rollout of a checkpoint under the limits of the miniature's run. UserError."""
    path, limits = options.model, load_config(CONFIG).rollout
    model, tokenizer = load_policy(path, options.quantise)
    context = min(limits.context_tokens, model.config.max_position_embeddings)
    attempts = (environment(task, 0, None) for task in World(0).tasks(HELD_OUT, 20))
    longest = max(len(chat.encode(tokenizer, env.messages, env.tools)) for env in attempts)
    if longest + limits.turn_tokens > context:
        raise UserError(
            f"{path}: prompts of {longest} tokens and a turn of {limits.turn_tokens} do not fit "
            f"into {context}; max_position_embeddings in its config.json is "
            f"{model.config.max_position_embeddings}, it must be larger"
        )
    engine = Engine(
        model,
        tokenizer,
        num_pages=ROWS * -(-context // limits.page_size),
        page_size=limits.page_size,
        max_running=ROWS,
        max_context=context,
    )
    return Rollout(
        engine,
        tokenizer,
        lambda seed, budget: SamplingParams(
            max_tokens=budget, temperature=options.temperature, seed=seed
        ),
        Limits(limits.turns, limits.turn_tokens, context),
        rebuild=options.context == "rebuild",
    )


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the summary of the checkpoint, and that of each router by its name."""
    rollout = load_rollout(options)
    tasks = World(options.seed).tasks(HELD_OUT, options.tasks)
    bar = tqdm(total=len(tasks), desc="held-out tasks", unit="task", dynamic_ncols=True)
    with Sandbox() as sandbox:
        with bar:
            attempts = evaluate(
                rollout, tasks, options.seed, sandbox, on_done=lambda _: bar.update()
            )
        scores = summarise(tasks, attempts)
        scores["price_x10"] = price_probe(rollout, tasks, options.seed, sandbox)
        return scores, evaluate_routers(tasks, options.seed, sandbox)


def show(name: str, scores: dict[str, Any], routers: dict[str, Any]) -> None:
    """Prints the table and what the policy does with preferences and prices."""
    print(table({"held_out": {"routers": {name: scores} | routers}}))
    costs = (f"{key} ${number(row['cost_usd'])}" for key, row in scores["by_preference"].items())
    print(f"cost per task by preference: {', '.join(costs)}")
    if scores["price_x10"]:
        shares = ", ".join(f"{share:.0%}" for share in scores["price_x10"].values())
        print(f"asks the large expert at a tenth of its price, as it is, at ten times: {shares}")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    try:
        options = parse(arguments)
        scores, routers = measure(options)
        show(min(str(options.model), os.path.relpath(options.model), key=len), scores, routers)
        if options.json:
            figures = {
                "model": str(options.model),
                "seed": options.seed,
                "tasks": options.tasks,
                "policy": scores,
                "routers": routers,
            }
            write_whole(options.json, (json.dumps(figures, indent=2) + "\n").encode())
        return 0
    except UserError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
