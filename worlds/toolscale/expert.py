"""Plays an agent: the right next turn of an attempt, and turns of experts that err.

The agent has the interface of a policy, knows the golden calls, and gets the yes that a rule
demands.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nanorchestra.records import ToolCall, ToolResult
from worlds.toolscale.domain import Domain
from worlds.toolscale.score import Call, confirmed
from worlds.toolscale.toolkit import ToolError

if TYPE_CHECKING:
    from worlds.toolscale.environment import DomainEnvironment

SAY = {
    "confirm": "Shall I do this: {} ({})?",
    "done": "This is done.{}",
    "refuse": "I am sorry, this cannot be done.",
    "wait": "One moment, please.",
}
TRIES = 8  # alterations of a call, until one does harm


def next_turn(env: DomainEnvironment) -> tuple[str, Call | None]:
    """Returns the right next turn: a message to the user, or a call."""
    scorer = env.scorer
    for place in _due(env):
        name, arguments = call = scorer.golden[place]
        confirms = any(rule["check"] == "confirmed" for rule in scorer.rules)
        asks = confirms and env.domain.kinds[name] == "write"
        if asks and not confirmed([*env.trace, ("call", *call, False)], [name]):
            given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
            return SAY["confirm"].format(name, given).replace("_", " "), None
        return "", call
    infos = scorer.communicate_info
    if not infos and not scorer.effects:
        return SAY["refuse"], None
    return SAY["done"].format(f" {', '.join(infos)}." if infos else ""), None


def right_turns(
    env: DomainEnvironment,
) -> Iterator[tuple[str, ToolCall | None, ToolResult | None]]:
    """Takes the right turns until the conversation is over.

    Yields message, call and result of each; a message has no result if it is the last.
    """
    while not env.over:
        words, made = next_turn(env)
        if made:
            call = ToolCall(*made)
            yield "", call, env.do(call)
        else:
            answer = env.hear(words)
            yield words, None, None if env.over else ToolResult(answer)


def wrong_turn(env: DomainEnvironment, rng: random.Random) -> tuple[str, Call | None]:
    """Returns a wrong next turn: a message to the user, or a call.

    It changes what nobody asked for, if there is a write to do; else it wastes the turn.
    """
    writes = [place for place in _due(env) if place in env.scorer.effects]
    for place in writes * TRIES:
        call = altered(env.domain, env.scorer.golden[place], rng)
        kit = env.kit.copy()
        with suppress(ToolError):
            kit.call(*call)
        if kit != env.kit:
            return "", call
    return SAY["wait"], None


def altered(domain: Domain, call: Call, rng: random.Random) -> Call:
    """Returns the call with one argument altered; as it is if it has none."""
    name, arguments = call
    if not arguments:
        return call
    argument = rng.choice(list(arguments))
    properties = domain.functions[name]["function"]["parameters"]["properties"]
    other = _other(domain, arguments[argument], properties.get(argument, {}), rng)
    return name, arguments | {argument: other}


def _other(domain, value, shape, rng) -> Any:
    """Another value: of the choices, a key of the same table, a number, or a text that is none."""
    choices = shape.get("enum", ())
    for table in domain.start.tables if isinstance(value, str) and not choices else ():
        if value in table:
            choices = list(table)
    others = [choice for choice in choices if choice != value]
    if others:
        return rng.choice(others)
    return value + 1 if isinstance(value, int | float) else f"{value}x"


def _due(env) -> list[int]:
    """The places of the golden calls that have not been made."""
    made = [step[1:3] for step in env.trace if step[0] == "call"]
    return [place for place, call in enumerate(env.scorer.golden) if call not in made]
