"""The built-in author of tasks: a draft (who calls, and what they want) is acted out in the world, and what was called is the gold.

`generate` starts from an easy draft, one wish with every number known, and `evolve`s it as often as its level says: another wish, a
number that must now be looked up, a condition with a way out, tools that are not needed. A draft is plain JSON; `act` turns one into
a task in the tau2 format by executing it, or raises Unfit if it cannot be done. Identifiers that only a lookup reveals stay out of the text.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import re
from types import SimpleNamespace
from typing import Any, Callable

from worlds.toolscale.domains import _field
from worlds.toolscale.program import ToolError
from worlds.toolscale.world import World

MOST_CALLS, MOST_WISHES = 12, 4
LEVELS = {
    1: (0, 0),
    2: (1, 2),
    3: (3, 4),
    4: (5, 6),
    5: (7, 9),
}  # difficulty -> how often a draft is evolved
WEIGHTS = {
    "create": 5,
    "cancel": 3,
    "quantity": 3,
    "option": 3,
    "exchange": 3,
    "gift": 3,
    "email": 1,
    "phone": 1,
    "city": 1,
    "funds": 2,
    "points": 2,
    "tier": 2,
    "extra": 3,
    "drop": 3,
    "item_field": 3,
    "person_field": 2,
    "place_field": 3,
    "deal_field": 3,
    "spent": 2,
    "average": 2,
    "sum": 3,
    "extra_field": 1,
    "handover": 2,
}
PICKS = {"cheapest": ("price", min), "most expensive": ("price", max)}
WHEN = {"most recent": max, "oldest": min}
OPENINGS = (
    "You want to {}.",
    "You would like to {}.",
    "You are calling to {}.",
    "You need to {}.",
    "Today you want to {}.",
)
NEXT = (
    "You also want to {}.",
    "Then you want to {}.",
    "After that, you would like to {}.",
    "You would also like to {}.",
    "Besides, you want to {}.",
    "In addition, you need to {}.",
)
ASKING = ("find out {}", "know {}", "learn {}", "be told {}")
STYLES = (
    "You are polite and brief.",
    "You are in a hurry and write short sentences.",
    "You are friendly and a little chatty.",
    "You give details only when you are asked for them.",
    "You are careful and like to have things confirmed.",
    "You are calm and answer exactly what is asked.",
    "You are a bit impatient, but you stay polite.",
    "You write in plain words and dislike jargon.",
)
PERSONAS = (
    None,
    None,
    "A retired teacher who is new to such services",
    "A parent who writes between two errands",
    "A student on a small budget",
    "A busy nurse on a night shift",
    "An engineer who likes exact figures",
    "A frequent caller who knows the routine",
)


class Unfit(Exception):
    """A draft that cannot be acted out as it stands, and why."""


class Act:
    """One draft, acted out: its calls, their results, the words, and what must be communicated. Everything is drawn from the draft's own seed."""

    def __init__(self, world: World, words: SimpleNamespace, draft: dict[str, Any]):
        self.world, self.w, self.draft = world, words, draft
        self.tables = world.fresh()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.results: dict[str, Any] = {}  # of the reads: what a later wish need not look up again
        self.sentences: list[str] = []
        self.template: list[str] = []
        self.communicate: list[str] = []
        self.assertions: list[str] = []
        self.unknown: dict[str, None] = {}
        self.deals: set[str] = set()
        self.rng = random.Random(draft["seed"])
        self.me = draft["person"]
        if draft["by"] != "id":
            self._find_person(self.me)
            self.unknown[f"your {words.person.one} number"] = None
        for wish in draft["wishes"]:
            self._wish(wish)
        if len(self.calls) > MOST_CALLS:
            raise Unfit("too many calls")

    # --- calls

    def call(self, role: str, **arguments: Any) -> Any:
        """One golden call. A read that was made before and would return the same is not made again."""
        name = self.w.tool.get(role)
        if name is None:
            raise Unfit(f"no tool to {role}")
        properties = self.world.by_name[name]["function"]["parameters"]["properties"]
        arguments = dict(zip(properties, arguments.values(), strict=True))
        try:
            result = self.world.call(self.tables, name, arguments)
        except ToolError as error:
            raise Unfit(str(error)) from None
        memo = name + json.dumps(arguments)
        if self.results.get(memo) != result or self.world.by_name[name]["kind"] in (
            "write",
            "handover",
        ):
            if memo in self.results:
                raise Unfit("what was looked up has changed since")
            self.calls.append((name, arguments))
            self.results[memo] = result
        return result

    def _find_person(self, key: str) -> None:
        record = self.tables[self.w.person.table][key]
        self.call(
            "find_person",
            first=record["first_name"],
            last=record["last_name"],
            proof=record[_field(self.w.proof)],
        )

    def _item(self, ref: dict[str, Any]) -> tuple[str, str]:
        """(id, the words for it) of an item, by the lookups that the reference needs."""
        w, items = self.w, self.tables[self.w.item.table]
        price = _field(w.price[0])
        if ref["by"] == "id":
            return ref["key"], f"the {w.item.one} {ref['key']}"
        if ref["by"] == "title":
            title = items[ref["key"]][_field(w.name)]
            found = self.call("find_item", title=title)
            return found[w.item.key], w.blueprint["item"]["noun"].format(title=title)
        if ref["by"] == "search":
            found = self.call("search", category=ref["category"], limit=float(ref["limit"]))
            words = f"the {ref['pick']} {w.item.one} ({w.category}: {ref['category']}) with a {w.price[0]} of at most ${ref['limit']}"
        else:
            name = self.tables[w.place.table][ref["key"]]["name"]
            found = self.call("at_place", place=self.call("find_place", name=name)[w.place.key])
            found = [row for row in found if row[w.status] == w.item_states[0]]
            words = f"the {ref['pick']} {w.item.one} {w.blueprint['place']['at']} {name} that is {w.item_states[0]}"
        field, best = PICKS[ref["pick"]]
        if len(found) < 2:
            raise Unfit("nothing to choose from")
        return best(found, key=lambda row: row[price])[w.item.key], words

    def _deal(self, ref: dict[str, Any]) -> tuple[str, str]:
        """As `_item`; each deal once."""
        key, words = self._find_deal(ref)
        if key in self.deals:
            raise Unfit("the same deal twice")
        self.deals.add(key)
        return key, words

    def _find_deal(self, ref: dict[str, Any]) -> tuple[str, str]:
        w = self.w
        if ref["by"] == "id":
            return ref["key"], f"your {w.deal.one} {ref['key']}"
        self.unknown[f"any {w.deal.one} number"] = None
        if ref["by"] == "title":
            key, noun = self._item({"by": "title", "key": ref["key"]})
            found = [
                row for row in self.call("list_deals", person=self.me) if row[w.item.key] == key
            ]
            words = f"your {w.deal.one} {w.blueprint['deal'].get('for', 'for')} {noun}"
        elif ref["by"] == "when":
            if any(name == w.tool["create"] for name, _ in self.calls):
                raise Unfit("the newest is one of this task")
            found = [
                row
                for row in self.call("list_deals", person=self.me)
                if row[w.status] == w.deal_states[0]
            ]
            if len(found) < 2:
                raise Unfit("nothing to choose from")
            found.sort(key=lambda row: row[_field(w.created)], reverse=ref["pick"] == "most recent")
            found = (
                found[:1] if found[0][_field(w.created)] != found[1][_field(w.created)] else found
            )
            words = f"your {ref['pick']} {w.deal.one} that is {w.deal_states[0]}"
        else:
            found = [
                row
                for row in self.call("list_deals", person=self.me)
                if row[_field(w.quantity)] == ref["quantity"] and row[w.status] == w.deal_states[0]
            ]
            words = f"your {w.deal_states[0]} {w.deal.one} {w.blueprint['deal'].get('with', 'for')} {self._count(ref['quantity'])}"
        if len(found) != 1:
            raise Unfit("not one deal")
        return found[0][w.deal.key], words

    def _extra(self, ref: dict[str, Any]) -> tuple[str, str]:
        w = self.w
        if ref["by"] == "id":
            return ref["key"], f"your {w.extra.one} {ref['key']}"
        self.unknown[f"any {w.extra.one} number"] = None
        found = [
            row
            for row in self.call("list_extras", person=self.me)
            if row[_field(w.topic)] == ref["topic"]
        ]
        if len(found) != 1:
            raise Unfit("not one extra")
        return found[0][w.extra.key], w.blueprint["extra"]["noun"].format(topic=ref["topic"])

    def _count(self, quantity: int) -> str:
        return f"{quantity} {self.w.unit if quantity == 1 else self.w.units}"

    # --- wishes

    def say(self, pattern: str, after: str = "", **words: Any) -> None:
        """One wish in words: "book {quantity} on {item}" -> a sentence; `after` is a sentence that follows it."""
        frame = self.rng.choice(
            [frame for frame in NEXT if frame not in self.template] if self.sentences else OPENINGS
        )
        self.template += [frame, pattern, after]
        sentence = " ".join(part for part in (frame.format(pattern), after) if part).format(**words)
        self.sentences.append(re.sub(r"\b1 (star|hour|time)s\b", r"1 \1", sentence))

    def ask(self, pattern: str, value: Any, **words: Any) -> None:
        self.say(self.rng.choice(ASKING).format(pattern), **words)
        self.communicate.append(
            f"{value:.2f}".removesuffix(".00") if isinstance(value, float) else str(value)
        )

    def _wish(self, wish: dict[str, Any]) -> None:
        kind, w = wish["kind"], self.w
        phrase = (w.ask.get(kind) or [""])[wish.get("phrase", 0) % len(w.ask.get(kind) or [1])]
        if kind == "create":
            self._create(wish, phrase)
        elif kind in ("cancel", "quantity", "option", "exchange", "gift"):
            key, noun = self._deal(wish["deal"])
            self._change(kind, wish, key, noun, phrase)
        elif kind in ("email", "phone", "city"):
            self.call(kind, person=self.me, value=wish["value"])
            self.say(
                (
                    "have {contact} changed to {value}",
                    "update {contact} to {value}",
                    "replace {contact} with {value}",
                )[wish["phrase"] % 3],
                contact=f"your {'home city' if kind == 'city' else 'phone number' if kind == 'phone' else 'email address'}",
                value=wish["value"],
            )
        elif kind == "funds":
            self.call("funds", person=self.me, amount=float(wish["value"]))
            self.say(
                (
                    "pay ${value} into {balance}",
                    "add ${value} to {balance}",
                    "top {balance} up by ${value}",
                )[wish["phrase"] % 3],
                value=wish["value"],
                balance=f"your {w.balance}",
            )
        elif kind == "points":
            self.call("points", person=self.me, points=wish["value"])
            self.say(
                (
                    "turn {value} of your {points} into money on your {balance}",
                    "redeem {value} of your {points} to top up your {balance}",
                )[wish["phrase"] % 2],
                value=wish["value"],
                points=w.points,
                balance=w.balance,
            )
        elif kind == "tier":
            self.call("tier", person=self.me, tier=wish["value"])
            self.say(
                (
                    "move to the {tier} {value}",
                    "change your {tier} to {value}",
                    "have the {tier} {value} from now on",
                )[wish["phrase"] % 3],
                tier=w.tier,
                value=wish["value"],
            )
        elif kind == "extra":
            key, noun = self._item(wish["item"])
            self.call("extra", person=self.me, item=key, level=wish["level"], topic=wish["topic"])
            self.say(phrase, item=noun, level=wish["level"], topic=wish["topic"])
        elif kind == "drop":
            key, noun = self._extra(wish["extra"])
            self.call("drop", extra=key)
            self.say(phrase, extra=noun)
        elif kind == "handover":
            self.call("handover", person=self.me, reason=wish["reason"])
            self.say(w.handover[wish["reason"]])
            self.assertions.append("The agent hands the user over to a person.")
        else:
            self._question(kind, wish)

    def _create(self, wish: dict[str, Any], phrase: str) -> None:
        """A new deal; with `unless`, another item is taken if this one has too few left, or the balance is filled up first if it is too low."""
        w, after = self.w, ""
        key, noun = self._item(wish["item"])
        quantity, unless = wish["quantity"], wish.get("unless")
        words = {"quantity": self._count(quantity), "option": wish["option"], "item": noun}
        if unless and unless["kind"] == "instead":
            other, other_noun = (
                None,
                w.blueprint["item"]["noun"].format(
                    title=self.tables[w.item.table][unless["key"]][_field(w.name)]
                ),
            )
            if self.tables[w.item.table][key][_field(w.stock[0])] < quantity:
                other, _ = self._item({"by": "title", "key": unless["key"]})
            after = "If there is not enough left for that ({stock}), you want {other} instead."
            words |= {"stock": w.stock[0], "other": other_noun}
            key = other or key
        elif unless:
            if (
                self._charge(key, quantity, wish["option"])
                > self.tables[w.person.table][self.me][_field(w.balance)]
            ):
                self.call("funds", person=self.me, amount=float(unless["amount"]))
            after = (
                "If your {balance} does not cover it, you first want to pay in exactly ${amount}."
            )
            words |= {"balance": w.balance, "amount": unless["amount"]}
        made = self.call(
            "create", person=self.me, item=key, quantity=quantity, option=wish["option"]
        )
        self.say(phrase, after, **words)
        self.assertions.append(
            f"The agent makes one {w.deal.one} with {w.quantity} {quantity} and {w.option} {wish['option']}."
        )
        if wish.get("told"):
            self.ask(
                ("how much that costs in all", "the total that is charged for it")[
                    wish["phrase"] % 2
                ],
                made["total"],
            )

    def _charge(self, item: str, quantity: int, option: str) -> float:
        person = self.tables[self.w.person.table][self.me]
        return (
            self.tables[self.w.item.table][item][_field(self.w.price[0])]
            * quantity
            * self.w.options[option]
            * (1 - self.w.rules.discount[person[self.w.tier]] / 100)
        )

    def _change(self, kind: str, wish: dict[str, Any], key: str, noun: str, phrase: str) -> None:
        w, after = self.w, ""
        words = {"deal": noun}
        if wish.get("refused"):  # a rule forbids it, and a person is to look at it
            after = (
                "If that is not allowed, you want a person to look at it as an exception.",
                "Should a rule forbid that, you ask for a person who can make an exception.",
            )[wish["phrase"] % 2]
        if kind == "quantity":
            words["quantity"], arguments = (
                self._count(wish["quantity"]),
                {"quantity": wish["quantity"]},
            )
        elif kind == "option":
            words["option"], arguments = wish["option"], {"option": wish["option"]}
        elif kind == "exchange":
            item, words["item"] = self._item(wish["item"])
            arguments = {"item": item}
        elif kind == "gift":
            other = self.tables[w.person.table][wish["other"]]
            words["other"] = (
                f"{other['first_name']} {other['last_name']} ({w.proof} {other[_field(w.proof)]})"
            )
            self._find_person(wish["other"])
            arguments = {"other": wish["other"]}
        else:
            arguments = {}
        if wish.get("refused"):
            if kind not in w.tool:
                raise Unfit(f"no tool to {kind}")
            try:
                self.call(kind, deal=key, **arguments)
            except Unfit:
                self.call("handover", person=self.me, reason="exception")
                self.assertions.append("The agent does not do what the rules forbid.")
            else:
                raise Unfit("no rule forbids it")
            self.say(phrase, after, **words)
            return
        made = self.call(kind, deal=key, **arguments)
        self.say(phrase, **words)
        if kind == "cancel" and wish.get("told"):
            self.ask("how much money you get back for it", made["refund"])
        elif wish.get("told") and "total" in made:
            self.ask("what it costs in all after the change", made["total"])
        self.assertions.append(
            {
                "cancel": f"The {w.deal.one} is {w.deal_states[1]}.",
                "gift": f"The {w.deal.one} has a new holder.",
            }.get(kind, f"The {w.deal.one} is changed as asked.")
        )

    def _question(self, kind: str, wish: dict[str, Any]) -> None:
        w = self.w
        if kind == "person_field":
            record = self.call("get_person", person=self.me)
            self.ask(
                "{what}",
                record[wish["field"]],
                what=f"how high your {w.balance} is"
                if wish["field"] == _field(w.balance)
                else f"how many {w.points} you have",
            )
        elif kind == "item_field":
            key, noun = self._item(wish["item"])
            value = self.call("get_item", item=key)[_field(wish["field"])]
            self.ask(
                _about(wish["field"], value, wish["phrase"]), value, field=wish["field"], one=noun
            )
        elif kind == "place_field":
            name = self.tables[w.place.table][wish["key"]]["name"]
            key = self.call("find_place", name=name)[w.place.key]
            value = self.call("get_place", place=key)[_field(wish["field"])]
            self.ask(
                _about(wish["field"], value, wish["phrase"]),
                value,
                field=wish["field"],
                one=(f"the {w.place.one} {name}", name)[wish["phrase"] % 3 > 0],
            )
        elif kind == "deal_field":
            key, noun = self._deal(wish["deal"])
            self.ask(
                ("what the total of {deal} is", "how much {deal} costs in all")[wish["phrase"] % 2],
                self.call("get_deal", deal=key)["total"],
                deal=noun,
            )
        elif kind == "spent":
            self.ask(
                (
                    "how much you have spent on all your {deals} together",
                    "what your {deals} come to in all, without those that are {ended}",
                )[wish["phrase"] % 2],
                self.call("spent", person=self.me)["total"],
                deals=w.deal.many,
                ended=w.deal_states[1],
            )
        elif kind == "average":
            key, noun = self._item(wish["item"])
            self.ask(
                (
                    "what the average {level} of {item} is over all {extras}",
                    "the mean {level} that all {extras} give {item}",
                )[wish["phrase"] % 2],
                float(self.call("average", item=key)["mean"]),
                level=w.level,
                item=noun,
                extras=w.extra.many,
            )
        elif kind == "extra_field":
            found = [
                row
                for row in self.call("list_extras", person=self.me)
                if row[_field(w.topic)] == wish["topic"]
            ]
            if len(found) != 1:
                raise Unfit("not one extra")
            self.ask(
                "what is recorded as {level} in {extra}",
                found[0][_field(w.level)],
                level=w.level,
                extra=w.blueprint["extra"]["noun"].format(topic=wish["topic"]),
            )
        else:  # sum: the prices of two items, times quantities, by the calculator
            parts, nouns = [], []
            for ref, quantity in wish["items"]:
                key, noun = self._item(ref)
                record = self.tables[w.item.table][key]
                if ref["by"] == "id":
                    self.call("get_item", item=key)
                parts.append(f"{quantity} * {record[_field(w.price[0])]}")
                nouns.append(
                    f"{self._count(quantity)} {w.blueprint['deal'].get('of', 'of')} {noun}"
                )
            value = self.call("calculate", expression=" + ".join(parts))["value"]
            self.ask(
                (
                    "what {nouns} would cost together at the plain {price}",
                    "the sum of the plain {price} for {nouns}",
                )[wish["phrase"] % 2],
                float(value),
                nouns=" and ".join(nouns),
                price=w.price[0],
            )


