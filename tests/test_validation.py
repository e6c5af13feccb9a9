"""What a user writes wrong in a file is one line: where, field, value, what would be right."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from pydantic import Field

from nanorchestra.errors import UserError
from nanorchestra.validation import Count, Seconds, Usd, unshown, validated

Key = Annotated[str, Field(pattern=r"^\$\w+$"), unshown("'$NAME'")]


@dataclass
class Inner:
    timeout_s: Seconds = 1.0


@dataclass
class Outer:
    kind: Literal["code", "search"]
    usd: Usd = 0.0
    count: Count = 1
    inner: list[Inner] = field(default_factory=list)
    headers: dict[str, Key] = field(default_factory=dict)
    words: list[str | list[str]] = field(default_factory=list)
    pair: tuple[str, int] = ("", 0)


def test_a_form_that_is_kept_is_made_with_its_defaults():
    made = validated(Outer, {"kind": "code", "usd": 2, "inner": [{}]}, "it")
    assert made == Outer("code", 2.0, 1, [Inner(1.0)])


@pytest.mark.parametrize(
    "value, line",
    [
        (3, "it is 3; it should be a dictionary or an instance of Outer"),
        ({}, "kind is missing"),
        ({"knid": "code"}, "there is no knid; did you mean kind?"),
        ({"kind": "code", "zzz": "sk-123"}, "there is no zzz"),
        (
            {"kind": "serch"},
            "kind is 'serch'; it should be 'code' or 'search'; did you mean search?",
        ),
        ({"kind": "code", "usd": "2"}, "usd is '2'; it should be a valid number"),
        ({"kind": "code", "usd": True}, "usd is True; it should be a valid number"),
        ({"kind": "code", "usd": float("nan")}, "usd is nan; it should be a finite number"),
        ({"kind": "code", "usd": -1}, "usd is -1; it should be greater than or equal to 0"),
        ({"kind": "code", "count": 1.5}, "count is 1.5; it should be a valid integer"),
        (
            {"kind": "code", "inner": [{}, {"timeout": 3}]},
            "there is no inner[1].timeout; did you mean timeout_s?",
        ),
        (
            {"kind": "code", "headers": {"X-Org": "sk-123"}},
            "headers.X-Org must be '$NAME'; what is there is not shown",
        ),
        (
            {"kind": "code", "words": ["a", ["b", 5]]},
            "words[1][1] is 5; it should be a valid string",
        ),
        ({"kind": "code", "words": [5]}, "words[0] is 5; it should be a valid string"),
        ({"kind": "code", "pair": ["a"]}, "pair[1] is missing"),
    ],
)
def test_what_is_wrong_is_one_line(value, line):
    with pytest.raises(UserError) as refused:
        validated(Outer, value, "a.toml")
    assert str(refused.value) == f"a.toml: {line}"
