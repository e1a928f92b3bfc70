"""What the numbers of a configuration may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..shared.errors import ConfigurationError
from ..shared.shown import shown


class Range(NamedTuple):
    """A field's least and largest value; None as a value means that it was not given.

    Args:
        option: of ``worker start``, where it is not called as the field is.
        why: the reason for the bounds, or what to give instead.
    """

    least: float
    most: float
    option: str = ""
    why: str = ""


def check_ranges(config: object, ranges: Mapping[str, Range]) -> None:
    """Verify the fields of ``config`` that are in ``ranges``.

    Raises:
        ConfigurationError: one is out of its range; says which, and the bound.
    """
    for name, allowed in ranges.items():
        value = getattr(config, name)
        # Written so that NaN, which no comparison holds for, is refused as well.
        if value is None or allowed.least <= value <= allowed.most:
            continue
        field = f"{name} ({allowed.option})" if allowed.option else name
        bound = f"at most {allowed.most:,}" if value > allowed.most else f"at least {allowed.least:,}"
        why = f"; {allowed.why}" if allowed.why else ""
        raise ConfigurationError(f"{field} must be {bound}, got {shown(value)}{why}")
