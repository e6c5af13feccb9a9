"""Asks the experts of a catalogue questions with known answers, and writes down how they did.

    python -m worlds.profile mine.toml --questions frames.jsonl --out profiles.toml --max-usd 5

profiles.toml has a sentence for each expert: right answers by kind of question with intervals, US
dollars and seconds a question. `--tools mine.toml,profiles.toml` adds it to the descriptions that
the policy reads. The paper lets a language model write them from ten tasks (arXiv 2511.21689).
"""

import argparse
import asyncio
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from nanorchestra.config import TaskSection
from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.files import write_whole
from nanorchestra.records import ToolCall, ToolResult
from nanorchestra.tools.allowance import Allowance
from nanorchestra.tools.http import EndpointError
from nanorchestra.tools.models import ExpertTool
from nanorchestra.tools.replies import in_attempt
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from worlds.judge import grade
from worlds.load import open_world
from worlds.questions import PREFIX, QuestionWorld

Z = 1.96  # of a 95% interval
LEAST = 5  # questions of a kind that are told by themselves
KINDS = 4  # kinds that are told, those with most questions
PARALLEL = 16


@dataclass(frozen=True)
class Answer:
    """An expert's answer to a question of a kind; `result` has its price and latency."""

    kind: str
    is_right: bool
    result: ToolResult


def wilson(right: int, count: int) -> tuple[float, float]:
    """Returns the 95% interval of a share (Wilson 1927), from 0 to 1."""
    share = right / count
    centre = share + Z**2 / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    low, high = ((centre + sign * half) / (1 + Z**2 / count) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def sentence(answers: Sequence[Answer]) -> str:
    """Returns what is said of an expert in its description."""
    by_kind = defaultdict(list)
    for answer in answers:
        by_kind[answer.kind].append(answer)
    kinds = sorted(by_kind.items(), key=lambda pair: (-len(pair[1]), pair[0]))[:KINDS]
    told = [f"{kind} {_share(those)}" for kind, those in kinds if len(those) >= LEAST]
    by = f" ({', '.join(told)})" if len(by_kind) > 1 and told else ""
    usd = sum(answer.result.cost_usd for answer in answers) / len(answers)
    seconds = sum(answer.result.latency_s for answer in answers) / len(answers)
    return (
        f"Right in {_share(answers)} of {len(answers)} questions{by}; "
        f"${usd:.2g} and {seconds:.2g} s a question."
    )


def _share(answers) -> str:
    right = sum(answer.is_right for answer in answers)
    low, high = wilson(right, len(answers))
    return f"{100 * right / len(answers):.0f}% [{100 * low:.0f}, {100 * high:.0f}]"


def ask_all(
    world: QuestionWorld, expert: str, indices: Sequence[int], progress: tqdm
) -> list[Answer]:
    """Returns an expert's answers to questions of a world, without those that failed.

    A question that the run's dollars no longer pay for has none.
    """

    def ask(index):
        task = world.task("all", index)
        env = world.environment(task, index)
        with in_attempt(index):
            prepared = env.prepare(ToolCall(expert, {}), Allowance())
            result = asyncio.run(prepared.run())
        progress.update()
        if result.infrastructure or result.refused:
            return None
        try:
            outcome, _ = grade(task.question, task.data["answer"], result.content, world.judge)
        except EndpointError:  # the judge failed
            return None
        return Answer(task.kind, bool(outcome), result)

    with ThreadPoolExecutor(PARALLEL) as pool:
        return [answer for answer in pool.map(ask, indices) if answer]


def write_profiles(path: Path, profiles: dict[str, str]) -> None:
    """Writes the sentence of each expert as a table of a catalogue."""
    lines = [f"{json.dumps(name)} = {json.dumps(text)}\n" for name, text in profiles.items()]
    write_whole(path, "[profiles]\n" + "".join(lines))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options. UserError if one is wrong."""
    parser = ArgumentParser(
        prog="worlds.profile", description="Profiles the experts of a catalogue."
    )
    add = parser.add_argument
    add("catalogue", help="files of tools, as --tools of serve.py")
    add("--questions", required=True, help="a .jsonl file of questions and answers")
    add("--out", type=Path, default=Path("profiles.toml"), help="(default: profiles.toml)")
    add("--count", type=int, default=50, help="of questions for each expert (default: 50)")
    add("--judge", default="", help="expert of the catalogue that judges what no rule accepts")
    add("--experts", default="real", help="real, simulated, record:DIR or replay:DIR")
    add("--max-usd", type=float, default=math.inf, help="that experts and judge may cost")
    add("--seed", type=int, default=0, help="of the questions (default: 0)")
    return parser.parse_args(arguments)


@command("worlds.profile")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = parse(arguments)
    require(options.count > 0, f"--count is {options.count}; it must be at least 1")
    settings = TaskSection(
        f"{PREFIX}{options.questions}",
        tools=options.catalogue,
        experts=options.experts,
        judge=options.judge,
        preference="",
    )
    spending = Spending()
    spending.bound(options.max_usd)
    profiles = {}
    with Sandbox() as sandbox:
        world = open_world(settings, options.seed, sandbox, spending)
        experts = [tool.name for tool in world.tools if isinstance(tool, ExpertTool)]
        require(experts, f"{options.catalogue}: it has no expert to ask")
        size = world.size("all")
        drawn = random.Random(options.seed).sample(range(size), min(size, options.count))
        for name in experts:
            with tqdm(total=len(drawn), desc=name, unit="question") as progress:
                answers = ask_all(world, name, drawn, progress)
            if answers:
                profiles[name] = sentence(answers)
                write_profiles(options.out, profiles)
                print(f"{name}: {profiles[name]}")
            else:
                print(f"{name}: no answer came; it gets no profile", file=sys.stderr)
    require(profiles, f"{options.catalogue}: no expert answered; {options.out} is not written")
    print(f"{options.out}: use it with --tools {options.catalogue},{options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
