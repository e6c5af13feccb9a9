"""JSON schemas: what is wrong with a value under one, and the schema of a tool's arguments."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from nanorchestra.errors import require
from nanorchestra.files import read_json

Json = dict[str, Any]  # a JSON object
MOST_DEPTH = 64  # levels of JSON from outside; what is read by recursion stays far from its limit
SHAPES = {file.stem: read_json(file) for file in Path(__file__).with_name("shapes").glob("*.json")}


def check(value: Any, shape: Json | str, where: str) -> None:
    """Raises UserError, which begins with `where`, unless `value` has a shape: a schema, or a name.

    The named ones are files in shapes/.
    """
    problem = schema_error(value, SHAPES[shape] if isinstance(shape, str) else shape)
    require(problem is None, f"{where}: {problem}")


def schema_error(value: Any, schema: Json, first: bool = False) -> str | None:
    """Returns what is wrong with `value` under a JSON schema, in one line; None if nothing is.

    With `first` it stops at the first error, so that a value that is all wrong costs no more. A
    part of the schema that is "writeOnly" may hold a secret: the line has its description in place
    of the value.
    """
    errors = Draft202012Validator(schema).iter_errors(value)
    error = best_match(islice(errors, 1 if first else None))
    if error is None:
        return None
    message = error.message[-300:]  # a long one begins with the value
    if isinstance(error.schema, dict) and error.schema.get("writeOnly"):
        message = f"must be {error.schema['description']}; what is there is not shown"
    where = error.json_path.lstrip("$.")
    return f"{where}: {message}" if where else message


def levels(value: Any) -> Iterator[list[Any]]:
    """Yields the values of JSON level by level: itself, then those inside it, and so on.

    Without recursion, so that it can tell what is nested too deeply for the rest of the code.
    """
    level = [value]
    while level:
        yield level
        inner = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level = inner


def argument_error(arguments: Any, parameters: Json) -> str | None:
    """Returns why a tool with these `parameters` cannot take `arguments`; None if it can.

    Arguments that the schema does not name are errors.
    """
    strict = {"type": "object", "additionalProperties": False}
    return schema_error(arguments, strict | parameters)


def arguments_schema(**types: str) -> Json:
    """Returns the schema of an object that has all these properties, by their JSON types."""
    schema = {"type": "object", "properties": {name: {"type": t} for name, t in types.items()}}
    return schema | ({"required": list(types)} if types else {})
