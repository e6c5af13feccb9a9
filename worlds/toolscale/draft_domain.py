"""Drafts the file of a domain from a description: a language model writes it, part by part.

The model is shown a domain of ours and writes one like it in four parts. Each part is tried, with
those before it, until the next is asked for: it is read, made, and held to what a domain promises,
in a process of the sandbox, for no person has read it yet. What is wrong is told to the model,
which writes the part again.
"""

import inspect
import random
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import ModuleType

import pydantic.dataclasses  # noqa: F401  (which a run of the sandbox may not read)
from pydantic import TypeAdapter, ValidationError

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_text
from nanorchestra.tools.models import Expert
from nanorchestra.tools.sandbox import Sandbox
from worlds.toolscale.domain import Domain, of_module
from worlds.toolscale.domains import restaurant
from worlds.toolscale.generate import make_all, report, vain
from worlds.toolscale.plan import LEVELS, draw
from worlds.toolscale.toolkit import ToolError, Toolkit, as_json
from worlds.toolscale.wishes import Scene, UnfitError

MOST_TRIES = 3  # of a part
TRIAL_S = 60.0
MOST_CHARS = 500  # of what is wrong
TASKS = 50  # that it must give
PEOPLE = 5  # users who are looked for, and calls of each tool
DRAFT = "draft"  # the name of its module, and of its file in tracebacks
IMPORTS = """from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Literal, get_args

from worlds.toolscale.toolkit import Draw, Toolkit, handover, read, spoken, write
from worlds.toolscale.wishes import Mine, Scene, Wish, hand_over, rule, wish
"""
FIT = "fit"  # what a trial prints
PARTS = {
    "records": "the choices, each a Literal, and the records, each a frozen dataclass. The first "
    "record is the user's. The first field of each is its key, a str. A record of a user that "
    "wishes are about has the user's key as a field, and names(): words for it by its key, then "
    "three ways to speak of it by its other fields",
    "tools": "the Toolkit, whose tables are dictionaries of the records, the users first; its "
    "tools, each with type hints and a docstring: ten or more, @read and @write, and the @handover "
    "transfer_to_human_agents; then identify() and draw(). Tools that read find a user, list the "
    "records of a user, and read a record by its key. draw() makes 40 users with three to six "
    "records each, and draws every key and name by rng.number, rng.of_split and rng.people",
    "rules": "four to eight rules, which no tool enforces. Of the records that draw() makes some "
    "keep each rule, and some break it",
    "wishes": "what users may wish: each Mine and eight or more wishes, of which one only wants to "
    "know something, and hand_over(). A wish names, in reads, the calls that its arguments, rules "
    "and facts are found with, beside the record. Each rule is in a wish. Some wishes have facts, "
    "one has every, some have instead",
}
NEEDED = {"plain": "want", "if": "facts", "rule": "rules", "all": "every", "mind": "instead"}
PROMPT = """This file is a service desk: records, tools, rules that no tool enforces, and what \
users wish.

```python
{example}```

Write a file like it about {description}, in four parts: records, tools, rules, wishes. It has \
records, tools and wishes of its own, as a real desk of this kind does. What is written so far:

```python
{written}```

Write the next part, the {part}: {content}.

Import nothing more. Answer with the Python of this part alone, in one ```python block."""
AGAIN = """

You wrote:

```python
{answer}
```

That cannot be used: {problem}

Write the whole part again."""


def draft(
    description: str, expert: Expert, sandbox: Sandbox, tell: Callable[[str], None]
) -> tuple[str, str]:
    """Returns the file as far as it is written, and what is wrong with it, "" if it is whole.

    `tell` gets what the model has written, and what is wrong with a part.
    """
    example = read_text(restaurant.__file__).replace("HELD_OUT = True\n", "")
    title = re.sub(r'["\\\s]+', " ", description).strip()
    written = f'"""{title[:1].upper()}{title[1:]}."""\n\n{IMPORTS}'
    tell(written)
    for part, content in PARTS.items():
        asked = PROMPT.format(
            example=example, description=title, written=written, part=part, content=content
        )
        for number in range(1, MOST_TRIES + 1):
            tell(f"\n\n# {part}\n\n")
            result = expert.ask(asked, "the model")
            if result.error:
                return written, f"{part}: {result.content.removeprefix('Error: ')}"
            tell(result.content)
            answer = _code(result.content)
            added = f"\n\n{answer}\n"
            problem = _tried(sandbox, part, written + added)
            if not problem:
                break
            if number == MOST_TRIES:
                return written + added, f"{part}, written {number} times: {problem}"
            tell(f"\n\n# That cannot be used: {problem}")
            asked += AGAIN.format(answer=answer, problem=problem)
        written += added
    return written, ""


