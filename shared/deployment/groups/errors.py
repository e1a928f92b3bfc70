"""Errors of a group; part of the tree in ``errors``."""

from __future__ import annotations

from ...errors import EngineDeadError, EngineStateError


class GroupBrokenError(EngineDeadError):
    """The ranks of a group no longer compute together: one has exited, hangs, or is in another step."""

    code = "group_broken"


class GroupSizeError(EngineStateError):
    """The group cannot have this number of ranks."""

    code = "group_size"
