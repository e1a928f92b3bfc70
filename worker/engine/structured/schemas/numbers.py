"""Exact values and bounds of the numbers in a schema."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .document import Schema


def decimal_of(value: Any) -> Decimal:
    """Return a number of a schema exactly as it is written there."""
    return Decimal(repr(value) if isinstance(value, float) else value)


def fraction_of(value: Any) -> Fraction:
    """Return a number of a schema exactly as it is written there."""
    return Fraction(decimal_of(value))


def integer_bounds(schema: Schema) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer that ``schema`` allows; None without a bound."""
    lower = [math.ceil(fraction_of(schema["minimum"]))] if "minimum" in schema else []
    if "exclusiveMinimum" in schema:
        lower.append(math.floor(fraction_of(schema["exclusiveMinimum"])) + 1)
    upper = [math.floor(fraction_of(schema["maximum"]))] if "maximum" in schema else []
    if "exclusiveMaximum" in schema:
        upper.append(math.ceil(fraction_of(schema["exclusiveMaximum"])) - 1)
    return max(lower, default=None), min(upper, default=None)


def number_bounds(schema: Schema) -> tuple[tuple[Decimal, bool] | None, tuple[Decimal, bool] | None]:
    """Return the lower and the upper bound of ``schema``, each with whether it is exclusive; None without a bound."""
    lower = [(decimal_of(schema[k]), e) for k, e in (("minimum", False), ("exclusiveMinimum", True)) if k in schema]
    upper = [(decimal_of(schema[k]), e) for k, e in (("maximum", False), ("exclusiveMaximum", True)) if k in schema]
    return max(lower, default=None), min(upper, key=lambda bound: (bound[0], not bound[1]), default=None)


def is_empty(lower: tuple[Decimal, bool] | None, upper: tuple[Decimal, bool] | None) -> bool:
    """Return whether no number is between the two bounds."""
    if lower is None or upper is None:
        return False
    return lower[0] > upper[0] or (lower[0] == upper[0] and (lower[1] or upper[1]))


def num_fraction_digits(value: Decimal) -> int:
    """Return the number of digits after the decimal point."""
    exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return max(0, -exponent)
