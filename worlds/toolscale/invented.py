"""Invents a domain from a vocabulary: things with fields, tools, rules and wishes about them.

`invented.json` has the words. Each entry says one thing in several ways: how a user asks for it,
how a tool describes it, and what its name may be made of. What is drawn is a blueprint like the
files in domains/, so that everything else works as with them.
"""

import keyword
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

from nanorchestra.files import read_json
from worlds.toolscale.program import FUNCTIONS, METHODS, Json

INVENTED = "invented"  # the name of such a domain
VOCABULARY = read_json(Path(__file__).with_suffix(".json"))
PEOPLE, STATE = "people", "state"
THINGS = 2  # kinds of things
VERBS, SETS = (2, 3), (1, 2)  # tools that do something to a thing, and that set a field of it
FIELDS = (3, 5)  # of a thing
LISTED = 0.35  # the share of things that are looked up in a list of all that the user has
RULED = 0.7  # the share of wishes with a rule
DAYS = 20  # around today, where the limit of a rule about dates lies
# Names that have a meaning in programs and patterns.
TAKEN = {*METHODS, *FUNCTIONS, *keyword.kwlist, "it", "me", "mine", "each", "there", "today"}
TAKEN |= {"limit", "value", "part", "goods", "matter", "reason", "result", "row", "fields", STATE}


@dataclass
class Field:
    """A field of a record: its name, how it is called, and how it is drawn."""

    name: str
    said: str
    draw: list
    unit: str = "{}"
    step: int = 1
    values: list[str] = field(default_factory=list)


def invent(rng: random.Random) -> Json:
    """Returns the blueprint of a domain."""
    return _Invention(rng).blueprint()


def plural(noun: str) -> str:
    """Returns the plural of a noun of the vocabulary."""
    if noun[-1] == "y" and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if re.search(r"(s|x|ch|sh|f)$", noun) and noun[-1] != "f" else "s")