def _about(field: str, value: Any, phrase: int) -> str:
    """A question about a field in words: "how many tables ..." for a count, "what the tables of ... are" for another plural."""
    head = field.split(" in ")[0].split(" per ")[0]
    plural = head.endswith("s") and not head.endswith("ss")
    if plural and isinstance(value, int):
        return ("how many {field} {one} has", "the number of {field} of {one}")[phrase % 2]
    return ("what the {field} of {one} " + ("are" if plural else "is"), "the {field} of {one}")[
        phrase % 2
    ]


# --- drafts -----------------------------------------------------------------------------------------------------------------------------


def generate(
    world: World, words: SimpleNamespace, rng: random.Random, level: int, focus: int = 0
) -> tuple[dict[str, Any], Act]:
    """A draft of the level (1 to 5) that can be acted out, and the act. `focus` chooses the kind of the first wish, if that can be done."""
    kind = list(WEIGHTS)[focus % len(WEIGHTS)]
    for attempt in itertools.count():
        first = functools.partial(_add_wish, kind=kind if attempt < 20 else None)
        person = rng.choice(
            [
                key
                for key, row in world.tables[words.person.table].items()
                if row[words.status] == "active"
            ]
        )
        draft = {
            "seed": rng.getrandbits(32),
            "person": person,
            "by": "id",
            "wishes": [],
            "distractors": 3,
            "level": level,
        }
        grown = _grow(world, words, draft, rng, first)
        if grown is None:
            continue
        for _ in range(rng.randint(*LEVELS[level])):
            grown = evolve(world, words, grown[0], rng) or grown
        return grown


