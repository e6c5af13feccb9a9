"""Tools of your own: Python functions, with their prices.

    python serve.py --model MODEL@URL --tools examples/my_tools.py

docs/tools.md explains them.
"""

from typing import Literal

from tools import tool


@tool(usd_per_call=0.001, timeout_s=10)
def convert(amount: float, to: Literal["EUR", "USD"] = "EUR") -> str:
    """Converts an amount of Swiss francs.

    Args:
        amount: in Swiss francs
        to: the other currency
    """
    return f"{amount * {'EUR': 1.06, 'USD': 1.24}[to]:.2f} {to}"
