"""Proves tasks: says why a task is not fit for training.

Every golden argument must stand in the user's text, or an earlier golden call must have returned
it. Keys that a lookup returns must not stand in the text, nor what is to be communicated. Golden
calls must run; no call, or writes with one argument altered, must score 0. An agent that does all
that is right must get there with the scripted user. That one record alone fits what the user says
is ensured when a draft is acted out (act.py).
"""

import hashlib
import random
import re
from collections.abc import Iterator
from typing import Any

from nanorchestra.records import Preference, Task
from worlds.toolscale.domain import Domain, leaves
from worlds.toolscale.environment import DomainEnvironment
from worlds.toolscale.expert import altered, right_turns
from worlds.toolscale.program import Json, ToolError
from worlds.toolscale.score import Scorer, attempt, communicated
from worlds.toolscale.user import wishes

DUPLICATE = "near duplicate"


def task_text(task: Json) -> str:
    """Returns all that the user knows and may say."""
    instructions = task["user_scenario"]["instructions"]
    fields = ("reason_for_call", "known_info", "task_instructions")
    return " ".join(instructions[field] for field in fields)


def verify(domain: Domain, task: Json) -> str | None:
    """Returns why the task is not fit, or None. Near duplicates are found by `signature`."""
    scorer, text = Scorer(domain, task), task_text(task)
    golden, infos = scorer.golden, scorer.communicate_info
    try:
        arguments = list(_arguments(domain, golden))
    except ToolError:
        return "a golden call errs"
    kinds = {domain.by_name[name]["kind"] for name, _ in golden}
    if scorer.score([]) and (infos or kinds & {"write", "handover"}):
        return "solved by doing nothing"
    for value, known in arguments:
        stands = mentions(text, value)
        if stands and known and any(value in rows for rows in domain.tables.values()):
            return "an identifier that a lookup reveals is in the text"
        if not stands and not known:
            return "an argument is not determined by the text"
    if any(communicated(info, [text]) for info in infos):
        return "the answer is in the text"
    rng = random.Random(task["id"])
    writes = [p for p in scorer.effects if domain.by_name[golden[p][0]]["kind"] == "write"]
    for place in writes[:1]:
        wrong = altered(domain, [golden[place]], rng)
        if scorer.score(attempt([*golden[:place], *wrong, *golden[place + 1 :]], infos)):
            return "solved with an argument altered"
    played = Task(
        task["id"], wishes(task)[0].opening, Preference(), data={"task": task, "experts": []}
    )
    env = DomainEnvironment(domain, played, 0)
    for _ in right_turns(env):
        pass
    return None if env.score("") else "the scripted user does not let it be solved"


def _arguments(domain, calls) -> Iterator[tuple[Any, bool]]:
    """Every new golden argument, and whether an earlier call has returned it."""
    tables, returned, used = dict(domain.tables), set(), set()
    for name, arguments in calls:
        for value in arguments.values():
            if value not in used:
                used.add(value)
                yield value, value in returned
        returned.update(leaf for _, leaf in leaves(domain.invoke(tables, name, arguments)))


def mentions(text: str, value: str | float) -> bool:
    """Returns whether the text holds the value, as a number or in words ("_" is a space)."""
    if not isinstance(value, str):
        return communicated(f"{value:.2f}", [text])
    return communicated(value, [text]) or communicated(value.replace("_", " "), [text])


def signature(task: Json) -> str:
    """Returns a hash that near duplicates share: calls by name, wishes but for their numbers."""
    words = task["user_scenario"]["instructions"]["reason_for_call"]
    names = " ".join(action["name"] for action in task["evaluation_criteria"]["actions"])
    return hashlib.sha1((re.sub(r"\d+", "#", words.casefold()) + "|" + names).encode()).hexdigest()
