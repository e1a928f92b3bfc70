"""What became of one model type: written by the process that tried it, read by the one that makes the table."""

from __future__ import annotations

import msgspec

WAYS = ("alone", "mixed", "chunked", "preempted")
WAYS_WITH_IMAGES = ("one", "two", "mixed", "chunked", "preempted", "resumed")
SAME = "same"
# Of a model that takes no second image: its processor makes something else of several.
ONE_A_REQUEST = "one a request"
# Nobody is preempted where no request ever needs a block.
NEVER = "never"


class Outcome(msgspec.Struct, kw_only=True):
    """One row of the table.

    Args:
        mode: in which it is computed; empty if it is not.
        told: for each of ``WAYS``, ``SAME``, ``NEVER`` or how the tokens differ; empty if it did not come so far.
        reason: why it is not computed.
    """

    model_type: str
    mode: str = ""
    told: dict[str, str] = {}
    reason: str = ""

    @property
    def is_identical(self) -> bool:
        """Every way gave the tokens of transformers."""
        return set(self.told) == set(WAYS) and set(self.told.values()) <= {SAME, NEVER}
