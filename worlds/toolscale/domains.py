"""The built-in author of worlds: a blueprint (one JSON file of words and ranges) and a seed give tables, tools with rules, and a policy.

Every domain has people who hold deals on items that places offer, and smaller records beside them (`extra`): passengers, reservations,
trains, stations, delay claims. A blueprint says what these are called, what fields they may have and how people ask for things; the
seed draws names, optional fields, tools, rules, numbers and all records. domains/common.json holds names of people, cities and tools.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.files import read_json
from worlds.toolscale.world import World

HOME = Path(__file__).parent / "domains"
BUILT_IN = (
    "finance",
    "sport",
    "ecommerce",
    "medicine",
    "entertainment",
    "railway",
    "restaurant",
    "education",
    "travel",
    "weather",
)
ROLES = ("person", "place", "item", "deal", "extra")
OPTIONAL_TOOLS = (
    "get_place",
    "spent",
    "average",
    "quantity",
    "option",
    "exchange",
    "gift",
    "email",
    "phone",
    "city",
    "points",
    "tier",
    "drop",
)
PROOFS = {
    "zip code": lambda rng: str(rng.randint(10000, 98999)),
    "date of birth": lambda rng: _date(rng, 1945, 2005),
    "security word": lambda rng: rng.choice(
        (
            "amber",
            "birch",
            "cobalt",
            "delta",
            "ember",
            "fjord",
            "garnet",
            "hazel",
            "indigo",
            "jasper",
            "kestrel",
            "lotus",
            "maple",
            "nectar",
            "opal",
        )
    ),
}
_ASKED = {
    "create": "quantity option item",
    "cancel": "deal",
    "quantity": "deal quantity",
    "option": "deal option",
    "exchange": "deal item",
    "gift": "deal other",
    "extra": "item level topic",
    "drop": "extra",
}


def load_blueprint(name: str) -> dict[str, Any]:
    """The blueprint of a built-in domain, or of the JSON file `name`. Raises UserError that names the field that is wrong."""
    path = Path(name) if name.endswith(".json") else HOME / f"{name}.json"
    if name not in BUILT_IN and not name.endswith(".json"):
        raise UserError(
            f"domain {name!r}: there are {', '.join(BUILT_IN)}, or give a blueprint file NAME.json"
        )
    return _checked(read_json(path), str(path))


def _checked(blueprint: Any, where: str) -> dict[str, Any]:
    def need(holder: Any, field: str, kind: type) -> Any:
        value = holder.get(field) if isinstance(holder, dict) else None
        if not isinstance(value, kind) or not value:
            raise UserError(
                f"{where}: {field} is {value!r:.40}; it must be a non-empty {'text' if kind is str else 'object' if kind is dict else 'list'}"
            )
        return value

    if not re.fullmatch(r"\w+", need(blueprint, "domain", str)):
        raise UserError(
            f"{where}: domain is {blueprint['domain']!r}; it must be letters, digits and underscores"
        )
    need(blueprint, "business", str)
    need(blueprint, "handover", dict)
    for role in ROLES:
        need(need(blueprint, role, dict), "words", list)
        need(blueprint[role], "prefix", str)
    lists = {
        "person": ("tiers", "balance", "points", "fields"),
        "place": ("names", "fields"),
        "deal": ("quantity", "limit", "option", "states"),
        "extra": ("level", "topic"),
        "item": ("name", "titles", "category", "price", "stock", "states", "fields"),
    }
    for role, fields in lists.items():
        for field in fields:
            need(blueprint[role], field, list)
    (
        need(blueprint["item"], "noun", str),
        need(blueprint["extra"], "noun", str),
        need(blueprint["place"], "at", str),
    )
    if len({blueprint[role]["prefix"] for role in ROLES}) < len(ROLES):
        raise UserError(f"{where}: prefix: each of {', '.join(ROLES)} must have its own")
    for intent, allowed in _ASKED.items():
        for phrase in need(need(blueprint, "ask", dict), intent, list):
            if set(re.findall(r"\{(\w*)\}", phrase)) != set(allowed.split()):
                raise UserError(
                    f"{where}: ask.{intent}: {phrase!r} must hold exactly {', '.join('{%s}' % name for name in allowed.split())}"
                )
    return blueprint


@lru_cache(maxsize=32)
def build(name: str, seed: int) -> tuple[World, SimpleNamespace]:
    """The world of a blueprint for a seed, and its words: names of tables, fields and tools by role, rules, phrases (for tasks.py)."""
    blueprint, common = load_blueprint(name), read_json(HOME / "common.json")
    rng = random.Random(f"world/{blueprint['domain']}/{seed}")
    w = _draw_words(blueprint, common, rng)
    schema = _schema(w)
    tables = _records(w, common, rng)
    tools = [tool for role, tool in _tools(w).items() if role in w.tool]
    world = World(
        blueprint["domain"],
        schema,
        tables,
        tools,
        policy(w.business, w.today, schema, tools, _habits(w)),
    )
    world.check()
    return world, w


def _draw_words(b: dict[str, Any], common: dict[str, Any], rng: random.Random) -> SimpleNamespace:
    w = SimpleNamespace(
        blueprint=b,
        business=b["business"],
        today=_date(rng, 2026, 2026),
        ask=b["ask"],
        handover=b["handover"],
    )
    for role in ROLES:
        one, many = rng.choice(b[role]["words"])
        setattr(
            w,
            role,
            SimpleNamespace(
                one=one,
                many=many,
                table=_field(many),
                key=_field(one) + "_id",
                prefix=b[role]["prefix"],
            ),
        )
    w.proof = rng.choice(list(PROOFS))
    w.tiers = rng.choice(b["person"]["tiers"])
    w.tier = rng.choice(("tier", "level", "plan"))
    w.balance, w.points = rng.choice(b["person"]["balance"]), rng.choice(b["person"]["points"])
    w.status = rng.choice(("status", "state"))
    w.name = rng.choice(b["item"]["name"])
    w.category, w.categories = b["item"]["category"]
    w.price, w.stock = b["item"]["price"], b["item"]["stock"]
    w.item_states, w.deal_states = b["item"]["states"], b["deal"]["states"]
    w.quantity, w.unit, w.units = b["deal"]["quantity"]
    w.option, options = b["deal"]["option"]
    w.options = {
        option: round(factor * rng.uniform(0.95, 1.05), 2) if factor != 1 else 1.0
        for option, factor in options
    }
    w.level, low, high = b["extra"]["level"]
    w.levels = (low, high)
    w.topic, w.topics = b["extra"]["topic"]
    w.created = rng.choice(("created on", "made on", "entered on"))
    w.fields = {
        role: rng.sample(b[role]["fields"], max(2, len(b[role]["fields"]) - rng.randrange(2)))
        if role != "person"
        else rng.sample(b[role]["fields"], rng.randint(1, len(b[role]["fields"])))
        for role in ("person", "place", "item")
    }
    w.rules = SimpleNamespace(
        limit=rng.randint(*b["deal"]["limit"]),
        fee=rng.choice((0, 10, 15, 20, 25)),
        discount={
            t: d for t, d in zip(w.tiers, (0, rng.choice((5, 8, 10)), rng.choice((12, 15, 20))))
        },
        final=rng.choice([None, *list(w.options)[1:]]),
        reserved=rng.choice([None, list(w.options)[-1]]),
        most=rng.choice((None, 5, 6, 7)),
        top_up=rng.choice((200, 300, 400, 500)),
        least_points=rng.choice((100, 150, 200)),
        rate=rng.choice((0.02, 0.05, 0.1)),
        threshold=[0, rng.choice((300, 400, 500)), rng.choice((700, 800, 900))],
        same_category=rng.random() < 0.5,
        per_item=rng.random() < 0.5,
    )
    if w.rules.final == w.rules.reserved:
        w.rules.final = None
    names = rng.choice(common["naming"])
    short = {
        "p": w.person.one,
        "l": w.place.one,
        "i": w.item.one,
        "d": w.deal.one,
        "e": w.extra.one,
        "is": w.item.many,
        "ds": w.deal.many,
        "es": w.extra.many,
        "level": w.level,
        "quantity": w.quantity,
        "option": w.option,
        "balance": w.balance,
        "points": w.points,
        "tier": w.tier,
        "title": w.name,
    }
    left_out = set(rng.sample(OPTIONAL_TOOLS, rng.randint(0, 5)))
    w.tool = {
        role: _field(pattern.format(**short))
        for role, pattern in names.items()
        if role not in left_out
    }
    return w


# --- schema and records -----------------------------------------------------------------------------------------------------------------


def _schema(w: SimpleNamespace) -> dict[str, Any]:
    text, whole, number = {"type": "string"}, {"type": "integer"}, {"type": "number"}
    key = lambda role: {getattr(w, role).key: text}
    link = lambda *roles: {
        getattr(w, role).key: text | {"link": getattr(w, role).table} for role in roles
    }
    drawn = lambda role: {
        _field(f[0]): whole
        if f[1] == "integer"
        else text | {"enum": f[2]}
        if f[1] == "enum"
        else text
        for f in w.fields[role]
    }
    choice = lambda values: text | {"enum": list(values)}
    tables = {
        "person": key("person")
        | {
            "first_name": text,
            "last_name": text,
            _field(w.proof): text,
            "email": text,
            "phone": text,
            "city": text,
            w.status: choice(("active", "suspended")),
            _field(w.balance): number,
            _field(w.points): whole,
            w.tier: choice(w.tiers),
        }
        | drawn("person"),
        "place": key("place") | {"name": text, "city": text} | drawn("place"),
        "item": key("item")
        | {_field(w.name): text}
        | link("place")
        | {
            _field(w.category): choice(w.categories),
            _field(w.price[0]): number,
            _field(w.stock[0]): whole,
            w.status: choice(w.item_states),
        }
        | drawn("item"),
        "deal": key("deal")
        | link("person", "item")
        | {
            _field(w.quantity): whole,
            _field(w.option): choice(w.options),
            "total": number,
            w.status: choice(w.deal_states),
            _field(w.created): text,
        },
        "extra": key("extra")
        | link("person", "item")
        | {_field(w.level): whole, _field(w.topic): choice(w.topics)},
    }
    return {
        getattr(w, role).table: {"key": getattr(w, role).key, "fields": fields}
        for role, fields in tables.items()
    }


def _records(w: SimpleNamespace, common: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    def drawn(role: str) -> dict[str, Any]:
        return {_field(f[0]): _draw_field(f, rng) for f in w.fields[role]}

    def ids(role: str, count: int) -> list[str]:
        start = rng.randint(100, 400)
        return [
            f"{getattr(w, role).prefix}{n}"
            for n in sorted(rng.sample(range(start, start + 4 * count), count))
        ]

    people, places, items, deals, extras = {}, {}, {}, {}, {}
    names = rng.sample([(first, last) for first in common["first"] for last in common["last"]], 80)
    for key, (first, last) in zip(ids("person", rng.randint(60, 80)), names):
        people[key] = {
            w.person.key: key,
            "first_name": first,
            "last_name": last,
            _field(w.proof): PROOFS[w.proof](rng),
            "email": f"{first}.{last}@{rng.choice(common['mail'])}".lower(),
            "phone": _phone(rng),
            "city": rng.choice(common["cities"]),
            w.status: "suspended" if rng.random() < 0.08 else "active",
            _field(w.balance): round(
                rng.uniform(0, 6 * w.price[2])
                if rng.random() < 0.8
                else rng.uniform(0, w.price[1]),
                2,
            ),
            _field(w.points): 10 * rng.randint(0, 120),
            w.tier: rng.choice(w.tiers),
            **drawn("person"),
        }
    named = rng.sample(
        [
            pattern.format(city=city)
            for pattern in w.blueprint["place"]["names"]
            for city in common["cities"]
        ],
        26,
    )
    for key, name in zip(ids("place", rng.randint(18, 26)), named):
        places[key] = {
            w.place.key: key,
            "name": name,
            "city": next(city for city in common["cities"] if name.startswith(city)),
            **drawn("place"),
        }
    heads, tails = w.blueprint["item"]["titles"]
    titles = [f"{head} {tail}" for head in heads for tail in tails]
    titles = rng.sample(titles, min(len(titles), 70))
    prices = rng.sample(
        range(int(w.price[1] * 20), int(w.price[2] * 20)), len(titles)
    )  # in twentieths, each once: "the cheapest" is one
    for key, title, price in zip(
        ids("item", min(len(titles), rng.randint(56, 70))), titles, prices
    ):
        items[key] = {
            w.item.key: key,
            _field(w.name): title,
            w.place.key: rng.choice(list(places)),
            _field(w.category): rng.choice(w.categories),
            _field(w.price[0]): price / 20,
            _field(w.stock[0]): rng.choice(
                (0, rng.randint(1, 3), *(rng.randint(*w.stock[1:]) for _ in range(5)))
            ),
            w.status: w.item_states[rng.random() < 0.08],
            **drawn("item"),
        }
    count = rng.randint(120, 140)
    days = rng.sample(range(1, 360), count)
    for key, day in zip(ids("deal", count), sorted(days)):
        person, item = rng.choice(list(people)), rng.choice(list(items))
        quantity, option = rng.randint(1, max(2, w.rules.limit - 1)), rng.choice(list(w.options))
        total = round(
            items[item][_field(w.price[0])]
            * quantity
            * w.options[option]
            * (1 - w.rules.discount[people[person][w.tier]] / 100),
            2,
        )
        deals[key] = {
            w.deal.key: key,
            w.person.key: person,
            w.item.key: item,
            _field(w.quantity): quantity,
            _field(w.option): option,
            "total": total,
            w.status: rng.choices(w.deal_states, (8, 1, 1))[0],
            _field(w.created): f"2025-{(day - 1) // 30 + 1:02d}-{(day - 1) % 30 % 28 + 1:02d}",
        }
    for key in ids("extra", rng.randint(50, 64)):
        extras[key] = {
            w.extra.key: key,
            w.person.key: rng.choice(list(people)),
            w.item.key: rng.choice(list(items)),
            _field(w.level): rng.randint(*w.levels),
            _field(w.topic): rng.choice(w.topics),
        }
    return {
        w.person.table: people,
        w.place.table: places,
        w.item.table: items,
        w.deal.table: deals,
        w.extra.table: extras,
    }


def _draw_field(field: list[Any], rng: random.Random) -> Any:
    kind = field[1]
    if kind == "integer":
        return rng.randrange(field[2], field[3] + 1, field[4])
    return (
        rng.choice(field[2])
        if kind == "enum"
        else _date(rng, field[2], field[3])
        if kind == "date"
        else _phone(rng)
    )


def _date(rng: random.Random, first: int, last: int) -> str:
    return f"{rng.randint(first, last)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _phone(rng: random.Random) -> str:
    return f"555-{rng.randint(1000, 9999)}"


def _field(words: str) -> str:
    return re.sub(r"\W+", "_", words.lower())


# --- tools ------------------------------------------------------------------------------------------------------------------------------


def _tools(w: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """All tools that the domain could have, by role; the seed has chosen which it has (w.tool)."""
    p, l, i, d, e, r = w.person, w.place, w.item, w.deal, w.extra, w.rules
    balance, points, price, stock, quantity = (
        _field(w.balance),
        _field(w.points),
        _field(w.price[0]),
        _field(w.stock[0]),
        _field(w.quantity),
    )
    option, level, topic, name, category, created, proof = (
        _field(words)
        for words in (w.option, w.level, w.topic, w.name, w.category, w.created, w.proof)
    )
    text, whole, number = {"type": "string"}, {"type": "integer"}, {"type": "number"}
    P, L, I, D, E = (
        {role.key: text | {"description": f"id of the {role.one}, such as {role.prefix}123"}}
        for role in (p, l, i, d, e)
    )
    open_item, active_deal = w.item_states[0], w.deal_states[0]
    tools: dict[str, dict[str, Any]] = {}

    def add(
        role: str, kind: str, description: str, parameters: dict[str, Any], *program: Any
    ) -> None:
        function = {
            "name": w.tool.get(role, role),
            "description": description,
            "parameters": {
                "type": "object",
                "properties": parameters,
                "required": list(parameters),
            },
        }
        tools[role] = {
            "kind": kind,
            "function": function,
            "program": [step for step in program if step],
        }

    def get(role: SimpleNamespace, variable: str, key: str = "") -> dict[str, Any]:
        key = key or f"${role.key}"
        return {
            "op": "get",
            "table": role.table,
            "key": key,
            "as": variable,
            "error": f"There is no {role.one} {{{key[1:]}}}.",
        }

    def require(left: Any, compare: str, right: Any, error: str, rule: str) -> dict[str, Any]:
        return {"op": "require", "if": [left, compare, right], "error": error, "rule": rule}

    def compute(variable: str, value: Any, rule: str = "") -> dict[str, Any]:
        return {"op": "compute", "as": variable, "value": value} | ({"rule": rule} if rule else {})

    def update(role: SimpleNamespace, key: str, **fields: Any) -> dict[str, Any]:
        return {"op": "update", "table": role.table, "key": key, "set": fields}

    def give(**fields: Any) -> dict[str, Any]:
        return {"op": "return", "value": {"object": fields}}

    def total(quantity_: Any, option_: Any) -> list[dict[str, Any]]:
        factors = ", ".join(f"{o} {f}" for o, f in w.options.items())
        discounts = ", ".join(f"{t} {d_}%" for t, d_ in r.discount.items() if d_)
        rule = f"The total is the {w.price[0]} times the {w.quantity}, times the factor of the {w.option} ({factors}), less the discount of the {w.tier} ({discounts})."
        return [
            compute(
                "full",
                {"*": [{"*": [f"$item.{price}", quantity_]}, {"lookup": [option_, w.options]}]},
            ),
            compute(
                "total",
                {
                    "round": [
                        {
                            "*": [
                                "$full",
                                {
                                    "lookup": [
                                        f"$person.{w.tier}",
                                        {t: round(1 - d_ / 100, 2) for t, d_ in r.discount.items()},
                                    ]
                                },
                            ]
                        },
                        2,
                    ]
                },
                rule,
            ),
        ]

    active = require(
        f"$person.{w.status}",
        "==",
        "active",
        f"{p.one} {{person.{p.key}}} is {{person.{w.status}}}.",
        f"The {p.one} must be active, not suspended.",
    )
    is_open = require(
        f"$item.{w.status}",
        "==",
        open_item,
        f"{i.one} {{item.{i.key}}} is {{item.{w.status}}}.",
        f"The {i.one} must be {open_item}, not {w.item_states[1]}.",
    )
    is_active = require(
        f"$deal.{w.status}",
        "==",
        active_deal,
        f"{d.one} {{deal.{d.key}}} is {{deal.{w.status}}}.",
        f"The {d.one} must be {active_deal}: one that is {w.deal_states[1]} or {w.deal_states[2]} cannot be changed.",
    )
    within = lambda amount: [
        require(
            amount,
            ">=",
            1,
            f"At least 1 {w.unit} is needed.",
            f"There must be at least 1 {w.unit}.",
        ),
        require(
            amount,
            "<=",
            r.limit,
            f"At most {r.limit} {w.units} are possible.",
            f"One {d.one} has at most {r.limit} {w.units}.",
        ),
    ]
    reserved = r.reserved and require(
        f"$person.{w.tier}",
        "in",
        {
            "lookup": [
                f"${option}",
                {o: w.tiers[1:] if o == r.reserved else w.tiers for o in w.options},
            ]
        },
        f"{w.option} {{{option}}} is not open to {w.tier} {{person.{w.tier}}}.",
        f"The {w.option} {r.reserved} is open to the {w.tier} {' and '.join(w.tiers[1:])} only.",
    )
    pays = lambda amount: [
        require(
            f"$person.{balance}",
            ">=",
            amount,
            f"The {w.balance} is {{person.{balance}}}, which is not enough.",
            f"The {w.balance} must cover what is to be paid.",
        ),
        compute("left", {"round": [{"-": [f"$person.{balance}", amount]}, 2]}),
    ]
    holder, of = get(p, "person", f"$deal.{p.key}"), get(i, "item", f"$deal.{i.key}")

    add(
        "find_person",
        "read",
        f"Finds the id of a {p.one} by name and {w.proof}.",
        {"first_name": text, "last_name": text, proof: text},
        {
            "op": "find",
            "table": p.table,
            "where": [
                ["first_name", "==", "$first_name"],
                ["last_name", "==", "$last_name"],
                [proof, "==", f"${proof}"],
            ],
            "as": "person",
            "error": f"There is no {p.one} with this name and {w.proof}.",
        },
        give(**{p.key: f"$person.{p.key}"}),
    )
    add(
        "get_person",
        "read",
        f"Reads the record of a {p.one}: contact, {w.balance}, {w.points}, {w.tier}.",
        P,
        get(p, "person"),
        {"op": "return", "value": "$person"},
    )
    add(
        "find_item",
        "read",
        f"Finds a {i.one} by its exact {w.name}: id, {w.price[0]}, {w.stock[0]}, {w.status}.",
        {name: text},
        {
            "op": "find",
            "table": i.table,
            "where": [[name, "==", f"${name}"]],
            "as": "item",
            "error": f"There is no {i.one} called {{{name}}}.",
        },
        give(**{field: f"$item.{field}" for field in (i.key, price, stock, w.status)}),
    )
    add(
        "search",
        "read",
        f"Lists the {i.many} of a {w.category} that are {open_item} and whose {w.price[0]} is at most a limit, with {w.price[0]} and {w.stock[0]}.",
        {category: text | {"enum": w.categories}, f"highest_{price}": number},
        {
            "op": "select",
            "table": i.table,
            "where": [
                [category, "==", f"${category}"],
                [price, "<=", f"$highest_{price}"],
                [w.status, "==", open_item],
            ],
            "fields": [i.key, name, price, stock],
            "as": "found",
        },
        {"op": "return", "value": "$found"},
    )
    add(
        "get_item",
        "read",
        f"Reads the whole record of a {i.one}.",
        I,
        get(i, "item"),
        {"op": "return", "value": "$item"},
    )
    add(
        "find_place",
        "read",
        f"Finds the id of a {l.one} by its exact name.",
        {"name": text},
        {
            "op": "find",
            "table": l.table,
            "where": [["name", "==", "$name"]],
            "as": "place",
            "error": f"There is no {l.one} called {{name}}.",
        },
        give(**{l.key: f"$place.{l.key}"}),
    )
    add(
        "get_place",
        "read",
        f"Reads the whole record of a {l.one}.",
        L,
        get(l, "place"),
        {"op": "return", "value": "$place"},
    )
    add(
        "at_place",
        "read",
        f"Lists the {i.many} {w.blueprint['place']['at']} a {l.one}.",
        L,
        get(l, "place"),
        {
            "op": "select",
            "table": i.table,
            "where": [[l.key, "==", f"${l.key}"]],
            "fields": [i.key, name, category, price, stock, w.status],
            "as": "found",
        },
        {"op": "return", "value": "$found"},
    )
    add(
        "list_deals",
        "read",
        f"Lists the {d.many} of a {p.one}: {i.one}, {w.quantity}, {w.status} and date.",
        P,
        get(p, "person"),
        {
            "op": "select",
            "table": d.table,
            "where": [[p.key, "==", f"${p.key}"]],
            "fields": [d.key, i.key, quantity, w.status, created],
            "as": "found",
        },
        {"op": "return", "value": "$found"},
    )
    add(
        "get_deal",
        "read",
        f"Reads the whole record of a {d.one}, with its total.",
        D,
        get(d, "deal"),
        {"op": "return", "value": "$deal"},
    )
    add(
        "spent",
        "read",
        f"Adds up the totals of the {d.many} of a {p.one} that are not {w.deal_states[1]}.",
        P,
        get(p, "person"),
        {
            "op": "select",
            "table": d.table,
            "where": [[p.key, "==", f"${p.key}"], [w.status, "!=", w.deal_states[1]]],
            "as": "found",
        },
        {"op": "aggregate", "function": "sum", "rows": "$found", "field": "total", "as": "total"},
        give(total="$total"),
    )
    add(
        "list_extras",
        "read",
        f"Lists the {e.many} of a {p.one}.",
        P,
        get(p, "person"),
        {"op": "select", "table": e.table, "where": [[p.key, "==", f"${p.key}"]], "as": "found"},
        {"op": "return", "value": "$found"},
    )
    add(
        "average",
        "read",
        f"The mean {w.level} over all {e.many} on a {i.one}.",
        I,
        get(i, "item"),
        {"op": "select", "table": e.table, "where": [[i.key, "==", f"${i.key}"]], "as": "found"},
        {"op": "aggregate", "function": "mean", "rows": "$found", "field": level, "as": "mean"},
        give(mean="$mean"),
    )
    add(
        "create",
        "write",
        f"Makes a {d.one} for a {p.one} and pays it from the {w.balance}.",
        P | I | {quantity: whole, option: text | {"enum": list(w.options)}},
        get(p, "person"),
        get(i, "item"),
        active,
        is_open,
        *within(f"${quantity}"),
        reserved,
        *(
            [
                {
                    "op": "select",
                    "table": d.table,
                    "where": [[p.key, "==", f"${p.key}"], [w.status, "==", active_deal]],
                    "as": "running",
                },
                {"op": "aggregate", "function": "count", "rows": "$running", "as": "count"},
                require(
                    "$count",
                    "<",
                    r.most,
                    f"There are {{count}} {d.many} already.",
                    f"A {p.one} has at most {r.most} {active_deal} {d.many} at a time.",
                ),
            ]
            if r.most
            else []
        ),
        require(
            f"$item.{stock}",
            ">=",
            f"${quantity}",
            f"Only {{item.{stock}}} are left.",
            f"The {w.quantity} must not exceed what the {i.one} has left ({w.stock[0]}).",
        ),
        *total(f"${quantity}", f"${option}"),
        *pays("$total"),
        compute("id", {"next_id": [d.table, d.prefix]}),
        {
            "op": "insert",
            "table": d.table,
            "key": "$id",
            "record": {
                d.key: "$id",
                p.key: f"${p.key}",
                i.key: f"${i.key}",
                quantity: f"${quantity}",
                option: f"${option}",
                "total": "$total",
                w.status: active_deal,
                created: w.today,
            },
        },
        update(i, f"${i.key}", **{stock: {"-": [f"$item.{stock}", f"${quantity}"]}}),
        update(p, f"${p.key}", **{balance: "$left"}),
        give(**{d.key: "$id", "total": "$total", balance: "$left"}),
    )
    add(
        "cancel",
        "write",
        f"Ends a {d.one}: it becomes {w.deal_states[1]} and its total is paid back"
        + (f", less {r.fee}%." if r.fee else "."),
        D,
        get(d, "deal"),
        holder,
        of,
        is_active,
        r.final
        and require(
            f"$deal.{option}",
            "!=",
            r.final,
            f"{w.option} {r.final} cannot be {w.deal_states[1]}.",
            f"A {d.one} with the {w.option} {r.final} cannot be {w.deal_states[1]}.",
        ),
        compute(
            "refund",
            {"round": [{"*": ["$deal.total", round(1 - r.fee / 100, 2)]}, 2]},
            f"{100 - r.fee}% of the total goes back to the {w.balance}.",
        ),
        compute("left", {"round": [{"+": [f"$person.{balance}", "$refund"]}, 2]}),
        update(d, f"${d.key}", **{w.status: w.deal_states[1]}),
        update(i, f"$deal.{i.key}", **{stock: {"+": [f"$item.{stock}", f"$deal.{quantity}"]}}),
        update(p, f"$deal.{p.key}", **{balance: "$left"}),
        give(**{d.key: f"${d.key}", "refund": "$refund", balance: "$left"}),
    )
    pay_more = [
        compute(
            "more",
            {"round": [{"-": ["$total", "$deal.total"]}, 2]},
            f"The difference to the old total is taken from, or paid back to, the {w.balance}.",
        ),
        *pays("$more"),
    ]
    finish = [
        update(p, f"$deal.{p.key}", **{balance: "$left"}),
        give(**{d.key: f"${d.key}", "total": "$total", balance: "$left"}),
    ]
    add(
        "quantity",
        "write",
        f"Sets the {w.quantity} of a {d.one} to another number.",
        D | {quantity: whole},
        get(d, "deal"),
        holder,
        of,
        is_active,
        *within(f"${quantity}"),
        require(
            f"${quantity}",
            "!=",
            f"$deal.{quantity}",
            f"It has {{{quantity}}} {w.units} already.",
            f"The new number of {w.units} must differ from the old one.",
        ),
        compute("need", {"-": [f"${quantity}", f"$deal.{quantity}"]}),
        require(
            f"$item.{stock}",
            ">=",
            "$need",
            f"Only {{item.{stock}}} more are left.",
            f"The {i.one} must have enough left ({w.stock[0]}).",
        ),
        *total(f"${quantity}", f"$deal.{option}"),
        *pay_more,
        update(d, f"${d.key}", **{quantity: f"${quantity}", "total": "$total"}),
        update(i, f"$deal.{i.key}", **{stock: {"-": [f"$item.{stock}", "$need"]}}),
        *finish,
    )
    add(
        "option",
        "write",
        f"Changes the {w.option} of a {d.one}.",
        D | {option: text | {"enum": list(w.options)}},
        get(d, "deal"),
        holder,
        of,
        is_active,
        require(
            f"${option}",
            "!=",
            f"$deal.{option}",
            f"The {w.option} is {{{option}}} already.",
            f"The new {w.option} must differ from the old one.",
        ),
        reserved,
        *total(f"$deal.{quantity}", f"${option}"),
        *pay_more,
        update(d, f"${d.key}", **{option: f"${option}", "total": "$total"}),
        *finish,
    )
    add(
        "exchange",
        "write",
        f"Changes a {d.one} to another {i.one}, with the same {w.quantity} and {w.option}.",
        D | I,
        get(d, "deal"),
        holder,
        get(i, "old", f"$deal.{i.key}"),
        get(i, "item"),
        is_active,
        is_open,
        require(
            f"${i.key}",
            "!=",
            f"$deal.{i.key}",
            f"It is for {{{i.key}}} already.",
            f"The new {i.one} must not be the old one.",
        ),
        r.same_category
        and require(
            f"$item.{category}",
            "==",
            f"$old.{category}",
            f"The {w.category} differs.",
            f"The new {i.one} must be of the same {w.category} as the old one.",
        ),
        require(
            f"$item.{stock}",
            ">=",
            f"$deal.{quantity}",
            f"Only {{item.{stock}}} are left.",
            f"The new {i.one} must have enough left ({w.stock[0]}).",
        ),
        *total(f"$deal.{quantity}", f"$deal.{option}"),
        *pay_more,
        update(d, f"${d.key}", **{i.key: f"${i.key}", "total": "$total"}),
        update(i, f"$deal.{i.key}", **{stock: {"+": [f"$old.{stock}", f"$deal.{quantity}"]}}),
        update(i, f"${i.key}", **{stock: {"-": [f"$item.{stock}", f"$deal.{quantity}"]}}),
        *finish,
    )
    new_key = f"new_{p.key}"
    add(
        "gift",
        "write",
        f"Makes another {p.one} the holder of a {d.one}; nothing is paid.",
        D | {new_key: text | {"description": f"id of the {p.one} who gets it"}},
        get(d, "deal"),
        get(p, "person", f"${new_key}"),
        is_active,
        active,
        require(
            f"${new_key}",
            "!=",
            f"$deal.{p.key}",
            "This is the holder already.",
            f"The new holder must be another {p.one}.",
        ),
        update(d, f"${d.key}", **{p.key: f"${new_key}"}),
        give(**{d.key: f"${d.key}", p.key: f"${new_key}"}),
    )
    for contact in ("email", "phone", "city"):
        add(
            contact,
            "write",
            f"Sets the {contact} of a {p.one}.",
            P | {contact: text},
            get(p, "person"),
            active,
            require(
                f"${contact}",
                "!=",
                f"$person.{contact}",
                f"The {contact} is {{{contact}}} already.",
                f"The new {contact} must differ from the old one.",
            ),
            update(p, f"${p.key}", **{contact: f"${contact}"}),
            give(**{p.key: f"${p.key}", contact: f"${contact}"}),
        )
    add(
        "funds",
        "write",
        f"Pays an amount in dollars into the {w.balance} of a {p.one}.",
        P | {"amount": number},
        get(p, "person"),
        active,
        require(
            "$amount", ">", 0, "The amount must be more than 0.", "The amount must be more than $0."
        ),
        require(
            "$amount",
            "<=",
            r.top_up,
            f"At most ${r.top_up} at a time.",
            f"At most ${r.top_up} can be paid in at a time.",
        ),
        compute("left", {"round": [{"+": [f"$person.{balance}", "$amount"]}, 2]}),
        update(p, f"${p.key}", **{balance: "$left"}),
        give(**{p.key: f"${p.key}", balance: "$left"}),
    )
    add(
        "points",
        "write",
        f"Turns {w.points} of a {p.one} into {w.balance}.",
        P | {points: whole},
        get(p, "person"),
        active,
        require(
            f"${points}",
            ">=",
            r.least_points,
            f"At least {r.least_points} {w.points} are needed.",
            f"At least {r.least_points} {w.points} are turned in at a time.",
        ),
        require(
            f"$person.{points}",
            ">=",
            f"${points}",
            f"There are only {{person.{points}}} {w.points}.",
            f"The {p.one} must have so many {w.points}.",
        ),
        compute(
            "left",
            {"round": [{"+": [f"$person.{balance}", {"*": [f"${points}", r.rate]}]}, 2]},
            f"Each of the {w.points} is worth ${r.rate:.2f}.",
        ),
        update(
            p, f"${p.key}", **{points: {"-": [f"$person.{points}", f"${points}"]}, balance: "$left"}
        ),
        give(**{p.key: f"${p.key}", balance: "$left"}),
    )
    add(
        "tier",
        "write",
        f"Changes the {w.tier} of a {p.one}.",
        P | {w.tier: text | {"enum": w.tiers}},
        get(p, "person"),
        active,
        require(
            f"${w.tier}",
            "!=",
            f"$person.{w.tier}",
            f"The {w.tier} is {{{w.tier}}} already.",
            f"The new {w.tier} must differ from the old one.",
        ),
        require(
            f"$person.{points}",
            ">=",
            {"lookup": [f"${w.tier}", dict(zip(w.tiers, r.threshold))]},
            f"{{person.{points}}} {w.points} are not enough for {{{w.tier}}}.",
            f"{w.points.capitalize()} needed: "
            + ", ".join(f"{t} {n}" for t, n in zip(w.tiers, r.threshold))
            + ".",
        ),
        update(p, f"${p.key}", **{w.tier: f"${w.tier}"}),
        give(**{p.key: f"${p.key}", w.tier: f"${w.tier}"}),
    )
    add(
        "extra",
        "write",
        f"Makes a {e.one} of a {p.one} on a {i.one}.",
        P | I | {level: whole, topic: text | {"enum": w.topics}},
        get(p, "person"),
        get(i, "item"),
        active,
        require(
            f"${level}",
            ">=",
            w.levels[0],
            f"{w.level} must be at least {w.levels[0]}.",
            f"The {w.level} must be {w.levels[0]} to {w.levels[1]}.",
        ),
        require(f"${level}", "<=", w.levels[1], f"{w.level} must be at most {w.levels[1]}.", ""),
        *(
            [
                {
                    "op": "select",
                    "table": e.table,
                    "where": [[p.key, "==", f"${p.key}"], [i.key, "==", f"${i.key}"]],
                    "as": "made",
                },
                {"op": "aggregate", "function": "count", "rows": "$made", "as": "count"},
                require(
                    "$count",
                    "==",
                    0,
                    f"There is a {e.one} on this {i.one} already.",
                    f"A {p.one} makes at most one {e.one} on a {i.one}.",
                ),
            ]
            if r.per_item
            else []
        ),
        compute("id", {"next_id": [e.table, e.prefix]}),
        {
            "op": "insert",
            "table": e.table,
            "key": "$id",
            "record": {
                e.key: "$id",
                p.key: f"${p.key}",
                i.key: f"${i.key}",
                level: f"${level}",
                topic: f"${topic}",
            },
        },
        give(**{e.key: "$id"}),
    )
    add(
        "drop",
        "write",
        f"Deletes a {e.one}.",
        E,
        get(e, "extra"),
        get(p, "person", f"$extra.{p.key}"),
        active,
        {"op": "delete", "table": e.table, "key": f"${e.key}"},
        give(deleted=f"${e.key}"),
    )
    add(
        "calculate",
        "calculate",
        "The value of an expression of numbers, + - * / and brackets, to two decimals.",
        {"expression": text},
        give(value={"calculate": "$expression"}),
    )
    add(
        "handover",
        "handover",
        "Hands the user over to a person, with the reason; nothing more can be done afterwards.",
        P | {"reason": text | {"enum": [*w.handover, "exception"]}},
        get(p, "person"),
        {"op": "return", "value": "The user is being handed over."},
    )
    return tools


# --- policy -----------------------------------------------------------------------------------------------------------------------------


def _habits(w: SimpleNamespace) -> list[str]:
    p, i, d = w.person, w.item, w.deal
    reasons = ", ".join(f"`{reason}`" for reason in w.handover)
    return [
        f"Identify the {p.one} first: by the {p.one} number if the user gives it, else with `{w.tool['find_person']}`. Do the same for another {p.one} who is to receive something.",
        f"Find a {i.one} that the user names with `{w.tool['find_item']}`, one that the user describes with `{w.tool['search']}`, and one of a {w.place.one} with `{w.tool['find_place']}` and `{w.tool['at_place']}`.",
        f"Find the {d.many} of a {p.one} with `{w.tool['list_deals']}` unless the user gives the number.",
        f"Hand over with `{w.tool['handover']}` for what is outside these services ({reasons}), and with the reason `exception` when a rule forbids what is asked and the user wants a person to look at it. "
        f"Do not hand over for anything else.",
    ]


def policy(
    business: str,
    today: str,
    schema: dict[str, Any],
    tools: list[dict[str, Any]],
    habits: list[str],
) -> str:
    """The policy in Markdown: habits, tables, and each tool with the rules of its own program (the `rule` of a step; else its error text)."""
    lines = [
        f"# Policy of {business}",
        "",
        f"You are the agent of {business}. Today is {today}.",
        "",
        "## How to work",
        "",
    ]
    lines += [f"- {habit}" for habit in habits]
    lines += [
        "- Before a call that changes something, say what will be changed and get a clear yes.",
        "- Make one call at a time. Either write to the user or call a tool, never both in one turn.",
        "- Tell the user only what the tools return. Give no advice and invent nothing.",
        "- If a rule forbids what the user asks, say so and do not do it.",
        "",
        "## Records",
        "",
    ]
    for table, shape in schema.items():
        fields = ", ".join(
            name + (f" ({' / '.join(map(str, spec['enum']))})" if "enum" in spec else "")
            for name, spec in shape["fields"].items()
        )
        lines.append(f"- **{table}**: {fields}")
    for kinds, title in (
        (("write",), "What can be changed"),
        (("read", "calculate", "handover"), "What else can be called"),
    ):
        lines += ["", f"## {title}", ""]
        for tool in tools:
            if tool["kind"] in kinds:
                lines += [
                    f"- `{tool['function']['name']}`: {tool['function']['description']}",
                    *(f"  - {rule}" for rule in rules(tool)),
                ]
    return "\n".join(lines) + "\n"


def rules(tool: dict[str, Any]) -> list[str]:
    """What the tool's own program demands or works out, each in a sentence."""
    said = [
        step.get("rule", "" if step["op"] == "compute" else step["error"])
        for step in tool["program"]
        if step["op"] in ("require", "compute")
    ]
    return [rule for rule in dict.fromkeys(said) if rule]
