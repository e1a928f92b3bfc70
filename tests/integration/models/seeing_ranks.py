"""Models that read images, over the two processes of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.worker.engine import composition
from penstock.worker.models.images.processor import ImageProcessor
from penstock.worker.models.parallel.groups import RankGroups
from penstock.worker.survey.images.models import SEEING
from penstock.worker.survey.images.processors import PartsAlone, StandIn
from penstock.worker.survey.images.trial import compare

from .two_rank_engine import TwoRanks, follow

# That ``compare`` builds, one after the other.
_NUM_ENGINES = 5
# Half of what a token has in the cache of one rank: of its heads, or of its layers.
_BYTES_PER_TOKEN = 512


def serve_images(name: str, folder: str, groups: RankGroups, meeting: str) -> dict[str, Any]:
    """Run the survey's comparison of the model ``name`` of ``SEEING`` through engines of both ranks."""
    paths = iter(f"{meeting}-{number}" for number in range(_NUM_ENGINES))
    if groups.rank:
        for path in paths:
            follow(folder, groups, path)
        return {}
    _, processor = SEEING[name]()
    load, make_ranks = ImageProcessor.load, composition.make_ranks
    composition.make_ranks = lambda config, path: TwoRanks(config, path, groups, next(paths))
    if isinstance(processor, StandIn) and not isinstance(processor, PartsAlone):
        ImageProcessor.load = classmethod(lambda cls, *_, **__: cls(processor))  # type: ignore[method-assign]
    try:
        layout = groups.layout
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
