"""Acts a draft out in its world: the golden calls, the user's words, what must be communicated."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from nanorchestra.files import read_json
from worlds.toolscale.program import Json, run
from worlds.toolscale.words import Words
from worlds.toolscale.world import World

PHRASES = read_json(Path(__file__).with_name("phrases.json"))
# What the user may pick among several that fit, and how it is found.
PRICES = (("cheapest", min), ("most expensive", max))
DAYS = (("oldest", min), ("most recent", max))


class UnfitError(Exception):
    """A draft that cannot be acted out as it stands, and why."""


class Act:
    """A draft while it is acted out: calls, lookups of what the user refers to, and words.

    Random choices come from the draft's own seed.
    """

    def __init__(self, world: World, words: Words, draft: Json):
        self.world, self.w, self.me = world, words, draft["person"]["key"]
        self.rng = random.Random(draft["seed"])
        self.tables = dict(world.tables)
        self.calls = []  # (name, arguments)
        self.results = {}  # of the reads: a later wish need not look them up again
        self.sentences = []
        self.frames = list(PHRASES["next"])  # that no sentence has used yet
        self.communicate = []
        self.unknown = []  # what the user does not know
        self.deals = []  # keys of those that wishes are about

    # --- calls

    def call(self, role: str, *values: Any) -> Any:
        """Makes one golden call and returns its result. Raises ToolError if it fails.

        A read that was made before and would return the same is not made again.
        """
        if role not in self.w.tool:
            raise UnfitError(f"no tool to {role}")
        name = self.w.tool[role]
        tool = self.world.by_name[name]
        arguments = dict(zip(tool["function"]["parameters"]["properties"], values, strict=True))
        result = run(tool, arguments, self.tables)
        memo = name + json.dumps(arguments)
        if tool["kind"] in ("write", "handover") or self.results.get(memo) != result:
            if memo in self.results:
                raise UnfitError("what was looked up has changed since")
            self.calls.append((name, arguments))
            self.results[memo] = result
        return result

    def row(self, role: str, key: str) -> Json:
        """Returns a record as it is now."""
        return self.tables[getattr(self.w, role).table][key]

    # --- what the user refers to: each returns a key and the words for it

    def person(self, key: str) -> tuple[str, str]:
        """Looks a person up by name and proof."""
        row, proof = self.row("person", key), self.w.proof
        self.call("find_person", row["first_name"], row["last_name"], row[proof.field])
        return key, f"{row['first_name']} {row['last_name']} ({proof} {row[proof.field]})"

    def place(self, key: str, plain: bool = True) -> tuple[str, str]:
        """Looks a place up by its name."""
        name = self.row("place", key)["name"]
        words = name if plain else f"the {self.w.place} {name}"
        return self.call("find_place", name)[self.w.place.key], words

    def item(self, ref: Json) -> tuple[str, str]:
        """Finds an item by its id or title, or as the cheapest of a category or place, say."""
        w, row = self.w, self.row("item", ref["key"])
        if ref["by"] == "id":
            return ref["key"], f"the {w.item} {ref['key']}"
        if ref["by"] == "title":
            return self.call("find_item", row[w.name.field])[w.item.key], self.noun(ref["key"])
        pick, choose = PRICES[ref["pick"]]
        if ref["by"] == "search":
            category, limit = row[w.category.field], int(row[w.price.field] * ref["margin"]) + 1
            found = self.call("search", category, float(limit))
            what = f"({w.category}: {category}) with a {w.price} of at most ${limit}"
        else:
            key, name = self.place(row[w.place.key])
            found = matching(self.call("at_place", key), w.status, w.open)
            what = f"{w.at} {name} that is {w.open}"
        return extreme(found, w.price.field, choose)[w.item.key], f"the {pick} {w.item} {what}"

    def noun(self, key: str) -> str:
        """Returns the words for an item by its title."""
        title = self.row("item", key)[self.w.name.field]
        return self.w.blueprint["item"]["noun"].format(title=title)

    def deal(self, ref: Json) -> tuple[str, str]:
        """Finds a deal of the user by its id, item, quantity or day."""
        w, deal = self.w, self.w.blueprint["deal"]
        if ref["by"] == "id":
            return ref["key"], f"your {w.deal} {ref['key']}"
        self.unknown.append(f"any {w.deal} number")
        row = self.row("deal", ref["key"])
        if ref["by"] == "title":
            item, noun = self.item({"by": "title", "key": row[w.item.key]})
            found = only(matching(self.call("list_deals", self.me), w.item.key, item))
            return found[w.deal.key], f"your {w.deal} {deal.get('for', 'for')} {noun}"
        rows = matching(self.call("list_deals", self.me), w.status, w.standing)
        if ref["by"] == "quantity":
            quantity = row[w.quantity.field]
            found = only(matching(rows, w.quantity.field, quantity))
            words = f"{deal.get('with', 'for')} {self.count(quantity)}"
            return found[w.deal.key], f"your {w.standing} {w.deal} {words}"
        if any(name == w.tool["create"] for name, _ in self.calls):
            raise UnfitError("the newest is one of this task")
        pick, choose = DAYS[ref["pick"]]
        found = extreme(rows, w.created.field, choose)
        return found[w.deal.key], f"your {pick} {w.deal} that is {w.standing}"

    def extra(self, ref: Json) -> tuple[str, str]:
        """Finds an extra of the user by its id or topic."""
        if ref["by"] == "id":
            return ref["key"], f"your {self.w.extra} {ref['key']}"
        self.unknown.append(f"any {self.w.extra} number")
        row, words = self.about(self.row("extra", ref["key"])[self.w.topic.field])
        return row[self.w.extra.key], words

    def about(self, topic: str) -> tuple[Json, str]:
        """Returns the user's only extra about the topic, and the words for it."""
        row = only(matching(self.call("list_extras", self.me), self.w.topic.field, topic))
        return row, self.w.blueprint["extra"]["noun"].format(topic=topic)

    # --- words

    def count(self, quantity: int) -> str:
        """Returns the quantity in words, such as "2 seats"."""
        return f"{quantity} {self.w.unit if quantity == 1 else self.w.units}"

    def say(self, pattern: str, after: str = "", **words: Any) -> None:
        """Adds a sentence that wants what the pattern says, and `after`, which follows it."""
        frame = self.rng.choice(self.frames if self.sentences else PHRASES["openings"])
        if self.sentences:
            self.frames.remove(frame)
        sentence = f"{frame.format(pattern)} {after}".strip().format(**words)
        self.sentences.append(re.sub(r"\b1 (star|hour|time)s\b", r"1 \1", sentence))

    def ask(self, pattern: str, value: Any, **words: Any) -> None:
        """Adds a question whose answer must be communicated."""
        self.say(self.rng.choice(PHRASES["asking"]).format(pattern), **words)
        text = f"{value:.2f}".removesuffix(".00") if isinstance(value, float) else str(value)
        self.communicate.append(text)


def matching(rows: list[Json], field: str, value: Any) -> list[Json]:
    """Returns the rows that have this value in the field."""
    return [row for row in rows if row[field] == value]


def extreme(rows: list[Json], field: str, choose: Any) -> Json:
    """Returns the only row with the least or greatest value, as `choose` (min or max) says.

    Raises UnfitError if there is nothing to choose from, or more than one such row.
    """
    if len(rows) < 2:
        raise UnfitError("nothing to choose from")
    return only(matching(rows, field, choose(row[field] for row in rows)))


def only(rows: list[Json]) -> Json:
    """Returns the only row. Raises UnfitError if there is none, or more than one."""
    if len(rows) != 1:
        raise UnfitError(f"{len(rows)} records fit")
    return rows[0]
