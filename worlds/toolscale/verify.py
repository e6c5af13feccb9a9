"""Throws tasks away. `verify` gives the first reason why a task is not fit to be practised on, or None; nothing here knows who wrote the task.

A golden argument must be determined: it stands in the user's text, or a golden call before it has returned it. If it was one of several that
were returned, something in the text must tell it from each other one with which the call would also succeed. What a call returns only to be
passed on must not stand in the text, nor what is to be communicated.
"""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any, Iterator

from nanorchestra.errors import UserError
from worlds.toolscale.program import Tables, ToolError
from worlds.toolscale.score import Call, Scorer, communicated
from worlds.toolscale.tasks import changes
from worlds.toolscale.world import World, row_problems

FORMAT, ERRS, NOTHING, UNDETERMINED = (
    "not in the task format",
    "a golden call errs",
    "solved by doing nothing",
    "an argument is not determined by the text",
)
AMBIGUOUS, LEAK, TOLD, ROWS, UNFAIR, DUPLICATE = (
    "two different ends satisfy the text",
    "an identifier that a lookup reveals is in the text",
    "the answer is in the text",
    "a row breaks the schema or a link",
    "the golden calls do not score 1",
    "near duplicate",
)
REASONS = (FORMAT, ERRS, NOTHING, UNDETERMINED, AMBIGUOUS, LEAK, TOLD, ROWS, UNFAIR, DUPLICATE)
# Words of a superlative, which way they look, and what they look at: money (numbers with cents, or so called), sizes (any number) or times (dates).
SUPERLATIVES = (
    (r"\bcheapest\b", float.__lt__, "money"),
    (r"\b(most expensive|dearest)\b", float.__gt__, "money"),
    (r"\b(lowest|smallest|fewest|least|shortest|lightest)\b", float.__lt__, "size"),
    (r"\b(highest|largest|biggest|longest|greatest|heaviest|best rated)\b", float.__gt__, "size"),
    (r"\b(oldest|earliest|first|soonest)\b", str.__lt__, "time"),
    (r"\b(most recent|latest|newest|last)\b", str.__gt__, "time"),
)
_DATE, _MONEY = (
    re.compile(r"\d{4}-\d\d-\d\d"),
    re.compile(r"price|cost|fee|fare|total|amount|rate|charge"),
)


def task_text(task: dict[str, Any]) -> str:
    """All that the user knows and may say."""
    instructions = task["user_scenario"]["instructions"]
    if isinstance(instructions, str):
        return instructions
    return " ".join(
        instructions.get(field) or ""
        for field in ("reason_for_call", "known_info", "task_instructions")
    )


def verify(world: World, task: dict[str, Any]) -> str | None:
    """One of REASONS (but DUPLICATE, which needs the other tasks: see `signature`), or None."""
    try:
        check_format(task)
        scorer = Scorer(world, task)
        start = scorer.start()
    except UserError:
        return FORMAT
    try:
        gold = scorer.gold
    except UserError:
        return ERRS
    calls = scorer.golden_calls()
    if scorer.score([], []).reward:
        return NOTHING
    reason = _undetermined(world, task, calls, start)
    if reason is not None:
        return reason
    criteria, text = task["evaluation_criteria"], task_text(task)
    if any(communicated(info, [text]) for info in criteria.get("communicate_info") or ()):
        return TOLD
    touched: Tables = {}
    for table, key, _, new in changes(start, gold):
        if new is not None:
            touched.setdefault(table, {})[key] = new
    if row_problems(world.schema, gold, touched):
        return ROWS
    basis = set(criteria["reward_basis"]) - {
        "NL_ASSERTION"
    }  # what needs a judge is not proved here
    parts = scorer.score(calls, criteria.get("communicate_info") or ()).parts
    return None if basis and all(parts[part] for part in basis) else UNFAIR


