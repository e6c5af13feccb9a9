"""What an evaluation compares: checkpoints, models behind endpoints and routers, with fewer tools.

A policy is written BASE[:CHANGE]...: a checkpoint (a directory, a .gguf file or a hub id),
MODEL@URL, or a router. A change is "basic" (tools without a language model), "none" (no tools),
usd=X (the loop lets no task cost more), or one of its settings, like turns=10.
"""

import math
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from nanorchestra import formats
from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Rollout
from nanorchestra.agent.world import World
from nanorchestra.config import Config, RolloutSection
from nanorchestra.errors import UserError, nearest, require
from nanorchestra.files import merge, read_toml
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model.checkpoint import NANO, read_config, read_sampling
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Price, Task
from nanorchestra.schemas import Json
from nanorchestra.serving.endpoint import EndpointRollout
from nanorchestra.tools.roles import ROLES
from nanorchestra.tools.spending import Spending
from reward import PRICES
from worlds.toolscale.environment import EXPERT, HAND_OVER

RUNS = Path("runs")
ROUTERS = "routers"  # all of a world
TOOLS = ("basic", "none")  # changes that take tools away
LIMITS = ("turns", "calls_per_turn", "turn_tokens", "context_tokens")
SAMPLING = ("temperature", "top_p", "top_k")
PRICE = ("input", "output")  # US dollars per million tokens
WHOLE = (*LIMITS, "top_k")  # numbers without a fraction
CHANGES = {  # numbers that a change may set, by kind of policy
    "router": ("usd",),
    "checkpoint": ("usd", *LIMITS, *SAMPLING),
    "endpoint": ("usd", *LIMITS, "temperature", *PRICE),
}
CHANGE = re.compile(r":(?=basic\b|none\b|[a-z_]+=)")  # before each change of a policy
CONTEXT = 32768  # tokens of an endpoint


@dataclass(frozen=True)
class Policy:
    """A policy as it was written, and what that means. `base` of a checkpoint is where it lies.

    `settings` are `tools` ("all", "basic" or "none"), and `usd` if the policy has a limit. A
    checkpoint and an endpoint also have LIMITS and `from`, where these come from; a checkpoint has
    sampling, an endpoint a temperature if one is given, and its PRICE if one is known.
    """

    text: str
    base: str
    kind: Literal["router", "checkpoint", "endpoint"]
    settings: Json

    @property
    def priced(self) -> bool:
        """Whether it is known what its own tokens cost."""
        return self.kind != "endpoint" or "input" in self.settings

    def load(self, spending: Spending, running: int) -> Rollout:
        """Returns what plays a checkpoint or an endpoint, `running` attempts at a time. UserError.

        `spending` bounds and counts what an endpoint costs.
        """
        settings = RolloutSection(**{name: self.settings[name] for name in LIMITS})
        if self.kind == "endpoint":
            price = Price(self.settings.get("input", 0.0), self.settings.get("output", 0.0))
            tokenizer = Tokenizer.from_dir(NANO)
            temperature = self.settings.get("temperature")
            return EndpointRollout(self.base, price, tokenizer, settings, spending, temperature)
        sampling = {name: self.settings[name] for name in SAMPLING}
        word = CHANGE.split(self.text)[0]
        return load_rollout(Path(self.base), settings, sampling, running, named=word)

    def environment(self, world: World, task: Task, seed: int) -> Environment:
        """Returns an attempt at a task of a world, with this policy's tools and limit of dollars.

        The stricter of two limits holds, that of the policy and that of the user.
        """
        env = world.environment(task, seed)
        names = [tool["function"]["name"] for tool in env.tools]
        if self.settings["tools"] == "none":
            removed = names
        elif self.settings["tools"] == "basic":
            removed = [name for name in names if name in ROLES or env.kinds.get(name) == "expert"]
        else:
            removed = []
        env.tools = [tool for tool in env.tools if tool["function"]["name"] not in removed]
        env.kinds = {name: kind for name, kind in env.kinds.items() if name not in removed}
        if EXPERT not in names or EXPERT in removed:
            message = env.messages[0]
            message["content"] = message["content"].replace(HAND_OVER, "")
        limits = Preference(usd=self.settings.get("usd"), never=removed)
        env.task = replace(task, preference=task.preference.stricter(limits))
        return env


