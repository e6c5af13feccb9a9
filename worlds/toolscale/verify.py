"""Proves tasks: says why a task is not fit for training; nothing here knows who wrote it.

A golden argument must be determined: it stands in the user's text, or an earlier golden call has
returned it. If that call returned several records, the text must tell the right one from every
other with which the call would succeed too. What is returned only to be passed on, or to be
communicated, must not stand in the text.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from worlds.toolscale.program import ToolError
from worlds.toolscale.score import Call, Scorer, communicated
from worlds.toolscale.shapes import Json
from worlds.toolscale.world import World

ERRS = "a golden call errs"
NOTHING = "solved by doing nothing"
UNDETERMINED = "an argument is not determined by the text"
AMBIGUOUS = "two different ends satisfy the text"
LEAK = "an identifier that a lookup reveals is in the text"
TOLD = "the answer is in the text"
UNFAIR = "the golden calls do not score 1"
DUPLICATE = "near duplicate"
_MONEY = re.compile(r"price|cost|fee|fare|total|amount|rate|charge")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _is_money(field: str, value: Any) -> bool:
    return isinstance(value, float) or _is_number(value) and bool(_MONEY.search(field))


def _is_date(field: str, value: Any) -> bool:
    return isinstance(value, str) and bool(re.match(r"\d{4}-\d\d-\d\d", value))


_SUPERLATIVES = {  # -> direction, what it compares
    "cheapest": (operator.lt, _is_money),
    "most expensive": (operator.gt, _is_money),
    "oldest": (operator.lt, _is_date),
    "most recent": (operator.gt, _is_date),
}


def task_text(task: Json) -> str:
    """Returns all that the user knows and may say."""
    instructions = task["user_scenario"]["instructions"]
    fields = ("reason_for_call", "known_info", "task_instructions")
    return " ".join(instructions[field] for field in fields)


def verify(world: World, task: Json) -> str | None:
    """Returns why the task is not fit, or None. Near duplicates are found by `signature`."""
    scorer, told = Scorer(world, task), task["evaluation_criteria"]["communicate_info"]
    calls, text = scorer.golden_calls(), task_text(task)
    try:
        if scorer.score([], []).reward:
            return NOTHING
    except ToolError:
        return ERRS
    if reason := _undetermined(world, text, calls, told):
        return reason
    if any(communicated(info, [text]) for info in told):
        return TOLD
    parts = scorer.score(calls, told).parts
    parts.pop("NL_ASSERTION", None)  # what needs a judge is not proved here
    return None if parts and all(parts.values()) else UNFAIR


def mentions(text: str, value: str | float) -> bool:
    """Returns whether the text holds the value, as a number or in words ("_" is a space)."""
    if _is_number(value):
        return communicated(f"{value:.2f}", [text])
    return communicated(value, [text]) or communicated(value.replace("_", " "), [text])


def _undetermined(world: World, text: str, calls: list[Call], told: list[str]) -> str | None:
    """The first reason why an argument, or what is to be communicated, is not determined."""
    evidence = _Evidence(text, {key for rows in world.tables.values() for key in rows})
    tables = dict(world.tables)
    for name, arguments in calls:
        for argument, value in arguments.items():
            values = [value]
            works = partial(_succeeds, world, tables, name, arguments, argument)
            if world.by_name[name]["kind"] == "calculate":
                values, works = set(map(float, re.findall(r"\d+(?:\.\d+)?", value))), None
            for value in values:
                if reason := evidence.problem(value, works):
                    return reason
        evidence.add(arguments, world.call(tables, name, arguments))
    for info in told:
        found = [entry for entry in evidence.returned if communicated(info, [str(entry.value)])]
        if found and all(evidence.rivals(entry) for entry in found):
            return AMBIGUOUS
    return None


def _succeeds(world, tables, name, arguments, argument, value) -> bool:
    """Whether the call would succeed with another value of the argument."""
    with contextlib.suppress(ToolError):
        world.call(dict(tables), name, arguments | {argument: value})
        return True
    return False


class _Entry(NamedTuple):
    """A value that a call returned, its field and record, and the rows the record is one of."""

    value: Any
    field: str
    record: Json
    rows: list[Json]


class _Evidence:
    """What determines arguments: the user's text, and what the golden calls so far returned."""

    def __init__(self, text: str, keys: set[str]):
        self.text, self.keys = text, keys
        self.returned: list[_Entry] = []
        self.known: set[str] = set()  # texts that calls were given, or returned as the only one

    def add(self, arguments: Json, result: Any) -> None:
        rows = result if isinstance(result, list) else [result] if isinstance(result, dict) else []
        for row in rows:
            others = rows if len(rows) > 1 else []
            self.returned += [_Entry(value, field, row, others) for field, value in row.items()]
        only = rows[0].values() if len(rows) == 1 else ()
        self.known.update(v for v in (*arguments.values(), *only) if isinstance(v, str))

    def problem(self, value: Any, works: Callable[[Any], bool] | None) -> str | None:
        """Why the value of an argument is not determined, or None.

        `works` says whether the call would succeed with another value; None: it would.
        """
        found = [
            entry
            for entry in self.returned
            if entry.value == value and _is_number(entry.value) == _is_number(value)
        ]
        if mentions(self.text, value):
            return LEAK if found and isinstance(value, str) and value in self.keys else None
        if not found:
            return UNDETERMINED
        for entry in found:
            if not any(works is None or works(row[entry.field]) for row in self.rivals(entry)):
                return None
        return AMBIGUOUS

    def rivals(self, entry: _Entry) -> list[Json]:
        """The other rows that the text does not tell from the entry's record."""
        value, name, record, rows = entry
        telling = [field for field in record if field != name and self._tells(field, record[field])]
        others = [
            row
            for row in rows
            if row is not record
            and row[name] != value
            and all(row[field] == record[field] for field in telling)
        ]
        return [] if not others or self._extreme(record, others) else others

    def _tells(self, field: str, value: Any) -> bool:
        """Whether the text says this of a record.

        A number must stand beside a word of its field's name, as "3 seats" does for `seats`: a bare
        number may be about something else.
        """
        if not _is_number(value):
            return isinstance(value, str) and value in self.known or mentions(self.text, value)
        stems = "|".join(re.escape(word.rstrip("s")) for word in field.split("_"))
        before, after = rf"(?<![\w.]){value:g}\W{{1,2}}", rf"\W{{1,2}}{value:g}(?![\w.]*\d)"
        pattern = rf"{before}(?:{stems})|(?:{stems})\w*{after}"
        return f"{value:g}" in self.text and bool(re.search(pattern, self.text.casefold()))

    def _extreme(self, record: Json, others: list[Json]) -> bool:
        """Whether the record is the only answer, in some field, to a superlative in the text."""
        return any(
            fits(field, value) and all(better(value, row[field]) for row in others)
            for superlative, (better, fits) in _SUPERLATIVES.items()
            if superlative in self.text
            for field, value in record.items()
        )


# --- near duplicates, and calls with one argument altered ----------------------------------------


def signature(task: Json) -> str:
    """Returns a hash that near duplicates share: calls by name, wishes but for their numbers."""
    words = task["user_scenario"]["instructions"]["reason_for_call"]
    names = " ".join(action["name"] for action in task["evaluation_criteria"]["actions"])
    return hashlib.sha1((re.sub(r"\d+", "#", words.casefold()) + "|" + names).encode()).hexdigest()


def altered(world: World, calls: list[Call], rng: random.Random) -> list[Call]:
    """Returns the calls with one argument altered."""
    places = [(at, name) for at, (_, arguments) in enumerate(calls) for name in arguments]
    at, argument = rng.choice(places)
    name, arguments = calls[at]
    tool, value = world.by_name[name], arguments[argument]
    choices = tool["function"]["parameters"]["properties"][argument].get("enum")
    if choices is None and isinstance(value, str):
        choices = next((list(rows) for rows in world.tables.values() if value in rows), None)
    if choices is not None:
        other = rng.choice([choice for choice in choices if choice != value])
    elif _is_number(value):
        other = value + 1
    else:
        other = f"{value}x"
    return [*calls[:at], (name, arguments | {argument: other}), *calls[at + 1 :]]
