"""Integer pi, log and exp, against mpmath and against known digits."""

from fractions import Fraction

import pytest

from mens_core import fixedpoint

PI_HEX = "3243f6a8885a308d313198a2e03707344a4093822299f31d008"  # 200 fractional bits


def test_pi_has_the_known_digits():
    assert f"{fixedpoint.floor_to_bits(fixedpoint.pi, 200):x}" == PI_HEX


@pytest.mark.parametrize("precision", [200, 333])
def test_log_and_exp_are_within_the_promised_error(precision):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workprec(precision + 200):
        unit = mpmath.mpf(2) ** precision
        bound = mpmath.mpf(2) ** fixedpoint.GUARD_BITS / 1024  # far below, as the docstring says
        for value in (Fraction(2), Fraction(1, 3), Fraction(10_000), Fraction(1_000_000), Fraction(1, 7**20)):
            expected = mpmath.log(mpmath.mpf(value.numerator) / value.denominator) * unit
            assert abs(fixedpoint.log(value, precision) - expected) < bound
        for y in (Fraction(0), Fraction(1, 1000), Fraction(5, 7), Fraction(69, 5), Fraction(40)):
            scaled = fixedpoint.from_fraction(y, precision)
            expected = mpmath.exp(-mpmath.mpf(scaled) / unit) * unit
            assert abs(fixedpoint.exp_negative(scaled, precision) - expected) < bound


def test_a_floor_in_doubt_is_settled_with_more_bits():
    asked = []

    def barely_below_five(precision):
        asked.append(precision)
        return (5 << precision) - (1 << max(precision - 150, 0))

    assert fixedpoint.floor_to_bits(barely_below_five, 0) == 4
    assert len(asked) > 1


def test_a_number_on_the_grid_is_refused_instead_of_guessed():
    with pytest.raises(ArithmeticError):
        fixedpoint.floor_to_bits(lambda precision: 3 << precision, 0)
