"""Draws the records of a domain, field by field, as its file says."""

import random
from dataclasses import dataclass
from typing import Any

from nanorchestra.errors import require
from worlds.toolscale.program import Json, Tables, evaluate
from worlds.toolscale.words import day

MOST_DRAWS = 10_000  # for words that no other record has


def holds(text: str, scope: Json) -> bool:
    """Returns whether the conditions of a text are true; what cannot be looked up is not."""
    try:
        return not text or evaluate(text, scope)
    except (LookupError, TypeError):
        return False


def key_of(row: Json) -> Any:
    """Returns the key of a record, which is its first field."""
    return next(iter(row.values()))


@dataclass
class ColumnDraws:
    """Draws values: each public method is a kind of draw that a domain's file may name.

    `row` is the record so far, `number` its place in the table, `rows` those before it.
    """

    words: Json
    today: str
    rng: random.Random
    tables: Tables

    def __post_init__(self) -> None:
        self.row, self.rows, self.number = {}, {}, 0

    def fill(self, name: str, table: Json) -> None:
        """Draws the records of a table."""
        count, most = table["count"], 10 ** table.get("digits", 4)
        numbers = sorted(self.rng.sample(range(most // 10, most), count))
        rows = self.rows = self.tables[name] = {}
        for self.number, number in enumerate(numbers):
            self.row = {table["key"]: ""}
            if "rows" in table:
                self.row |= table["rows"][self.number]
            for field, how in table["fields"].items():
                self.row[field] = self.value(how)
            key = self.row[table["key"]] = table["prefix"].format(**self.row) + str(number)
            rows[key] = self.row

    def value(self, how: Any) -> Any:
        """Draws a value, or a record of them."""
        if isinstance(how, dict):
            return {field: self.value(each) for field, each in how.items()}
        require(how[0] in KINDS, f"{how[0]!r} is not a kind of draw: {', '.join(KINDS)}")
        return getattr(self, how[0])(*how[1:])

    def enum(self, values: Any) -> Any:
        """One of the values, or of the names of {name: weight}."""
        weights = list(values.values()) if isinstance(values, dict) else None
        return self.rng.choices(list(values), weights)[0]

    name = enum  # one of the values, which the policy does not list

    def common(self, name: str) -> str:
        """A word that every domain may use: a first name, a city."""
        return self.rng.choice(self.words[name])

    def last(self) -> str:
        """A last name; no two records of a table share first and last."""
        taken = {(row["first_name"], row["last_name"]) for row in self.rows.values()}
        names = [name for name in self.words["last"] if (self.row["first_name"], name) not in taken]
        return self.rng.choice(names)

    def title(self, *parts: list[str]) -> str:
        """A word of each part; no two records of a table share all."""
        taken = {
            value for row in self.rows.values() for value in row.values() if isinstance(value, str)
        }
        for _ in range(MOST_DRAWS):
            words = " ".join(map(self.rng.choice, parts))
            if words not in taken:
                return words
        raise ValueError(f"title: no words are left after {len(self.rows)} records")

    def digits(self, count: int, prefix: str = "") -> str:
        """A number of so many digits, as text."""
        return prefix + str(self.rng.randrange(10 ** (count - 1), 10**count))

    def int(self, low: int, high: int, step: int = 1) -> int:
        """A number from `low` to `high`."""
        return self.rng.randrange(low, high + 1, step)

    def money(self, low: int, high: int) -> float:
        """An amount that ends in 0, 25, 50, 90 or 99 cents."""
        return self.rng.randrange(low, high) + self.rng.choice((0.25, 0.5, 0.9, 0.99, 0.0))

    def day(self, low: int, high: int, since: str = "") -> str:
        """A date, so many days from today, or from another date."""
        return day(self.be(since) if since else self.today, self.rng.randint(low, high))

    def link(self, table: str) -> str:
        """A key of the table."""
        return self.rng.choice(list(self.tables[table]))

    def owner(self, table: str) -> str:
        """A key of the table, each in turn."""
        keys = list(self.tables[table])
        return keys[self.number % len(keys)]

    def pick(self, rows: str, field: str) -> Any:
        """A field of one of the records that an expression names."""
        return self.rng.choice(self.be(rows))[field]

    def several(self, low: int, high: int, fields: Json) -> list[Json]:
        """Records within the record; what they link to, they do not share."""
        outer, rows = self.row, []
        for _ in range(self.rng.randint(low, high)):
            self.row = {}
            for field, how in fields.items():
                self.row[field] = self.value(how)
            if key_of(self.row) not in map(key_of, rows):
                rows.append(self.row)
        self.row = outer
        return rows

    def be(self, text: str) -> Any:
        """The value of an expression over the fields so far."""
        return evaluate(text, self.row, self.tables)

    def when(self, condition: str, then: Any, other: Any = None) -> Any:
        """One draw if the condition on the fields so far is true, else the other, or nothing."""
        how = then if holds(condition, self.row) else other
        return None if how is None else self.value(how)


KINDS = [kind for kind in vars(ColumnDraws) if kind[0] != "_" and kind not in ("fill", "value")]
