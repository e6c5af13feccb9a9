"""Plays an agent: the right next turn of an attempt, and turns of experts that err.

The agent sees what a policy sees and has its interface. It acts on a wish only after the user has
spoken it, asks for what a call needs, and gets the yes that a rule demands.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from nanorchestra.records import ToolCall, ToolResult
from worlds.toolscale.domain import Domain
from worlds.toolscale.program import ToolError
from worlds.toolscale.score import Call, communicated, confirmed
from worlds.toolscale.user import TEXTS, SpokenWish, spoken

if TYPE_CHECKING:
    from worlds.toolscale.environment import DomainEnvironment

SAY = TEXTS["agent"]
TRIES = 8  # alterations of a call, until one does harm


def next_turn(env: DomainEnvironment) -> tuple[str, Call | None]:
    """Returns the right next turn: a message to the user, or a call."""
    heard, scorer = _heard(env), env.scorer
    for place in _due(env):
        name, arguments = call = scorer.golden[place]
        if missing := _missing(env, arguments):
            return SAY["ask"].format(", ".join(missing)), None
        confirms = any(rule["check"] == "confirmed" for rule in scorer.rules)
        asks = confirms and env.domain.by_name[name]["kind"] == "write"
        if asks and not confirmed([*env.trace, ("call", *call, False)], [name], arguments):
            given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
            return SAY["confirm"].format(name, given).replace("_", " "), None
        return "", call
    known = [wish for wish in env.wishes if spoken(wish.say, heard)]
    unknown = [wish for wish in env.wishes if wish not in known]
    if any(wish.first and spoken(wish.first, heard) for wish in unknown):
        return SAY["shall"], None
    infos = _infos(env, known, unknown)
    sentence = f" {', '.join(infos)}." if infos else ""
    achieved = bool(infos)
    for wish in known[-1:]:
        achieved |= bool(wish.communicate_info or {*wish.actions} & {*scorer.effects})
    return SAY["done" if achieved else "refuse"].format(sentence), None


def _infos(env: DomainEnvironment, known: list[SpokenWish], unknown: list[SpokenWish]) -> list[str]:
    """Returns what is still to be communicated for the wishes known, and for no later one."""
    later = {info for wish in unknown for info in wish.communicate_info}
    messages = [step[1] for step in env.trace if step[0] == "agent"]
    infos = []
    for wish in known:
        for info in wish.communicate_info:
            if info not in later and info not in infos and not communicated(info, messages):
                infos.append(info)
    return infos


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
        (call,) = altered(env.domain, [env.scorer.golden[place]], rng)
        tables = dict(env.tables)
        with suppress(ToolError):
            env.domain.call(tables, *call)
        if tables != env.tables:
            return "", call
    return SAY["wait"], None


def altered(domain: Domain, calls: list[Call], rng: random.Random) -> list[Call]:
    """Returns the calls with one argument altered; as they are if none has an argument."""
    places = [(at, name) for at, (_, arguments) in enumerate(calls) for name in arguments]
    if not places:
        return calls
    at, argument = rng.choice(places)
    name, arguments = calls[at]
    value = arguments[argument]
    shape = domain.by_name[name]["function"]["parameters"]["properties"].get(argument, {})
    tables = domain.tables.values() if isinstance(value, str) else ()
    choices = shape.get("enum") or next((rows for rows in tables if value in rows), ())
    if others := [choice for choice in choices if choice != value]:
        other = rng.choice(others)
    else:
        other = value + 1 if isinstance(value, int | float) else f"{value}x"
    return [*calls[:at], (name, arguments | {argument: other}), *calls[at + 1 :]]


def _heard(env) -> str:
    return " ".join(step[1] for step in env.trace if step[0] == "user")


def _due(env) -> list[int]:
    """The places of the golden calls that are to be made now: their wishes have been spoken."""
    made, heard = [step[1:3] for step in env.trace if step[0] == "call"], _heard(env)
    unspoken = [w.actions for w in env.wishes if not spoken(w.say, heard)]
    return [
        place
        for place, call in enumerate(env.scorer.golden)
        if call not in made and not any(place in actions for actions in unspoken)
    ]


def _missing(env, arguments) -> list[str]:
    """The arguments that the user knows and has not said."""
    known = env.task.data["task"]["user_scenario"]["instructions"].get("known_info") or ""
    return [
        name.replace("_", " ")
        for name, value in arguments.items()
        if isinstance(value, str) and communicated(value, [known])
        if not communicated(value, [_heard(env)])
    ]
