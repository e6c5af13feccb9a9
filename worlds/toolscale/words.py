"""What a text says: numbers as numbers, whole words in any case."""

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![\w.])(?<!\d[-:])\d+(?:\.\d+)?(?!\w)(?![-:.]\d)")


def communicated(info: str, messages: Sequence[str]) -> bool:
    """Returns whether a message holds `info`: as a number, or as whole words in any case."""
    info, messages = _spoken(info), [_spoken(message) for message in messages]
    if re.fullmatch(r"\$?\d+(\.\d+)?", info):
        return any(float(info.lstrip("$")) in numbers(message) for message in messages)
    words = rf"(?<!\w){re.escape(info)}(?!\w)"
    return any(info in message and re.search(words, message) for message in messages)


def numbers(text: str) -> set[float]:
    """Returns the numbers in a text; "1,000" is 1000, and 5 is not in 15."""
    return set(map(float, _NUMBER.findall(_spoken(text))))


def _spoken(text) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).casefold().strip()


def mentions(text: str, value: str | float) -> bool:
    """Returns whether the text holds the value, as a number or in words ("_" is a space)."""
    if not isinstance(value, str):
        return communicated(f"{value:.2f}", [text])
    return communicated(value, [text]) or communicated(value.replace("_", " "), [text])
