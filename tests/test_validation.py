"""What a user writes wrong in a file is one line: where, field, value, what would be right."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from pydantic import Field

from nanorchestra.errors import UserError
from nanorchestra.validation import Seconds, Usd, unshown, validated

Key = Annotated[str, Field(pattern=r"^\$\w+$"), unshown("'$NAME'")]


@dataclass
class Inner:
    timeout_s: Seconds = 1.0


@dataclass
class Outer:
    kind: Literal["code", "search"]
    usd: Usd = 0.0
    inner: list[Inner] = field(default_factory=list)
    headers: dict[str, Key] = field(default_factory=dict)
    words: list[str | list[str]] = field(default_factory=list)


def test_a_form_that_is_kept_is_made_with_its_defaults():
    made = validated(Outer, {"kind": "code", "usd": 2, "inner": [{}]}, "it")
    assert made == Outer("code", 2.0, [Inner(1.0)])


@pytest.mark.parametrize(
    "value, line",
    [
        (3, "it is 3; it should be a dictionary or an instance of Outer"),
        ({}, "kind is missing"),
        ({"knid": "code"}, "there is no knid; did you mean kind?"),
        (
            {"kind": "serch"},
            "kind is 'serch'; it should be 'code' or 'search'; did you mean search?",
        ),
        ({"kind": "code", "usd": "2"}, "usd is '2'; it should be a valid number"),
        ({"kind": "code", "usd": float("nan")}, "usd is nan; it should be a finite number"),
        ({"kind": "code", "inner": [{}, {"timeout": 3}]}, "there is no inner[1].timeout; did you "),
        ({"kind": "code", "headers": {"X": "sk-123"}}, "headers.X must be '$NAME'; what is there"),
        ({"kind": "code", "words": ["a", ["b", 5]]}, "words[1][1] is 5; it should be a valid s"),
    ],
)
def test_what_is_wrong_is_one_line(value, line):
    with pytest.raises(UserError) as refused:
        validated(Outer, value, "a.toml")
    said = str(refused.value)
    assert said.startswith(f"a.toml: {line}") and "\n" not in said and "sk-123" not in said
