"""What one call may do: the US dollars and seconds that are left for it, and the user's bans.

A caller hands a tool an `Allowance`; `within` returns the tool as it may be called under it. A tool
that can be made smaller has a method `within` of its own: an expert writes fewer tokens, a role
does without a banned helper, an orchestrator passes the allowance on to what it calls. So a limit
holds through any depth: what a call may spend is part of what its caller may spend. No torch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanorchestra.records import Preference, banned
from nanorchestra.schemas import Json


@dataclass(frozen=True)
class Allowance:
    """What one call may do.

    usd: US dollars at most. share: what a call that can be made smaller takes of them at most, so
    that calls of one turn do not starve each other. seconds: until the caller gives the call up.
    preference: the user's, with the names never to use.
    """

    usd: float = math.inf
    share: float = math.inf
    seconds: float = math.inf
    preference: Preference = Preference()

    @property
    def bounded(self) -> bool:
        """Whether it bounds dollars or seconds."""
        return self.usd < math.inf or self.seconds < math.inf

    def check_bans(self, names: set[str]) -> None:
        """Raises RefusedError if the user forbids a call that has one of the names."""
        if ban := banned(names, self.preference.never):
            raise RefusedError(f"the user forbids {ban}")

    def check_usd(self, name: str, most_usd: float) -> None:
        """Raises RefusedError if a call of `name` can cost more than the US dollars left."""
        if most_usd > self.usd:
            raise too_dear(name, most_usd, self.usd)


UNLIMITED = Allowance()


class RefusedError(Exception):
    """A call cannot be made within its allowance; the message is for the policy and the user."""


def within(tool: Any, arguments: Json, allowance: Allowance) -> Any:
    """Returns `tool` as it may be called with `arguments` under an allowance.

    Raises RefusedError if it is banned, or costs more even where it is made smaller.
    """
    allowance.check_bans(ban_names(tool, arguments))
    if hasattr(tool, "within"):
        return tool.within(arguments, allowance)
    allowance.check_usd(tool.name, most_usd(tool, arguments))
    return tool


def most_usd(tool: Any, arguments: Json) -> float:
    """Returns the most US dollars that a call can cost, as `most_usd` or the tool's prices say."""
    if hasattr(tool, "most_usd"):
        return tool.most_usd(arguments)
    by_time = getattr(tool, "usd_per_second", 0.0) * getattr(tool, "timeout_s", 0.0)
    return getattr(tool, "usd_per_call", 0.0) + by_time


def too_dear(name: str, most: float, left: float) -> RefusedError:
    """Returns the refusal of a call that could cost `most` US dollars where fewer are left."""
    return RefusedError(f"refused {name}: up to {dollars(most)}, {dollars(max(left, 0))} left")


def dollars(usd: float) -> str:
    """Returns US dollars with two digits: "$0.012", "$0.000011"."""
    if usd == math.inf:
        return "any sum"
    digits = f"{float(f'{usd:.2g}'):.9f}".rstrip("0").rstrip(".")
    return f"${digits}"


def ban_names(tool: Any, arguments: Json | None = None) -> set[str]:
    """Returns the names under which the user can ban a call: of the tool, its kind, its models.

    Without `arguments` those of every call. A tool whose models have names of their own has a
    method `ban_names`; any other has the values that its schema lets an argument choose from.
    """
    names = {tool.name, tool.kind}
    if hasattr(tool, "ban_names"):
        return names | tool.ban_names(arguments)
    for name, schema in tool.parameters.get("properties", {}).items():
        choices = [choice for choice in schema.get("enum", ()) if isinstance(choice, str)]
        chosen = choices if arguments is None else [arguments.get(name)]
        names |= {choice for choice in choices if choice in chosen}
    return names


def all_ban_names(tools: Iterable[Any]) -> list[str]:
    """Returns every name that a ban may have where these tools are on offer, sorted."""
    known = set()
    for tool in tools:
        inner = [*getattr(tool, "helpers", ()), *getattr(tool, "tools", ())]
        known |= ban_names(tool) | set(all_ban_names(inner))
    return sorted(known)
