"""Draws what a domain calls its people, things, fields, rules and tools: a blueprint and a seed.

Every domain has five roles: a person holds deals on items that places offer, and smaller records
beside them (extras). For a railway these are passengers, reservations, trains, stations and delay
claims.
"""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

from worlds.toolscale.program import Json

ROLES = ("person", "place", "item", "deal", "extra")


class Word(str):
    """A name as the user reads it."""

    @property
    def field(self) -> str:
        """The name as a field, table or tool: "seats left" is `seats_left`."""
        return re.sub(r"\W+", "_", self.lower())


class Role(Word):
    """What a domain calls one record of a role; `many` is the plural, `prefix` starts its keys."""

    many: Word
    prefix: str

    @property
    def key(self) -> str:
        """The field that holds the key."""
        return self.field + "_id"

    @property
    def table(self) -> str:
        """The table of the role."""
        return self.many.field


class Words(SimpleNamespace):
    """The words of a domain, to which domains/template.json refers. A text becomes a Word."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Word(value) if type(value) is str else value)


def draw_words(blueprint: Json, common: Json, template: Json, rng: random.Random) -> Words:
    """Returns the words of a domain; `common` and `template` are domains/common.json and so on."""
    sources, w = {"common": common, **blueprint}, Words(blueprint=blueprint, common=common)
    for name, value in expand(template["words"], sources).items():
        setattr(w, name, value)
    w.today = draw_date(rng, 2026, 2026)
    for name in ROLES:
        one, many = rng.choice(blueprint[name]["words"])
        role = Role(one)
        role.many, role.prefix = Word(many), blueprint[name]["prefix"]
        setattr(w, name, role)
    w.deals, w.extras = w.deal.many, w.extra.many
    for name, choices in expand(template["drawn words"], sources).items():
        setattr(w, name, rng.choice(choices))
    w.proof_draw = common["proof draws"][w.proof]
    w.options = {
        name: round(factor * rng.uniform(0.95, 1.05), 2) if factor != 1 else 1.0
        for name, factor in blueprint["deal"]["option"][1]
    }
    w.option_names = list(w.options)
    w.final_options = [None, *w.option_names[1:]]
    w.reserved_options = [None, w.option_names[-1]]
    w.handover_reasons = list(w.handover)
    w.reasons = [*w.handover, "exception"]
    w.reasons_text = ", ".join(f"`{reason}`" for reason in w.handover)
    w.created = rng.choice(common["created"])
    w.fields = {}
    for role in ("person", "place", "item"):
        fields = blueprint[role]["fields"]
        many = len(fields)
        count = rng.randint(1, many) if role == "person" else max(2, many - rng.randrange(2))
        w.fields[role] = rng.sample(fields, count)
    w.field_names = {role: [name for name, *_ in w.fields[role]] for role in w.fields}
    w.rules = _draw_rules(w, rng)
    naming = rng.choice(common["naming"])
    left_out = rng.sample(common["optional tools"], rng.randint(0, 5))
    names = {role: Word(expand(name, w)).field for role, name in naming.items()}
    w.tool = {role: name for role, name in names.items() if role not in left_out}
    return w


def _draw_rules(w: Words, rng: random.Random) -> Words:
    """The limits that the tools enforce, and the forms in which tools and policy name them."""
    r = Words(limit=rng.randint(*w.blueprint["deal"]["limit"]))
    for name, choices in expand(w.common["rules"], w).items():
        setattr(r, name, rng.choice(choices))
    r.discount = dict(zip(w.tiers, (0, r.silver_discount, r.gold_discount), strict=True))
    r.thresholds = dict(zip(w.tiers, (0, r.silver_points, r.gold_points), strict=True))
    r.same_category, r.per_item = rng.random() < 0.5, rng.random() < 0.5
    r.final = None if r.final == r.reserved else r.final
    r.most_points = r.least_points + 400
    r.refund, r.refund_percent = round(1 - r.fee / 100, 2), 100 - r.fee
    r.less_fee = f", less {r.fee}%" if r.fee else ""
    r.worth = f"{r.rate:.2f}"
    r.factors = _listed(w.options)
    r.discounts = _listed({tier: f"{percent}%" for tier, percent in r.discount.items() if percent})
    r.discount_factors = {tier: round(1 - off / 100, 2) for tier, off in r.discount.items()}
    r.higher_tiers = " and ".join(w.tiers[1:])
    r.allowed = {o: w.tiers[1:] if o == r.reserved else w.tiers for o in w.options}
    r.points_needed = f"{w.points.capitalize()} needed: {_listed(r.thresholds)}"
    return r


def _listed(values: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def draw_date(rng: random.Random, first: int, last: int) -> str:
    """Returns a day of the years `first` to `last`, such as 2026-03-14."""
    return f"{rng.randint(first, last)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def expand(template: Any, words: Any) -> Any:
    """Returns the template with every `<path>` replaced by the attribute of `words` that it names.

    A string that is nothing but a `<path>` becomes the value itself: a number, list or object.
    """
    if isinstance(template, dict):
        return {expand(key, words): expand(value, words) for key, value in template.items()}
    if isinstance(template, list):
        return [expand(value, words) for value in template]
    if not isinstance(template, str):
        return template
    if whole := re.fullmatch(r"<([\w.]+)>", template):
        value = _look(words, whole[1])
        return str(value) if isinstance(value, str) else value
    return re.sub(r"<([\w.]+)>", lambda match: str(_look(words, match[1])), template)


def _look(words: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(words, list):
            words = words[int(name)]
        else:
            words = words[name] if isinstance(words, dict) else getattr(words, name)
    return words