def evolve(
    world: World, words: SimpleNamespace, draft: dict[str, Any], rng: random.Random
) -> tuple[dict[str, Any], Act] | None:
    """A harder draft and its act: one more wish, lookup, condition or handful of tools. None if nothing that was tried can be done."""
    for _ in range(8):
        grown = _grow(
            world,
            words,
            draft,
            rng,
            rng.choices((_add_wish, _deepen, _condition, _distract), (4, 5, 3, 1))[0],
        )
        if grown is not None:
            return grown
    return None


def _grow(
    world: World,
    words: SimpleNamespace,
    draft: dict[str, Any],
    rng: random.Random,
    change: Callable,
) -> tuple[dict[str, Any], Act] | None:
    harder = json.loads(json.dumps(draft))
    try:
        if change(world, words, harder, rng) is False:
            return None
        return harder, Act(world, words, harder)
    except Unfit:
        return None


def _add_wish(
    world: World,
    w: SimpleNamespace,
    draft: dict[str, Any],
    rng: random.Random,
    kind: str | None = None,
) -> bool | None:
    if len(draft["wishes"]) >= MOST_WISHES or any(
        wish["kind"] == "handover" or wish.get("refused") for wish in draft["wishes"]
    ):
        return False  # after a hand-over nothing more can be done
    kinds = [
        kind
        for kind in WEIGHTS
        if kind not in {wish["kind"] for wish in draft["wishes"]}
        or kind in ("create", "item_field")
    ]
    draft["wishes"].append(
        _draw_wish(
            world,
            w,
            draft["person"],
            kind or rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0],
            rng,
        )
    )


