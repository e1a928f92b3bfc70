"""Other weights for an engine of several ranks: all have theirs, or none has."""

from __future__ import annotations

from pathlib import Path

from ....shared.errors import ModelLoadError
from ...models.weights.movable import WeightsExchange
from .errors import RankLostError
from .messages import ExchangeWeights, KeepWeights, PutWeightsBack
from .team import FILES_TIMEOUT_S, RankTeam


class SharedExchange:
    """The ``Exchange`` of all ranks, each of which reads its own part.

    Each raises ``RankLostError`` once a rank is gone.
    """

    def __init__(self, local: WeightsExchange, team: RankTeam) -> None:
        self._local = local
        self._team = team

    def exchange(self, folder: Path) -> None:
        try:
            self._team.together(ExchangeWeights(str(folder)), lambda: self._local.exchange(folder), FILES_TIMEOUT_S)
        except RankLostError as error:
            # A rank that has failed and stays, or one that is gone, which this tells.
            self.put_back()
            raise ModelLoadError(str(error)) from error
        except Exception:
            self.put_back()
            raise

    def put_back(self) -> None:
        self._team.together(PutWeightsBack(), self._local.put_back)

    def keep(self) -> None:
        self._team.together(KeepWeights(), self._local.keep)
