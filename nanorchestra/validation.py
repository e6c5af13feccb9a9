"""Checks what users write in files, with pydantic: one line says what is wrong, and what is right.

A form is a type with constraints: a TypedDict of a file's fields, or a dataclass. A field that the
form does not have is an error. pydantic reads "1" as a number where it is not told to be strict.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, WrapValidator

from nanorchestra.errors import UserError, nearest

Form = TypeVar("Form")
UNKNOWN = "extra_forbidden", "unexpected_keyword_argument"  # kinds of error, of a field
Text = Annotated[str, Field(pattern=r"\S")]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Usd = Annotated[Number, Field(ge=0, le=1_000_000)]
Seconds = Annotated[Number, Field(ge=0.1, le=3600)]


def unshown(right: str) -> WrapValidator:
    """Marks a field whose wrong value may be a secret: the message has what is right alone."""

    def check(value, inner):
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(f"must be {right}; what is there is not shown") from None

    return WrapValidator(check)


def validated(form: type[Form], value: Any, where: str, extra: str = "forbid") -> Form:
    """Returns `value` in a form. Raises UserError, one line that begins with `where`.

    extra: "allow" if a form names no more than the fields that are used.
    """
    try:
        return _adapter(form).validate_python(value, extra=extra)
    except ValidationError as error:
        names = set(_names(_adapter(form).json_schema()))
        _, line = one_line(error.errors(), value, names)
        raise UserError(f"{where}: {line}") from None


def one_line(
    errors: Sequence[Any], value: Any, names: Collection[str] = (), whole: str = "it"
) -> tuple[str, str]:
    """Returns the field of one of pydantic's errors about `value`, and a line.

    The line has the field, as messages[0].role, its value, and what would be right. `whole` is the
    name of all of the value.

    A field that is misspelt comes first, told with the nearest of the form's `names`, then what is
    deepest in the value.
    """
    error = max(errors, key=lambda each: (each["type"] in UNKNOWN, len(each["loc"])))
    kind, message, place, inside = error["type"], error["msg"], "", value
    for part in error["loc"]:
        if isinstance(inside, list) and isinstance(part, int):
            place, inside = f"{place}[{part}]", inside[part] if part < len(inside) else None
        elif isinstance(inside, dict) and (part in inside or kind == "missing"):
            place, inside = f"{place}.{part}", inside.get(part)
        # Any other part is the name of a type of several, or says that a key is wrong.
    place = place.removeprefix(".") or whole
    if kind in UNKNOWN:
        line = f"there is no {place}{nearest(error['loc'][-1], names)}"
    elif kind == "missing":
        line = f"{place} is missing"
    elif kind == "value_error":  # of a validator of ours, which may hide the value
        line = f"{place} {error['ctx']['error']}"
    else:
        if kind == "literal_error" and isinstance(inside, str):
            message += nearest(inside, re.findall("'(.*?)'", message))
        message = re.sub("^Input (?!tag)", "it ", message)
        line = f"{place} is {error['input']!r:.80}; {message[0].lower()}{message[1:]}"
    return place, line


@cache
def _adapter(form) -> TypeAdapter:
    return TypeAdapter(form)


def _names(schema) -> Iterator[str]:
    """Yields the names of the fields in a JSON schema, at every depth."""
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
        for inner in schema.values():
            yield from _names(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _names(inner)
