"""A world: the tables, their schema, the tools and the policy of one domain; its directory on disk; what must hold in it.

    DIR/db.json      {table: {key: record}}          DIR/tools.json   [tool, ...] (see program.py)
    DIR/policy.md    the rules in words              DIR/schema.json  {table: {"key": field, "fields": {field: {"type", "enum"?, "link"?}}}}

`link` names the table whose keys the field holds. A directory without schema.json or tools.json (tau2's) loads too: then nothing can be
checked against a schema, or called.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanorchestra.agent.environment import argument_error
from nanorchestra.errors import UserError
from nanorchestra.files import read_json, write_whole
from worlds.toolscale.program import Tables, ToolError, canonical, check_tool, run

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass
class World:
    domain: str
    schema: dict[str, Any]
    tables: Tables
    tools: list[dict[str, Any]]
    policy: str
    by_name: dict[str, dict[str, Any]] = field(init=False, repr=False)
    _texts: dict[int, str] = field(init=False, repr=False, default_factory=dict)
    _problems: dict[tuple[str, str], str | None] = field(
        init=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.by_name = {tool["function"]["name"]: tool for tool in self.tools}

    def fresh(self) -> Tables:
        """The tables as a task finds them, in outer dicts of their own; records are shared, and never changed in place."""
        return {table: dict(rows) for table, rows in self.tables.items()}

    def call(self, tables: Tables, name: str, arguments: Any) -> Any:
        """What the tool returns; may change `tables`. Raises ToolError, and then nothing has changed."""
        tool = self.by_name.get(name)
        if tool is None:
            raise ToolError(f"no tool named {name!r}; the tools are {', '.join(self.by_name)}")
        parameters = tool["function"]["parameters"]
        key = (name, repr(arguments))  # replays repeat the same calls, and the check costs 40 us
        if key not in self._problems:
            self._problems[key] = argument_error(arguments, parameters)
        if self._problems[key] is not None:
            raise ToolError(f"{name}: {self._problems[key]}")
        properties = parameters["properties"]
        return run(
            tool,
            {k: float(v) if properties[k]["type"] == "number" else v for k, v in arguments.items()},
            tables,
        )

    def functions(self, names: Any = None) -> list[dict[str, Any]]:
        """The OpenAI function objects of the tools named (None: of all), in the world's order."""
        return [
            {"type": "function", "function": tool["function"]}
            for name, tool in self.by_name.items()
            if names is None or name in names
        ]

    def hash(self, tables: Tables) -> str:
        """`program.database_hash(tables)`, five times faster: the text of each of the world's own records is made once."""
        texts = self._texts
        if not texts:
            texts.update(
                {
                    id(row): f"{canonical(key)}:{canonical(row)}"
                    for rows in self.tables.values()
                    for key, row in rows.items()
                }
            )
        parts = [
            canonical(table)
            + ":{"
            + ",".join(
                [
                    texts.get(id(row)) or f"{canonical(key)}:{canonical(row)}"
                    for key, row in sorted(rows.items())
                ]
            )
            + "}"
            for table, rows in sorted(tables.items())
        ]
        return hashlib.sha256(("{" + ",".join(parts) + "}").encode()).hexdigest()

    def check(self) -> None:
        """Raises UserError that names the first thing that is wrong with the schema, a tool or a row."""
        check_schema(self.schema, self.domain)
        for tool in self.tools:
            check_tool(tool, self.schema, f"{self.domain}: tools")
        if len(self.by_name) != len(self.tools):
            raise UserError(f"{self.domain}: tools: a name is used twice; names must differ")
        if self.schema and (missing := set(self.schema) - set(self.tables)):
            raise UserError(
                f"{self.domain}: db: table {sorted(missing)[0]!r} of the schema is missing"
            )
        for problem in row_problems(self.schema, self.tables).values():
            raise UserError(f"{self.domain}: db: {problem}")

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in (("db", self.tables), ("tools", self.tools), ("schema", self.schema)):
            write_whole(
                directory / f"{name}.json",
                (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(),
            )
        write_whole(directory / "policy.md", self.policy.encode())

    @classmethod
    def load(cls, directory: Path) -> World:
        """Raises UserError for a directory that is no world, or one whose parts do not fit together."""
        tables = read_json(directory / "db.json")
        if not isinstance(tables, dict) or not all(
            isinstance(rows, dict) for rows in tables.values()
        ):
            raise UserError(
                f"{directory / 'db.json'}: must be an object of tables, each an object of records"
            )
        schema = (
            read_json(directory / "schema.json") if (directory / "schema.json").exists() else {}
        )
        tools = read_json(directory / "tools.json") if (directory / "tools.json").exists() else []
        policy = directory / "policy.md"
        world = cls(
            directory.name, schema, tables, tools, policy.read_text() if policy.exists() else ""
        )
        if schema:
            world.check()
        return world


def check_schema(schema: Any, where: str) -> None:
    """Raises UserError that names a table or field that is not what the module's docstring says, or a dangling link."""
    if not isinstance(schema, dict):
        raise UserError(
            f"{where}: schema is a {type(schema).__name__}; it must be an object of tables"
        )
    for table, shape in schema.items():
        fields = shape.get("fields") if isinstance(shape, dict) else None
        if not isinstance(fields, dict) or shape.get("key") not in fields:
            raise UserError(
                f"{where}: schema: table {table}: it needs fields and a key that is one of them"
            )
        for name, spec in fields.items():
            if not isinstance(spec, dict) or spec.get("type") not in _TYPES:
                raise UserError(
                    f"{where}: schema: {table}.{name}: type must be one of {', '.join(_TYPES)}"
                )
            if "link" in spec and spec["link"] not in schema:
                raise UserError(
                    f"{where}: schema: {table}.{name}: it links to table {spec['link']!r}, which is not there; there are {', '.join(schema)}"
                )


def row_problems(
    schema: dict[str, Any], tables: Tables, only: Tables | None = None
) -> dict[tuple[str, str], str]:
    """(table, key) -> what is wrong with the row under the schema: a missing or unknown field, a type, an enum, a link to nowhere.

    `only`: look at the rows in it alone (their links still lead into `tables`).
    """
    problems: dict[tuple[str, str], str] = {}
    for table, rows in (tables if only is None else only).items():
        shape = schema.get(table)
        if shape is None:
            continue
        for key, row in rows.items():
            problem = _row_problem(shape, key, row, tables)
            if problem:
                problems[table, key] = f"{table} {key}: {problem}"
    return problems


def _row_problem(shape: dict[str, Any], key: str, row: Any, tables: Tables) -> str | None:
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}; it must be an object"
    fields = shape["fields"]
    if row.keys() != fields.keys():
        return f"field {sorted(row.keys() ^ fields.keys())[0]!r} is missing or unknown; the fields are {', '.join(fields)}"
    if row[shape["key"]] != key:
        return f"{shape['key']} is {row[shape['key']]!r}; it must be the key"
    for name, spec in fields.items():
        value = row[name]
        if (
            not isinstance(value, _TYPES[spec["type"]])
            or isinstance(value, bool)
            and spec["type"] != "boolean"
        ):
            return f"{name} is {value!r}; it must be a {spec['type']}"
        if "enum" in spec and value not in spec["enum"]:
            return f"{name} is {value!r}; it must be one of {', '.join(map(str, spec['enum']))}"
        if "link" in spec and value not in tables.get(spec["link"], ()):
            return f"{name} is {value!r}, and there is no such record in {spec['link']}"
    return None
