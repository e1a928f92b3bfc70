"""Counts of the KV blocks that an engine stores outside its KV cache."""

from __future__ import annotations

import msgspec


class KVOffloadStats(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Counters run since the core's start; new fields are only appended and have a default.

    Args:
        num_queried_tokens: of prompts and of what is resumed, looked for because the KV cache had them not.
        num_hit_tokens: tokens of them that were read.
        num_read_bytes, num_written_bytes: of keys and values.
        num_dropped_blocks: that were to be kept and are not: what they held was gone too soon, or could not be written.
        num_corrupt_blocks: that were not what had been written, and were computed again.
        memory_bytes: what blocks take of host memory now.
        dir_bytes: what blocks take of the folder now, those of other engines as well.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_read_bytes: int = 0
    num_written_bytes: int = 0
    num_dropped_blocks: int = 0
    num_corrupt_blocks: int = 0
    memory_bytes: int = 0
    dir_bytes: int = 0
