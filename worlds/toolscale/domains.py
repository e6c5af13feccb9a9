"""Builds the world of a domain from a blueprint and a seed: schema, tools, policy and records.

A blueprint (domains/railway.json, say) holds the words and ranges of one domain. words.py draws
from it; domains/template.json holds the schema and the tools of every domain with places for these
words; here the template is expanded and the tables are filled.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json
from worlds.toolscale.program import Json
from worlds.toolscale.records import draw_tables, field_shape
from worlds.toolscale.words import ROLES, Word, Words, draw_words, expand
from worlds.toolscale.world import World, read_shape

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


def load_blueprint(name: str) -> Json:
    """Returns the blueprint of a built-in domain, or of the JSON file `name`. Raises UserError."""
    path = HOME / f"{name}.json" if name in BUILT_IN else Path(name)
    known = f"there are {', '.join(BUILT_IN)}, or give a blueprint file NAME.json"
    require(path.suffix == ".json", f"domain {name!r}: {known}")
    return read_shape("blueprint", path)


@lru_cache(maxsize=32)
def build(name: str, seed: int) -> tuple[World, Words]:
    """Returns the world of a blueprint for a seed, and its words (see words.py).

    Raises UserError for a blueprint of which no world can be made.
    """
    blueprint = load_blueprint(name)
    common, template = read_json(HOME / "common.json"), read_json(HOME / "template.json")
    rng = random.Random(f"world/{blueprint['domain']}/{seed}")
    fields, schema = {}, {}
    try:
        words = draw_words(blueprint, common, template, rng)
        for role in ROLES:
            fields[role] = expand(template["fields"][role], words)
            for field, *draw in words.fields.get(role, ()):
                name_ = Word(field).field
                require(name_ not in fields[role], f"{name}: {role}.fields: {field!r} is in use")
                fields[role][name_] = draw
        tables = draw_tables(words, fields, rng)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: no records can be drawn: {error}") from None
    for role, draws in fields.items():
        name_, key = getattr(words, role).table, getattr(words, role).key
        row = next(iter(tables[name_].values()))
        shapes = {field: field_shape(row[field], *draw) for field, draw in draws.items()}
        schema[name_] = {"key": key, "fields": shapes}
    tools = [_tool(role, template, words) for role in template["tools"] if role in words.tool]
    text = _policy(expand(template["policy"], words), schema, tools)
    return World(blueprint["domain"], schema, tables, tools, text), words


def _tool(role: str, template: Json, words: Words) -> Json:
    tool = template["tools"][role]
    properties: Json = {}
    for name in tool["parameters"]:
        properties |= expand(template["parameters"][name], words)
    return {
        "kind": tool["kind"],
        "function": {
            "name": words.tool[role],
            "description": expand(tool["description"], words),
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
        "program": _program(tool["program"], template["steps"], words),
    }


def _program(steps: list[Any], named: dict[str, list[Any]], words: Words) -> list[Json]:
    """The steps, expanded.

    A text, or {"use": text, ...}, stands for the steps of that name, in which the other entries
    are words too. A step whose "when" is not true is left out.
    """
    program = []
    for step in steps:
        step = {"use": step} if isinstance(step, str) else expand(step, words)
        if "use" in step:
            program += _program(named[step["use"]], named, Words(**vars(words) | step))
        elif step.pop("when", True):
            program.append(step)
    return program


def _policy(lines: list[str], schema: Json, tools: list[Json]) -> str:
    """The policy in Markdown: the given lines, tables, and each tool with its program's rules."""
    for table, shape in schema.items():
        fields = ", ".join(
            f"{name} ({' / '.join(spec['enum'])})" if "enum" in spec else name
            for name, spec in shape["fields"].items()
        )
        lines.append(f"- **{table}**: {fields}")
    for title, writes in (("What can be changed", True), ("What else can be called", False)):
        lines += ["", f"## {title}", ""]
        for tool in tools:
            if (tool["kind"] == "write") == writes:
                function = tool["function"]
                lines.append(f"- `{function['name']}`: {function['description']}")
                lines += [f"  - {rule}" for rule in rules(tool)]
    return "\n".join(lines) + "\n"


def rules(tool: Json) -> list[str]:
    """Returns what the tool's program demands or works out, a sentence each."""
    said = [
        step.get("rule", step.get("error"))
        for step in tool["program"]
        if step["op"] in ("require", "compute")
    ]
    return [rule for rule in dict.fromkeys(said) if rule]
