"""Builds a domain from its blueprint and a seed: tools, policy and records.

A blueprint (domains/railway.json, say) is the whole domain: tables, tools, rules, wishes and
phrases. Nothing in Python knows one. words.py draws what the file leaves to the seed, program.py
runs its programs.
"""

import random
from functools import lru_cache
from pathlib import Path

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json
from nanorchestra.validation import validated
from worlds.toolscale.act import PHRASES, people
from worlds.toolscale.domain import Domain, leaves
from worlds.toolscale.forms import Blueprint
from worlds.toolscale.program import FAULTS, Json, ToolError, parse, parse_call, rules
from worlds.toolscale.records import ColumnDraws
from worlds.toolscale.words import Words, draw_words, expand

HOME = Path(__file__).parent / "domains"
BUILT_IN = tuple(sorted(path.stem for path in HOME.glob("*.json")))


def load_blueprint(name: str) -> Json:
    """Returns the file of a built-in domain, or the JSON file `name`. Raises UserError."""
    path = HOME / f"{name}.json" if name in BUILT_IN else Path(name)
    known = f"there are {', '.join(BUILT_IN)}, or give a file NAME.json"
    require(path.suffix == ".json", f"domain {name!r}: {known}")
    blueprint = read_json(path)
    validated(Blueprint, blueprint, str(path))
    return blueprint


@lru_cache(maxsize=32)
def build(name: str, seed: int) -> tuple[Domain, Words]:
    """Returns the domain of a blueprint and a seed, and its words.

    Raises UserError for a file of which no domain can be made.
    """
    blueprint = load_blueprint(name)
    rng = random.Random(f"world/{blueprint['domain']}/{seed}")
    try:
        words = draw_words(blueprint, rng)
        draws = ColumnDraws(PHRASES["names"], words.today, rng, {})
        for table, how in words.data["tables"].items():
            draws.fill(table, how)
        holder = words.data["tables"][people(words.data)]
        common = expand(PHRASES["tools"], {"person": holder["key"]})
        tools = [_tool(*each) for each in (words.data["tools"] | common).items()]
        _compile(words.data)
    except (*FAULTS, ToolError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{name}: no domain can be made ({problem})") from None
    return Domain(blueprint["domain"], draws.tables, tools, _policy(words, tools)), words


def _compile(data):
    """Raises one of FAULTS for a wish, rule or test that cannot be read."""
    for ref in data["refs"].values():
        for words in ref["by"]:
            parse(words.partition(" | ")[2] or "0")
    for wish in data["wishes"].values():
        for field, text in leaves(wish):
            if field in ("where", "can", "test"):
                parse(text)
            elif field == "rules":
                parse(data["rules"][text]["test"])
            elif field in ("reads", "do"):
                name, given = parse_call(text)
                wanted = len(data["tools"][name]["arguments"])
                require(len(given) == wanted, f"{text!r} must have {wanted} arguments")
        for _, text in wish.get("tell", ()):
            parse(text)


def _tool(name, tool) -> Json:
    """A tool of a domain. A type of argument is "string: what it is", or a list of values."""
    properties: Json = {}
    for argument, kind in tool["arguments"].items():
        if isinstance(kind, list):
            properties[argument] = {"type": "string", "enum": kind}
            continue
        kind, _, text = kind.partition(": ")
        properties[argument] = {"type": kind} | ({"description": text} if text else {})
        if kind == "array":
            properties[argument]["items"] = {"type": "string"}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": tool["description"], "parameters": parameters}
    for line in tool["program"]:
        parse(line)
    return {"kind": tool["kind"], "function": function, "program": tool["program"]}


def _policy(words, tools) -> str:
    """The policy in Markdown: the file's lines and rules, tables, each tool with its own rules."""
    data = words.data
    lines = [f"# Policy of {words.business}", "", f"Today is {words.today}.", ""]
    lines += [*data["policy"], "", "## Rules", ""]
    lines += [f"- {rule['text']}" for rule in data["rules"].values()]
    lines += ["", "## Records", ""]
    for table, how in data["tables"].items():
        fields = dict.fromkeys(how.get("rows", [{}])[0], [""]) | how["fields"]
        lines.append(f"- **{table}**: {', '.join(map(_field, fields.items()))}")
    lines += ["", "## Tools", ""]
    for tool in tools:
        function = tool["function"]
        lines.append(f"- `{function['name']}`: {function['description']}")
        lines += [f"  - {rule}" for rule in rules(tool)]
    return "\n".join(lines) + "\n"


def _field(field) -> str:
    name, how = field
    inner = how if isinstance(how, dict) else how[-1] if how[0] == "several" else {}
    if inner:
        return f"{name} [{', '.join(map(_field, inner.items()))}]"
    return f"{name} ({' / '.join(how[1])})" if how[0] == "enum" else name
