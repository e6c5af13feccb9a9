"""Checks arguments by the JSON Schemas of tools, and reads JSON from outside."""

import json
import math
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry

Json = dict[str, Any]  # a JSON object
MOST_DEPTH = 64  # levels of JSON from outside; what is read by recursion stays far from its limit


def argument_error(arguments: Any, parameters: Json) -> str | None:
    """Returns why a tool with these `parameters` cannot take `arguments`; None if it can.

    Arguments that the schema does not name are errors. The schema of an MCP server may be one of
    another draft, or refer to nothing: no argument fits it then.
    """
    strict = {"type": "object", "additionalProperties": False} | parameters
    try:
        local = Registry()  # a reference to an address would be fetched
        wrong = best_match(Draft202012Validator(strict, registry=local).iter_errors(arguments))
    except Exception as error:
        return f"its schema cannot be applied ({type(error).__name__}: {error})"[:300]
    if wrong is None:
        return None
    where = wrong.json_path.lstrip("$.")
    message = wrong.message[-300:].replace("\n", " ")  # a long one begins with the value
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


def arguments_schema(descriptions: Json | None = None, /, **types: str) -> Json:
    """Returns the schema of an object that has all these properties, by their JSON types."""
    properties = {name: {"type": json_type} for name, json_type in types.items()}
    for name, text in (descriptions or {}).items():
        properties[name]["description"] = text
    schema = {"type": "object", "properties": properties}
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
