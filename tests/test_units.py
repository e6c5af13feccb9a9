"""Money and time have one form, without exponents, from millionths to thousands."""

from nanorchestra.units import bill, dollars, mean_and_ends, percent


def test_dollars_seconds_shares_and_intervals():
    shown = [dollars(usd) for usd in (2.677e-6, 0.0027, 0.9996, 1234.567, 0.0)]
    assert shown == ["$0.00000268", "$0.0027", "$1", "$1,234.57", "$0"]
    assert [dollars(usd, "+") for usd in (0.012, -0.012)] == ["+$0.012", "-$0.012"]
    assert bill(0.5, 1234.56, 0.12) == "$0.5, 1,234.6 s (measured 0.1 s)"
    assert mean_and_ends(percent, 0.5, -0.25, None, "+") == "+50.0% [-25.0%, -]"
