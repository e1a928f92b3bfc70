"""Kinds of requests, and of the items of their streams."""

from __future__ import annotations

import enum

GENERATE = "generate"
POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


class RequestOutputKind(enum.IntEnum):
    """Content of each item of a stream."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2
