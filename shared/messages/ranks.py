"""The ranks of an engine: processes that compute one model together."""

from __future__ import annotations

import msgspec


class RankSetup(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Processes and memory of the ranks; lists are by rank, and rank 0 is the engine core.

    Args:
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: consecutive stages.
        enable_expert_parallel: each rank has whole experts.
        pids: process ids.
        weight_bytes, kv_cache_bytes: memory of each.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    pids: list[int] = []
    weight_bytes: list[int] = []
    kv_cache_bytes: list[int] = []

    def describe(self) -> str:
        """Return the layout in short: "tp 2, pp 2"."""
        sizes = {"tp": self.tensor_parallel_size, "pp": self.pipeline_parallel_size}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return ", ".join([*words, *(["ep"] if self.enable_expert_parallel else [])])
