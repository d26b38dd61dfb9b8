"""Interval arithmetic on printed numbers: what can be concluded from figures that were rounded for print."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction


@dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`, ends included, exact.

    Results of +, -, * and / contain every result that members can have. Each operand counts as independent, so an
    expression that uses one figure twice may come out wider than it is.
    """

    low: Fraction
    high: Fraction

    def __str__(self) -> str:
        return f"{float(self.low):.6g} .. {float(self.high):.6g}"

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Interval) -> Interval:
        return Interval(self.low - other.high, self.high - other.low)

    def __mul__(self, other: Interval) -> Interval:
        ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(min(ends), max(ends))

    def __truediv__(self, other: Interval) -> Interval:
        if other.low <= 0 <= other.high:
            raise ZeroDivisionError(f"the divisor {other} contains 0")
        return self * Interval(1 / other.high, 1 / other.low)

    def overlaps(self, other: Interval) -> bool:
        """Whether some number lies in both."""
        return self.low <= other.high and other.low <= self.high


def exactly(number: int | float | Fraction) -> Interval:
    """The interval of one number, taken as it is."""
    return Interval(Fraction(number), Fraction(number))


def printed(text: str) -> Interval:
    """Every number that prints as `text`: half a unit of its last digit either way, ``131e3`` to the thousand.

    ValueError when the text is no number.
    """
    try:
        number = Decimal(text)
        half = Fraction(Decimal(5).scaleb(int(number.as_tuple().exponent) - 1))
    except (InvalidOperation, ValueError):
        raise ValueError(f"{text!r} is not a printed number") from None
    return Interval(Fraction(number) - half, Fraction(number) + half)