def _draw_wish(
    world: World, w: SimpleNamespace, person: str, kind: str, rng: random.Random
) -> dict[str, Any]:
    """A wish of a kind with every number known. Whether it can be done is seen when it is acted out."""
    items, me = world.tables[w.item.table], world.tables[w.person.table][person]
    mine = lambda role: [
        key
        for key, row in world.tables[getattr(w, role).table].items()
        if row[w.person.key] == person
    ]
    any_item = lambda: {"by": "id", "key": rng.choice(list(items))}
    wish: dict[str, Any] = {"kind": kind, "phrase": rng.randrange(60)}
    if kind in ("cancel", "quantity", "option", "exchange", "gift", "deal_field"):
        wish["deal"] = {"by": "id", "key": _one(mine("deal"), rng)}
        wish["told"] = rng.random() < 0.3
    if kind == "create":
        wish |= {
            "item": any_item(),
            "quantity": rng.randint(1, w.rules.limit),
            "option": rng.choice(list(w.options)),
            "told": rng.random() < 0.3,
        }
    elif kind == "quantity":
        wish["quantity"] = rng.randint(1, w.rules.limit)
    elif kind == "option":
        wish["option"] = rng.choice(list(w.options))
    elif kind in ("exchange", "item_field", "average"):
        wish["item"] = any_item()
        if kind == "item_field":
            wish["field"] = rng.choice(w.fields["item"])[0]
    elif kind == "gift":
        wish["other"] = rng.choice([key for key in world.tables[w.person.table] if key != person])
    elif kind == "email":
        wish["value"] = (
            f"{me['first_name']}{rng.randint(10, 99)}@{rng.choice(('mail', 'post', 'inbox'))}.example".lower()
        )
    elif kind == "phone":
        wish["value"] = f"555-{rng.randint(1000, 9999)}"
    elif kind == "city":
        wish["value"] = rng.choice(
            sorted({row["city"] for row in world.tables[w.person.table].values()} - {me["city"]})
        )
    elif kind == "funds":
        wish["value"] = rng.randint(2, w.rules.top_up // 5) * 5
    elif kind == "points":
        wish["value"] = w.rules.least_points + 10 * rng.randint(0, 40)
    elif kind == "tier":
        wish["value"] = rng.choice(w.tiers)
    elif kind == "extra":
        wish |= {"item": any_item(), "level": rng.randint(*w.levels), "topic": rng.choice(w.topics)}
    elif kind == "drop":
        wish["extra"] = {"by": "id", "key": _one(mine("extra"), rng)}
    elif kind == "extra_field":
        wish["topic"] = rng.choice(w.topics)
    elif kind == "person_field":
        wish["field"] = rng.choice((_field(w.balance), _field(w.points)))
    elif kind == "place_field":
        wish |= {
            "key": rng.choice(list(world.tables[w.place.table])),
            "field": rng.choice(w.fields["place"])[0],
        }
    elif kind == "sum":
        wish["items"] = [[any_item(), rng.randint(2, 9)] for _ in range(2)]
    elif kind == "handover":
        wish["reason"] = rng.choice(list(w.handover))
    return wish


def _one(keys: list[str], rng: random.Random) -> str:
    if not keys:
        raise Unfit("nothing to choose from")
    return rng.choice(keys)


def _deepen(
    world: World, w: SimpleNamespace, draft: dict[str, Any], rng: random.Random
) -> bool | None:
    """Takes a number away from the user, so that it must be looked up."""
    refs: list[tuple[str, dict[str, Any]]] = [("person", draft)] * (draft["by"] == "id")
    for wish in draft["wishes"]:
        refs += [
            (field, wish[field])
            for field in ("item", "deal", "extra")
            if field in wish and wish[field]["by"] == "id"
        ]
        refs += [("item", ref) for ref, _ in wish.get("items", ()) if ref["by"] == "id"]
    if not refs:
        return False
    role, ref = rng.choice(refs)
    if role == "person":
        ref["by"] = "name"
    elif role == "item":
        record, way = world.tables[w.item.table][ref["key"]], rng.random()
        if way < 0.45:
            ref["by"] = "title"
        elif way < 0.75:
            price = _field(w.price[0])
            ref |= {
                "by": "search",
                "category": record[_field(w.category)],
                "limit": int(record[price] * rng.uniform(1.0, 1.6)) + 1,
                "pick": rng.choice(list(PICKS)),
            }
        else:
            ref |= {"by": "place", "key": record[w.place.key], "pick": rng.choice(list(PICKS))}
    elif role == "deal":
        record, way = world.tables[w.deal.table][ref["key"]], rng.random()
        if way < 0.5:
            ref |= {"by": "title", "key": record[w.item.key]}
        elif way < 0.8:
            ref |= {"by": "when", "pick": rng.choice(list(WHEN))}
        else:
            ref |= {"by": "quantity", "quantity": record[_field(w.quantity)]}
    else:
        ref |= {"by": "topic", "topic": world.tables[w.extra.table][ref["key"]][_field(w.topic)]}


def _condition(
    world: World, w: SimpleNamespace, draft: dict[str, Any], rng: random.Random
) -> bool | None:
    """A condition: another item if too few are left, money first if the balance is too low, or a person if a rule forbids it."""
    for wish in rng.sample(draft["wishes"], len(draft["wishes"])):
        if wish["kind"] == "create" and "unless" not in wish:
            if rng.random() < 0.5:
                wish["unless"] = {
                    "kind": "funds",
                    "amount": rng.randint(2, w.rules.top_up // 5) * 5,
                }
                return None
            others = list(world.tables[w.item.table])
            wish["unless"] = {"kind": "instead", "key": rng.choice(others)}
            if (
                rng.random() < 0.6
            ):  # an item that runs short, and is named, so that the condition bites
                short = [
                    key
                    for key in others
                    if world.tables[w.item.table][key][_field(w.stock[0])] < wish["quantity"]
                ]
                wish["item"] = {"by": "title", "key": _one(short, rng)}
            if wish["item"].get("key") == wish["unless"]["key"]:
                return False
            return None
        if (
            wish is draft["wishes"][-1]
            and wish["kind"] in ("cancel", "quantity", "option", "exchange")
            and not wish.get("refused")
        ):
            deals = [
                key
                for key, row in world.tables[w.deal.table].items()
                if row[w.person.key] == draft["person"]
            ]
            wish |= {"refused": True, "told": False, "deal": {"by": "id", "key": _one(deals, rng)}}
            return None
    return False


def _distract(world: World, w: SimpleNamespace, draft: dict[str, Any], rng: random.Random) -> None:
    draft["distractors"] += rng.randint(2, 6)


# --- a task in the tau2 format ------------------------------------------------------------------------------------------------------------


def to_task(
    world: World, w: SimpleNamespace, draft: dict[str, Any], act: Act, name: str
) -> dict[str, Any]:
    """The tau2 task of an act, with `domain`, `level`, `tools` (those offered) and `template` (a hash of its wording) beside tau2's fields."""
    rng = random.Random(f"{draft['seed']}/task")
    me = world.tables[w.person.table][draft["person"]]
    known = (
        f"You are {me['first_name']} {me['last_name']} and your {w.proof} is {me[_field(w.proof)]}."
    )
    if draft["by"] == "id":
        known = f"You are {me['first_name']} {me['last_name']}. Your {w.person.one} number is {draft['person']}."
    instructions = [
        rng.choice(STYLES),
        "If the agent asks you to confirm a step that you want, confirm it.",
    ]
    if len(draft["wishes"]) > 1:
        instructions.append("Bring up your wishes one after the other, in the order given.")
    unknown = "You do not know " + " or ".join(act.unknown) + "." if act.unknown else None
    calls = [
        {
            "action_id": f"{name}_{number}",
            "requestor": "assistant",
            "name": tool,
            "arguments": arguments,
            "info": None,
            "compare_args": None,
        }
        for number, (tool, arguments) in enumerate(act.calls)
    ]
    assertions = env_assertions(world.tables, act.tables)
    basis = (
        ["DB", "ACTION"]
        + ["COMMUNICATE"] * bool(act.communicate)
        + ["ENV_ASSERTION"] * bool(assertions)
    )
    used = {tool for tool, _ in act.calls} | {
        w.tool["find_person"],
        w.tool["calculate"],
        w.tool["handover"],
    }
    spare = [tool for tool in world.by_name if tool not in used]
    offered = used | set(rng.sample(spare, min(len(spare), draft["distractors"])))
    return {
        "id": name,
        "domain": world.domain,
        "level": draft["level"],
        "description": {
            "purpose": "; ".join(dict.fromkeys(wish["kind"] for wish in draft["wishes"])),
            "relevant_policies": None,
            "notes": None,
        },
        "user_scenario": {
            "persona": rng.choice(PERSONAS),
            "instructions": {
                "domain": world.domain,
                "reason_for_call": " ".join(act.sentences),
                "known_info": known,
                "unknown_info": unknown,
                "task_instructions": " ".join(instructions),
            },
        },
        "ticket": None,
        "initial_state": None,
        "evaluation_criteria": {
            "actions": calls,
            "env_assertions": assertions,
            "communicate_info": list(dict.fromkeys(act.communicate)),
            "nl_assertions": list(dict.fromkeys(act.assertions)) or None,
            "reward_basis": basis,
        },
        "tools": [tool for tool in world.by_name if tool in offered],
        "template": hashlib.sha1("|".join(act.template).encode()).hexdigest()[:10],
    }


def env_assertions(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """One assertion for each field that changed in a record that stays; for a record that comes or goes, that it is there or not."""
    found = []
    for table, key, old, new in changes(before, after):
        wanted = (
            [{"field": f, "value": new[f]} for f in new if old[f] != new[f]]
            if old and new
            else [{}]
        )
        found += [
            {
                "env_type": "assistant",
                "func_name": "assert_record",
                "arguments": {"table": table, "key": key} | more,
                "assert_value": bool(new),
                "message": None,
            }
            for more in wanted
        ]
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """(table, key, record before or None, record after or None) of every record that differs."""
    return [
        (table, key, before[table].get(key), after[table].get(key))
        for table in after
        for key in sorted(before[table].keys() | after[table].keys())
        if before[table].get(key) is not after[table].get(key)
        and before[table].get(key) != after[table].get(key)
    ]
