"""Draws one wish of a domain's file, and acts it out: plainly, or with a twist.

A wish is data: the record that it is `it`, what it is done `with`, what must be true for the tools
(`can`) and for the agent (`rules`), what is read and done, said and told. A twist is how it is
put, and all of them work with all wishes that have what they need:

    if      only if a fact is so         rule    although a rule may forbid it
    prefer  this, or else that           all     to all records that fit
    mind    after another wish that the user gives up
"""

import ast
import math
import re
from contextlib import suppress
from typing import Any

from worlds.toolscale.act import PHRASES, Act, UnfitError, people, spoken
from worlds.toolscale.program import Json, Tables, ToolError, evaluate, parse
from worlds.toolscale.records import ColumnDraws, holds, key_of

TRIES = 12  # draws of one thing, until it fits


class Wish:
    """A wish that is drawn: its kind's data, and the scope of its expressions and patterns."""

    def __init__(self, act: Act, kind: str, it: Json | None = None):
        self.act, self.data = act, act.data["wishes"][kind]
        self.tables = {"it": self.data["it"]} if "it" in self.data else {}
        me = act.tables[people(act.data)][key_of(act.me)]  # as earlier wishes left it
        self.scope: Json = {"me": me, "today": act.words.today, "there": act.there}
        if self.tables:
            self.scope["it"] = it or self._pick(self.mine())
        for name in self.data.get("with", ()):
            self.draw(name)

    def mine(self, used: bool = False) -> list[Json]:
        """Returns the records that the wish may be about, those that another is about if `used`."""
        where, taken = self.data.get("where", ""), () if used else self.act.used
        rows = [row for row in self.act.rows(self.data["it"]) if key_of(row) not in taken]
        return [row for row in rows if holds(where, self.scope | {"it": row})]

    def draw(self, name: str, condition: str = "") -> None:
        """Draws what the wish is done with."""
        kind, *values = self.data["with"][name]
        for _ in range(TRIES):
            if kind in ("record", "among"):
                rows = f"select({values[0]})" if kind == "record" else values[0]
                self.scope[name] = self._pick(evaluate(rows, self.scope, self.act.tables))
                if (table := values[0].removeprefix("it.")) in self.act.data["refs"]:
                    self.tables[name] = table
            else:
                names, today = PHRASES["names"], self.act.words.today
                draws = ColumnDraws(names, today, self.act.rng, self.act.tables)
                draws.row = self.scope
                self.scope[name] = draws.value([kind, *values])
            needed = values[1] if kind in ("record", "among") and values[1:] else ""
            if holds(needed, self.scope) and holds(condition, self.scope):
                return
        raise UnfitError(f"nothing fits {name}")

    def _pick(self, rows) -> Any:
        if not rows:
            raise UnfitError("nothing to choose from")
        return self.act.rng.choice(rows)

    def broken(self) -> list[str]:
        """Returns the rules that forbid the wish."""
        rules = self.act.data["rules"]
        return [r for r in self.data.get("rules", ()) if not holds(rules[r]["test"], self.scope)]

    def can(self) -> bool:
        """Returns whether the tools let it be done."""
        return holds(self.data.get("can", ""), self.scope)

    def near(self, fact: Json, truth: bool) -> None:
        """Draws the fact's limit so that the fact is as true as it should be."""
        path, step = fact["limit"]
        value = evaluate(path, self.scope)
        (compare,) = parse(fact["test"]).value.ops
        above = isinstance(compare, ast.Gt | ast.GtE) != truth
        share = self.act.rng.uniform(1.1, 1.6) if above else self.act.rng.uniform(0.5, 0.9)
        limit = (math.floor(value * share / step) + above) * step
        if limit <= 0 or limit == value:
            raise UnfitError("no limit is near")
        self.scope["limit"] = limit

    # --- words

    def words(self, pattern: str) -> str:
        """Returns a pattern of the file in words; one of the ways in "(a|b)" is drawn."""
        ways = re.sub(
            r"\(([^()]*\|[^()]*)\)", lambda ways: self.act.rng.choice(ways[1].split("|")), pattern
        )
        ways = re.sub(r" +(?=[ .,;:?!])", "", ways)  # after a way without words
        return self.act.render(ways, self.scope, self.tables)

    def phrase(self, texts: list[str]) -> str:
        """Returns one of the texts in words: of the task's story, if one is, and none twice."""
        act = self.act
        tag, fresh = f"[{act.story}] ", [text for text in texts if text not in act.used_texts]
        tagged = [text for text in fresh if text.startswith(tag)]
        if act.story and not tagged and "[" in str(texts)[2:] and act.rng.random() < 0.7:
            raise UnfitError("not of the story")
        text = self._pick(tagged or [text for text in fresh if text[0] != "["])
        act.used_texts.add(text)
        if tagged:
            act.used_texts.add(act.story)
        return self.words(text.removeprefix(tag))

    # --- deeds

    def look(self) -> None:
        """Reads what the wish is about."""
        for call in self.data.get("reads", ()):
            self.act.call(call, self.scope)
        if "it" in self.data:
            self.act.used.add(key_of(self.scope["it"]))

    def do(self) -> None:
        """Does it."""
        for call in self.data.get("do", ()):
            self.scope["result"] = self.act.call(call, self.scope)

    def attempt(self, tables: Tables) -> bool:
        """Makes the calls in these tables. Returns if the tools let it."""
        with suppress(ToolError):
            for call in self.data.get("do", ()):
                self.act.domain.invoke(tables, *self.act.parse(call, self.scope))
            return True
        return False

    def tell(self) -> list[str]:
        """Returns the questions of the user, whose answers must be communicated."""
        questions = []
        for texts, value in self.data.get("tell", ()):
            if texts and self.act.rng.random() < 0.5:
                continue
            questions += [self.phrase(texts)] if texts else []
            answer = evaluate(value, self.scope)
            self.act.communicate.append(str(answer) if isinstance(answer, str) else spoken(answer))
        return questions

    def forbidden(self, rule: str) -> None:
        """Notes that a rule forbids the calls of the wish."""
        text = self.act.data["rules"][rule]["text"]
        for call in self.data["do"]:
            name, arguments = self.act.parse(call, self.scope)
            args = {"tools": [name], "where": arguments}
            self.act.rules.append({"text": text, "check": "never", "args": args})
