"""What an evaluation compares: checkpoints, models behind endpoints and routers, with fewer tools.

A policy is written BASE[:CHANGE]...: a checkpoint's directory, MODEL@URL, or a router; a change is
"basic" (tools without a language model), "none" (no tools), usd=X (the loop lets no task cost
more), or one of its limits, like turns=10.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.load import NANO, load_rollout
from nanorchestra.agent.loop import AttemptLimits, Rollout
from nanorchestra.agent.policy import EndpointRollout
from nanorchestra.errors import UserError, require
from nanorchestra.model.hf_config import read_config, read_sampling
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Price, Task
from nanorchestra.schemas import Json
from nanorchestra.settings import load_config
from nanorchestra.tools.roles import ROLES
from nanorchestra.tools.spending import Spending
from reward import PRICES
from worlds.mixture import Worlds
from worlds.toolscale.environment import EXPERT, HAND_OVER

LIMITS = ("turns", "calls_per_turn", "turn_tokens", "context_tokens")
PRICE = ("input", "output")  # US dollars per million tokens
SAMPLING = ("temperature", "top_p", "top_k")
CONTEXT = 32768  # tokens of an endpoint
TOOLS = ("all", "basic", "none")


@dataclass(frozen=True)
class Policy:
    """A policy as it was written.

    `settings` are its tools ("all", "basic" or "none"), its limits and sampling, and where they
    come from; no limits for a router. Those of an endpoint have a price if one is known.
    """

    name: str
    base: str
    settings: Json

    @property
    def router(self) -> bool:
        """Whether it is a fixed router."""
        return "turns" not in self.settings

    @property
    def priced(self) -> bool:
        """Whether it is known what its own tokens cost."""
        return "://" not in self.base or "input" in self.settings

    def load(self, spending: Spending, running: int) -> Rollout:
        """Returns what plays it, `running` attempts at a time; no router. UserError."""
        given = self.settings
        limits = AttemptLimits(**{name: given[name] for name in LIMITS})
        if "://" in self.base:
            price = Price(*(given.get(name, 0.0) for name in PRICE))
            tokenizer, warmth = Tokenizer.from_dir(NANO), given["temperature"]
            return EndpointRollout(self.base, price, tokenizer, limits, warmth, spending)
        sampling = {name: given[name] for name in SAMPLING}
        rollout = load_rollout(Path(self.base), limits, sampling, running)
        rollout.rebuild = given["context"] == "rebuild"
        return rollout

    def open(self, worlds: Worlds, task: Task, seed: int) -> Environment:
        """Returns an attempt at a task, with the tools and the dollars of this policy."""
        env = worlds.environment(task, seed)
        names = [tool["function"]["name"] for tool in env.tools]
        basic = [name for name in names if name not in ROLES and env.kinds.get(name) != "expert"]
        kept = {"all": names, "basic": basic, "none": []}[self.settings["tools"]]
        env.tools = [tool for tool, name in zip(env.tools, names, strict=True) if name in kept]
        env.kinds = {name: kind for name, kind in env.kinds.items() if name in kept}
        if EXPERT not in kept:
            env.messages[0]["content"] = env.messages[0]["content"].replace(HAND_OVER, "")
        wish, usd = task.preference, self.settings["usd"]
        never = [*wish.never, *(name for name in names if name not in kept)]
        usd = min(filter(None, (usd, wish.usd)), default=None)  # the stricter of both
        env.task = replace(task, preference=replace(wish, usd=usd, never=never))
        return env


def parse(text: str, routers: Collection[str]) -> Policy:
    """Returns the policy that is written `text`; `routers` are known by name. UserError."""
    base, *changes = re.split(r":(?=basic\b|none\b|[a-z_]+=)", text)
    settings = {"tools": "all", "usd": 0.0}
    kinds = {}
    if "://" in base:
        settings |= _limits(CONTEXT) | {"temperature": 1.0, "from": "evaluate.py"}
        settings |= zip(PRICE, PRICES.get(base.partition("@")[0], ()), strict=False)
        kinds = dict.fromkeys(PRICE, float)
    elif base not in routers:
        known = f"a checkpoint's directory, MODEL@URL, or one of {', '.join(routers)}"
        require(
            (Path(base) / "config.json").is_file(), f"--policy {text}: {base} is none of {known}"
        )
        settings |= limits_of(Path(base))
    kinds = {name: type(value) for name, value in settings.items()} | kinds
    for change in changes:
        name, _, value = (change if "=" in change else f"tools={change}").partition("=")
        numbers = [known for known in kinds if known not in ("tools", "context", "from")]
        try:
            if name not in numbers and (name != "tools" or value not in TOOLS):
                raise ValueError(change)
            settings[name] = kinds[name](value)
        except ValueError:
            right = f"basic, none, or a number of {', '.join(numbers)}"
            raise UserError(f"--policy {text}: {change} must be {right}") from None
    require(0 <= settings["usd"] < math.inf, f"--policy {text}: usd must be US dollars, 0 or more")
    small = [name for name in LIMITS if settings.get(name, 1) < 1]
    require(not small, f"--policy {text}: {', '.join(small)} must be 1 or more")
    price = [settings[name] for name in PRICE if name in settings]
    whole = len(price) != 1 and all(0 <= usd < math.inf for usd in price)
    right = "input and output must both be US dollars per million tokens, 0 or more"
    require(whole, f"--policy {text}: {right}")
    return Policy(text, base, settings)


def limits_of(path: Path) -> Json:
    """Returns limits and sampling of a checkpoint.

    They are those of the run that trained it, or else its context and generation_config.json.
    """
    home = path.resolve().parent
    own = "nano" if home == NANO.parent else home / "config.toml"
    if own == "nano" or own.is_file():
        config = load_config(own)
        found = {name: getattr(config.rollout, name) for name in (*LIMITS, "context")}
        warmth = config.evaluation.temperature
        return found | {"temperature": warmth, "top_p": 1.0, "top_k": 0, "from": "its run"}
    found = _limits(read_config(path).max_position_embeddings) | read_sampling(path)
    return found | {"context": "append", "from": "generation_config.json"}


def _limits(context):
    return dict(zip(LIMITS, (50, 4, context // 2, context), strict=True))
