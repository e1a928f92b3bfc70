"""The end of a generation that repeats itself."""

from __future__ import annotations

import msgspec

from ..errors import ValidationError
from .checks import check_number

MAX_PATTERN_SIZE = 2048
MAX_PATTERN_COUNT = 1000


class RepetitionFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``RepetitionDetectionParams``, and of ``repetition_detection`` in a body."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class RepetitionDetectionParams(
    RepetitionFields, array_like=True, omit_defaults=True, frozen=True, kw_only=True, gc=False
):
    """End a generation whose last output tokens are ``min_count`` times the same pattern.

    Args:
        max_pattern_size: longest pattern to look for, in tokens; 0 looks for none. Range [0, 2048].
        min_pattern_size: shortest one; 0 means 1. At most ``max_pattern_size``.
        min_count: how often the pattern comes. Range [2, 1000].

    Raises:
        ValidationError: a value has the wrong type or range.
    """

    def __post_init__(self) -> None:
        check_number("repetition_detection.max_pattern_size", self.max_pattern_size, int, 0, MAX_PATTERN_SIZE)
        check_number("repetition_detection.min_pattern_size", self.min_pattern_size, int, 0, MAX_PATTERN_SIZE)
        if self.min_pattern_size > self.max_pattern_size:
            raise ValidationError(
                "repetition_detection.min_pattern_size must be at most max_pattern_size "
                f"({self.max_pattern_size}), got {self.min_pattern_size}"
            )
        fewest = 2 if self.max_pattern_size else 0
        check_number("repetition_detection.min_count", self.min_count, int, fewest, MAX_PATTERN_COUNT)
