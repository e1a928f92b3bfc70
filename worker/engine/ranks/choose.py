"""Chooses between one rank and several."""

from __future__ import annotations

from pathlib import Path

from ...config.engine_config import EngineConfig
from .interface import Ranks
from .one import OneRank
from .several import SeveralRanks


def make_ranks(config: EngineConfig, folder: Path) -> Ranks:
    """Return the ranks that compute the model in ``folder``; starts the processes of several ranks."""
    return OneRank(config, folder) if config.num_ranks == 1 else SeveralRanks(config, folder)