def check_format(task: Any) -> None:
    """Raises UserError that names the field of a task that is not in the tau2 format."""
    name = task.get("id") if isinstance(task, dict) else None
    if not isinstance(name, str):
        raise UserError(f"task: id is {name!r}; it must be a text")

    def need(holder: Any, path: str, *kinds: type) -> Any:
        value = holder.get(path.split(".")[-1]) if isinstance(holder, dict) else None
        if not isinstance(value, kinds):
            raise UserError(
                f"task {name}: {path} is {value!r:.40}; it must be a {' or '.join(kind.__name__ for kind in kinds)}"
            )
        return value

    instructions = need(need(task, "user_scenario", dict), "user_scenario.instructions", dict, str)
    if isinstance(instructions, dict):
        for field in ("reason_for_call", "task_instructions"):
            need(instructions, f"instructions.{field}", str)
    criteria = need(task, "evaluation_criteria", dict)
    for action in need(criteria, "evaluation_criteria.actions", list):
        need(action, "actions.name", str), need(action, "actions.arguments", dict)
    need(criteria, "evaluation_criteria.reward_basis", list)
    for info in criteria.get("communicate_info") or ():
        if not isinstance(info, str):
            raise UserError(f"task {name}: communicate_info has {info!r:.40}; it must be a text")


def mentions(text: str, value: Any) -> bool:
    """True if the text holds the value, as a number or in words (an underscore is a space)."""
    if isinstance(value, (list, tuple)):
        return all(mentions(text, element) for element in value)
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        return False
    if isinstance(value, (int, float)):
        return communicated(f"{value:.2f}", [text])
    return (
        communicated(value, [text])
        or "_" in value
        and communicated(value.replace("_", " "), [text])
    )


def _undetermined(
    world: World, task: dict[str, Any], calls: list[Call], start: Tables
) -> str | None:
    text = task_text(task)
    spoken = {
        "text": text,
        "known": set(),
    }  # ids that calls were given, or returned as the only one
    returned: list[
        tuple[Any, str, dict[str, Any], list[dict[str, Any]] | None]
    ] = []  # value, field, record, the list that the record is of
    keys = {key for rows in world.tables.values() for key in rows}
    tables = {table: dict(rows) for table, rows in start.items()}
    for name, arguments in calls:
        tool = world.by_name[name]
        for argument, value in arguments.items():
            if tool["kind"] == "calculate":
                numbers = {float(n) for n in re.findall(r"\d+(?:\.\d+)?", str(value))}
                for n in numbers:
                    found = [entry for entry in returned if _is_number(entry[0]) and entry[0] == n]
                    if not mentions(text, n) and not found:
                        return UNDETERMINED
                    if not mentions(text, n) and all(_rivals(entry, spoken) for entry in found):
                        return AMBIGUOUS
                continue
            found = [
                entry for entry in returned if entry[0] == value and type(entry[0]) is type(value)
            ]
            stands = mentions(text, value)
            if found and stands and isinstance(value, str) and value in keys:
                return LEAK
            if stands:
                continue
            if not found:
                return UNDETERMINED
            if all(
                _would_do(world, name, arguments, argument, entry, spoken, tables)
                for entry in found
            ):
                return AMBIGUOUS
        try:
            result = world.call(tables, name, arguments)
        except ToolError:
            return ERRS
        spoken["known"].update(value for value in arguments.values() if isinstance(value, str))
        for entry in _entries(result):
            returned.append(entry)
            if entry[3] is None and isinstance(entry[0], str):
                spoken["known"].add(entry[0])
    for info in task["evaluation_criteria"].get("communicate_info") or ():
        found = [entry for entry in returned if communicated(info, [str(entry[0])])]
        if found and all(_rivals(entry, spoken) for entry in found):
            return AMBIGUOUS
    return None


def _rivals(entry: tuple, spoken: dict[str, Any]) -> list[dict[str, Any]]:
    """The other rows of the list that a value came in which the text does not tell from its own."""
    value, field, record, rows = entry
    text, known = spoken["text"], spoken["known"]
    telling = [
        f
        for f, v in record.items()
        if f != field
        and (
            isinstance(v, str)
            and v in known
            or (_counted(text, f, v) if _is_number(v) else mentions(text, v))
        )
    ]
    others = [
        row
        for row in rows or ()
        if row is not record
        and row.get(field) != value
        and all(row.get(f) == record[f] for f in telling)
    ]
    return [] if not others or _extreme(text, record, others) else others


