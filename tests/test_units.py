"""Money and time have one form, without exponents, from millionths to thousands."""

from nanorchestra.units import bill, dollars, mean_and_ends, percent, seconds


def test_dollars_have_three_digits_or_cents_and_no_exponent():
    shown = [dollars(usd) for usd in (2.677e-6, 0.0027, 0.3, 0.9996, 12.5, 1234.567, 0.0)]
    assert shown == ["$0.00000268", "$0.0027", "$0.3", "$1", "$12.5", "$1,234.57", "$0"]
    assert [dollars(usd, "+") for usd in (0.012, -0.012)] == ["+$0.012", "-$0.012"]


def test_seconds_shares_and_intervals():
    assert bill(0.5, 1234.56) == "$0.5, 1,234.6 s" and seconds(-1.0, "+") == "-1.0 s"
    assert bill(0.5, 11.4, 0.12) == "$0.5, 11.4 s (measured 0.1 s)"
    assert bill(0.5, 3.6, 3.8) == "$0.5, 3.6 s", "the same, but for the work around it"
    assert mean_and_ends(percent, 0.5, -0.25, None, "+") == "+50.0% [-25.0%, -]"
