"""Replaces the weights of an engine of several ranks: on all ranks or on none."""

from __future__ import annotations

from pathlib import Path

from ....shared.errors import ModelLoadError
from ...models.weights.movable import WeightsExchange
from .errors import RankLostError
from .messages import ExchangeWeights, KeepWeights, PutWeightsBack
from .team import FILES_TIMEOUT_S, RankTeam


class SharedExchange:
    """The ``Exchange`` of all ranks. Each rank reads its own part.

    Every method raises ``RankLostError`` once a rank is lost.
    """

    def __init__(self, local: WeightsExchange, team: RankTeam) -> None:
        self._local = local
        self._team = team

    def exchange(self, folder: Path) -> None:
        try:
            self._team.together(ExchangeWeights(str(folder)), lambda: self._local.exchange(folder), FILES_TIMEOUT_S)
        except RankLostError as error:
            # If the rank has failed but still works, this restores its weights; if it is lost, this raises.
            self.put_back()
            raise ModelLoadError(str(error)) from error
        except Exception:
            self.put_back()
            raise

    def put_back(self) -> None:
        self._team.together(PutWeightsBack(), self._local.put_back)

    def keep(self) -> None:
        self._team.together(KeepWeights(), self._local.keep)
