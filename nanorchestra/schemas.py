"""Checks JSON by schemas, and reads JSON from outside."""

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry

from nanorchestra.errors import UserError, nearest, require
from nanorchestra.files import read_json

Json = dict[str, Any]  # a JSON object
MOST_DEPTH = 64  # levels of JSON from outside; what is read by recursion stays far from its limit
SHAPES = {file.stem: read_json(file) for file in Path(__file__).with_name("shapes").glob("*.json")}


def check(value: Any, shape: Json | str, where: str) -> None:
    """Raises UserError, which begins with `where`, unless `value` has a shape: a schema, or a name.

    The named ones are files in shapes/. NaN, which every comparison lets pass, has no place in any.
    A misspelt name is told with the nearest one.
    """
    numbers = (each for level in levels(value) for each in level if isinstance(each, float))
    require(not any(map(math.isnan, numbers)), f"{where}: nan is not a number")
    error = _best_error(value, SHAPES[shape] if isinstance(shape, str) else shape)
    if error is not None:
        raise UserError(f"{where}: {_line(error)}{_nearest(error)}")


def schema_error(value: Any, schema: Json, first: bool = False) -> str | None:
    """Returns what is wrong with `value` under a JSON schema, in one line; None if nothing is.

    With `first` it stops at the first error, so that a value that is all wrong costs no more. A
    part of the schema that is "writeOnly" may hold a secret: the line has its description in place
    of the value.
    """
    error = _best_error(value, schema, 1 if first else None)
    return None if error is None else _line(error)


def _best_error(value, schema, most=None) -> ValidationError | None:
    local = Registry()  # a reference to an address would be fetched
    errors = Draft202012Validator(schema, registry=local).iter_errors(value)
    return best_match(islice(errors, most))


def _line(error) -> str:
    """Returns where an error is, and what is wrong there."""
    message = error.message[-300:]  # a long one begins with the value
    if isinstance(error.schema, dict) and error.schema.get("writeOnly"):
        message = f"must be {error.schema['description']}; what is there is not shown"
    where = error.json_path.lstrip("$.")
    return f"{where}: {message}" if where else message


def _nearest(error) -> str:
    """Returns the name that a misspelt field or value is like, in words; "" if there is none."""
    if error.validator == "enum" and isinstance(error.instance, str):
        return nearest(error.instance, map(str, error.validator_value))
    if error.validator not in ("additionalProperties", "required"):
        return ""
    known = error.schema.get("properties", {})
    unknown = [name for name in error.instance if name not in known]
    if error.validator == "required":  # the field may be there under another name
        missing = [name for name in error.validator_value if name not in error.instance]
        for name in unknown:
            if nearest(name, missing):
                return f"; {name!r} is no field{nearest(name, missing)}"
        return ""
    return next(filter(None, (nearest(name, known) for name in unknown)), "")


def schema_fault(schema: Json) -> str | None:
    """Returns why a schema is none itself, in one line; None if it is one."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path.lstrip('$.')}: {error.message[-300:]}".replace("\n", " ")
    return None


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

    Arguments that the schema does not name are errors. The schema of an MCP server may be one of
    another draft, or refer to nothing: no argument fits it then.
    """
    strict = {"type": "object", "additionalProperties": False}
    try:
        return schema_error(arguments, strict | parameters)
    except Exception as error:
        return f"its schema cannot be applied ({type(error).__name__}: {error})"[:300]


def arguments_schema(**types: str) -> Json:
    """Returns the schema of an object that has all these properties, by their JSON types."""
    schema = {"type": "object", "properties": {name: {"type": t} for name, t in types.items()}}
    return schema | ({"required": list(types)} if types else {})


def bounded_json(text: str) -> Any:
    """Returns the JSON value of a text from outside, in which nothing surprises its reader.

    A number that is not finite or has no place in 64 bits becomes null, half a surrogate pair the
    replacement character. Raises ValueError for what is not JSON or is nested deeper than
    MOST_DEPTH.
    """
    try:
        value = json.loads(text)
        deep = any(depth > MOST_DEPTH for depth, _ in enumerate(levels(value), 1))
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"nested deeper than {MOST_DEPTH} levels")
    return _plain(value)


def _plain(value):
    """Returns JSON with numbers and texts that can be computed with and written."""
    if isinstance(value, dict):
        return {_plain(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):  # bool is one
        return value if abs(value) < 2**63 else None
    return value


def whole_characters(text: str) -> str:
    """Returns a text that UTF-8 can hold: half a surrogate pair is the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
