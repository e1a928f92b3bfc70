"""What is told of an engine that has several ranks: processes which compute one model together."""

from __future__ import annotations

import msgspec


class RankSetup(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Who they are and what each holds; lists are by rank, and rank 0 is the engine core.

    Args:
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages, one behind the other.
        enable_expert_parallel: experts are shared whole.
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
        """The layout in few words: "tp 2, pp 2"."""
        sizes = {"tp": self.tensor_parallel_size, "pp": self.pipeline_parallel_size}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return ", ".join([*words, *(["ep"] if self.enable_expert_parallel else [])])
