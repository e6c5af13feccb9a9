"""Draws the records of a domain, field by field, as domains/template.json says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

from worlds.toolscale.program import Json, Tables
from worlds.toolscale.words import Words, draw_date

TYPES = {int: "integer", float: "number", str: "string"}


def field_shape(value: Any, kind: str, *values: Any) -> Json:
    """Returns the schema of a field that is drawn in this way; `value` is one of those drawn."""
    shape = {"type": TYPES[type(value)]}
    if kind in ("enum", "state", "states"):
        shape["enum"] = values[0]
    return shape | ({"link": values[0]} if kind == "link" else {})


def draw_tables(w: Words, fields: Json, rng: random.Random) -> Tables:
    """Returns about 350 records. `fields` has, for each role, {field: [kind of draw, *values]}."""
    common, draws = w.common, Draws(w, rng, {})
    names = list(itertools.product(common["first"], common["last"]))
    draws.fill(fields, "person", rng.sample(names, 80), rng.randint(60, 80))
    patterns = w.blueprint["place"]["names"]
    places = [(p.format(city=city), city) for p in patterns for city in common["cities"]]
    draws.fill(fields, "place", rng.sample(places, 26), rng.randint(18, 26))
    titles = list(map(" ".join, itertools.product(*w.blueprint["item"]["titles"])))
    titles = rng.sample(titles, min(len(titles), 70))
    # In twentieths of a dollar and each once, so that "the cheapest" is one item.
    low, high = (int(20 * price) for price in w.blueprint["item"]["price"][1:])
    prices = [price / 20 for price in rng.sample(range(low, high), len(titles))]
    items = zip(titles, prices, strict=True)
    draws.fill(fields, "item", items, min(len(titles), rng.randint(56, 70)))
    count = rng.randint(120, 140)
    days = sorted(rng.sample(range(359), count))
    dates = [(f"2025-{day // 30 + 1:02d}-{day % 30 % 28 + 1:02d}",) for day in days]
    draws.fill(fields, "deal", dates, count)
    draws.fill(fields, "extra", [()] * 64, rng.randint(50, 64))
    return draws.tables


def charge(w: Words, person: Json, item: Json, quantity: int, option: str) -> float:
    """Returns what a deal costs in dollars, before rounding, as the tools compute it."""
    full = item[w.price.field] * quantity * w.options[option]
    return full * (1 - w.rules.discount[person[w.tier]] / 100)


class Draws:
    """Draws values: each method is a kind of draw that the JSON files name.

    `row` is the record so far (for a wish, that of the person who calls); `given` has the values of
    the record that are not drawn.
    """

    def __init__(self, w: Words, rng: random.Random, tables: Tables):
        self.w, self.rng, self.tables = w, rng, tables

    def fill(self, fields: Json, name: str, given: Iterable[tuple], count: int) -> None:
        """Draws `count` records of a role; `given` has what the next record does not draw."""
        role, start = getattr(self.w, name), self.rng.randint(100, 400)
        numbers = self.rng.sample(range(start, start + 4 * count), count)
        rows = self.tables[role.table] = {}
        for number, values in zip(sorted(numbers), given, strict=False):
            key = f"{role.prefix}{number}"
            self.row, self.given = {}, iter((key, *values))
            for field, (kind, *more) in fields[name].items():
                self.row[field] = getattr(self, kind)(*more)
            rows[key] = self.row

    def next(self) -> Any:
        """The next of the given values."""
        return next(self.given)

    def integer(self, low: int, high: int, step: int) -> int:
        """A number from `low` to `high`."""
        return self.rng.randrange(low, high + 1, step)

    def number(self, low: int, high: int) -> str:
        """Digits."""
        return str(self.rng.randint(low, high))

    def enum(self, values: list[Any]) -> Any:
        """One of the values."""
        return self.rng.choice(values)

    name = enum  # one of the values, which the schema does not list

    def state(self, values: list[str]) -> str:
        """The first value as a rule."""
        return values[self.rng.random() < 0.08]

    def states(self, values: list[str]) -> str:
        """The first of three values as a rule."""
        return self.rng.choices(values, (8, 1, 1))[0]

    def date(self, first: int, last: int) -> str:
        """A day of these years."""
        return draw_date(self.rng, first, last)

    def phone(self) -> str:
        """A phone number."""
        return f"555-{self.rng.randint(1000, 9999)}"

    def link(self, table: str) -> str:
        """A key of the table."""
        return self.rng.choice(list(self.tables[table]))

    def email(self, hosts: list[str]) -> str:
        """The address of a person."""
        return f"{self.row['first_name']}.{self.row['last_name']}@{self.rng.choice(hosts)}".lower()

    def quantity(self) -> int:
        """A quantity within the limit."""
        return self.rng.randint(1, max(2, self.w.rules.limit - 1))

    def balance(self) -> float:
        """Money enough for some items, or for hardly one."""
        low, high = self.w.blueprint["item"]["price"][1:]
        return round(self.rng.uniform(0, 6 * high if self.rng.random() < 0.8 else low), 2)

    def stock(self) -> int:
        """What an item has left: sometimes nothing, or little."""
        low, high = self.w.blueprint["item"]["stock"][1:]
        many = (self.rng.randint(low, high) for _ in range(5))
        return self.rng.choice([0, self.rng.randint(1, 3), *many])

    def total(self) -> float:
        """What a deal costs."""
        w, row = self.w, self.row
        person = self.tables[w.person.table][row[w.person.key]]
        item = self.tables[w.item.table][row[w.item.key]]
        return round(charge(w, person, item, row[w.quantity.field], row[w.option.field]), 2)
