"""How an engine of several ranks ends when it loses one. The worker process knows ``RankKilledError`` by its name."""

from __future__ import annotations

from ....shared.errors import EngineDeadError


class RankLostError(EngineDeadError):
    """A rank has failed, or the ranks do not hear each other any more; the others cannot go on without it."""


class RankKilledError(RankLostError):
    """Somebody outside has ended a rank: no request is to blame."""


class RankRefusedError(RankLostError):
    """A rank could not do what it was told, and stays; the others may have done it."""
