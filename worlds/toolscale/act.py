"""Acts wishes out in a domain: the golden calls, what the user says, what must be communicated."""

import copy
import itertools
import random
import re
from datetime import date
from pathlib import Path
from typing import Any, Self

from nanorchestra.files import read_json
from worlds.toolscale.domain import Domain
from worlds.toolscale.program import Json, Tables, evaluate, parse_call
from worlds.toolscale.records import holds, key_of
from worlds.toolscale.words import Words

PHRASES = read_json(Path(__file__).with_name("phrases.json"))


class UnfitError(Exception):
    """A wish that cannot be had as it was drawn, and why."""


def people(data: Json) -> str:
    """Returns the table of those who call: the first of a domain's file."""
    return next(iter(data["tables"]))


class Act:
    """What has been wished and done so far. A wish is tried on a `clone`.

    `naive` are the tables of an agent that makes every call that is spoken of, unless a tool
    refuses it: no rule and no condition keeps it from a call.
    """

    def __init__(
        self,
        domain: Domain,
        words: Words,
        me: str,
        rng: random.Random,
        named: bool,
        known: bool = False,
    ):
        self.domain, self.words, self.data, self.rng = domain, words, words.data, rng
        self.me = domain.tables[people(words.data)][me]
        self.tables, self.naive = dict(domain.tables), dict(domain.tables)
        self.calls: list[tuple[str, Json]] = []  # name, arguments
        self.reasons: list[str] = []  # for the call: sentences, a text a wish
        self.wishes: list[Json] = []  # the same as the user says them: {"say", "first"?}
        self.marks = [(0, 0)]  # how much was called and communicated before each wish, and after
        self.communicate: list[str] = []
        self.unknown: list[str] = []  # what the user does not know
        self.rules: list[Json] = []  # that the agent must keep, and their checks
        self.done: set[str] = set()  # the kinds of the wishes
        self.used: set[str] = set()  # keys of the records that wishes are about
        self.twists: list[tuple[str, bool]] = []  # the conditions, and whether they were true
        self.mentioned: set[str] = set()  # keys of what the present sentence is about
        stories = words.data.get("stories", {})  # what joins the wishes
        self.story = rng.choice([*stories, *len(stories) * [""]] or [""]) if not known else ""
        self.used_texts: set[str] = set()  # the texts that were used, and the story once it is told
        self.there = rng.choice(PHRASES["names"]["cities"])
        # Tables whose keys the user knows; one that is `listed` is read as a whole, keys and all.
        self.by_id = {
            name: known or not ref.get("listed") and rng.random() < 0.4
            for name, ref in words.data["refs"].items()
        }
        self.own: dict[str, list[str]] = {}  # the keys of the records that are the user's, by table
        self.named = named  # whether the user says a name, and not a number
        if named:
            self.call(words.data["identify"]["call"], {"me": self.me})

    def clone(self) -> Self:
        """Returns a copy, on which a wish can be tried."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | set) or name in ("tables", "naive"):
                setattr(other, name, copy.copy(value))
        return other

    def call(self, text: str, scope: Json) -> Any:
        """Makes one golden call, "cancel(it.id)", and returns its result. Raises ToolError.

        A read that was made before is not made again.
        """
        made = name, arguments = self.parse(text, scope)
        result = self.domain.invoke(self.tables, name, arguments)
        kind = self.domain.by_name[name]["kind"]
        if kind in ("write", "handover") or made not in self.calls:
            self.calls.append(made)
        return result

    def parse(self, text: str, scope: Json) -> tuple[str, Json]:
        """Returns the name and the arguments of a call."""
        name, expressions = parse_call(text)
        named = self.domain.by_name[name]["function"]["parameters"]["properties"]
        values = [evaluate(e, scope) for e in expressions]
        return name, dict(zip(named, values, strict=True))

    def rows(self, table: str, tables: Tables | None = None) -> list[Json]:
        """Returns the records of a table as they are now; only the user's own if they have one."""
        if table not in self.own:
            own, rows = self.data["refs"].get(table, {}).get("own"), self.domain.tables[table]
            me = key_of(self.me)
            self.own[table] = [k for k, row in rows.items() if own is None or row[own] == me]
        rows = (tables or self.tables)[table]
        return [rows[key] for key in self.own[table] if key in rows]

    def refer(self, table: str, row: Json, it: Json, plain: bool = False) -> str:
        """Returns the user's words for a record, or an entry of `it`, and looks it up.

        The words fit nothing else of the kind, before the wishes and now: "your latest order |
        TEST" are words for a record for which the test holds, among all that are `mine`. With
        `plain` no entry is named, as in the words that follow one. Raises UnfitError.
        """
        ref, key = self.data["refs"][table], key_of(row)
        if key in self.mentioned and "again" in ref:
            return ref["again"]
        self.mentioned.add(key)
        if "id" in ref and self.by_id[table]:
            return self.render(ref["id"], {"it": row})
        home, entries = ref.get("in", table), ref.get("list")

        def scopes(record: Json) -> list[Json]:
            each = record[entries] if entries else [None]
            return [{"it": record, "each": one} for one in each]

        def fitting(records: list[Json], pattern: str, test: str, words: str) -> list[Any]:
            """Returns which of the records, or of their entries, the words fit."""
            hits = []
            for record in records:
                places = [
                    place
                    for place, scope in enumerate(scopes(record))
                    if holds(test, scope | {"mine": records})
                    and self.render(pattern, scope) == words
                ]
                if "in" not in ref:  # which entry it is does not matter
                    places = [0] if places else []
                hits += [(key_of(record), place) for place in places]
            return hits

        mine = {"it": it, "each": row} if "in" in ref else self.rng.choice(scopes(row))
        pools = [(self.rows(home, self.domain.tables), self.rows(home), "")]
        pools += [([it], [it], ref["tail"])] if "in" in ref else []
        patterns = [each for each in ref["by"] if not plain or "{each" not in each]
        patterns = self.rng.sample(patterns, len(patterns))
        for (records, now, tail), pattern in itertools.product(pools, patterns):
            pattern, _, test = pattern.partition(" | ")
            if not holds(test, mine | {"mine": records}):
                continue
            how = pattern, test, self.render(pattern, mine)
            hits = fitting(records, *how)
            if len(hits) == 1 and hits == fitting(now, *how):
                words = how[-1]
                for call in ref["find"] if not tail else ():
                    self.call(call, {"me": self.me} | mine)
                if "unknown" in ref and not tail:
                    self.unknown.append(ref["unknown"])
                return words + (tail and tail.format(it=self.refer(home, it, it, plain=True)))
        raise UnfitError("the words fit several records")

    def render(self, pattern: str, scope: Json, tables: Json | None = None) -> str:
        """Returns a pattern with every {path:filter} filled in.

        A name of `tables` ({name: table}) is a record, and becomes the words for it.
        """

        def fill(match: re.Match[str]) -> str:
            path, how = match[1], match[2]
            if path in (tables or {}):
                return self.refer(tables[path], scope[path], scope.get("it", {}))
            return spoken(evaluate(path, scope), how)

        return re.sub(r"\{([\w.]+)(?::(\w+))?\}", fill, pattern)


def spoken(value: Any, how: str | None = None) -> str:
    """Returns a value as a person says it; `how` is day, or nothing."""
    if how == "day":
        day = date.fromisoformat(value)
        return f"{day:%B} {day.day}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " and ".join(map(spoken, value))
    text = f"{value:.2f}".removesuffix(".00") if isinstance(value, float) else str(value)
    return text.replace("_", " ")
