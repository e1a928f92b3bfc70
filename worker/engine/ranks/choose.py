"""Which ranks an engine has."""

from __future__ import annotations

from pathlib import Path

from ...config.engine_config import EngineConfig
from .interface import Ranks
from .one import OneRank
from .several import SeveralRanks


def make_ranks(config: EngineConfig, folder: Path) -> Ranks:
    """Return what computes the model in ``folder``: this process alone, or with others, which it starts."""
    return OneRank(config, folder) if config.num_ranks == 1 else SeveralRanks(config, folder)
