"""Proves tasks: says why a task is not fit for training.

Golden calls must run, and golden writes change something. Every golden argument must stand in the
user's text, or an earlier golden call must have returned it; no answer may stand in the text.
Nothing done, a write with an argument altered, and one left out must score 0. An agent that does
all that is right must get there with the scripted user. That the user's words for a record fit no
other of its records is so by construction (wishes.py).
"""

import random
from collections.abc import Iterator
from typing import Any

from nanorchestra.records import Preference, Task
from nanorchestra.schemas import Json
from worlds.toolscale.domain import Domain
from worlds.toolscale.environment import DomainEnvironment
from worlds.toolscale.expert import altered, right_turns
from worlds.toolscale.score import Scorer, attempt
from worlds.toolscale.toolkit import ToolError
from worlds.toolscale.user import opening
from worlds.toolscale.words import communicated, mentions


def task_text(task: Json) -> str:
    """Returns all that the user knows and may say."""
    instructions = task["user_scenario"]["instructions"]
    return f"{instructions['reason_for_call']} {instructions['known_info']}"


def verify(domain: Domain, task: Json) -> str | None:
    """Returns why the task is not fit, or None."""
    scorer, text = Scorer(domain, task), task_text(task)
    golden, infos = scorer.golden, scorer.communicate_info
    try:
        undetermined = list(_undetermined(domain, golden, text))
    except ToolError as error:
        return f"a golden call errs: {error}"
    if undetermined:
        return f"{undetermined[0]} is neither in the text nor returned"
    if any(communicated(info, [text]) for info in infos):
        return "the answer is in the text"
    if scorer.score([]):
        return "solved by doing nothing"
    writes = [p for p, (name, _) in enumerate(golden) if domain.kinds[name] == "write"]
    for place in writes:
        if place not in scorer.effects:
            return f"{golden[place][0]} changes nothing"
    rng = random.Random(task["id"])
    for place in writes:
        wrong = altered(domain, golden[place], rng)
        for instead, how in (([wrong], "with another argument"), ([], "left out")):
            calls = [*golden[:place], *instead, *golden[place + 1 :]]
            if scorer.score(attempt(calls, infos)):
                return f"solved with {golden[place][0]} {how}"
    played = Task(task["id"], opening(task), Preference(), data={"task": task, "experts": []})
    env = DomainEnvironment(domain, played, 0)
    for _ in right_turns(env):
        pass
    return None if env.score("") else "the scripted user does not let it be solved"


def _undetermined(domain, calls, text) -> Iterator[str]:
    """Yields the golden arguments that are neither said nor returned. Raises ToolError."""
    kit, returned = domain.start.copy(), set()
    for name, arguments in calls:
        for argument, value in arguments.items():
            if value not in returned and not mentions(text, value):
                yield f"{argument} of {name}"
        returned.update(leaves(kit.call(name, arguments)))


def leaves(value: Any) -> Iterator[Any]:
    """Yields what is in a JSON value, however deep."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value
