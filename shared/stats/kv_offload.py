"""Counts of the KV blocks that an engine stores outside its KV cache."""

from __future__ import annotations

import msgspec


class KVOffloadStats(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Counters run since the core's start; new fields are only appended and have a default.

    Args:
        num_queried_tokens: tokens of prompts and resumed requests that were looked up because the KV cache lacked them.
        num_hit_tokens: tokens of them that were read.
        num_read_bytes, num_written_bytes: of keys and values.
        num_dropped_blocks: blocks that were not stored: the content was overwritten too soon, or not written.
        num_corrupt_blocks: blocks that differed from the written ones, and were computed again.
        memory_bytes: current size of the blocks in host memory.
        dir_bytes: current size of the blocks in the folder, including those of other engines.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_read_bytes: int = 0
    num_written_bytes: int = 0
    num_dropped_blocks: int = 0
    num_corrupt_blocks: int = 0
    memory_bytes: int = 0
    dir_bytes: int = 0
