"""Opens the world that task.world names."""

import math
from dataclasses import replace
from pathlib import Path

from nanorchestra.agent.world import World
from nanorchestra.config import TaskSection
from nanorchestra.errors import require
from nanorchestra.files import read_toml
from nanorchestra.model.checkpoint import NANO, NANO_BASE
from nanorchestra.tools.models import ExpertTool
from nanorchestra.tools.replies import store_of
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from tools import load_tools
from worlds import preferences, questions, recorded
from worlds.desk import Desk
from worlds.mixture import Mixture
from worlds.toolscale import dataset
from worlds.toolscale.small import small_world
from worlds.user_world import load_user_world

DESKS = {Desk.name: "held_out", f"{Desk.name}:unseen": "unseen"}  # what is held out of each


def open_world(
    settings: TaskSection, seed: int, sandbox: Sandbox, spending: Spending | None = None
) -> World:
    """Returns the world that task.world names, or the mixture of the worlds that it names.

    `spending` bounds and counts what real experts cost, and gets the recorded replies that
    task.experts names. UserError.
    """
    spending = spending or Spending()
    spending.replies = store_of(settings.experts, "task.experts", spending.replies)
    shares = parse_mixture(settings.world)
    worlds = {name: _open(name, settings, seed, sandbox, spending) for name in shares}
    if len(worlds) == 1:
        (world,) = worlds.values()
        return world
    return Mixture(settings.world, worlds, shares, seed)


def knows_only_desk(model: Path) -> bool:
    """Returns whether a checkpoint has seen nothing but the desk: nano, its base, and runs."""
    if model.resolve() in (NANO, NANO_BASE):
        return True
    config = model.parent / "config.toml"
    world = read_toml(config).get("task", {}).get("world") if config.is_file() else None
    return world in DESKS


def note_on_tools(model: str, world: str, setting: str) -> str:
    """Returns a line if a checkpoint has seen the desk alone and the world is another.

    "" if not. `model` "" is one of random weights; `setting` is where the user names a model.
    """
    known = [name.partition("=")[0].strip() for name in world.split(",")]
    if DESKS.keys() & known or (model and not knows_only_desk(Path(model))):
        return ""
    name = model or "a model of random weights"
    return (
        f"{name} knows the desk at most, not the tools of {world}: expect few right answers. "
        f"Name a model that calls tools by {setting}, say Qwen/Qwen3-0.6B (docs/tools.md)"
    )


def parse_mixture(text: str) -> dict[str, float]:
    """Returns the shares that task.world states, which add up to 1.

    "desk=0.99, data/=0.01" names worlds and weights; a weight that is missing is 1. UserError.
    """
    entries = [entry.partition("=") for entry in text.split(",")]
    try:
        weights = {name.strip(): float(weight or 1) for name, _, weight in entries}
    except ValueError:
        weights = {}
    require(
        len(weights) == len(entries)
        and all(name and 0 < weight < math.inf for name, weight in weights.items()),
        f"task.world is {text!r}; it must name each world once with a weight above 0, like "
        "'desk=0.9, data/=0.1'",
    )
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _open(name, settings, seed, sandbox, spending) -> World:
    """Returns one world. UserError."""
    if name in DESKS:
        return Desk(seed, sandbox, DESKS[name])
    kind, _, domains = name.partition(":")
    if kind == "domains":
        chosen = [domain.strip() for domain in domains.split("+")] if ":" in name else None
        spoiled = settings.spoiled
        require(spoiled <= 1, f"task.spoiled is {spoiled}; it must be a share from 0 to 1")
        return small_world(seed, name, chosen, spoiled)
    asks = questions.is_questions(name) or name.startswith(recorded.PREFIX)
    is_there = not name.endswith((".py", ".jsonl")) or asks or Path(name).exists()
    require(is_there, f"task.world: {name}: no such file")
    require(
        asks or Path(name).exists(),
        f"task.world: there is no world {name!r}; it must be {', '.join(DESKS)}, "
        f"domains, domains:NAME+NAME, {', '.join(questions.PUBLISHED)}, "
        f"{questions.PREFIX}FILE, {recorded.PREFIX}FILE, a directory of data_gen.py, a "
        ".jsonl file of ToolScale's rows, or a .py file with an environment of your own",
    )
    if name.endswith(".py"):
        return load_user_world(name, seed)
    simulated = settings.experts == "simulated"
    tools, named = [], (settings.user, settings.judge)
    if settings.tools:
        tools = load_tools(settings.tools, sandbox, spending, simulated, aside=named)
    experts = {tool.name: tool for tool in tools if isinstance(tool, ExpertTool)}
    require(
        {"", *experts} >= set(named),
        f"task.user and task.judge are {named}; each must be an expert of the catalogue "
        f"task.tools, {settings.tools!r}, or empty",
    )
    user = _paid_as("user", experts.get(settings.user))
    judge = _paid_as("judge", experts.get(settings.judge))
    offered = [tool for tool in tools if tool.name not in named]
    if name.startswith(recorded.PREFIX):
        return recorded.load_world(name, seed, settings, offered)
    if asks:
        return questions.load_world(name, seed, settings, offered, judge)
    models = None
    if not simulated:
        models = {
            tool.expert.model: tool.expert for tool in offered if isinstance(tool, ExpertTool)
        }
    preference = preferences.of_setting(settings.preference)
    return dataset.load_world(name, seed, dataset.Models(user, judge, models), preference)


def _paid_as(name: str, tool: ExpertTool | None) -> ExpertTool | None:
    """Returns an expert whose bill is under the name of what it is asked for."""
    if tool is None:
        return None
    return replace(tool, expert=replace(tool.expert, listed_as=name))
