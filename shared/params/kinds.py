"""What a request may be for, and how much each item of its stream carries."""

from __future__ import annotations

import enum

GENERATE = "generate"
POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


class RequestOutputKind(enum.IntEnum):
    """How much each item of a stream carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2
