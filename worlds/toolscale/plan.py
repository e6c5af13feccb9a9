"""Plans tasks: drafts of who calls and what they want, from easy to hard.

`generate` starts from one wish with every number known and makes it harder as often as its level
says: another wish, a number that must be looked up, a condition.
"""

from __future__ import annotations

import copy
import itertools
import random
from functools import partial
from typing import Any

from worlds.toolscale.act import PHRASES, Act, UnfitError
from worlds.toolscale.program import Json, ToolError
from worlds.toolscale.records import Draws
from worlds.toolscale.wishes import act_out
from worlds.toolscale.words import ROLES, Words, expand
from worlds.toolscale.world import World

MOST_WISHES = 4
LEVELS = {1: (0, 0), 2: (1, 2), 3: (3, 4), 4: (5, 6), 5: (7, 9)}  # how often a draft is evolved
WISHES, WAYS = PHRASES["wishes"], PHRASES["ways"]
CHANGES = ("cancel", "quantity", "option", "exchange")  # wishes that a rule may forbid


class Planner(Draws):
    """Draws drafts for a world. What a draft says is seen to be possible when it is acted out."""

    def __init__(self, world: World, words: Words, rng: random.Random):
        super().__init__(words, rng, world.tables)
        self.world = world
        self.rows = {role: world.tables[getattr(words, role).table] for role in ROLES}

    def generate(self, level: int, focus: int = 0) -> tuple[Json, Act]:
        """Returns a draft of the level (1 to 5) and its act.

        `focus` chooses the kind of the first wish, if that can be done.
        """
        kind = list(WISHES)[focus % len(WISHES)]
        people = [k for k, row in self.rows["person"].items() if row[self.w.status] == "active"]
        for attempt in itertools.count():
            person, seed = self.rng.choice(people), self.rng.getrandbits(32)
            caller = {"by": "id", "key": person}
            draft = {"seed": seed, "person": caller, "wishes": [], "level": level}
            self.row = self.rows["person"][person]
            first = partial(self._add_wish, kind=kind if attempt < 20 else None)
            if grown := self._grow(draft, first):
                break
        changes = (self._add_wish, self._hide, self._condition)
        for _ in range(self.rng.randint(*LEVELS[level])):
            for _ in range(8):  # until one of the changes that are tried can be done
                change = self.rng.choices(changes, (4, 5, 3))[0]
                if harder := self._grow(grown[0], change):
                    grown = harder
                    break
        return grown

    def _grow(self, draft: Json, change: Any) -> tuple[Json, Act] | None:
        """Returns the draft with a change, and its act; None if that cannot be done."""
        harder = copy.deepcopy(draft)
        try:
            change(harder)
            return harder, act_out(self.world, self.w, harder)
        except (UnfitError, ToolError):
            return None

    def _add_wish(self, draft: Json, kind: str | None = None) -> None:
        wishes = draft["wishes"]
        # After a hand-over nothing more can be done.
        handed = any(wish["kind"] == "handover" or wish.get("refused") for wish in wishes)
        if len(wishes) >= MOST_WISHES or handed:
            raise UnfitError("no more wishes")
        if kind is None:
            there = {wish["kind"] for wish in wishes} - {"create", "item_field"}
            kinds = [kind for kind in WISHES if kind not in there]
            kind = self.rng.choices(kinds, [WISHES[kind]["weight"] for kind in kinds])[0]
        wish = {"kind": kind, "phrase": self.rng.randrange(60)}
        for field, (draw, *values) in expand(WISHES[kind]["draw"], self.w).items():
            wish[field] = getattr(self, draw)(*values)
        wishes.append(wish)

    # --- what a wish is about

    def item(self) -> Json:
        """Refers to any item by its id."""
        return {"by": "id", "key": self.rng.choice(list(self.rows["item"]))}

    def items(self) -> list[Any]:
        """Refers to two items, each with a quantity."""
        return [[self.item(), self.rng.randint(2, 9)] for _ in range(2)]

    def held(self, role: str) -> Json:
        """Refers to any deal or extra of the person by its id."""
        holder = self.w.person.key
        mine = [key for key, row in self.rows[role].items() if row[holder] == self.row[holder]]
        return {"by": "id", "key": self.one(mine)}

    def chance(self, share: float) -> bool:
        """Returns True in this share of cases."""
        return self.rng.random() < share

    def other(self) -> str:
        """Chooses another person."""
        people = self.rows["person"].items()
        return self.rng.choice([key for key, row in people if row is not self.row])

    def address(self) -> str:
        """Returns a new email address."""
        number, host = self.rng.randint(10, 99), self.rng.choice(("mail", "post", "inbox"))
        return f"{self.row['first_name']}{number}@{host}.example".lower()

    def city(self) -> str:
        """Chooses another city."""
        cities = {row["city"] for row in self.rows["person"].values()} - {self.row["city"]}
        return self.rng.choice(sorted(cities))

    def one(self, values: list[Any]) -> Any:
        """Chooses one of the values. Raises UnfitError if there is none."""
        if not values:
            raise UnfitError("nothing to choose from")
        return self.rng.choice(values)

    # --- what makes a draft harder

    def _hide(self, draft: Json) -> None:
        """Takes a number away from the user, so that it must be looked up."""
        refs = [("person", draft["person"])]
        for wish in draft["wishes"]:
            refs += [(role, wish[role]) for role in ("item", "deal", "extra") if role in wish]
            refs += [("item", ref) for ref, _ in wish.get("items", ())]
        role, ref = self.one([(role, ref) for role, ref in refs if ref["by"] == "id"])
        ref["by"] = self.rng.choices(list(WAYS[role]), WAYS[role].values())[0]
        ref |= {"pick": self.rng.randrange(2), "margin": self.rng.uniform(1.0, 1.6)}

    def _condition(self, draft: Json) -> None:
        """Adds a condition.

        Another item if too few are left, money first if the balance is too low, or a person if a
        rule forbids it.
        """
        wish = self.rng.choice(draft["wishes"])
        if wish["kind"] == "create" and "unless" not in wish:
            self._unless(wish)
        elif wish is draft["wishes"][-1] and wish["kind"] in CHANGES and "refused" not in wish:
            wish |= {"refused": True, "told": False, "deal": self.held("deal")}
        else:
            raise UnfitError("no wish for a condition")

    def _unless(self, wish: Json) -> None:
        if self.chance(0.5):
            amount = self.integer(10, self.w.rules.top_up, 5)
            wish["unless"] = {"kind": "funds", "amount": amount}
            return
        items, stock, other = self.rows["item"], self.w.stock.field, self.item()["key"]
        wish["unless"] = {"kind": "instead", "key": other}
        if self.chance(0.6):  # an item that runs short, so that the condition holds
            short = [key for key, row in items.items() if row[stock] < wish["quantity"]]
            wish["item"] = {"by": "title", "key": self.one(short)}
        if wish["item"]["key"] == other:
            raise UnfitError("the same item")