def _counted(text: str, field: str, value: float) -> bool:
    """True if the number stands beside a word of its field's name, as "3 seats" does for `seats`: a bare number may be about something else."""
    stems = "|".join(re.escape(word.rstrip("s")) for word in field.split("_"))
    return bool(
        re.search(
            rf"(?<![\w.]){value:g}\W{{1,2}}(?:{stems})|(?:{stems})\w*\W{{1,2}}{value:g}(?![\w.]*\d)",
            text.casefold(),
        )
    )


def _would_do(
    world: World,
    name: str,
    arguments: dict[str, Any],
    argument: str,
    entry: tuple,
    spoken: dict[str, Any],
    tables: Tables,
) -> bool:
    """True if the call succeeds with a rival, too."""
    field = entry[1]
    for row in _rivals(entry, spoken):
        try:
            world.call(
                {table: dict(held) for table, held in tables.items()},
                name,
                arguments | {argument: row[field]},
            )
            return True
        except ToolError:
            continue
    return False


def _extreme(text: str, record: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    """True if the text has a superlative for which the record is the only answer in some field: numbers for sizes, dates for times."""
    text = text.casefold()
    for pattern, better, what in SUPERLATIVES:
        if not re.search(pattern, text):
            continue
        for field, value in record.items():
            rest = [row.get(field) for row in others]
            if what == "time":
                fits = (
                    isinstance(value, str)
                    and _DATE.match(value)
                    and all(isinstance(v, str) and better(value, v) for v in rest)
                )
            else:
                fits = (
                    _is_number(value)
                    and (what == "size" or isinstance(value, float) or _MONEY.search(field))
                    and all(_is_number(v) and better(float(value), float(v)) for v in rest)
                )
            if fits:
                return True
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _entries(
    value: Any, record: Any = None, field: str = "", rows: Any = None
) -> Iterator[tuple[Any, str, Any, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _entries(inner, value, name, rows)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(
                inner, record, field, value if len(value) > 1 and isinstance(inner, dict) else rows
            )
    elif value is not None:
        yield value, field, record or {}, rows


# --- near duplicates, and calls with one argument altered ---------------------------------------------------------------------------------


def signature(task: dict[str, Any]) -> str:
    """Tasks with the same signature are near duplicates: the same calls by name, and the same wishes but for their numbers."""
    instructions = task["user_scenario"]["instructions"]
    words = instructions if isinstance(instructions, str) else instructions["reason_for_call"]
    names = " ".join(action["name"] for action in task["evaluation_criteria"]["actions"])
    return hashlib.sha1((re.sub(r"\d+", "#", words.casefold()) + "|" + names).encode()).hexdigest()


def altered(world: World, calls: list[Call], rng: random.Random) -> list[Call]:
    """The calls with one argument of one of them altered to another value of its kind. Unchanged if no call has arguments."""
    places = [
        (position, argument)
        for position, (_, arguments) in enumerate(calls)
        for argument in arguments
    ]
    if not places:
        return calls
    position, argument = rng.choice(places)
    name, arguments = calls[position]
    shape = world.by_name[name]["function"]["parameters"]["properties"][argument]
    value = arguments[argument]
    table = next(
        (rows for rows in world.tables.values() if isinstance(value, str) and value in rows), None
    )
    if "enum" in shape:
        other = rng.choice([choice for choice in shape["enum"] if choice != value])
    elif table is not None:
        other = rng.choice([key for key in table if key != value])
    elif isinstance(value, bool):
        other = not value
    elif isinstance(value, (int, float)):
        other = value + 1
    elif world.by_name[name]["kind"] == "calculate":
        other = value + " + 1"
    else:
        other = str(value) + "x"
    return [*calls[:position], (name, arguments | {argument: other}), *calls[position + 1 :]]