class _Invention:
    """The parts of a blueprint while it is drawn."""

    def __init__(self, rng: random.Random):
        self.rng, self.words = rng, VOCABULARY
        self.person = rng.choice(self.words["people"])
        self.key = f"{self.person}_id"
        self.names = {PEOPLE, self.person, self.key, "first_name", "last_name"}
        self.tables, self.refs, self.tools, self.rules, self.wishes = {}, {}, {}, {}, {}
        self.days: dict[str, str] = {}

    def blueprint(self) -> Json:
        rng, words = self.rng, self.words
        self.me = self._fields(2, days=False)
        self.tables[PEOPLE] = self._table(self.key, self.me, 10) | {
            "fields": {"first_name": ["common", "first"], "last_name": ["last"]}
            | {each.name: each.draw for each in self.me}
        }
        view = self._tool(
            words["view_names"],
            self.person,
            "read",
            self._described(words["view_desc"], self.person, self.me[0]),
            {self.key: "string"},
            [f"row = get({PEOPLE}, {self.key})", "return row"],
        )
        self.me_read = f"{view}(me.{self.key})"
        for noun in rng.sample(words["things"], THINGS):
            self._thing(noun)
        self._goods()
        self._person()
        known = [self._filled(text, KEY=self.key) for text in words["known"]]
        order = [*self.wishes]
        rng.shuffle(order)
        return {
            "domain": INVENTED,
            "business": rng.choice(words["businesses"]),
            "days": self.days,
            "policy": [],
            "tables": self.tables,
            "identify": {
                "call": self.me_read,
                "known": known,
                "id": known,
                "unknown": [f"your {self.person} number"],
            },
            "refs": self.refs,
            "tools": self.tools,
            "rules": self.rules,
            "wishes": {name: self.wishes[name] for name in order},
        }

    # --- tables

    def _fields(self, count, days=True) -> list[Field]:
        """Draws fields, at least one with numbers and one with names."""
        rng, fields = self.rng, []
        kinds = ["numbers", "enums"]
        kinds += rng.choices(["numbers", "enums", "days"][: 2 + days], k=count - 2)
        for kind in kinds:
            while True:
                entry = rng.choice(self.words[kind])
                name = rng.choice(entry["names"])
                if not self.names & {name, *entry["names"]} and name not in TAKEN:
                    break
            self.names |= {*entry["names"]}
            if kind == "numbers":
                unit = {"unit": entry["unit"], "step": entry["step"]}
                fields.append(Field(name, entry["said"], entry["draw"], **unit))
            elif kind == "enums":
                values = rng.sample(entry["values"], min(len(entry["values"]), rng.choice((2, 3))))
                fields.append(Field(name, entry["said"], ["enum", values], values=values))
            else:
                fields.append(Field(name, entry["said"], ["day", -90, 60]))
        rng.shuffle(fields)
        return fields

    def _table(self, key, fields, count) -> Json:
        return {
            "key": key,
            "prefix": "",
            "digits": 6,
            "count": count,
            "fields": {each.name: each.draw for each in fields},
        }

    def _thing(self, noun):
        """A kind of thing: its table, its tools and the wishes about it."""
        rng, words, name = self.rng, self.words, noun.replace(" ", "_")
        key, table = f"{name}_id", f"{name}_rows"
        fields = self._fields(rng.randint(*FIELDS))
        verbs = rng.sample(words["verbs"], rng.randint(*VERBS))
        states = sorted({verb["from"] for verb in verbs})
        self.tables[table] = self._table(key, fields, 24)
        self.tables[table]["fields"] = {
            self.key: ["owner", PEOPLE],
            STATE: ["enum", states],
        } | self.tables[table]["fields"]
        listed = rng.random() < LISTED
        if not listed:
            within = f"'{name}': row"
            returned = rng.choice(("row", "row", f"{{{within}}}", f"{{{within}, 'found': 1}}"))
            view = self._tool(
                words["view_names"],
                name,
                "read",
                self._described(words["view_desc"], noun, rng.choice(fields)),
                {key: "string"},
                [f"row = get({table}, {key})", f"return {returned}"],
            )
        several = plural(noun).replace(" ", "_")
        only = "" if listed else f", fields=[{key}]"
        listing = self._tool(
            words["view_names"],
            several,
            "read",
            self._described(words["list_desc"], noun),
            {self.key: "string"},
            [
                f"rows = select({table}, {self.key} == {self.key}{only})",
                "return " + rng.choice(("rows", f"{{'{several}': rows, 'total': count(rows)}}")),
            ],
        )
        read = f"{listing}(me.{self.key})" if listed else f"{view}(it.{key})"
        self.refs[table] = {
            "own": self.key,
            "id": self._filled(rng.choice(words["ids"]), NOUN=noun, KEY=key),
            "by": [f"your {noun}"],
            "find": [f"{listing}(me.{self.key})"],
            "unknown": f"any {noun} number",
            "again": rng.choice(("it", f"that {noun}", f"the {noun}")),
        }
        thing = (noun, name, key, table, read, fields)
        done = [self._verb(thing, verb) for verb in verbs]
        settable = [each for each in fields if each.draw[0] != "day"]
        for each in rng.sample(settable, min(len(settable), rng.randint(*SETS))):
            done.append(self._set(thing, each))
        for wish in done:  # any of the others may take its place
            others = [other for other in done if other != wish]
            clauses = {}
            for other in rng.sample(others, min(2, len(others))):
                clauses[other] = [f"you want to {rng.choice(self.wishes[other]['to'])}"]
            self.wishes[wish]["or"] = clauses
        if rng.random() < 0.5:
            self._parts(thing)
        self._ask(thing)
        self._hand_over(thing)

    # --- tools and wishes about a thing

    def _verb(self, thing, verb) -> str:
        noun, name, key, table, read, fields = thing
        demands = []
        if self.rng.random() < 0.5:
            before = verb["from"]
            texts = f"'It is {{row.state}}.', 'The {noun} must be {before}.'"
            demands = [f"require(row.state == '{before}', {texts})"]
        tool = self._tool(
            verb["names"],
            name,
            "write",
            self._described(verb["desc"], noun),
            {key: "string"},
            [
                f"row = get({table}, {key})",
                *demands,
                f"update({table}, {key}, state='{verb['to']}')",
                f"return {{'state': '{verb['to']}'}}",
            ],
        )
        wish = {
            "it": table,
            "where": f"it.state == '{verb['from']}'",
            "reads": [read],
            "do": [f"{tool}(it.{key})"],
        }
        return self._wished(tool, wish, self.rng.choice(verb["said"]), thing, verb["to"])

    def _set(self, thing, each) -> str:
        noun, name, key, table, read, fields = thing
        kind = "string" if each.values else "integer" if each.draw[0] == "int" else "number"
        argument = self.rng.choice((f"new_{each.name}", each.name + "_wanted"))
        tool = self._tool(
            self.words["set_names"],
            each.name,
            "write",
            self._described(self.words["set_desc"], noun, each),
            {key: "string", argument: each.values or kind},
            [
                f"row = get({table}, {key})",
                f"update({table}, {key}, {each.name}={argument})",
                f"return {{'{each.name}': {argument}}}",
            ],
        )
        wish = {
            "it": table,
            "with": {"value": ["enum", each.values] if each.values else ["int", *each.draw[1:3]]},
            "can": f"it.{each.name} != value",
            "reads": [read],
            "do": [f"{tool}(it.{key}, value)"],
        }
        said = self._filled(
            self.rng.choice(self.words["set_say"]).replace("{value}", each.unit.format("{value}")),
            FIELD=each.said,
        )
        others = [other for other in fields if other is not each]
        return self._wished(tool, wish, said, (*thing[:5], others), "changed")

    def _wished(self, name, wish, said, thing, done) -> str:
        """Adds a wish to do something, with the facts and the rule that may decide it."""
        noun, fields, words = thing[0], thing[5], self.words
        says = [
            self.rng.choice(words["why"]) + self._filled(text, DO=said)
            for text in self.rng.sample(words["wish_say"], 4)
        ]
        facts = [self._fact(each, said) for each in fields if each.draw[0] != "day"]
        for _ in range(2):
            each = self.rng.choice(self.me)
            facts.append(self._fact(each, said, "me"))
        wish |= {"say": says, "no": self.rng.sample(words["no"], 2), "to": [said]}
        by_me = [fact for fact in facts if "me." in fact["test"]]
        if self.rng.random() < 0.8:
            wish["facts"] = [fact for fact in facts if fact not in by_me]
        else:  # what decides stands in the record of the user
            wish["facts"], wish["reads"] = by_me, [self.me_read]
        if self.rng.random() < RULED and "me." not in str(wish["facts"]):
            rule = f"rule{len(self.rules)}"
            self.rules[rule] = self._rule(self.rng.choice(fields), noun, done)
            wish["rules"] = [rule]
        self.wishes[name] = wish
        return name

    def _fact(self, each, said, owner="it") -> Json:
        path = f"{owner}.{each.name}"
        if each.values:
            sign, fact = self.rng.choice(("==", "==", "!=")), {}
            value = self.rng.choice(each.values)
            fact["test"] = f"{path} {sign} '{value}'"
        else:
            sign, value = self.rng.choice((">=", ">=", ">", "<", "<=")), each.unit.format("{limit}")
            fact = {"test": f"{path} {sign} limit", "limit": [path, each.step]}
        says = []
        for text in self.rng.sample(self.words["facts"][sign], 3):
            if owner == "me":
                text = re.sub(r"the FIELD( of \{it\})?|a FIELD", "your FIELD", text)
            says.append(self._filled(text, DO=said, FIELD=each.said, VALUE=value))
        return fact | {"say": says}

    def _rule(self, each, noun, done) -> Json:
        low, high = (each.draw[1:3]) if not each.values else (0, 0)
        if each.draw[0] == "day":
            sign, name = "day", f"day{len(self.days)}"
            self.days[name] = str(self.rng.randint(-DAYS - 20, DAYS))
            value, test = f"<{name}>", f"it.{each.name} >= '<{name}>'"
        elif each.values:
            sign, value = self.rng.choice(("==", "!=")), self.rng.choice(each.values)
            test = f"it.{each.name} {sign} '{value}'"
        else:
            sign = self.rng.choice((">=", "<="))
            limit = low + int((high - low) * self.rng.uniform(0.25, 0.75))
            value, test = each.unit.format(limit), f"it.{each.name} {sign} {limit}"
        text = self._filled(
            self.rng.choice(self.words["rules"][sign]),
            NOUN=noun,
            PLURAL=plural(noun),
            FIELD=each.said,
            VALUE=value,
            DONE=done,
        )
        return {
            "text": text[0].upper() + text[1:],
            "test": test,
        }

    def _parts(self, thing):
        """What is in a thing, found by a look-up alone."""
        noun, name, key, table, read, fields = thing
        rng, words = self.rng, self.words
        parts = rng.choice([each for each in words["parts"] if each not in self.names])
        verb = rng.choice(words["part_verbs"])
        self.names.add(parts)
        items, inner = rng.sample(words["items"], 6), rng.choice(("item_id", "item_no", "slot"))
        entry = {"item": ["enum", items], inner: ["digits", 3], "status": ["enum", ["fitted"]]}
        self.tables[table]["fields"][parts] = ["several", 2, 3, entry]
        tool = self._tool(
            verb["names"],
            f"{name}_item",
            "write",
            self._described(verb["desc"], noun).replace("WHAT", parts),
            {key: "string", inner: "string"},
            [
                f"row = get({table}, {key})",
                f"entry = find(row.{parts}, {inner} == {inner}, 'There is no such item.')",
                f"inside = change(row.{parts}, {inner} == {inner}, status='{verb['names'][0]}')",
                f"update({table}, {key}, {parts}=inside)",
                "return {'item': entry.item}",
            ],
        )
        said = rng.choice(verb["said"])
        self.wishes[tool] = {
            "it": table,
            "with": {"part": ["among", f"it.{parts}"]},
            "reads": [read],
            "do": [f"{tool}(it.{key}, part.{inner})"],
            "say": [self._filled(text, DO=said) for text in rng.sample(words["wish_say"], 3)],
            "to": [said],
            "facts": [self._fact(each, said) for each in fields if each.draw[0] != "day"],
        }

    def _ask(self, thing):
        noun, name, key, table, read, fields = thing
        each = self.rng.choice([each for each in fields if each.draw[0] != "day"])
        self.wishes[f"ask_{name}"] = {
            "it": table,
            "weight": 1,
            "reads": [read],
            "say": [self._filled(text, FIELD=each.said) for text in self.words["ask"]],
            "tell": [[[], f"it.{each.name}"]],
        }

    def _hand_over(self, thing):
        """A matter for a person, if a field is so."""
        noun, name, key, table, read, fields = thing
        tool = next((tool for tool in self.tools if self.tools[tool]["kind"] == "handover"), None)
        if not tool:
            self.matters = dict(self.rng.sample(self.words["matters"], 3))
            tool = self._tool(
                self.words["handover_names"],
                "",
                "handover",
                self._described(self.words["handover_desc"], noun),
                {"reason": [*self.matters]},
                ["return 'Somebody is on the way.'"],
            )
        said = self.rng.choice(self.words["handover_say"])
        self.wishes[f"person_{name}"] = {
            "last": True,
            "it": table,
            "with": self._matter(),
            "reads": [read],
            "do": [f"{tool}(reason)"],
            "say": ["You want to " + said + "; it is about {it}."],
            "facts": [self._fact(each, said) for each in fields if each.draw[0] != "day"],
        }
        self.handover = tool

    def _matter(self) -> Json:
        lookup = f"lookup(reason, {self.matters!r})"
        return {"reason": ["enum", [*self.matters]], "matter": ["be", lookup]}

    # --- wishes of the user alone

    def _goods(self):
        rng, words = self.rng, self.words
        goods, argument = rng.sample(words["goods"], 3), rng.choice(("goods_name", "article"))
        tool = self._tool(
            words["goods_names"],
            rng.choice(("goods", "article", self.person)),
            "write",
            self._described(words["goods_desc"], self.person),
            {self.key: "string", argument: goods},
            [
                f"row = get({PEOPLE}, {self.key})",
                f"update({PEOPLE}, {self.key}, ordered={argument})",
                f"return {{'ordered': {argument}}}",
            ],
        )
        said = rng.choice(words["goods_say"])
        self.wishes[tool] = {
            "with": {"goods": ["enum", goods]},
            "reads": [self.me_read],
            "do": [f"{tool}(me.{self.key}, goods)"],
            "say": [self._filled(text, DO=said) for text in rng.sample(words["wish_say"], 3)],
            "to": [said],
            "facts": [self._fact(each, said, "me") for each in self.me for _ in range(2)],
        }

    def _person(self):
        says = self.rng.sample(self.words["handover_say"], 2)
        self.wishes["person"] = {
            "last": True,
            "weight": 1,
            "with": self._matter(),
            "do": [f"{self.handover}(reason)"],
            "say": [f"You want to {said}." for said in says],
        }

    # --- words

    def _tool(self, verbs, noun, kind, description, arguments, program) -> str:
        name = "_".join(filter(None, (self.rng.choice(verbs), noun)))
        while name in self.tools or name in TAKEN:
            name = f"{self.rng.choice(verbs)}_{noun}_{self.rng.choice(self.words['plain_words'])}"
        self.tools[name] = {
            "kind": kind,
            "description": description,
            "arguments": arguments,
            "program": program,
        }
        return name

    def _described(self, texts, noun, each=None) -> str:
        text = self.rng.choice(texts)
        said = each.said if each else ""
        return self._filled(text, NOUN=noun, PLURAL=plural(noun), FIELD=said)

    def _filled(self, text, **words) -> str:
        """Returns a text of the vocabulary with its words in capitals filled in."""
        words = {"PERSON": self.person} | words
        text = re.sub(r"\b[A-Z]{2,}\b", lambda match: str(words.get(match[0], match[0])), text)
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
