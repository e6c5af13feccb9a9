"""Acts out the wishes of a draft.

phrases.json says what each kind of wish draws, calls and says: `call` are the arguments of the tool
(`tool`, or the one of the wish's own name), `say` the patterns of the sentence, `answer` the field
of the result that is asked for, `told` the field of the result that some users want to be told
beside.
"""

from __future__ import annotations

from typing import Any

from worlds.toolscale.act import PHRASES, Act, UnfitError
from worlds.toolscale.program import Json, ToolError
from worlds.toolscale.records import charge
from worlds.toolscale.words import Word, Words
from worlds.toolscale.world import World

MOST_CALLS = 12


def act_out(world: World, words: Words, draft: Json) -> Act:
    """Returns the act of a draft; it depends on nothing else.

    Raises UnfitError or ToolError if it cannot be acted out, or is about the same deal twice.
    A draft is JSON: the `person` who calls, the `wishes`, the `level` and the `seed`.
    """
    act = Act(world, words, draft)
    if draft["person"]["by"] != "id":
        act.person(act.me)
        act.unknown.append(f"your {words.person} number")
    for wish in draft["wishes"]:
        SPECIAL.get(wish["kind"], _wish)(act, wish)
    if len(act.calls) > MOST_CALLS or len(set(act.deals)) < len(act.deals):
        raise UnfitError("too many calls, or the same deal twice")
    return act


def _wish(act: Act, wish: Json) -> None:
    kind, after = PHRASES["wishes"][wish["kind"]], ""
    words, values = vars(act.w) | wish, []
    words |= {name: text.format(**words) for name, text in kind.get("words", {}).items()}
    for name in kind["call"]:
        value, words[name] = _argument(act, wish, name)
        values.append(value)
    if "unless" in wish:
        after = _unless(act, wish["unless"], values, words)
    tool = kind.get("tool", wish["kind"])
    if wish.get("refused"):
        _refused(act, tool, values)
        act.say(_pattern(act, wish), _one_of(PHRASES["refused"], wish), **words)
        return
    result = act.call(tool, *values)
    if "answer" in kind:
        value = result[Word(wish.get("field", kind["answer"])).field]
        one = words.get("place") if tool == "get_place" else words.get("item")
        what = "balance" if wish.get("field") == act.w.balance else "points"
        words |= {"one": one, "what": PHRASES["what"][what].format(**words)}
        act.ask(_pattern(act, wish, value), value, **words)
    else:
        act.say(_pattern(act, wish), after, **words)
    for field, patterns in kind.get("told", {}).items() if wish.get("told") else ():
        act.ask(_one_of(patterns, wish), result[field])


def _argument(act: Act, wish: Json, name: str) -> tuple[Any, Any]:
    """How an argument of a wish is found: its value and the words for it."""
    match name:
        case "me":
            return act.me, ""
        case "deal":
            key, words = act.deal(wish["deal"])
            act.deals.append(key)
            return key, words
        case "item" | "extra":
            return getattr(act, name)(wish[name])
        case "other":
            return act.person(wish["other"])
        case "place":
            return act.place(wish["place"], wish["phrase"] % 3 > 0)
        case "quantity":
            return wish["quantity"], act.count(wish["quantity"])
        case "amount":
            return float(wish["value"]), ""
    return wish[name], wish[name]


def _one_of(patterns: list[str], wish: Json) -> str:
    return patterns[wish["phrase"] % len(patterns)]


def _pattern(act: Act, wish: Json, value: Any = None) -> str:
    """The pattern of a wish.

    A question about a field asks "how many tables X has" for a number, "what the opening hours of X
    are" for a plural.
    """
    kind = wish["kind"]
    if kind == "handover":
        return act.w.handover[wish["reason"]]
    if kind in ("item_field", "place_field"):
        head = wish["field"].split(" in ")[0].split(" per ")[0]
        plural = head.endswith("s") and not head.endswith("ss")
        form = "one" if not plural else "number" if isinstance(value, int) else "many"
        return _one_of(PHRASES["fields"][form], wish)
    return _one_of(act.w.blueprint["ask"].get(kind) or PHRASES["wishes"][kind]["say"], wish)


def _unless(act: Act, unless: Json, values: list[Any], words: Json) -> str:
    """Meets a condition of a new deal, whose arguments are `values`; returns its sentence.

    Another item is taken if the one wanted has too few left, or the balance is filled up if it is
    too low.
    """
    w, (me, key, quantity, option) = act.w, values
    person, item = act.row("person", me), act.row("item", key)
    if unless["kind"] == "instead":
        words["other"] = act.noun(unless["key"])
        if item[w.stock.field] < quantity:
            values[1], _ = act.item({"by": "title", "key": unless["key"]})
        return PHRASES["instead"]
    words["amount"] = unless["amount"]
    if charge(w, person, item, quantity, option) > person[w.balance.field]:
        act.call("funds", me, float(unless["amount"]))
    return PHRASES["funds first"]


def _refused(act: Act, tool: str, values: list[Any]) -> None:
    """A call that a rule forbids; a person is to look at it."""
    try:
        act.call(tool, *values)
    except ToolError:
        act.call("handover", act.me, "exception")
    else:
        raise UnfitError("no rule forbids it")


def _extra_field(act: Act, wish: Json) -> None:
    row, noun = act.about(wish["topic"])
    level = act.w.level
    act.ask(_pattern(act, wish), row[level.field], level=level, extra=noun)


def _sum(act: Act, wish: Json) -> None:
    """The prices of two items, times quantities, by the calculator."""
    w, parts, nouns = act.w, [], []
    for ref, quantity in wish["items"]:
        key, noun = act.item(ref)
        if ref["by"] == "id":
            act.call("get_item", key)
        parts.append(f"{quantity} * {act.row('item', key)[w.price.field]}")
        nouns.append(f"{act.count(quantity)} {w.blueprint['deal'].get('of', 'of')} {noun}")
    value = act.call("calculate", " + ".join(parts))["value"]
    act.ask(_pattern(act, wish), value, nouns=" and ".join(nouns), price=w.price)


SPECIAL = {"extra_field": _extra_field, "sum": _sum}
