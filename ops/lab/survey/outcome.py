"""Outcome of the trial of one model type, written by the trying process, read by the one that makes the table."""

from __future__ import annotations

import msgspec

WAYS = ("alone", "mixed", "chunked", "preempted")
WAYS_WITH_IMAGES = ("one", "two", "mixed", "chunked", "preempted", "resumed")
SAME = "same"
# Of a model that takes no second image: its processor makes something else of several.
ONE_A_REQUEST = "one a request"
# No request is preempted if none ever needs a block.
NEVER = "never"


class Outcome(msgspec.Struct, kw_only=True):
    """A row of the table.

    Args:
        mode: mode of computation; empty if it was not computed.
        told: ``SAME``, ``NEVER`` or the difference of the tokens, for each of ``WAYS``; empty without a comparison.
        reason: why it was not computed.
    """

    model_type: str
    mode: str = ""
    told: dict[str, str] = {}
    reason: str = ""

    @property
    def is_identical(self) -> bool:
        """Whether every way gave the tokens of transformers."""
        return set(self.told) == set(WAYS) and set(self.told.values()) <= {SAME, NEVER}