def parse(text: str, routers: Collection[str], option: str = "--policy") -> Policy:
    """Returns the policy that is written `text` after an option. UserError.

    `routers` are known by name.
    """
    base, *changes = CHANGE.split(text)
    where = f"{option} {text}"
    settings = {"tools": "all"}
    if base in routers:
        kind = "router"
    elif "://" in base:
        kind = "endpoint"
        settings |= endpoint_settings(base)
    else:
        kind = "checkpoint"
        words = [*routers, ROUTERS] if routers else []
        known = ", ".join(["a checkpoint", "a hub id", "MODEL@URL", *words])
        is_other = Path(base).is_dir() and not (Path(base) / "config.json").exists()
        problem = "it has no config.json" if is_other else "there is no such path"
        unknown = f"{where}: {problem}; it must be {known}{_nearest(base, words)}"
        require(formats.names_model(base) and not is_other, unknown)
        path = formats.directory_of(base)
        settings |= checkpoint_settings(path)
        base = str(path)
    for change in changes:
        if change in TOOLS:
            settings["tools"] = change
            continue
        name, _, value = change.partition("=")
        try:
            if name not in CHANGES[kind]:
                raise ValueError(name)
            settings[name] = int(value) if name in WHOLE else float(value)
        except ValueError:
            right = f"basic, none, or a number of {', '.join(CHANGES[kind])}"
            right += "" if name in CHANGES[kind] else nearest(name, [*TOOLS, *CHANGES[kind]])
            raise UserError(f"{where}: {change} must be {right}") from None
    _check(settings, where)
    return Policy(text, base, kind, settings)


def _nearest(base: str, words: list[str]) -> str:
    """Returns "; did you mean NAME?": the model of a run that `base` names, or what is like it."""
    for model in (Path(base) / "model", RUNS / base / "model"):
        if os.path.lexists(model):
            return f"; did you mean {model}?"
    return nearest(base, [*words, *map(str, RUNS.glob("*/model"))])


def _check(settings, where) -> None:
    """Raises UserError for a number out of its range, or half a price."""
    usd, temperature = settings.get("usd", 0.0), settings.get("temperature", 0.0)
    require(0 <= usd < math.inf, f"{where}: usd must be US dollars, 0 or more")
    require(0 <= temperature < math.inf, f"{where}: temperature must be 0 or more")
    require(0 < settings.get("top_p", 1.0) <= 1, f"{where}: top_p must be above 0, at most 1")
    require(settings.get("top_k", 0) >= 0, f"{where}: top_k must be 0 or more")
    small = [name for name in LIMITS if settings.get(name, 1) < 1]
    require(not small, f"{where}: {', '.join(small)} must be 1 or more")
    price = [settings[name] for name in PRICE if name in settings]
    is_price = len(price) != 1 and all(0 <= usd < math.inf for usd in price)
    right = "input and output must both be US dollars per million tokens, 0 or more"
    require(is_price, f"{where}: {right}")


def endpoint_settings(base: str) -> Json:
    """Returns limits and, if it is known, the price of MODEL@URL."""
    settings = _default_limits(CONTEXT) | {"from": "evaluate.py"}
    price = PRICES.get(base.partition("@")[0])
    if price:
        settings["input"], settings["output"] = price
    return settings


def checkpoint_settings(path: Path) -> Json:
    """Returns limits and sampling of a checkpoint.

    They are those of the run that trained it, or else its context and generation_config.json.
    """
    home = path.resolve().parent
    shipped = home == NANO.parent
    config_of_run = home.parent / "configs" / "nano.toml" if shipped else home / "config.toml"
    if not config_of_run.is_file():
        settings = _default_limits(read_config(path).max_position_embeddings) | read_sampling(path)
        return settings | {"from": "generation_config.json"}
    config = merge(asdict(Config()), read_toml(config_of_run))
    settings = {name: config["rollout"][name] for name in LIMITS}
    sampling = {"temperature": config["evaluation"]["temperature"], "top_p": 1.0, "top_k": 0}
    return settings | sampling | {"from": "its run"}


def _default_limits(context: int) -> Json:
    return {
        "turns": 50,
        "calls_per_turn": 4,
        "turn_tokens": context // 2,
        "context_tokens": context,
    }
