"""Draws a domain anew for each task, so that only reading the prompt can work.

The tools, their arguments and what they return get other names, another order and other shapes of
names (snake_case, camelCase, verb_noun, noun-verb); records get ids of another form, lose fields
that no wish needs, and get others. A tool's name may be plain words or unseen letters: then its
description alone tells what it does. Names are put on at the interface: `Drawn` translates calls
and results, and the programs keep theirs.
"""

import random
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from worlds.toolscale.blueprint import load_blueprint, make
from worlds.toolscale.domain import Domain
from worlds.toolscale.invented import INVENTED, VOCABULARY, invent
from worlds.toolscale.program import Json, Tables, ToolError, run
from worlds.toolscale.words import Words

STYLES = ("own", "own", "own", "words", "letters")  # what the names of tools are made of
SHAPES = ("snake", "snake", "camel", "pascal", "kebab")
DROPPED, ADDED = 0.5, 2  # the share of needless fields that are left out; fields added at most
RECORDS = 0.4  # the share of a domain's records that are drawn: they cost time


@dataclass
class Names:
    """The names of one drawn domain, as the prompt has them, from those of its programs."""

    rng: random.Random
    needless: set[str] = field(default_factory=set)  # fields
    known: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng
        self.tool_style, self.tool_shape = rng.choice(STYLES), rng.choice(SHAPES)
        self.shape, self.id_word = rng.choice(SHAPES), rng.choice(VOCABULARY["id_words"])
        self.turned = rng.random() < 0.5  # the noun before the verb
        self.seed = rng.getrandbits(32)
        self.dropped = {each for each in sorted(self.needless) if rng.random() < DROPPED}
        entries = rng.sample(VOCABULARY["numbers"], ADDED) + rng.sample(VOCABULARY["enums"], ADDED)
        self.added = rng.sample(entries, rng.randint(0, ADDED))

    def tool(self, name: str) -> str:
        """Returns the name of a tool in the prompt; the same again for the same."""
        style, rng = self.tool_style, random.Random(f"{self.seed}/tool/{name}")
        words = name.split("_")
        if style == "letters":
            words = [_letters(rng) for _ in range(rng.choice((1, 2)))]
        elif style == "words":
            words = rng.sample(VOCABULARY["plain_words"], 2)
        elif self.turned:
            words = words[1:] + words[:1]
        return self._free(shaped(words, self.tool_shape), f"tool/{name}")

    def argument(self, name: str, alone: bool) -> str:
        """Returns the name of an argument; one that is alone may be called anything."""
        rng = random.Random(f"{self.seed}/argument/{name}")
        if alone and self.tool_style != "own" and rng.random() < 0.5:
            return rng.choice(("which", "target", "item", "record", _letters(rng)))
        return self.field(name)

    def field(self, name: str) -> str:
        """Returns the name of a field."""
        words = name.split("_")
        if words[-1] == "id":
            words[-1] = self.id_word
        return shaped(words, self.shape)

    def result(self, value: Any) -> Any:
        """Returns what a call returned as the prompt's names have it."""
        if isinstance(value, list):
            return [self.result(each) for each in value]
        if not isinstance(value, dict):
            return value
        pairs = [pair for pair in value.items() if pair[0] not in self.dropped]
        pairs.sort(key=lambda pair: random.Random(f"{self.seed}/{pair[0]}").random())
        shown = {self.field(name): self.result(each) for name, each in pairs}
        if len(value) > 3 and all(not isinstance(each, list) for each in value.values()):
            key = next(iter(value.values()))
            for entry in self.added:
                name = self.field(entry["names"][0])
                rng = random.Random(f"{self.seed}/{key}/{name}")
                drawn = rng.choice(entry["values"]) if "values" in entry else rng.randint(1, 90)
                shown.setdefault(name, drawn)
        return shown

    def _free(self, name, of) -> str:
        """The name, or one with a number if another has it."""
        for number in range(100):
            one = f"{name}{number or ''}"
            if self.known.setdefault(one, of) == of:
                return one
        raise ValueError(f"{name}: no name is left")


def shaped(words: list[str], shape: str) -> str:
    """Returns words as one name: snake, camel, pascal or kebab."""
    if shape in ("snake", "kebab"):
        return ("_" if shape == "snake" else "-").join(words)
    name = "".join(word[:1].upper() + word[1:] for word in words)
    return name if shape == "pascal" else name[:1].lower() + name[1:]


def _letters(rng) -> str:
    """A word that is in no dictionary."""
    parts = VOCABULARY["letters"], VOCABULARY["vowels"]
    return "".join(rng.choice(parts[at % 2]) for at in range(rng.randint(3, 5)))


