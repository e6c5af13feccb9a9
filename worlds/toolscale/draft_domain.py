"""Drafts the file of a domain from a description: a language model writes it after one of ours.

A file is tried in a process of the sandbox, for no person has read it yet: it is made, and held to
what a domain promises. What is wrong is told to the model, which writes the file again.
"""

import re
import sys
import traceback
from dataclasses import replace
from types import ModuleType

import pydantic.dataclasses  # noqa: F401  (which a run of the sandbox may not read)
from pydantic import TypeAdapter

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_text
from nanorchestra.tools.models import Expert
from nanorchestra.tools.sandbox import Sandbox
from worlds.toolscale.domain import of_module
from worlds.toolscale.domains import restaurant
from worlds.toolscale.generate import make_all, report, vain
from worlds.toolscale.plan import LEVELS

MOST_TRIES = 4  # of the file
FILE_TOKENS = 16_384  # of a reply, its reasoning included
TRIAL_S = 60.0
MOST_CHARS = 500  # of what is wrong
TASKS = 50  # that it must give
DRAFT = "draft"  # the name of its module, and of its file in tracebacks
FIT = "fit"  # what a trial prints
PROMPT = """This file is a service desk: records, tools, rules that no tool enforces, and what \
users wish.

```python
{example}```

Write a file like it about {description}, with records, tools and wishes of its own, as a real \
desk of this kind has them:

- Records are frozen dataclasses. The first field of each is its key, a str. A record of a user \
that wishes are about has the user's key as a field, and names(): words for it by its key, then \
three ways to speak of it by its other fields.
- The Toolkit's tables are dictionaries of the records, the users first. Ten or more tools have \
type hints and docstrings: @read and @write, and the @handover transfer_to_human_agents. Tools \
that read find a user, list the records of a user, and read a record by its key.
- Four to eight rules, which no tool enforces. Some records keep each rule, and some break it.
- Eight or more wishes, of which one only wants to know something, and hand_over(). A wish names, \
in reads, the calls that its arguments, rules and facts are found with, beside the record. Each \
rule is in a wish. Some wishes have facts, one has every, some have instead.
- identify(), and draw(), which makes 40 users with three to six records each, by rng alone, and \
draws every key and name by rng.number, rng.of_split and rng.people.

Import nothing more. Answer with the file in one ```python block."""
AGAIN = """

You wrote:

```python
{source}```

That cannot be used: {problem}

Write the whole file again."""


def draft(description: str, expert: Expert, sandbox: Sandbox) -> tuple[str, str]:
    """Prints what the model writes, and what is wrong with it.

    Returns the last file, and what is wrong with it, "" if nothing is.
    """
    example = read_text(restaurant.__file__).replace("HELD_OUT = True\n", "")
    asked = PROMPT.format(example=example, description=" ".join(description.split()))
    expert, source, problem = replace(expert, max_tokens=FILE_TOKENS), "", ""
    for _ in range(MOST_TRIES):
        result = expert.ask(asked, "the model")
        if result.error:
            return source, result.content.removeprefix("Error: ")
        source = _code(result.content)
        print(source, flush=True)
        problem = _tried(sandbox, source)
        if not problem:
            return source, ""
        print(f"\n# That cannot be used: {problem}\n", flush=True)
        asked += AGAIN.format(source=source, problem=problem)
    return source, f"written {MOST_TRIES} times: {problem}"


def _code(text) -> str:
    """Returns the Python of an answer: its first block, or all of it."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.DOTALL)
    return (block[1] if block else text).strip() + "\n"


def _tried(sandbox, source) -> str:
    """Returns what is wrong with a file, in one line; "" if nothing is."""
    program = f"from {__name__} import trial\nprint(trial({source!r}) or {FIT!r})"
    result = sandbox.run(program, TRIAL_S)
    said = " ".join((result.error or result.stdout or "it ends the process").split())
    return "" if said == FIT else said[:MOST_CHARS]


# In the sandbox.


def trial(source: str) -> str:
    """Returns what is wrong with a file, "" if nothing is."""
    module = sys.modules[DRAFT] = ModuleType(DRAFT)
    try:
        exec(compile(source, DRAFT, "exec"), vars(module))
        _check(module)
    except UserError as error:
        return str(error)
    except Exception as error:  # whatever the file leads to
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [frame.lineno for frame in frames if frame.filename == DRAFT]
        number = error.lineno if isinstance(error, SyntaxError) else (numbers or [0])[-1]
        where = f", at {source.splitlines()[number - 1].strip()}" if number else ""
        return f"{type(error).__name__}: {error}{where}"
    return ""


def _check(module: ModuleType) -> None:
    """Raises UserError, or what the file leads to, unless it promises what a domain does."""
    domain, again = (of_module(module, DRAFT, 0) for _ in range(2))
    tables = TypeAdapter(type(domain.start))
    read_back = tables.validate_json(tables.dump_json(domain.start))
    right = "draw() must draw by rng alone, and records of the types that they state"
    require(domain.start == again.start == read_back, right)
    require(domain.rules, "there must be predicates under @rule(text)")
    require(domain.wishes, "there must be functions under @wish")
    problems = vain(domain)
    require(not problems, "; ".join(problems))
    tasks, thrown = make_all([domain], TASKS, 0, [*LEVELS])
    reasons = "; ".join(line.strip() for line in report(tasks, thrown, 0).splitlines()[1:])
    require(len(tasks) == TASKS, f"not {TASKS} tasks can be proved: {reasons}")
