"""Errors of an engine that loses a rank. The worker process recognizes ``RankKilledError`` by its name."""

from __future__ import annotations

from ....shared.errors import EngineDeadError


class RankLostError(EngineDeadError):
    """A rank has failed or lost its connection to the others, which cannot continue without it."""


class RankKilledError(RankLostError):
    """A rank was killed from outside, so no request is the cause."""


class RankRefusedError(RankLostError):
    """A rank failed to run a command but still works. The others may have run it."""