@dataclass
class Drawn(Domain):
    """A domain under the names of a prompt; `inner` has those of its programs."""

    inner: Domain = None
    names: Names = None

    def __post_init__(self) -> None:
        self.inward: dict[str, tuple[str, dict[str, str]]] = {}  # name: (name, arguments)
        if self.inner is None:
            return
        self.tools, rng = [], random.Random(f"{self.names.seed}/order")
        for tool in self.inner.tools:
            name, function = tool["function"]["name"], tool["function"]
            properties = function["parameters"]["properties"]
            alone, order = len(properties) == 1, [*properties]
            rng.shuffle(order)
            outward = {self.names.argument(each, alone): each for each in order}
            new = self.names.tool(name)
            self.inward[new] = name, outward
            parameters = {
                "type": "object",
                "properties": {each: properties[own] for each, own in outward.items()},
                "required": [*outward],
            }
            function = function | {"name": new, "parameters": parameters}
            self.tools.append(tool | {"function": function})
        rng.shuffle(self.tools)
        self.outward = {name: new for new, (name, _) in self.inward.items()}

    def invoke(self, tables: Tables, name: str, arguments: Json) -> Any:
        """Does a call that has been checked."""
        own, outward = self.inward[name]
        given = {outward[each]: value for each, value in arguments.items()}
        try:
            return self.names.result(run(self.inner.by_name[own], given, tables))
        except ToolError as error:
            raise ToolError(self.renamed(str(error))) from None

    def call_of(self, name: str, arguments: Json) -> tuple[str, Json]:
        """Returns a call of the programs' names in those of the prompt."""
        new = self.outward[name]
        named = {own: each for each, own in self.inward[new][1].items()}
        return new, {named[each]: value for each, value in arguments.items()}

    def renamed(self, text: str) -> str:
        """Returns an error's text with the names of the prompt."""

        def rename(match):
            word = match[0]
            return self.outward.get(word) or (self.names.field(word) if "_" in word else word)

        return re.sub(r"\w+", rename, text)

    def task(self, task: Json) -> Json:
        """Returns a task of `inner` as one of this domain."""
        criteria, rules, policy = task["evaluation_criteria"], [], []
        actions = []
        for action in criteria["actions"]:
            name, arguments = self.call_of(action["name"], action["arguments"])
            actions.append(action | {"name": name, "arguments": arguments})
        for rule in task["rules"]:
            args = dict(rule["args"])
            if "where" in args:
                (tool,) = args["tools"]
                args["where"] = self.call_of(tool, args["where"])[1]
            args["tools"] = [self.outward[tool] for tool in args["tools"]]
            rules.append(rule | {"args": args})
        for line in task["policy"].split("\n"):
            name = re.match(r"- (\w+): ", line)
            if name and name[1] in self.outward:
                line = line.replace(name[1], self.outward[name[1]], 1)
            policy.append(line)
        offered = {self.outward[name] for name in task["tools"]}
        return task | {
            "evaluation_criteria": criteria | {"actions": actions},
            "rules": rules,
            "policy": "\n".join(policy),
            "tools": [name for name in self.by_name if name in offered],
            "domain": self.name,
            "thoughts": [
                re.sub(r"<(\w+)>", lambda name: self.names.field(name[1]), text)
                for text in task["thoughts"]
            ],
        }


@lru_cache(maxsize=64)
def draw(name: str) -> tuple[Drawn, Words]:
    """Returns the domain that a name like "bank/0-train-5" draws, and the words of its programs.

    The same name gives the same domain.
    """
    kind = name.partition("/")[0]
    rng = random.Random(name)
    if kind == INVENTED:
        blueprint, needless = invent(rng), set()
    else:
        blueprint = load_blueprint(kind)
        needless = _needless(blueprint)
        for table in blueprint["tables"].values():
            if "rows" not in table:
                table["count"] = max(12, int(table["count"] * RECORDS))
    for table in blueprint["tables"].values():
        if "{" not in table["prefix"]:
            letters = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=rng.randint(1, 3)))
            table["prefix"] = rng.choice(VOCABULARY["prefixes"]).replace("{}", letters)
            table["digits"] = rng.randint(max(3, len(str(table["count"])) + 1), 8)
    inner, words = make(blueprint, rng, kind)
    return Drawn(name, inner.tables, [], inner.policy, inner, Names(rng, needless)), words


def _needless(blueprint) -> set[str]:
    """The fields of records that no wish, rule, reference or tool but a read names."""
    used = {name: blueprint[name] for name in ("identify", "refs", "rules", "wishes")}
    used["written"] = [tool for tool in blueprint["tools"].values() if tool["kind"] != "read"]
    named = set(re.findall(r"\w+", str(used)))
    fields = {name for table in blueprint["tables"].values() for name in table["fields"]}
    return fields - named


class DrawnDomains(dict):
    """Domains by the names that draw them; none is kept."""

    def __missing__(self, name: str) -> Drawn:
        return draw(name)[0]
