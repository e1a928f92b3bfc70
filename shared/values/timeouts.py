"""Checks of timeouts."""

from __future__ import annotations

from ..errors import ValidationError
from .shown import shown

MAX_TIMEOUT_S = 86_400.0


def check_timeout(field: str, value: object) -> None:
    """Raise ``ValidationError`` unless ``value`` is a number of seconds of at most a day."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TIMEOUT_S:
        raise ValidationError(
            f"{field} must be a number of seconds above 0, at most {MAX_TIMEOUT_S:g}, got {shown(value)}"
        )
