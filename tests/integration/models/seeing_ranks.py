"""Models that read images, over the two processes of a test."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.images.processor import ImageProcessor
from penstock.worker.models.loader import load_model
from penstock.worker.models.parallel.groups import RankGroups
from penstock.worker.survey.images.models import SEEING
from penstock.worker.survey.images.processors import PartsAlone, StandIn
from penstock.worker.survey.images.trial import as_loaded_by, compare

from .two_rank_engine import TwoRanks, follow

# Half of what a token has in the cache of one rank: of its heads, or of its layers.
_BYTES_PER_TOKEN = 512


def serve_images(name: str, folder: str, groups: RankGroups, meeting: str) -> dict[str, Any]:
    """Run the survey's comparison of the model ``name`` of ``SEEING`` through engines of both ranks, each of which
    loads its part once."""
    layout = groups.layout
    sizes: dict[str, Any] = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    config = EngineConfig(model=folder, num_threads=1, **sizes)
    if groups.rank:
        part = load_model(config, Path(folder), groups)
        while number := _told():
            follow(folder, groups, f"{meeting}-{number}", part=part)
        return {}
    _, processor = SEEING[name]()
    with ExitStack() as stack:
        if isinstance(processor, StandIn) and not isinstance(processor, PartsAlone):
            stack.callback(setattr, ImageProcessor, "load", ImageProcessor.load)
            ImageProcessor.load = classmethod(lambda cls, *_, **__: cls(processor))  # type: ignore[method-assign]
        part = load_model(config, Path(folder), groups)
        stack.callback(_told)
        numbers = count(1)

        def make_ranks(config: EngineConfig, path: Path) -> TwoRanks:
            return TwoRanks(config, path, groups, f"{meeting}-{_told(next(numbers))}", as_loaded_by(config, part))

        return compare(name, Path(folder), processor, make_ranks, _BYTES_PER_TOKEN, **sizes)


def _told(number: int = 0) -> int:
    """The number of the engine that comes next, which rank 0 tells; 0 for none."""
    told = torch.tensor(number)
    dist.broadcast(told, 0)
    return int(told.item())
