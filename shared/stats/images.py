"""Counts of an engine's images: computed and cached features."""

from __future__ import annotations

import msgspec


class ImageStats(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Counters run since the core's start; new fields are only appended and have a default.

    Args:
        num_cache_hits: images of requests whose features were kept from an earlier one.
        num_encoded: images whose features the vision encoder computed: the cache's misses.
        num_processed: those whose bytes were decoded and cut up for the tower; fewer than ``num_encoded`` where a
            processed image was kept longer than its features.
        memory_bytes: current size of the cache.
    """

    num_cache_hits: int = 0
    num_encoded: int = 0
    num_processed: int = 0
    memory_bytes: int = 0
