"""What may be wrong with a group; part of ``errors``, whose tree has these too."""

from __future__ import annotations

from ...errors import EngineDeadError, EngineStateError


class GroupBrokenError(EngineDeadError):
    """The ranks of a group do not compute together any more: one is gone, hangs, or is somewhere else."""

    code = "group_broken"


class GroupSizeError(EngineStateError):
    """A group cannot have that many ranks."""

    code = "group_size"
