"""Other weights for several ranks: if one rank cannot load them, none has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.shared.errors import ModelLoadError
from penstock.worker.engine.ranks.messages import ExchangeWeights, KeepWeights, PutWeightsBack
from penstock.worker.engine.ranks.several import SharedExchange
from penstock.worker.engine.ranks.team import RankLostError
from penstock.worker.models.weights.movable import ModelWeights, WeightsExchange


class Team:
    """Another rank, which may fail."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.told: list[Any] = []
        self._failure = failure

    def together(self, command: Any, act: Callable[[], Any], timeout_s: float = 0.0) -> Any:
        self.told.append(command)
        act()
        if self._failure is not None and isinstance(command, ExchangeWeights):
            raise self._failure


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_have_other_weights_or_none(fails: bool) -> None:
    network, other = nn.Linear(2, 2), nn.Linear(2, 2)
    former, expected = network.weight, other.weight
    team: Any = Team(RankLostError("rank 1 failed: no memory") if fails else None)
    exchange = SharedExchange(WeightsExchange(ModelWeights(network, lambda: network), lambda _: other), team)
    if fails:
        with pytest.raises(ModelLoadError, match="rank 1 failed: no memory"):
            exchange.exchange(Path("/others"))
        assert network.weight is former
        assert team.told == [ExchangeWeights("/others"), PutWeightsBack()]
        return
    exchange.exchange(Path("/others"))
    exchange.keep()
    exchange.put_back()
    assert network.weight is expected, "the former ones are gone"
    assert team.told == [ExchangeWeights("/others"), KeepWeights(), PutWeightsBack()]
    assert torch.equal(network.weight, expected)
