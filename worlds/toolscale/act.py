"""Acts a draft out in its world: the golden calls, the user's words, what must be communicated."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from nanorchestra.files import read_json
from worlds.toolscale.program import Json, ToolError, run
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
        self.calls: list[tuple[str, Json]] = []
        self.results: Json = {}  # of the reads: a later wish need not look them up again
        self.sentences: list[str] = []
        self.frames = list(PHRASES["next"])  # that no sentence has used yet
        self.communicate: list[str] = []
        self.unknown: list[str] = []  # what the user does not know
        self.deals: set[str] = set()

    # --- calls

    def call(self, role: str, *values: Any) -> Any:
        """Makes one golden call and returns its result. Raises UnfitError if it fails.

        A read that was made before and would return the same is not made again.
        """
        if role not in self.w.tool:
            raise UnfitError(f"no tool to {role}")
        name = self.w.tool[role]
        tool = self.world.by_name[name]
        arguments = dict(zip(tool["function"]["parameters"]["properties"], values, strict=True))
        try:
            result = run(tool, arguments, self.tables)
        except ToolError as error:
            raise UnfitError(str(error)) from None
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
            found = [row for row in self.call("at_place", key) if row[w.status] == w.open]
            what = f"{w.at} {name} that is {w.open}"
        if len(found) < 2:
            raise UnfitError("nothing to choose from")
        chosen = choose(found, key=lambda row: row[w.price.field])
        return chosen[w.item.key], f"the {pick} {w.item} {what}"

    def noun(self, key: str) -> str:
        """Returns the words for an item by its title."""
        title = self.row("item", key)[self.w.name.field]
        return self.w.blueprint["item"]["noun"].format(title=title)

    def deal(self, ref: Json) -> tuple[str, str]:
        """Finds a deal of the user; each deal once."""
        key, words = self._deal(ref)
        if key in self.deals:
            raise UnfitError("the same deal twice")
        self.deals.add(key)
        return key, words

    def _deal(self, ref: Json) -> tuple[str, str]:
        w, deal = self.w, self.w.blueprint["deal"]
        if ref["by"] == "id":
            return ref["key"], f"your {w.deal} {ref['key']}"
        self.unknown.append(f"any {w.deal} number")
        row = self.row("deal", ref["key"])
        if ref["by"] == "title":
            item, noun = self.item({"by": "title", "key": row[w.item.key]})
            rows = [row for row in self.call("list_deals", self.me) if row[w.item.key] == item]
            return only(rows)[w.deal.key], f"your {w.deal} {deal.get('for', 'for')} {noun}"
        rows = [row for row in self.call("list_deals", self.me) if row[w.status] == w.standing]
        if ref["by"] == "quantity":
            quantity = row[w.quantity.field]
            rows = [row for row in rows if row[w.quantity.field] == quantity]
            words = f"{deal.get('with', 'for')} {self.count(quantity)}"
            return only(rows)[w.deal.key], f"your {w.standing} {w.deal} {words}"
        if len(rows) < 2 or any(name == w.tool["create"] for name, _ in self.calls):
            raise UnfitError("nothing to choose from, or the newest is one of this task")
        pick, choose = DAYS[ref["pick"]]
        day = choose(row[w.created.field] for row in rows)
        rows = [row for row in rows if row[w.created.field] == day]
        return only(rows)[w.deal.key], f"your {pick} {w.deal} that is {w.standing}"

    def extra(self, ref: Json) -> tuple[str, str]:
        """Finds an extra of the user by its id or topic."""
        if ref["by"] == "id":
            return ref["key"], f"your {self.w.extra} {ref['key']}"
        self.unknown.append(f"any {self.w.extra} number")
        row, words = self.about(self.row("extra", ref["key"])[self.w.topic.field])
        return row[self.w.extra.key], words

    def about(self, topic: str) -> tuple[Json, str]:
        """Returns the user's only extra about the topic, and the words for it."""
        rows = self.call("list_extras", self.me)
        row = only([row for row in rows if row[self.w.topic.field] == topic])
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


def only(rows: list[Json]) -> Json:
    """Returns the only row. Raises UnfitError if there is none, or more than one."""
    if len(rows) != 1:
        raise UnfitError(f"{len(rows)} records fit")
    return rows[0]
