"""Models that read images, over the two processes of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.ops.lab.survey.images.models import SEEING
from penstock.ops.lab.survey.images.processors import PartsAlone, StandIn
from penstock.ops.lab.survey.images.trial import compare
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine import composition
from penstock.worker.models.images.processor import ImageProcessor
from penstock.worker.models.parallel.groups import RankGroups

from .two_rank_engine import TwoRanks, follow, loading_once

# Half of what a token has in the cache of one rank: of its heads, or of its layers.
_BYTES_PER_TOKEN = 512


def serve_images(name: str, folder: str, groups: RankGroups, meeting: str) -> dict[str, Any]:
    """Run the survey's comparison of the model ``name`` of ``SEEING`` through engines of both ranks.

    Each rank loads its part once, for all of them.
    """
    load_part = loading_once()
    if groups.rank:
        while number := _told():
            follow(folder, groups, f"{meeting}-{number}", load_part=load_part)
        return {}
    _, processor = SEEING[name]()
    load, make_ranks, num_engines = ImageProcessor.load, composition.make_ranks, 0

    def make(config: EngineConfig, path: Path) -> TwoRanks:
        nonlocal num_engines
        num_engines += 1
        return TwoRanks(config, path, groups, f"{meeting}-{_told(num_engines)}", load_part)

    composition.make_ranks = make
    if isinstance(processor, StandIn) and not isinstance(processor, PartsAlone):
        ImageProcessor.load = classmethod(lambda cls, *_, **__: cls(processor))  # type: ignore[method-assign]
    layout = groups.layout
    try:
        return compare(
            name,
            Path(folder),
            processor,
            _BYTES_PER_TOKEN,
            tensor_parallel_size=layout.tensor,
            pipeline_parallel_size=layout.pipeline,
        )
    finally:
        ImageProcessor.load, composition.make_ranks = load, make_ranks
        _told(0)


def _told(number: int = 0) -> int:
    """The number of the engine that comes next, which rank 0 tells; 0 for none."""
    told = torch.tensor(number)
    dist.broadcast(told, 0)
    return int(told.item())
