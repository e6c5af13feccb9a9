"""What bodies of all servers of the project have in common. pydantic checks them. No torch."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

T = TypeVar("T")
COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: Any, errors: str = "replace") -> bytes:
    """Returns compact JSON in UTF-8. ValueError for NaN, infinity, "strict" also for surrogates."""
    return COMPACT.encode(value).encode(errors=errors)


def whole(value: Any) -> Any:
    """Returns 1 for 1.0, which is an integer in JSON; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Many = Annotated[list[T], Field(fail_fast=True)]  # a list that is all wrong has one error


class Body(BaseModel):
    """The body of a request. A text is no number; a field that is null has its default."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_json(cls, body):
        """Leaves out what is null. ValueError for NaN, infinity or half a surrogate pair."""
        try:
            dumps(body, "strict")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if value is not None}
        return body


def first_line(errors: Sequence[Any], body: Any) -> str:
    """Returns one of pydantic's errors in a line that begins with its field, as messages[0].role.

    It is the one deepest in the body, where several types were tried; their names are left out.
    """
    error = max(errors, key=lambda each: len(each["loc"]))
    if error["type"] == "json_invalid":
        return f"body: not JSON: {error['ctx']['error']}"
    where, place = "", body
    for key in error["loc"][1:]:
        inner = place[key : key + 1] if isinstance(place, list) and isinstance(key, int) else ()
        if isinstance(place, dict) and key in place:
            where, place = f"{where}.{key}", place[key]
        elif inner:
            where, place = f"{where}[{key}]", inner[0]
        elif error["type"] == "missing" and key == error["loc"][-1]:
            where = f"{where}.{key}"
    message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if isinstance(place, str | int | float):
        message += f", not {place!r:.80}"
    return f"{where.removeprefix('.') or 'body'}: {message[:300]}"