def _code(text) -> str:
    """Returns the Python of an answer: its first block, or all of it."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.DOTALL)
    return (block[1] if block else text).strip()


def _tried(sandbox, part, source) -> str:
    """Returns what is wrong with a file that ends with a part, in one line; "" if nothing is."""
    program = f"from {__name__} import trial\nprint(trial({part!r}, {source!r}) or {FIT!r})"
    result = sandbox.run(program, TRIAL_S)
    said = " ".join((result.error or result.stdout or "it ends the process").split())
    return "" if said == FIT else said[:MOST_CHARS]


# In the sandbox.


def trial(part: str, source: str) -> str:
    """Returns what is wrong with a file that ends with a part, "" if nothing is."""
    module = sys.modules[DRAFT] = ModuleType(DRAFT)
    try:
        exec(compile(source, DRAFT, "exec"), vars(module))
        _check(module, part)
    except UserError as error:
        return str(error)
    except Exception as error:  # whatever the file leads to
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [frame.lineno for frame in frames if frame.filename == DRAFT]
        number = error.lineno if isinstance(error, SyntaxError) else (numbers or [0])[-1]
        where = f", at {source.splitlines()[number - 1].strip()}" if number else ""
        return f"{type(error).__name__}: {error}{where}"
    return ""


def _check(module: ModuleType, part: str) -> None:
    """Raises UserError, or what the file leads to, unless a file is right up to a part."""
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == DRAFT]
    records = [each for each in own if inspect.isclass(each) and not issubclass(each, Toolkit)]
    for each in records:
        frozen = is_dataclass(each) and each.__dataclass_params__.frozen
        require(frozen, f"{each.__name__} must be @dataclass(frozen=True)")
    named = any(hasattr(each, "names") for each in records)
    require(named, "a record that wishes are about must have names()")
    if part == "records":
        return

    domain, again = (of_module(module, DRAFT, 0) for _ in range(2))
    tables = TypeAdapter(type(domain.start))
    read_back = tables.validate_json(tables.dump_json(domain.start))
    right = "draw() must draw by rng alone, and records of the types that they state"
    require(domain.start == again.start == read_back, right)
    for kind in ("read", "write", "handover"):
        require(domain.of_kind(kind), f"no tool is @{kind}")
    require(domain.functions, "the tools must have schemas")  # raises for one that has none
    for person in domain.people[:PEOPLE]:
        scene = Scene(domain.start, domain.start.copy(), person, random.Random(person))
        found = scene.call(domain.identify(scene.me)[1])
        right = f"the call of identify() must return the record of {person}, not {found}"
        require(found == as_json(scene.me), right)
        _call_all(domain, scene.rng)
    require(domain.rules or part == "tools", "there must be predicates under @rule(text)")
    if part != "wishes":
        return

    require(domain.wishes, "there must be functions under @wish")
    problems = vain(domain)
    require(not problems, "; ".join(problems))
    for twist, field in NEEDED.items():
        try:
            draw(domain, [twist], random.Random(0))
        except UnfitError:
            raise UserError(f"no user can have a wish for its {field}") from None
    tasks, thrown = make_all([domain], TASKS, 0, [*LEVELS])
    reasons = "; ".join(line.strip() for line in report(tasks, thrown, 0).splitlines()[1:])
    require(len(tasks) == TASKS, f"not {TASKS} tasks can be proved: {reasons}")


def _call_all(domain: Domain, rng: random.Random) -> None:
    """Calls each tool with keys and choices at random. Raises UserError for one that has a bug."""
    known = {fields(row)[0].name: [*rows] for rows in domain.start.tables for row in rows.values()}
    for name, function in domain.functions.items():
        given = {}
        for argument, shape in function["function"]["parameters"]["properties"].items():
            given[argument] = rng.choice(shape.get("enum") or known.get(argument) or [1])
        try:
            domain.start.copy().call(name, given)
        except ToolError as error:
            is_told = isinstance(error.__context__, ToolError | ValidationError | KeyError)
            require(is_told, f"a call of {error}")
