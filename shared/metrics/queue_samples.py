"""Statistics of a model's queue as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from ..queue.stats import QueueStats
from .sample import Sample, values_of


def queue_samples(queue: QueueStats) -> Iterator[Sample]:
    """Return the metrics of one model's queue."""
    yield from values_of(
        (queue.model,),
        {
            "num_requests_waiting": queue.depth,
            "queue_tokens_waiting": queue.num_tokens,
            "queue_oldest_age_seconds": queue.oldest_age_s,
            "queue_estimated_wait_seconds": queue.estimated_wait_s,
            "queue_running_requests": queue.num_running,
            "queue_returned_requests": queue.num_returned,
            "queue_tokens_per_s": queue.tokens_per_s,
            "queue_paused": float(queue.is_paused),
            "queue_warm_requests": queue.num_warm,
            "queue_warm_kept_requests": queue.num_warm_kept,
        },
    )
    for band in queue.bands:
        values = {
            "queue_waiting_requests": band.depth,
            "queue_band_estimated_wait_seconds": band.estimated_wait_s,
        }
        yield from values_of((queue.model, band.band), values)
