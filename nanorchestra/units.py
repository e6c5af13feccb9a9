"""How figures are written for people: US dollars, seconds, shares and plain numbers.

Every table, page and line of the terminal writes them so. `sign` is "" or "+", which writes the
sign of a positive number too.
"""

import math
from collections.abc import Callable, Mapping

Write = Callable[..., str]  # a figure, and `sign`, to a text


def dollars(usd: float, sign: str = "") -> str:
    """Returns US dollars to three digits, or to the cent: "$0.00253", "$0.3", "$1,234.56"."""
    decimals = 2
    if 0 < abs(usd) < 1:
        decimals -= math.floor(math.log10(abs(usd)))
    digits = f"{abs(usd):,.{decimals}f}".rstrip("0").rstrip(".")
    return f"{'-' if usd < 0 else sign}${digits}"


def seconds(duration: float, sign: str = "") -> str:
    """Returns seconds to a tenth: "11.4 s"."""
    return f"{duration:{sign},.1f} s"


def bill(usd: float, duration: float, measured: float | None = None) -> str:
    """Returns a cost and seconds: "$0.00253, 11.4 s".

    With seconds that a clock has `measured`, where these are others by more than half a second and
    a tenth: "$0.00253, 11.4 s (measured 0.1 s)".
    """
    text = f"{dollars(usd)}, {seconds(duration)}"
    if measured is None or abs(measured - duration) <= max(0.5, 0.1 * duration):
        return text
    return f"{text} (measured {seconds(measured)})"


def percent(share: float, sign: str = "", decimals: int = 1) -> str:
    """Returns a share in percent: "78.3%"."""
    return f"{100 * share:{sign}.{decimals}f}%"


def decimal(value: float, sign: str = "", decimals: int = 3) -> str:
    """Returns a number with so many decimals: "0.578"."""
    return f"{value:{sign},.{decimals}f}"


def is_graded(figures: Mapping[str, float | None]) -> bool:
    """Returns whether an outcome lies between 0 and 1: then an answer is not just right or wrong.

    `accuracy`, the mean outcome, is then above `exact`, the share of outcomes that are 1.
    """
    accuracy = figures.get("accuracy")
    return figures.get("exact", accuracy) != accuracy


def mean_and_ends(write: Write, mean: float, low: float, high: float, sign: str = "") -> str:
    """Returns a mean with the ends of its interval: "83.1% [79.0%, 86.5%]".

    An end that is None or infinite is "-".
    """
    ends = []
    for end in (low, high):
        known = end is not None and math.isfinite(end)
        ends.append(write(end, sign) if known else "-")
    return f"{write(mean, sign)} [{', '.join(ends)}]"
