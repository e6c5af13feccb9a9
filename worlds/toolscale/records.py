"""Draws the records of a domain, field by field, as its file says."""

import random
from typing import Any

from nanorchestra.errors import require
from worlds.toolscale.program import Json, Tables, evaluate
from worlds.toolscale.words import day


def holds(text: str, scope: Json) -> bool:
    """Returns whether the conditions of a text are true; what cannot be looked up is not."""
    try:
        return not text or evaluate(text, scope)
    except (LookupError, TypeError):
        return False


class Draws:
    """Draws values: each public method is a kind of draw that a domain's file may name.

    `row` is the record so far, `number` its place in the table.
    """

    def __init__(self, common: Json, today: str, rng: random.Random, tables: Tables):
        self.common, self.today, self.rng, self.tables = common, today, rng, tables
        self.row: Json = {}
        self.number = 0

    def fill(self, name: str, table: Json) -> None:
        """Draws the records of a table."""
        count, most = table["count"], 10 ** table.get("digits", 4)
        numbers = sorted(self.rng.sample(range(most // 10, most), count))
        rows = self.tables[name] = {}
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
        require(how[0] in KINDS, f"{how[0]!r} is no kind of draw: {', '.join(KINDS)}")
        return getattr(self, how[0])(*how[1:])

    def enum(self, values: Any) -> Any:
        """One of the values, or of the names of {name: weight}."""
        weights = list(values.values()) if isinstance(values, dict) else None
        return self.rng.choices(list(values), weights)[0]

    name = enum  # one of the values, which the policy does not list

    def first(self) -> str:
        """A first name."""
        return self.rng.choice(self.common["first"])

    def last(self) -> str:
        """A last name; no two records of a table share first and last."""
        taken = {(row["first_name"], row["last_name"]) for row in self._before()}
        names = [
            name for name in self.common["last"] if (self.row["first_name"], name) not in taken
        ]
        return self.rng.choice(names)

    def city(self) -> str:
        """A city."""
        return self.rng.choice(self.common["cities"])

    def email(self) -> str:
        """The address of a person."""
        return f"{self.row['first_name']}.{self.row['last_name']}@example.com".lower()

    def title(self, *parts: list[str]) -> str:
        """A word of each part; no two records of a table share all."""
        taken = {
            value for row in self._before() for value in row.values() if isinstance(value, str)
        }
        while (words := " ".join(map(self.rng.choice, parts))) in taken:
            pass
        return words

    def mailbox(self) -> str:
        """A new address for the person who calls."""
        host = self.rng.choice(("post", "inbox", "mail"))
        return f"{self.row['me']['first_name']}{self.rng.randint(10, 99)}@{host}.example".lower()

    def code(self, prefix: str, count: int) -> str:
        """A prefix and a number of so many digits."""
        return prefix + self.digits(count)

    def digits(self, count: int) -> str:
        """A number of so many digits, as text."""
        return str(self.rng.randrange(10 ** (count - 1), 10**count))

    def int(self, low: int, high: int, step: int = 1) -> int:
        """A number from `low` to `high`."""
        return self.rng.randrange(low, high + 1, step)

    def money(self, low: int, high: int) -> float:
        """An amount that ends in 0, 25, 50, 90 or 99 cents."""
        return self.rng.randrange(low, high) + self.rng.choice((0.25, 0.5, 0.9, 0.99, 0.0))

    def day(self, low: int, high: int) -> str:
        """A date, so many days from today."""
        return day(self.today, self.rng.randint(low, high))

    def after(self, field: str, low: int, high: int) -> str:
        """A date, so many days after another."""
        return day(self.be(field), self.rng.randint(low, high))

    def link(self, table: str) -> str:
        """A key of the table."""
        return self.rng.choice(list(self.tables[table]))

    def owner(self, table: str) -> str:
        """A key of the table, each in turn."""
        keys = list(self.tables[table])
        return keys[self.number % len(keys)]

    def of(self, table: str, field: str, path: str, inner: str = "") -> Any:
        """What the record that a field links to has; with `inner`, a record of its list."""
        found = evaluate(path, self.tables[table][self.row[field]])
        return self.rng.choice(found)[inner] if inner else found

    def several(self, low: int, high: int, fields: Json) -> list[Json]:
        """Records within the record; what they link to, they do not share."""
        outer, rows = self.row, []
        for _ in range(self.rng.randint(low, high)):
            self.row = {}
            for field, how in fields.items():
                self.row[field] = self.value(how)
            if not rows or next(iter(self.row.values())) not in [[*r.values()][0] for r in rows]:
                rows.append(self.row)
        self.row = outer
        return rows

    def be(self, text: str) -> Any:
        """The value of an expression over the fields so far."""
        return evaluate(text, self.row, self.tables)

    def fitting(self, rows: str, condition: str) -> list[Json]:
        """Those of a list of records for which the condition on `each` is true."""
        return [each for each in self.be(rows) if holds(condition, self.row | {"each": each})]

    def when(self, condition: str, then: Any, other: Any = None) -> Any:
        """One draw if the condition on the fields so far is true, else the other, or nothing."""
        how = then if holds(condition, self.row) else other
        return None if how is None else self.value(how)

    def _before(self) -> list[Json]:
        return list(list(self.tables.values())[-1].values())


KINDS = [kind for kind in vars(Draws) if kind[0] != "_" and kind not in ("fill", "value")]
