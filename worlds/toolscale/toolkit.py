"""The records, tools and database of a domain: what a domain's file is made of, beside its wishes.

The toolkit is its own database: a dataclass whose fields are tables {key: record}. Records are
frozen, and a tool never changes one: it puts `replace(record, ...)` in its place. So a copy of the
database copies the outer dicts alone, and two databases are equal if they compare equal.
"""

import functools
import inspect
import random
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date, timedelta
from typing import Any, Self, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError, validate_call

from nanorchestra.schemas import Json
from nanorchestra.tools.functions import tool
from nanorchestra.validation import one_line

Record = TypeVar("Record")
NAMES_HELD_OUT = 3  # of a list of names, every third is of the held-out split alone


_ANYTHING = TypeAdapter(Any)


class ToolError(Exception):
    """A call that cannot be done. The message is what the agent reads."""


def _tool(kind: str) -> Callable:
    """Returns a decorator that makes a method a tool of the kind."""

    def mark(method):
        method.kind = kind
        return method

    return mark


read, write, handover = _tool("read"), _tool("write"), _tool("handover")


@dataclass
class Toolkit:
    """The tables of a domain and the tools over them. The first table has the users."""

    today: date

    @classmethod
    @functools.cache
    def kinds(cls) -> dict[str, str]:
        """Returns the kind of each tool: "read", "write" or "handover"."""
        methods = inspect.getmembers(cls, inspect.isfunction)
        return {name: method.kind for name, method in methods if hasattr(method, "kind")}

    def functions(self) -> list[Json]:
        """Returns the OpenAI function objects, made of type hints and docstrings."""
        return [tool(getattr(self, name)).schema for name in self.kinds()]

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The tables, the users first."""
        values = (getattr(self, each.name) for each in fields(self))
        return [value for value in values if isinstance(value, dict)]

    def copy(self) -> Self:
        """Returns a database that can be written without changing this one."""
        own = {name: dict(v) if isinstance(v, dict) else v for name, v in vars(self).items()}
        return replace(self, **own)

    def call(self, name: str, arguments: Any) -> Any:
        """Does a call, and returns its result as JSON. ToolError, and then nothing has changed."""
        if name not in self.kinds():
            raise ToolError(f"no tool named {name!r}")
        if not isinstance(arguments, dict):
            raise ToolError(f"{name}: the arguments must be an object")
        work, method = self.copy(), getattr(type(self), name)
        try:
            given = _checked(method)(**arguments)
            result = as_json(method(work, **given))
        except ToolError as error:
            raise ToolError(f"{name}: {error}") from None
        except ValidationError as error:
            raise ToolError(f"{name}: {one_line(error.errors(), arguments)[1]}") from None
        except KeyError as error:
            raise ToolError(f"{name}: there is no {error}") from None
        except Exception as error:  # of a domain of the user's own
            raise ToolError(f"{name}: {type(error).__name__}: {error}") from None
        vars(self).update(vars(work))
        return result

    # --- for the tools of a domain

    @staticmethod
    def require(condition: Any, problem: str) -> None:
        """Raises ToolError unless the condition holds."""
        if not condition:
            raise ToolError(problem)

    def one(self, records: Collection[Record], problem: str, **values: Any) -> Record:
        """Returns the record that has these values. Raises ToolError if there is none."""
        for record in records:
            if all(getattr(record, name) == value for name, value in values.items()):
                return record
        raise ToolError(problem)

    @staticmethod
    def change(table: dict[str, Record], record: Record, **values: Any) -> Record:
        """Puts a changed record in the place of the record; returns it."""
        table[key_of(record)] = changed = replace(record, **values)
        return changed

    @staticmethod
    def change_part(parts: tuple[Record, ...], part: Record, **values: Any) -> tuple[Record, ...]:
        """Returns the parts of a record with a changed one in the place of `part`."""
        return tuple(replace(each, **values) if each is part else each for each in parts)

    @staticmethod
    def new_key(prefix: str, *about: str) -> str:
        """Returns the key of a new record, made of what it is about: the order of calls is free."""
        return f"{prefix}{zlib.crc32('/'.join(about).encode()) % 10**6:06}"


@functools.cache
def _checked(method: Callable) -> Callable:
    """Returns a function of a tool's arguments that returns them as the type hints say."""
    parameters = [*inspect.signature(method).parameters.values()][1:]

    def given(**arguments):
        return arguments

    given.__signature__ = inspect.Signature(
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    given.__annotations__ = {each.name: each.annotation for each in parameters}
    return validate_call(given)


def as_json(value: Any) -> Any:
    """Returns a value as JSON has it: records as objects, days as texts. ValueError for a loop."""
    return _ANYTHING.dump_python(value, mode="json", fallback=str)


def key_of(record: Any) -> str:
    """Returns the key of a record, its first field."""
    return getattr(record, fields(record)[0].name)


class Draw(random.Random):
    """Draws the records of a split: no name, number or key of one split is in another."""

    def __init__(self, seed: str, split: str):
        super().__init__(f"{seed}/{split}")
        self.held_out = split == "held_out"
        self.drawn = set()

    def of_split(self, names: Sequence[str]) -> list[str]:
        """Returns those of the names that are the split's."""
        return [n for at, n in enumerate(names) if (at % NAMES_HELD_OUT == 0) == self.held_out]

    def name(self, names: Sequence[str]) -> str:
        """Returns one of the names."""
        return self.choice(self.of_split(names))

    def one_of(self, choices: Any) -> Any:
        """Returns one of the values of a Literal."""
        return self.choice(get_args(choices))

    def number(self, prefix: str = "", digits: int = 5) -> str:
        """Returns a prefix with a number that was not drawn before: a key, or a telephone's."""
        while True:
            value = 2 * self.randrange(10 ** (digits - 1) // 2, 10**digits // 2) + self.held_out
            if (text := f"{prefix}{value}") not in self.drawn:
                self.drawn.add(text)
                return text

    def day(self, today: date, first: int, last: int) -> date:
        """Returns a day, from so many days after today to so many."""
        return today + timedelta(self.randint(first, last))

    def today(self) -> date:
        """Returns the day on which the tasks take place."""
        return date(2026, 1, 1) + timedelta(self.randrange(365))

    def people(self, count: int) -> list[str]:
        """Returns so many names of people, all different."""
        pairs = [f"{a} {b}" for a in self.of_split(FIRST_NAMES) for b in self.of_split(LAST_NAMES)]
        return self.sample(pairs, count)


def spoken(day: date) -> str:
    """Returns a day as users say it: "May 3"."""
    return f"{day:%B} {day.day}"


FIRST_NAMES = (
    "Ana Ben Carla Dan Elif Farid Greta Hugo Ines Jonas Kira Liam Mei Nils Olga Pavel Rosa Samir "
    "Tess Uma Viktor Wanda Yara Zeno Amos Bela Chloe Dora Emil Freya"
).split()
LAST_NAMES = (
    "Amsel Berg Costa Dorn Eriksen Fontana Garcia Hanson Ivanov Jansen Keller Lindt Marino Novak "
    "Okafor Popescu Quist Rossi Silva Tanaka Umar Vogel Weiss Young Zimmer Arslan Bauer Clark"
).split()
